"""Limits of what comes from outside: files of data and models that somebody else wrote.

Every reader checks its limits here. ``fnet COMMAND --limits FACTOR`` multiplies all of them. Code
of others, such as chat templates, runs in a process of its own, with limits of memory and time.
"""

import atexit
import functools
import importlib
import os
import pickle
import resource
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from train.errors import UserError

_VARIABLE = "FNET_LIMITS"
"""Holds the factor, so that worker processes have it as well."""
FLAG = "--limits"


class Limit(NamedTuple):
    """Largest value of something that is read.

    Attributes:
      what: What has the value, for messages.
      value: The largest one, before it is multiplied by the flag.
      unit: Plural of its unit.
    """

    what: str
    value: int
    unit: str

    @property
    def most(self) -> int:
        """Largest value that is read."""
        return int(self.value * factor())

    def check(self, given: int, where: object) -> None:
        """Raise `UserError` if a value is above the limit."""
        if given > self.most:
            raise UserError(
                f"{where}: {self.what} has {given:,} {self.unit}; at most {self.most:,} are read"
                f"{advice()}"
            )


ANNOTATIONS = Limit("the file", 2**30, "bytes")
CLASS_NAME = Limit("the label", 1000, "symbols")
"""An array of names gives each one the longest's bytes."""
CODE_MEMORY = Limit("a template or a tokenizer", 384 * 2**20, "bytes of memory")
CODE_TIME = Limit("a template or a tokenizer", 2, "seconds of computing")
ENTRIES = Limit("the checkpoint", 10**5, "entries")
HEADER = Limit("the header", 100 * 2**20, "bytes")
JSON_FILE = Limit("the file", 64 * 2**20, "bytes")
LABEL_FILE = Limit("the label", 2**20, "bytes")
LINKS_AND_FOLDERS = Limit("the tar", 10**5, "links and folders")
LOG = Limit("the log", 2**30, "bytes")
LINE = Limit("the line", 2**22, "bytes")
"""Encoding a text takes 60 times its memory."""
LINKS = Limit("links lead there", 64, "times")
"""Links to folders of links are as many paths as a power of two."""
PICTURE = Limit("the picture", 16 * 2**20, "bytes")
ROWS = Limit("the shard", 10**7, "examples")
TEMPLATE = Limit("the chat template", 2**20, "bytes")
UNPACKED = Limit("the unpacked file", 2**28, "bytes")
VOCABULARY = Limit("the tokenizer", 10**7, "tokens")
SIZES = {
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "depth"), 10_000),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "n_head", "head_dim"), 10_000),
    **dict.fromkeys(("hidden_size", "n_embd", "intermediate_size", "patch_size"), 10**7),
    **dict.fromkeys(("vocab_size", "image_size", "rope_theta"), 10**12),
    **dict.fromkeys(("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon"), 1),
}
"""Largest value of each size in a model's config.json."""


def check_unpacked(unpacked: int, packed: int, where: object) -> None:
    """Raise `UserError` if a file unpacks to bytes above the limit and 8 times its size."""
    if unpacked > 8 * packed:
        UNPACKED.check(unpacked, where)


def factor() -> float:
    """Return the factor that multiplies all limits."""
    return float(os.environ.get(_VARIABLE) or 1)


def take_flag(words: Sequence[str]) -> list[str]:
    """Set the limits from the words of a command, and return the other words."""
    rest = list(words)
    os.environ.pop(_VARIABLE, None)
    for i, word in enumerate(words):
        name, is_joined, value = word.partition("=")
        if name != FLAG:
            continue
        if not is_joined:
            value = words[i + 1] if i + 1 < len(words) else "nothing"
        del rest[i : i + 2 - bool(is_joined)]
        try:
            if not 0 < float(value) < float("inf"):
                raise ValueError
        except ValueError:
            raise UserError(f"{FLAG}: expected a number above 0, got {value}") from None
        os.environ[_VARIABLE] = value
        break
    return rest


class CodeError(Exception):
    """Foreign code failed, such as a template. The message is the reason."""


class CodeLimitError(CodeError):
    """It needed more memory or time than its limits, or ended its process."""


def run(function: str, *args: Any, size: int = 0) -> Any:
    """Run a function on what others wrote, in a process with limits of memory and time.

    The process stays for the next call. It ends with this one, or with what it cannot bear.

    The function has a name with its module, such as ``"train.data.chat:render"``. Arguments and
    result are pickled. Limits of memory and time grow with the ``size`` of its input in bytes.

    Raises:
      CodeError: if the function raises an exception.
      CodeLimitError: if it exceeds a limit, or ends its process.
    """
    with _LOCK:
        return _process(os.getpid()).run(function, args, size)


_LOCK = threading.Lock()
_MEMORY_PER_BYTE, _SECONDS_PER_BYTE = 1000, 2e-5


class _Process:
    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        # Not a copy of this process, which has JAX's threads and the user's data.
        code = f"import sys; sys.path[:] = {sys.path!r}\n"
        code += f"from train.limits import _serve\n_serve({theirs.fileno()})"
        self._process = subprocess.Popen(
            [sys.executable, "-c", code],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=os.environ | {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
            start_new_session=True,  # Ctrl-C is for the program, which ends this one
        )
        theirs.close()
        self._connection = Connection(ours.detach())
        atexit.register(self.end)

    def run(self, function: str, args: Sequence[Any], size: int) -> Any:
        memory = CODE_MEMORY.most + _MEMORY_PER_BYTE * size
        seconds = CODE_TIME.value * factor() + _SECONDS_PER_BYTE * size
        try:
            self._connection.send((function, args, memory, seconds))
            is_result, value = self._connection.recv()
        except (EOFError, OSError):
            _process.cache_clear()
            code = self._process.wait()
            self.end()
            if code == -signal.SIGPROF:
                raise CodeLimitError(f"it takes more than {seconds:.2g} s{advice()}") from None
            why = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            raise CodeLimitError(f"it ended its process ({why})") from None
        except BaseException:  # Ctrl-C: the result of this call must not be taken for the next
            _process.cache_clear()
            self.end()
            raise
        if is_result:
            return value
        if value == MemoryError.__name__:
            mb = memory / 1e6
            raise CodeLimitError(f"it needs more than {mb:.0f} MB of memory{advice()}")
        raise CodeError(value)

    def end(self) -> None:
        atexit.unregister(self.end)
        self._connection.close()
        self._process.kill()
        self._process.wait()


@functools.lru_cache(maxsize=1)
def _process(pid: int) -> _Process:  # of this process; a fork needs its own
    return _Process()


def advice() -> str:
    """Return how to raise the limits, which ends a message."""
    return f" (if you trust it, {FLAG} {2 * factor():g} allows twice as much)"


def _serve(descriptor: int) -> None:
    connection = Connection(descriptor)
    while True:
        try:
            name, args, memory, seconds = connection.recv()
        except EOFError:
            return
        try:
            module, _, function = name.partition(":")
            called = getattr(importlib.import_module(module), function)
            # This process has some memory by now, and more threads have stacks.
            pages = int(Path("/proc/self/statm").read_text().split()[5])
            most = pages * resource.getpagesize() + (os.cpu_count() or 1) * 2**23 + memory
            resource.setrlimit(resource.RLIMIT_DATA, (most, resource.RLIM_INFINITY))
            signal.setitimer(signal.ITIMER_PROF, seconds)  # SIGPROF ends the process
            answer = True, called(*args)
            signal.setitimer(signal.ITIMER_PROF, 0)
            content = pickle.dumps(answer)
        except MemoryError as error:
            content = pickle.dumps((False, type(error).__name__))
        except BaseException as error:  # a panic of Rust is no Exception
            reason = " ".join(str(error)[:2000].split()) or type(error).__name__
            content = pickle.dumps((False, reason))
        signal.setitimer(signal.ITIMER_PROF, 0)
        resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        connection.send_bytes(content)
