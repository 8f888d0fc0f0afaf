"""`fnet.testing`: limits and baselines of compiled peaks in a user's tests."""

import json

import jax
import pytest

pytest_plugins = ["pytester"]

TEST = """
import jax, jax.numpy as jnp
import pytest

def step(x):
    return jnp.sort(x) @ x

@pytest.mark.parametrize("width", [WIDTH])
def test_step(assert_peak, width):
    shape = jax.ShapeDtypeStruct((width, 64), jnp.float32)
    assert assert_peak(LIMITED).total > 0
"""


@pytest.fixture
def run(pytester):
    def run(*options, call="step, (jnp.zeros((64, 64)),)", size=64):
        source = TEST.replace("LIMITED", call.replace("64", str(size))).replace("WIDTH", "64")
        pytester.makepyfile(test_user=source)
        result = pytester.runpytest_inprocess(
            "-p", "fnet.testing", "-p", "no:cacheprovider", *options
        )
        return result, pytester.path / "test_user.peaks.json"

    return run


def test_a_limit_passes_or_fails_in_one_line(run):
    call = "jax.jit(step), (jnp.zeros((64, 64)),), "
    result, file = run(call=call + '"1MiB"')
    result.assert_outcomes(passed=1)
    assert not file.exists()
    result, _ = run(call=call + "1024")
    result.assert_outcomes(failed=1)
    result.stdout.re_match_lines(
        [
            r"assert_peak: 48.00 KiB is above the limit \(1024? bytes|.*1.00 KiB\); largest: float32\["
        ]
    )
    result, _ = run(call=call + '"abc"')
    result.stdout.fnmatch_lines(["*assert_peak: limit: expected a number with a unit*"])


def test_a_baseline_is_written_and_fails_on_growth(run):
    result, file = run()
    result.assert_outcomes(passed=1)
    versions = f"{jax.default_backend()}, jax {jax.__version__}"
    assert json.loads(file.read_text()) == {"test_step[64]": {versions: 49152}}
    run()[0].assert_outcomes(passed=1)

    result, _ = run(size=128)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["assert_peak: 192.00 KiB is above the baseline 48.00 KiB + 1 %*"])
    run("--update-peaks", size=128)[0].assert_outcomes(passed=1)

    result, _ = run()
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(
        ["*shrank from 192.00 KiB to 48.00 KiB; keep it with --update-peaks"]
    )
    assert json.loads(file.read_text())["test_step[64]"][versions] == 4 * 49152, "kept"
