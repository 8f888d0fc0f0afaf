"""The tests on the newest JAX run if they can, and otherwise say why not."""

import subprocess
import sys
import time

import pytest

from tests import newest


@pytest.mark.parametrize(
    ("words", "found", "reason"),
    [
        (["--seconds", "-20"], sys.executable, "less than 180 s are left"),
        ([], None, "this machine has no Python 3."),
        ([], "/bin/false", "its packages cannot be installed"),
    ],
)
def test_what_is_missing_is_no_failure(words, found, reason, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(sys, "argv", ["newest", *words])
    monkeypatch.setattr(newest, "interpreter", lambda version: found)
    monkeypatch.setattr(newest, "ENVIRONMENT", tmp_path / "environment")
    assert newest.main() == 0
    assert f"newest JAX: not tested, because {reason}" in capsys.readouterr().out


def test_an_installation_that_takes_too_long_is_no_failure(monkeypatch, tmp_path):
    def slow(command, end):
        raise subprocess.TimeoutExpired(command, 1)

    monkeypatch.setattr(newest, "_run", slow)
    monkeypatch.setattr(newest, "interpreter", lambda version: sys.executable)
    monkeypatch.setattr(newest, "ENVIRONMENT", tmp_path / "environment")
    with pytest.raises(newest.NotTestedError, match="takes too long"):
        newest.environment(time.monotonic() + 1000)


def test_the_tests_are_there():
    assert all((newest.ROOT / path).exists() for path in newest.TESTS)


@pytest.mark.slow
def test_a_test_that_fails_is_a_failure(monkeypatch, tmp_path):
    codes = []
    for body in ("pass", "assert False", "__import__('os').abort()"):
        path = tmp_path / "test_a.py"
        path.write_text(f"def test_a():\n    {body}\n")
        monkeypatch.setattr(newest, "TESTS", (str(path),))
        codes.append(newest.run_tests(sys.executable, time.monotonic() + 100))
    assert codes == [0, 1, 1]
    path.write_text("import time\ndef test_a():\n    time.sleep(60)\n")
    with pytest.raises(newest.NotTestedError, match="tests take too long"):
        newest.run_tests(sys.executable, time.monotonic() + 8)
