"""Run the tests that read or compile traced programs on the newest Python and JAX.

    python -m tests.newest [--seconds 480]

It keeps their environment in .venv-newest. If this machine lacks that Python, its packages or the
time, it says so, with exit code 0: that says nothing about fnet. A test that fails or ends its
process gives exit code 1.
"""

import argparse
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

from tests.release import ROOT, interpreter, supported

TESTS = (
    "tests/jaxpr",
    *(f"tests/autodiff/test_{name}.py" for name in ("accumulate", "backward_pass", "coupling")),
    *(
        f"tests/autodiff/per_example/test_{name}.py"
        for name in ("batching", "clipped", "clipped_remat", "derived", "ghost_norm", "products")
    ),
    *(
        f"tests/memory/test_{name}.py"
        for name in ("donation", "odd_programs", "peak", "plan", "residuals", "rows")
    ),
    *(f"tests/step/test_{name}.py" for name in ("fsdp", "nonfinite", "state")),
    *("tests/noise", "tests/memory/test_host_state.py", "tests/train/commands/test_onnx.py"),
)
LEAST_SECONDS = 180
"""Time below which it is no use to begin."""
ENVIRONMENT = ROOT / ".venv-newest"


class NotTestedError(Exception):
    """Why the tests cannot run here."""


def main() -> int:
    """Make the environment and run the tests; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seconds", type=float, default=480, help="Time limit of everything.")
    end = time.monotonic() + parser.parse_args().seconds
    try:
        python = environment(end)
        return run_tests(python, end)
    except NotTestedError as error:
        print(f"newest JAX: not tested, because {error}", flush=True)
        return 0


def environment(end: float) -> str:
    """Return the Python of an environment with the newest packages, made if it is not there."""
    if end - time.monotonic() < LEAST_SECONDS:
        raise NotTestedError(f"less than {LEAST_SECONDS} s are left")
    version = supported()[-1]
    newest = interpreter(version)
    if newest is None:
        raise NotTestedError(f"this machine has no Python {version}")
    python = str(ENVIRONMENT / "bin" / "python")
    installed, listed = ENVIRONMENT / "installed", ROOT / "pyproject.toml"
    try:
        if not installed.exists() or installed.stat().st_mtime < listed.stat().st_mtime:
            _run([newest, "-m", "venv", "--clear", str(ENVIRONMENT)], end)
            _run([python, "-m", "pip", "install", "--quiet", "--editable", f"{ROOT}[test]"], end)
            installed.touch()
        versions = "import sys, jax; print(sys.version.split()[0], 'and JAX', jax.__version__)"
        shown = _run([python, "-c", versions], end).strip()
    except subprocess.TimeoutExpired:
        raise NotTestedError("installing its packages takes too long") from None
    except (OSError, subprocess.CalledProcessError) as error:
        lines = (getattr(error, "stderr", "") or str(error)).strip().splitlines()
        reason = next((line for line in reversed(lines) if line.startswith("ERROR")), lines[-1])
        raise NotTestedError(f"its packages cannot be installed: {reason}") from None
    print(f"newest JAX: Python {shown}", flush=True)
    return python


def run_tests(python: str, end: float) -> int:
    """Run the tests until the end; returns 1 if one failed."""
    words = "-n logical --maxprocesses 4 -q -p no:cacheprovider --maxfail 20 --tb short"
    # In a group of its own, because its workers must end with it.
    with subprocess.Popen(
        [python, "-m", "pytest", *words.split(), *TESTS], cwd=ROOT, start_new_session=True
    ) as process:
        try:
            code = process.wait(end - time.monotonic())
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)  # pytest reports what it has
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                subprocess.run(["kill", "-9", "--", f"-{process.pid}"], check=False)
            raise NotTestedError("its tests take too long here") from None
    return int(code != 0)


def _run(command: Sequence[str], end: float) -> str:
    seconds = max(end - time.monotonic(), 1)
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=seconds
    )
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
