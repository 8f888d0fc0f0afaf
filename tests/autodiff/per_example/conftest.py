"""Small arrays take the ways of large ones, and losses promote ranks."""

import zlib

import pytest

from fnet.autodiff.per_example import parameter_gradients


@pytest.fixture(autouse=True)
def losses_promote_ranks(request):
    """But for files whose losses do not."""
    if request.path.stem not in ("test_adaptive", "test_kept_in_microbatches"):
        request.getfixturevalue("allow_rank_promotion")


@pytest.fixture
def real_sizes():
    """The test has parameters as large as they count."""


@pytest.fixture(autouse=True)
def small_parameters_count_as_large(request, monkeypatch):
    """Without it, the small parameters of tests would all be materialized.

    Half of the random programs are as users run them.
    """
    is_random = request.path.stem in ("test_random_programs", "test_sensitivity")
    is_real = is_random and zlib.crc32(request.node.nodeid.encode()) % 2
    if not (is_real or "real_sizes" in request.fixturenames):
        monkeypatch.setattr(parameter_gradients, "_MATERIALIZED", 0.25)
