"""The platform that JAX runs on, chosen before JAX loads the plugins of accelerators."""

import glob
import os
import sys
from importlib import metadata

import jax

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
    chosen: str | None = getattr(jax.config, "jax_platforms")  # noqa: B009
    if chosen or not sys.platform.startswith("linux"):
        return
    plugins = [plugin.name for plugin in metadata.entry_points(group="jax_plugins")]
    others = [name for name in plugins if not any(key in name for key in _DEVICE_FILES)]
    drivers = [file for files in _DEVICE_FILES.values() for file in files]
    if not others and not any(glob.glob(file) for file in drivers):
        use_cpu()


def use_cpu() -> None:
    """Run on the CPU, without loading the plugins of accelerators and their warnings.

    A program that only compiles for an accelerator needs no device of it.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    jax.config.update("jax_platforms", "cpu")
