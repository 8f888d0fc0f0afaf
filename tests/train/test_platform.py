"""The platform of JAX, and the folder of compiled programs."""

import os
from types import SimpleNamespace

import jax
import pytest

from train import platform


@pytest.mark.parametrize(
    ("plugins", "files", "variables", "is_cpu"),
    [
        ([], [], {}, True),
        (["xla_cuda12"], [], {}, True),
        (["xla_cuda12"], ["/dev/nvidia*"], {}, False),
        (["xla_cuda12"], ["/dev/kfd"], {}, False),
        (["metal"], [], {}, False),
        (["xla_cuda12"], [], {"JAX_PLATFORMS": "cuda"}, False),
    ],
)
def test_without_a_device_of_a_plugin_programs_run_on_the_cpu(
    plugins, files, variables, is_cpu, monkeypatch
):
    for name in ("JAX_PLATFORMS", "TF_CPP_MIN_LOG_LEVEL"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    chosen = []
    monkeypatch.setattr(platform, "configure_jax", lambda *given: chosen.append(given))
    monkeypatch.setattr(platform.glob, "glob", lambda file: [file] if file in files else [])
    entries = [SimpleNamespace(name=name) for name in plugins]
    monkeypatch.setattr(platform.metadata, "entry_points", lambda group: entries)
    monkeypatch.setattr(platform.sys, "platform", "linux")
    platform.choose_platform()
    assert chosen == [("jax_platforms", "cpu")] * is_cpu
    assert ("TF_CPP_MIN_LOG_LEVEL" in os.environ) == is_cpu


def test_programs_not_used_for_longest_are_dropped(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(platform, "CACHE_BYTES", 250)
    folder, before = tmp_path / "a" / "cache", jax.config.jax_compilation_cache_dir
    try:
        platform.cache_programs(folder)
        assert (
            f"compiled programs are kept in {folder}, which has at most 4 GiB"
            in capsys.readouterr().err
        )
        for i, (accessed, changed) in enumerate([(5, 1), (1, 2), (3, 3), (1, 4)]):
            (folder / f"{i}").write_bytes(bytes(100))
            os.utime(folder / f"{i}", (accessed, changed))
        platform.cache_programs(folder)
        assert jax.config.jax_compilation_cache_dir == str(folder)
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
    assert sorted(path.name for path in folder.iterdir()) == ["0", "3"]
    assert not capsys.readouterr().err
    assert platform.CACHE_BYTES == 250


def test_options_reach_a_jax_that_is_not_imported_yet(monkeypatch):
    monkeypatch.delitem(platform.sys.modules, "jax")
    monkeypatch.setenv("JAX_SOME_OPTION", "")
    platform.configure_jax("jax_some_option", 3)
    assert os.environ["JAX_SOME_OPTION"] == "3"
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.mmap_threshold=1")
    assert platform.keeps_freed_memory()
    monkeypatch.delenv("GLIBC_TUNABLES")
    assert not platform.keeps_freed_memory()
