"""A pytest plugin that keeps the compiled peak memory of a function: the fixture `assert_peak`."""

import json
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import pytest

from fnet.memory import Peak, format_bytes, parse_bytes, peak

GROWTH = 0.01
"""Peaks within this share of the baseline pass in silence."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--update-peaks``, which writes baselines again."""
    parser.addoption(
        "--update-peaks", action="store_true", help="write the baselines of assert_peak again"
    )


@pytest.fixture
def assert_peak(request: pytest.FixtureRequest) -> Callable[..., Peak]:
    """Return ``assert_peak(f, args, limit=None)``, which fails if the peak of f is larger.

    Args:
      request: pytest's request.

    Returns:
      A function of a step or a function ``f``, jitted or not, a tuple of its arguments or their
      shapes, and a limit: bytes, or text for `fnet.memory.parse_bytes`. It compiles f, runs
      nothing, and returns the peak. Without a limit, it compares with the baseline in
      ``<test file>.peaks.json``, one per backend and version of JAX. The first run writes it.
    """
    file, update = request.path.with_suffix(".peaks.json"), request.config.getoption("update_peaks")
    calls = 0

    def check(f: Any, args: Sequence[Any], limit: float | str | None = None) -> Peak:
        nonlocal calls
        calls += 1
        found = peak((f if hasattr(f, "lower") else jax.jit(f)).lower(*args).compile())
        if limit is not None:
            _compare(found, parse_bytes(limit, "assert_peak: limit"), "the limit")
            return found
        test = request.node.name + (f" #{calls}" if calls > 1 else "")
        versions = f"{jax.default_backend()}, jax {jax.__version__}"
        baseline = None if update else _baselines(file).get(test, {}).get(versions)
        if baseline is None:
            kept = _baselines(file)
            kept.setdefault(test, {})[versions] = found.total
            file.write_text(json.dumps(kept, indent=2, sort_keys=True) + "\n")
            return found
        _compare(
            found, int((1 + GROWTH) * baseline), f"the baseline {format_bytes(baseline)} + 1 %"
        )
        if found.total < (1 - GROWTH) * baseline:
            warnings.warn(
                f"assert_peak: {test} shrank from {format_bytes(baseline)} to "
                f"{format_bytes(found.total)}; keep it with --update-peaks",
                stacklevel=2,
            )
        return found

    return check


def _compare(found: Peak, limit: int, name: str) -> None:
    if found.total <= limit:
        return
    largest = ", ".join(
        f"{b.dtype}{list(b.shape)} {format_bytes(b.bytes)}{f' of {b.layer}' if b.layer else ''}"
        for b in found.largest[:5]
    )
    exceeded = f"{name} ({format_bytes(limit)})" if name == "the limit" else name
    pytest.fail(
        f"assert_peak: {format_bytes(found.total)} is above {exceeded}; largest: {largest}",
        pytrace=False,
    )


def _baselines(file: Path) -> dict[str, dict[str, int]]:
    return json.loads(file.read_text()) if file.exists() else {}
