"""The ``fnet`` command: dispatch, exit codes and JAX's configuration."""

import _thread
import contextlib
import errno
import gc
import importlib
import io
import os
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from fnet.cpu.heap import limit_freed_memory
from train import limits
from train.errors import TrainingError, UserError, did_you_mean, is_out_of_memory, warn
from train.platform import cache_programs, choose_platform, configure_jax, keeps_freed_memory

USAGE = """\
usage: fnet COMMAND ...

  fnet train CONFIG     train a network, or resume a run
  fnet eval RUN         evaluate a run on its test examples
  fnet predict RUN FILE...
                        label images, or their pixels, with a trained network
  fnet attribute RUN    rank training examples: wrong labels, or those behind a prediction
  fnet memory CONFIG    predict the memory of training, and find settings that fit a budget
  fnet fit MODEL        show the ways to fine-tune a published model in a budget
  fnet sample RUN       generate text or images with a trained model
  fnet import CONFIG WEIGHTS
                        start a run from pretrained weights (torch or safetensors);
                        fnet import MODEL: from a published language model
  fnet export RUN       write a run's weights as safetensors, or its network as StableHLO or ONNX
  fnet report RUN...    show runs as one HTML page
  fnet configs          list the recipes

CONFIG is a recipe's name (digits) or file, or a run's folder. RUN is a run's folder.
fnet COMMAND --help explains the flags of a command.
fnet train CONFIG --help lists every field of CONFIG with its value.
fnet COMMAND --limits 2 reads files twice as large, deep or slow as it would trust.
"""

_COMMANDS = (
    *("train", "eval", "predict", "attribute", "memory", "fit"),
    *("sample", "import", "export", "report", "configs"),
)


def main(argv: Sequence[str] | None = None) -> None:
    """Run a command and exit.

    The exit code is 0 if all went well, 2 for a mistake of the user and 1 for anything else.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)
    if sys.stdout is None:  # closed by the caller
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):  # some names are not in a terminal's encoding
        sys.stdout.reconfigure(errors="replace")
    try:
        try:
            _dispatch(list(sys.argv[1:] if argv is None else argv))
        finally:
            gc.enable()
            sys.stdout.flush()  # raises here, not at exit, if nobody reads the output
    except (UserError, TrainingError) as error:
        _fail(error, 2 if isinstance(error, UserError) else 1)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # drop buffered output
        raise SystemExit(1) from None
    except OSError as error:
        if error.filename is not None and error.errno in (errno.EACCES, errno.ENAMETOOLONG):
            _fail(f"cannot access {error.filename}: {error.strerror}", 2)
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG):
            raise
        _fail(f"cannot write: {error}", 1)
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a third Ctrl-C would print tracebacks
        print("fnet: interrupted", file=sys.stderr)
        raise SystemExit(1) from None
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        reason = next(iter(str(error).splitlines()), type(error).__name__).rstrip(".")
        _fail(
            f"out of memory: {reason}; predict a run's memory with fnet memory CONFIG, limit it "
            "with --memory.budget",
            1,
        )


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt; later, where Python would drop it: in the garbage collection."""
    while frame is not None:
        if frame.f_code.co_name in ("_xla_gc_callback", "__del__"):
            threading.Timer(0.1, _thread.interrupt_main).start()
            return
        frame = frame.f_back
    raise KeyboardInterrupt


def _fail(error: Exception | str, code: int) -> None:
    warn(" ".join(str(error).split("\n")))
    raise SystemExit(code)


def _dispatch(argv: list[str]) -> None:
    if not argv or argv[0] in ("-h", "--help"):
        print(USAGE, end="")
        raise SystemExit(0 if argv else 2)
    name, *rest = limits.take_flag(argv)
    if name not in _COMMANDS:
        raise UserError(f"no command {name}{did_you_mean(name, _COMMANDS)}; see fnet --help")
    # Programs for a device that is not there cannot be read from the cache: JAX warns.
    _prepare_jax(caches=not any(a.split("=")[0] == "--target" for a in rest))
    gc.disable()  # modules stay: not to look at them, now and later, saves a second
    # Imported here, so that a command loads only the libraries it needs, and --help few of them.
    words = importlib.import_module("train.arguments").READERS[name](rest)
    module = "import_run" if name == "import" else name  # import is a keyword
    command = importlib.import_module(f"train.commands.{module}")
    if not gc.get_freeze_count():
        gc.freeze()
    gc.enable()
    command.main(*words)


def _prepare_jax(caches: bool = True) -> None:
    """Choose a platform, limit freed memory and perhaps cache compiled programs between runs."""
    choose_platform()
    if not keeps_freed_memory():
        limit_freed_memory()
    if not caches:
        configure_jax("jax_enable_compilation_cache", False)
    elif not os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        with contextlib.suppress(RuntimeError):  # a user without a home has no cache
            cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
            cache_programs(Path(cache, "fnet/jax"))
    configure_jax("jax_persistent_cache_min_compile_time_secs", 0.2)
