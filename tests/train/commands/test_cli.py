"""The ``fnet`` command: help, exit codes and JAX's configuration."""

import ast
import dataclasses
import errno
import functools
import inspect
import itertools
import re
import textwrap
from typing import get_type_hints
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from program_cases import assert_one_line_error, exit_code, fnet_command

from train import arguments, cli
from train import config as configs

COMMANDS = (
    *("train", "eval", "predict", "attribute", "memory", "fit", "sample", "import", "export"),
    *("report", "configs"),
)


@pytest.mark.parametrize(("words", "code"), [((), 2), (("-h",), 0), (("--help",), 0)])
def test_help_lists_the_commands(words, code, capsys):
    assert exit_code(*words) == code
    output = capsys.readouterr().out
    assert output.startswith("usage: fnet COMMAND")
    assert tuple(re.findall(r"^  fnet (\w+)", output, re.MULTILINE)) == COMMANDS


OPTIONS = {
    "train": (arguments.TrainArguments,),
    "eval": (arguments.EvalArguments,),
    "predict": (arguments.PredictArguments,),
    "attribute": (arguments.AttributeArguments,),
    "memory": (arguments.MemoryArguments,),
    "fit": (arguments.FitArguments,),
    "sample": (arguments.TextArguments, arguments.ImageArguments),
    "import": (arguments.ImportArguments,),
    "export": (arguments.ExportArguments,),
    "report": (arguments.ReportArguments,),
    "configs": (arguments.ConfigsArguments,),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_a_command_explains_each_of_its_options(command, capsys):
    assert exit_code(command, "--help") == 0
    output = capsys.readouterr().out
    assert output.startswith(f"usage: fnet {command}")
    for kind in OPTIONS[command]:
        for field in dataclasses.fields(kind):
            assert f"--{field.name.replace('_', '-')}" in output


def test_help_with_a_config_lists_its_fields_and_their_values(capsys):
    assert exit_code("train", "digits", "--help") == 0
    output = capsys.readouterr().out
    assert re.search(r"--train.epochs FLOAT[^-]*\(default: 60.0\)", output)
    assert re.search(r"--data.source \{arrays,chat_file,digits,[^}]*text_file\}", output)


@functools.cache
def docstrings(kind):
    """The text below each field of a class."""
    body = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0].body
    pairs = [(a, b) for a, b in itertools.pairwise(body) if isinstance(b, ast.Expr)]
    return {a.target.id: b.value.value for a, b in pairs if isinstance(a, ast.AnnAssign)}


def field_help(kind, name, hints):
    """The help of a field's type, or the docstring below it, in the class that declares it."""
    marks = getattr(hints[name], "__metadata__", ())
    if told := [mark.help for mark in marks if getattr(mark, "help", None)]:
        return told[0]
    return next(found[name] for b in kind.__mro__[:-1] if name in (found := docstrings(b)))


SECTIONS = [configs.Config, *configs.all_variants()]
SECTIONS += [
    configs.Optim,
    configs.Train,
    configs.Nonfinite,
    configs.Memory,
    configs.Mesh,
    configs.Checkpoint,
    configs.Tracking,
]


def test_every_field_has_one_line_of_help():
    for kind in (*SECTIONS, *itertools.chain(*OPTIONS.values())):
        hints = get_type_hints(kind, include_extras=True)
        for field in dataclasses.fields(kind):
            text = field_help(kind, field.name, hints)
            assert re.fullmatch(r"[A-Z][^\n]{5,89}[.]", text or ""), (kind, field.name, text)


@pytest.mark.parametrize(
    ("error", "code", "output"),
    [
        (KeyboardInterrupt(), 1, "fnet: interrupted\n"),
        (OSError(errno.ENOSPC, "No space left on device"), 1, "fnet: cannot write: [Errno 28]"),
        (OSError(errno.EFBIG, "File too large"), 1, "fnet: cannot write: [Errno 27]"),
        (PermissionError(errno.EACCES, "Permission denied", "x"), 2, "fnet: cannot access x: Perm"),
    ],
)
def test_prints_one_line_for_an_error_of_the_system(error, code, output, monkeypatch, capsys):
    monkeypatch.setattr(cli, "_dispatch", Mock(side_effect=error))
    assert exit_code("train", "digits") == code
    assert capsys.readouterr().err.startswith(output)


@pytest.mark.parametrize(
    "error", [OSError(errno.EIO, "broken"), jax.errors.JaxRuntimeError("INTERNAL: broken")]
)
def test_raises_other_errors(error, monkeypatch):
    monkeypatch.setattr(cli, "_dispatch", Mock(side_effect=error))
    with pytest.raises(type(error), match="broken"):
        fnet_command("train", "digits")


@pytest.mark.parametrize("zeros", [np.zeros, lambda n: jax.block_until_ready(jnp.zeros(n))])
def test_running_out_of_memory_is_one_line_with_exit_code_1(zeros, monkeypatch, capsys):
    monkeypatch.setattr(cli, "_dispatch", lambda argv: zeros(2**46))
    assert exit_code("train", "digits") == 1
    assert_one_line_error(capsys, "fnet: out of memory: ")


def test_caches_programs_in_the_users_cache_folder(workplace, monkeypatch, capsys):
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(workplace / "cache"))
    cli._prepare_jax()
    cache = workplace / "cache" / "fnet" / "jax"
    assert jax.config.jax_compilation_cache_dir == str(cache)
    assert_one_line_error(capsys, f"fnet: compiled programs are kept in {cache}")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("eval run --path a --path b", "--path: given twice, as --path a"),
        ("train tiny.py --train.steps 2 --train.steps=3", "--train.steps: given twice"),
        (
            "train tiny.py --nonfinite.skip --nonfinite.no-skip",
            "--nonfinite.no-skip: given twice, as --nonfinite.skip and as --nonfinite.no-skip",
        ),
    ],
)
def test_a_flag_with_two_values_is_refused(words, message, workplace, capsys):
    assert exit_code(*words.split()) == 2
    assert_one_line_error(capsys, message)


def test_a_switch_that_turns_donation_off_is_refused(workplace, capsys):
    with jax.debug_nans(True):
        assert exit_code("train", "tiny.py") == 2
    assert_one_line_error(capsys, "JAX_DEBUG_NANS: turns donation off, on which training in place")


def test_another_source_keeps_what_the_recipe_sets_of_fields_that_both_have():
    config = configs.Config(data=configs.Digits(batch_size=48, max_shift=1))
    flags = ["--data.source", "arrays"]
    _, config = arguments.read_with_config(arguments.TrainArguments, config, flags, "fnet")
    assert (config.data.source, config.data.batch_size) == ("arrays", 48)
