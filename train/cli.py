"""The ``fnet`` command."""

import contextlib
import errno
import io
import itertools
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from train.errors import TrainingError, UserError, is_of_memory, nearest

if TYPE_CHECKING:
    from train.config import Mesh
    from train.run.run_folder import RunFolder

USAGE = """\
usage: fnet COMMAND ...

  fnet train CONFIG [--out DIR] [--resume] [--profile STEPS] [--section.field VALUE ...]
                         --distributed: together with other processes
  fnet eval RUN [--crops 10] [--scales 0.7 1 1.2] [--flip]
                         metrics of a run's last checkpoint on its test examples, class by class
  fnet predict RUN IMAGE... [--top-k 5] [--json] [--out DIR]
                         labels of images, or of their pixels, from a trained model
  fnet memory CONFIG [--budget 4GiB] [--target h100] [--batch-size auto]
                         what training would take, without training; the way that fits
  fnet sample RUN [--prompt TEXT]
                         text or images from a trained model; fnet sample RUN --help: how
  fnet import CONFIG WEIGHTS [--out DIR] [--new-classifier] [--section.field VALUE ...]
                         a run that begins with a torch checkpoint or safetensors
  fnet export RUN [--out FILE.safetensors] [--names torchvision]
                         a run's weights as safetensors, with torch's names and layouts
  fnet report RUN [RUN...] [--out FILE.html]
                         runs as one HTML page: curves, memory, throughput, examples, differences
  fnet configs           the recipes, one line each

CONFIG is a recipe's name (digits) or file, or a run's folder or config.json.
fnet train CONFIG --help lists every field, with its value in that config.
"""


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command line and exits: 0 well, 2 a mistake in what was given, 1 anything else."""
    if sys.stdout is None:  # whoever calls has closed it
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):  # a name need not be in a terminal's encoding
        sys.stdout.reconfigure(errors="replace")
    try:
        try:
            _dispatch(list(sys.argv[1:] if argv is None else argv))
        finally:
            sys.stdout.flush()  # what nobody reads is answered here, not when Python ends
    except UserError as error:
        _fail(error, 2)
    except TrainingError as error:
        _fail(error, 1)
    except BrokenPipeError:  # nobody reads any more; what is left must not be written at the end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(1) from None
    except OSError as error:
        if error.filename is not None and error.errno in (errno.EACCES, errno.ENAMETOOLONG):
            _fail(f"cannot reach {error.filename}: {error.strerror}", 2)
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
            raise
        _fail(f"cannot write: {error}", 1)
    except KeyboardInterrupt:
        print("fnet: interrupted", file=sys.stderr)
        raise SystemExit(1) from None
    except Exception as error:
        if not is_of_memory(error):
            raise
        reason = next(iter(str(error).splitlines()), type(error).__name__).rstrip(".")
        _fail(
            f"there is not enough memory: {reason}; fnet memory CONFIG says what a run takes, "
            "--memory.budget trains within less",
            1,
        )


def _fail(error: Exception | str, code: int) -> None:
    print(f"fnet: {' '.join(str(error).split(chr(10)))}", file=sys.stderr)
    raise SystemExit(code)


def _dispatch(argv: list[str]) -> None:
    # What a command needs is imported when it runs: a mistake is answered at once.
    commands = {
        "train": _train,
        "eval": _eval,
        "memory": _memory,
        "sample": _sample,
        "predict": _predict,
        "import": _import,
        "export": _export,
        "report": _report,
        "configs": _configs,
    }
    if not argv or argv[0] in ("-h", "--help"):
        print(USAGE, end="")
        raise SystemExit(0 if argv else 2)
    if argv[0] not in commands:
        raise UserError(f"no command {argv[0]}{nearest(argv[0], commands)}; see fnet --help")
    commands[argv[0]](argv[1:])


def _train(argv: list[str]) -> None:
    from train import arguments
    from train.config import recipes

    given = _positional(argv, "fnet train CONFIG [--out DIR] [--resume] [--section.field VALUE]")
    defaults = arguments.TrainArguments(recipes.load(given))
    a = arguments.read(defaults, argv[1:], f"fnet train {given}")
    out = Path(a.out or (_run_of(given) if a.resume else None) or f"runs/{a.config.name}")

    together = a.distributed or any(x is not None for x in (a.coordinator, a.processes, a.process))
    mesh = a.config.mesh
    _prepare_jax(mesh, (a.processes or mesh.data * mesh.fsdp) if together else 1)
    first = True
    if together:
        from train.run.distributed import join

        first = join(a.coordinator, a.processes, a.process)
    from rich.console import Console

    from train.run.loop import train

    train(a.config, out, resume=a.resume, console=Console(quiet=not first), profile=a.profile)


def _eval(argv: list[str]) -> None:
    given = _positional(argv, "fnet eval RUN [--crops 10] [--scales 0.7 1 1.2] [--flip]")
    from train import arguments

    a = arguments.read_options(arguments.EvalArguments, argv[1:], f"fnet eval {given}")
    folder = _run_folder(given)
    folder.read_config()  # answered at once if there is none

    _prepare_jax()
    from rich.console import Console

    from train.commands.eval import evaluate_run

    evaluate_run(folder, a, Console())


def _predict(argv: list[str]) -> None:
    usage = "fnet predict RUN IMAGE... [--top-k 5] [--json] [--out DIR]"
    given = _positional(argv, usage)
    images = list(itertools.takewhile(_is_value, argv[1:]))
    from train import arguments

    options = argv[1 + len(images) :]
    a = arguments.read_options(arguments.PredictArguments, options, f"fnet predict {given}")
    folder = _run_folder(given)
    config = folder.read_config()
    if not images:
        raise UserError(f"say which images: {usage}")

    _prepare_jax()
    from rich.console import Console

    from train.commands.predict import as_dict, predict, show
    from train.output.progress import printable

    found = predict(folder, config, images, a)
    if a.json:
        print(json.dumps(as_dict(found), indent=2))
    else:
        show(found, Console())
        print(printable(f"predictions: {found.path}"))
    for path, reason in found.unreadable:
        print(f"fnet: cannot read {path}: {reason}", file=sys.stderr)
    if found.unreadable:
        raise SystemExit(2)


def _memory(argv: list[str]) -> None:
    from train import arguments
    from train.config import recipes

    given = _positional(argv, "fnet memory CONFIG [--budget 4GiB] [--section.field VALUE]")
    defaults = arguments.MemoryArguments(recipes.load(given))
    a = arguments.read(defaults, argv[1:], f"fnet memory {given}")

    if a.target:  # before XLA starts: its own warnings are not about this machine
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    _prepare_jax(a.config.mesh)
    if a.target:
        import jax

        # Nothing runs: this machine's own accelerator, or the lack of one, is not looked at.
        jax.config.update("jax_platforms", "cpu")
    from rich.console import Console

    from train.commands.memory import foresee

    foresee(a, Console())


def _sample(argv: list[str]) -> None:
    given = _positional(argv, "fnet sample RUN [--prompt TEXT] [--length 500] [--labels 3 5]")
    from train import arguments
    from train.config import Denoiser, LanguageModel

    folder = _run_folder(given)
    config = folder.read_config()
    if not isinstance(config.model, LanguageModel | Denoiser):
        raise UserError(
            f"{folder.path} is a run of {config.model.name}, which generates nothing; "
            "there are language_model (text) and denoiser (images)"
        )
    prog = f"fnet sample {given}"
    if isinstance(config.model, LanguageModel):
        text = arguments.read_options(arguments.TextArguments, argv[1:], prog)
        _prepare_jax()
        from train.commands.sample_text import continued

        for piece in continued(folder, config, text):
            print(piece, end="", flush=True)
        print()
        return
    images = arguments.read_options(arguments.ImageArguments, argv[1:], prog)
    _prepare_jax()
    from train.commands.sample_images import draw
    from train.output.progress import printable

    print(printable(str(draw(folder, config, images))))


def _import(argv: list[str]) -> None:
    usage = "fnet import CONFIG WEIGHTS [--out DIR] [--new-classifier] [--section.field VALUE]"
    given, weights = _positional(argv, usage), _positional(argv[1:], usage)
    from train import arguments
    from train.config import recipes

    defaults = arguments.ImportArguments(recipes.load(given))
    a = arguments.read(defaults, argv[2:], f"fnet import {given} {weights}")
    out = Path(a.out or f"runs/{a.config.name}")

    _prepare_jax()
    from rich.console import Console

    from train.commands.weights import import_weights, report_table
    from train.output.progress import plain
    from train.run.run_folder import quote

    report = import_weights(
        a.config,
        Path(weights),
        out,
        new_classifier=a.new_classifier,
        trained_with=a.trained_with,
    )
    console = Console()
    console.print(report_table(report))
    run = quote(out)
    plain(console)(f"{out} is at step 0: fnet eval {run}, or fnet train {run} --resume")


def _export(argv: list[str]) -> None:
    usage = "fnet export RUN [--out FILE.safetensors] [--names reference|torchvision]"
    given = _positional(argv, usage)
    from train import arguments

    a = arguments.read_options(arguments.ExportArguments, argv[1:], f"fnet export {given}")
    folder = _run_folder(given)

    _prepare_jax()
    from train.commands.weights import export_weights
    from train.output.progress import printable

    print(printable(str(export_weights(folder, a))))


def _report(argv: list[str]) -> None:
    _positional(argv, "fnet report RUN [RUN...] [--out FILE.html]")
    runs = list(itertools.takewhile(_is_value, argv))
    from train import arguments

    prog = f"fnet report {' '.join(runs)}"
    a = arguments.read_options(arguments.ReportArguments, argv[len(runs) :], prog)
    from rich.console import Console

    from train.output.report import report

    folders = [_run_folder(given) for given in runs]
    report(folders, Path(a.out) if a.out else None, Console())


def _configs(argv: list[str]) -> None:
    from train.config.recipes import recipes

    if argv and argv[0] in ("-h", "--help"):
        _positional(argv, "fnet configs")
    if argv:
        raise UserError(f"fnet configs takes nothing, got {' '.join(argv)}")
    known = recipes()
    width = max(map(len, known))
    for name, line in known.items():
        print(f"{name:{width}}  {line}")


def _is_value(word: str) -> bool:
    return word != "-h" and not word.startswith("--")


def _positional(argv: list[str], usage: str) -> str:
    if not argv or (argv[0].startswith("-") and argv[0] not in ("-h", "--help")):
        raise UserError(f"say what first: {usage}")
    if argv[0] in ("-h", "--help"):
        print(f"usage: {usage}")
        raise SystemExit(0)
    return argv[0]


def _run_of(given: str) -> str | None:
    """The folder of the run that a folder or a config.json belongs to, if it is one."""
    path = Path(given)
    if path.name == "config.json":
        path = path.parent
    return str(path) if (path / "config.json").is_file() else None


def _run_folder(given: str) -> "RunFolder":
    """The folder that is named, itself or by its config.json."""
    from train.run.run_folder import RunFolder

    return RunFolder(Path(_run_of(given) or given))


def _prepare_jax(mesh: "Mesh | None" = None, processes: int = 1) -> None:
    """Compiled programs are kept between runs, in the user's cache folder; freed memory is not."""
    import jax

    from train.run.process_memory import hold_little_freed_memory

    hold_little_freed_memory()
    if not os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        with contextlib.suppress(RuntimeError):  # a user without a home has no cache
            cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
            jax.config.update("jax_compilation_cache_dir", str(Path(cache) / "fnet" / "jax"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
    if mesh:
        from train.run.mesh import make_cpu_devices

        make_cpu_devices(mesh, processes)
