"""The ``fnet`` command."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from train.errors import TrainingError, UserError, nearest

USAGE = """\
usage: fnet COMMAND ...

  fnet train CONFIG [--out DIR] [--resume] [--section.field VALUE ...]
  fnet eval RUN          metrics of a run's last checkpoint on its test examples
  fnet memory CONFIG [--budget 4GiB] [--target h100] [--batch-size auto]
                         what training would take, without training; the way that fits
  fnet sample RUN [--prompt TEXT]
                         text or images from a trained model; --help says how to draw
  fnet configs           the recipes, one line each

CONFIG is a recipe's name (digits) or file, or a run's folder or config.json.
fnet train CONFIG --help lists every field, with its value in that config.
"""


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command line and exits: 0 well, 2 a mistake in what was given, 1 anything else."""
    try:
        _dispatch(list(sys.argv[1:] if argv is None else argv))
    except UserError as error:
        _fail(error, 2)
    except TrainingError as error:
        _fail(error, 1)
    except KeyboardInterrupt:
        print("fnet: interrupted", file=sys.stderr)
        raise SystemExit(1) from None


def _fail(error: Exception, code: int) -> None:
    print(f"fnet: {' '.join(str(error).split(chr(10)))}", file=sys.stderr)
    raise SystemExit(code)


def _dispatch(argv: list[str]) -> None:
    # What a command needs is imported when it runs: a mistake is answered at once.
    commands = {
        "train": _train,
        "eval": _eval,
        "memory": _memory,
        "sample": _sample,
        "configs": _configs,
    }
    if not argv or argv[0] in ("-h", "--help"):
        print(USAGE, end="")
        raise SystemExit(0 if argv else 2)
    if argv[0] not in commands:
        raise UserError(f"no command {argv[0]}{nearest(argv[0], commands)}; see fnet --help")
    commands[argv[0]](argv[1:])


def _train(argv: list[str]) -> None:
    from train import arguments, recipes

    given = _positional(argv, "fnet train CONFIG [--out DIR] [--resume] [--section.field VALUE]")
    defaults = arguments.TrainArguments(recipes.load(given))
    a = arguments.read(defaults, argv[1:], f"fnet train {given}")
    out = Path(a.out or (_run_of(given) if a.resume else None) or f"runs/{a.config.name}")

    _prepare_jax()
    from rich.console import Console

    from train.loop import train

    train(a.config, out, resume=a.resume, console=Console())


def _eval(argv: list[str]) -> None:
    given = _positional(argv, "fnet eval RUN")
    if argv[1:]:
        raise UserError(f"fnet eval takes one run, got {' '.join(argv)}")
    from train.run_folder import RunFolder

    folder = RunFolder(Path(_run_of(given) or given))
    config = folder.read_config()

    _prepare_jax()
    from train.checkpoint import Checkpoints
    from train.setup import setup

    run = setup(config)
    with Checkpoints(folder.checkpoints, config.checkpoint.keep) as checkpoints:
        restored = checkpoints.restore(run.state_shapes)
    if restored is None:
        raise UserError(f"no checkpoint in {folder.path}: the run has not saved one yet")
    evaluate = run.compile_evaluation()
    print(f"{folder.path} after step {restored.step}")
    for name, value in evaluate(restored.state).metrics.items():
        print(f"test/{name} {value:.6g}")


def _memory(argv: list[str]) -> None:
    from train import arguments, recipes

    given = _positional(argv, "fnet memory CONFIG [--budget 4GiB] [--section.field VALUE]")
    defaults = arguments.MemoryArguments(recipes.load(given))
    a = arguments.read(defaults, argv[1:], f"fnet memory {given}")

    if a.target:  # before XLA starts: its own warnings are not about this machine
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    _prepare_jax()
    if a.target:
        import jax

        # Nothing runs: this machine's own accelerator, or the lack of one, is not looked at.
        jax.config.update("jax_platforms", "cpu")
    from rich.console import Console

    from train.foresee import foresee

    foresee(a, Console())


def _sample(argv: list[str]) -> None:
    given = _positional(argv, "fnet sample RUN [--prompt TEXT] [--length 500] [--labels 3 5]")
    from train import arguments
    from train.config import Denoiser, LanguageModel
    from train.run_folder import RunFolder

    folder = RunFolder(Path(_run_of(given) or given))
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
        from train.sample_text import continued

        for piece in continued(folder, config, text):
            print(piece, end="", flush=True)
        print()
        return
    images = arguments.read_options(arguments.ImageArguments, argv[1:], prog)
    _prepare_jax()
    from train.sample_images import draw

    print(draw(folder, config, images))


def _configs(argv: list[str]) -> None:
    from train.recipes import recipes

    if argv:
        raise UserError(f"fnet configs takes nothing, got {' '.join(argv)}")
    known = recipes()
    width = max(map(len, known))
    for name, line in known.items():
        print(f"{name:{width}}  {line}")


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


def _prepare_jax() -> None:
    """Compiled programs are kept between runs, in the user's cache folder; freed memory is not."""
    import jax

    from train.process_memory import hold_little_freed_memory

    hold_little_freed_memory()
    if not os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        jax.config.update("jax_compilation_cache_dir", str(Path(cache) / "fnet" / "jax"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
