"""Description of the machine that benchmarks run on."""

import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def describe() -> dict[str, Any]:
    """Describe CPU, usable cores, memory, system, Python version and JAX devices.

    A subprocess lists the devices, because JAX preallocates most of a GPU's memory.

    Raises:
      RuntimeError: if JAX fails to list its devices.
    """
    return {
        "cpu": _cpu(),
        "cores": cores(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": _system(),
        "python": platform.python_version(),
        "devices": _devices(),
    }


def cores() -> int:
    """Number of CPU cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def same_hardware(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    """Whether figures of two machines can be compared."""
    gib = round(a["memory_bytes"] / 2**30) == round(b["memory_bytes"] / 2**30)
    return gib and all(a.get(key) == b.get(key) for key in ("cpu", "cores", "devices"))


def format_machine(machine: Mapping[str, Any]) -> str:
    """Format the result of `describe` as one line."""
    return (
        f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_bytes'] / 2**30:.0f} GiB, "
        f"{machine['system']}, Python {machine['python']}; JAX's devices: "
        f"{', '.join(machine['devices'])}"
    )


def _system() -> str:
    """Versions of the system and the C library, without the distributor's suffix."""
    libc = " ".join(platform.libc_ver())
    return f"{platform.system()} {platform.release().split('-')[0]}" + (
        f", {libc}" if libc.strip() else ""
    )


def _cpu() -> str:
    listed = Path("/proc/cpuinfo")
    if listed.is_file():
        for line in listed.read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()


def _devices() -> list[str]:
    """Kinds of devices, with their number."""
    count = (
        "import collections, jax; "
        "print(*(f'{n} x {k}' for k, n in "
        "collections.Counter(d.device_kind for d in jax.devices()).items()), sep='\\n')"
    )
    answer = subprocess.run([sys.executable, "-c", count], capture_output=True, text=True)
    if answer.returncode:
        raise RuntimeError(
            f"JAX failed with exit code {answer.returncode} while listing its devices; "
            "set JAX_PLATFORMS=cpu to use the CPU only"
        )
    return answer.stdout.splitlines()
