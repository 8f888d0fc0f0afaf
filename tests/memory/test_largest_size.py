import hypothesis
import hypothesis.strategies as st
import pytest

from fnet.memory import largest_size


@hypothesis.given(
    fixed=st.integers(0, 10_000),
    each=st.integers(1, 500),
    bent=st.floats(0, 300),
    room=st.integers(0, 50_000),
    start=st.integers(1, 300),
)
def test_finds_the_largest_size_that_fits_to_within_2_percent(fixed, each, bent, room, start):
    def peak(n):
        return int(fixed + each * n + bent * n**0.5)

    found = largest_size(peak, fixed + room, start)
    fits = [n for n in range(1, room // each + 2) if peak(n) <= fixed + room]
    if not fits:
        assert found is None
    else:
        assert max(fits) >= found >= 0.98 * max(fits) - 1


def test_rejects_a_start_below_1():
    with pytest.raises(ValueError, match="start must be at least 1, got 0"):
        largest_size(lambda n: n, 10, 0)


def test_calls_peak_three_times_if_memory_is_linear():
    asked = []

    def peak(n):
        asked.append(n)
        return 1000 + 37 * n

    assert largest_size(peak, 100_000, 16) == pytest.approx(2675, rel=0.02)
    assert len(asked) == 3
