"""The platform that JAX runs on, chosen before JAX loads the plugins of accelerators."""

import contextlib
import glob
import os
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from train.errors import warn

_DEVICE_FILES = {
    "cuda": ("/dev/nvidia*", "/dev/dxg"),
    "rocm": ("/dev/kfd",),
    "tpu": ("/dev/accel*", "/dev/vfio/*"),
}
"""Files of the drivers, by a part of the plugin's name."""


def choose_platform() -> None:
    """Run on the CPU if this machine has no accelerator that an installed plugin is for.

    Without its device, a plugin prints errors when JAX looks for devices: libraries that are
    missing, or a host name that is not a TPU's. ``JAX_PLATFORMS`` takes precedence.
    """
    if os.environ.get("JAX_PLATFORMS") or not sys.platform.startswith("linux"):
        return
    plugins = [plugin.name for plugin in metadata.entry_points(group="jax_plugins")]
    others = [name for name in plugins if not any(key in name for key in _DEVICE_FILES)]
    drivers = [file for files in _DEVICE_FILES.values() for file in files]
    if not others and not any(glob.glob(file) for file in drivers):
        use_cpu()


def use_cpu() -> None:
    """Run on the CPU, without plugins of accelerators: a program compiles for them without."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    configure_jax("jax_platforms", "cpu")


def configure_jax(name: str, value: Any) -> None:
    """Set an option of JAX without importing it: it reads its environment when it is imported."""
    if jax := sys.modules.get("jax"):
        jax.config.update(name, str(value) if isinstance(value, Path) else value)
    else:
        os.environ[name.upper()] = str(value)


CACHE_BYTES = 4 * 2**30
"""Largest size of the compiled programs that are kept between runs."""


def cache_programs(folder: Path) -> None:
    """Keep compiled programs for later runs in a folder, which drops those not used for longest."""
    configure_jax("jax_compilation_cache_dir", folder)
    with contextlib.suppress(OSError):  # read-only, or another process drops them, too
        if not folder.is_dir():
            folder.mkdir(parents=True)
            warn(f"compiled programs are kept in {folder}, which has at most 4 GiB")
        used = {path: path.stat() for path in folder.iterdir()}
        total = sum(file.st_size for file in used.values())
        for path in sorted(used, key=lambda p: max(used[p].st_atime, used[p].st_mtime)):
            if total > CACHE_BYTES:
                path.unlink()
                total -= used[path].st_size


def keeps_freed_memory() -> bool:
    """Whether GLIBC_TUNABLES says from which size on glibc returns arrays to the system."""
    return "glibc.malloc.mmap_threshold" in os.environ.get("GLIBC_TUNABLES", "")
