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

    (given,), flags = _positional(argv, "fnet train CONFIG", arguments.TrainArguments)
    a, config = arguments.read_with_config(
        arguments.TrainArguments, recipes.load(given), flags, f"fnet train {given}"
    )
    out = Path(a.out or (_run_of(given) if a.resume else None) or f"runs/{config.name}")

    together = a.distributed or any(x is not None for x in (a.coordinator, a.processes, a.process))
    mesh = config.mesh
    _prepare_jax(mesh, (a.processes or mesh.data * mesh.fsdp) if together else 1)
    first = True
    if together:
        from train.run.distributed import join

        first = join(a.coordinator, a.processes, a.process)
    from rich.console import Console

    from train.run.loop import train

    train(config, out, resume=a.resume, console=Console(quiet=not first), profile=a.profile)


def _eval(argv: list[str]) -> None:
    from train import arguments

    (given,), flags = _positional(argv, "fnet eval RUN", arguments.EvalArguments)
    a = arguments.read(arguments.EvalArguments, flags, f"fnet eval {given}")
    folder = _run_folder(given)
    folder.read_config()  # answered at once if there is none

    _prepare_jax()
    from rich.console import Console

    from train.commands.eval import evaluate_run

    evaluate_run(folder, a, Console())


def _predict(argv: list[str]) -> None:
    from train import arguments

    (given, *images), flags = _positional(
        argv, "fnet predict RUN IMAGE...", arguments.PredictArguments
    )
    a = arguments.read(arguments.PredictArguments, flags, f"fnet predict {given} IMAGE...")
    folder = _run_folder(given)
    config = folder.read_config()

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

    (given,), flags = _positional(argv, "fnet memory CONFIG", arguments.MemoryArguments)
    a, config = arguments.read_with_config(
        arguments.MemoryArguments, recipes.load(given), flags, f"fnet memory {given}"
    )

    if a.target:  # before XLA starts: its own warnings are not about this machine
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    _prepare_jax(config.mesh)
    if a.target:
        import jax

        # Nothing runs: this machine's own accelerator, or the lack of one, is not looked at.
        jax.config.update("jax_platforms", "cpu")
    from rich.console import Console

    from train.commands.memory import foresee

    foresee(config, a, Console())


def _sample(argv: list[str]) -> None:
    from train import arguments
    from train.config import Denoiser, LanguageModel

    (given,), flags = _positional(
        argv, "fnet sample RUN", arguments.TextArguments, arguments.ImageArguments
    )

    folder = _run_folder(given)
    config = folder.read_config()
    if not isinstance(config.model, LanguageModel | Denoiser):
        raise UserError(
            f"{folder.path} is a run of {config.model.name}, which generates nothing; "
            "there are language_model (text) and denoiser (images)"
        )
    prog = f"fnet sample {given}"
    if isinstance(config.model, LanguageModel):
        text = arguments.read(arguments.TextArguments, flags, prog)
        _prepare_jax()
        from train.commands.sample_text import continued

        for piece in continued(folder, config, text):
            print(piece, end="", flush=True)
        print()
        return
    images = arguments.read(arguments.ImageArguments, flags, prog)
    _prepare_jax()
    from train.commands.sample_images import draw
    from train.output.progress import printable

    print(printable(str(draw(folder, config, images))))


def _import(argv: list[str]) -> None:
    from train import arguments
    from train.config import recipes

    (given, weights), flags = _positional(
        argv, "fnet import CONFIG WEIGHTS", arguments.ImportArguments
    )
    a, config = arguments.read_with_config(
        arguments.ImportArguments, recipes.load(given), flags, f"fnet import {given} {weights}"
    )
    out = Path(a.out or f"runs/{config.name}")

    _prepare_jax()
    from rich.console import Console

    from train.commands.weights import import_weights, report_table
    from train.output.progress import plain
    from train.run.run_folder import quote

    report = import_weights(
        config,
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
    from train import arguments

    (given,), flags = _positional(argv, "fnet export RUN", arguments.ExportArguments)
    a = arguments.read(arguments.ExportArguments, flags, f"fnet export {given}")
    folder = _run_folder(given)

    _prepare_jax()
    from train.commands.weights import export_weights
    from train.output.progress import printable

    print(printable(str(export_weights(folder, a))))


def _report(argv: list[str]) -> None:
    from train import arguments

    runs, flags = _positional(argv, "fnet report RUN...", arguments.ReportArguments)
    a = arguments.read(arguments.ReportArguments, flags, f"fnet report {' '.join(runs)}")
    from rich.console import Console

    from train.output.report import report

    folders = [_run_folder(given) for given in runs]
    report(folders, Path(a.out) if a.out else None, Console())


def _configs(argv: list[str]) -> None:
    from train.config.recipes import recipes

    if argv:
        from train import arguments

        arguments.read(arguments.ConfigsArguments, argv, "fnet configs")
    known = recipes()
    width = max(map(len, known))
    for name, line in known.items():
        print(f"{name:{width}}  {line}")


def _positional(argv: list[str], usage: str, *options: type) -> tuple[list[str], list[str]]:
    """Split a command line into the positional arguments that ``usage`` names, and flags.

    Args:
      argv: the command line after the command's name.
      usage: ``"fnet predict RUN IMAGE..."``; dots allow one or more.
      options: classes of the command's options, for ``--help`` without positional arguments.

    Raises:
      UserError: for too few or too many positional arguments.
      SystemExit: with code 0, after ``--help``.
    """
    names = usage.split()[2:]
    values = list(itertools.takewhile(lambda word: not word.startswith("-"), argv))
    if len(values) < len(names) and {"-h", "--help"} & set(argv):
        from train import arguments

        for kind in options[:-1]:
            with contextlib.suppress(SystemExit):
                arguments.read(kind, ["--help"], usage)
        arguments.read(options[-1], ["--help"], usage)
    if len(values) < len(names):
        raise UserError(f"missing {names[len(values)].removesuffix('...')}; usage: {usage}")
    if len(values) > len(names) and not usage.endswith("..."):
        raise UserError(f"unexpected {values[len(names)]}; usage: {usage}")
    return values, argv[len(values) :]


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
