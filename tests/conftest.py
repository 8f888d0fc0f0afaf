"""Strict settings for all tests: an implicit rank promotion or a reused key is an error."""

import os

# Four devices on the CPU, so that sharding is tested everywhere; set before JAX starts.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"
)
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import program_cases
import pytest

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_debug_key_reuse", True)


@pytest.fixture
def float64():
    """Enables float64 for one test."""
    with jax.enable_x64(True):
        yield


@pytest.fixture
def workplace(tmp_path, monkeypatch):
    """An empty folder to work in, with a recipe in it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "tiny.py").write_text(program_cases.TINY)
    return tmp_path
