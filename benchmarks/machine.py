"""The machine that benchmarks ran on, in a few words."""

import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def describe() -> dict[str, Any]:
    """CPU, cores that this process may use, bytes of memory, system, Python, JAX's devices.

    The devices are asked for in a process of their own: whoever has JAX look for a GPU takes
    most of its memory.

    Raises:
      RuntimeError: if JAX cannot tell its devices, so that no benchmark would run.
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
    """How many this process may use."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def same_hardware(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    """Whether figures of one may stand beside figures of the other."""
    gib = round(a["memory_bytes"] / 2**30) == round(b["memory_bytes"] / 2**30)
    return gib and all(a.get(key) == b.get(key) for key in ("cpu", "cores", "devices"))


def in_words(machine: Mapping[str, Any]) -> str:
    """What `describe` found, as one line."""
    return (
        f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_bytes'] / 2**30:.0f} GiB, "
        f"{machine['system']}, Python {machine['python']}; JAX's devices: "
        f"{', '.join(machine['devices'])}"
    )


def _system() -> str:
    """Its version and the C library's, without what who built it calls it."""
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
    """Each kind once, with how many there are."""
    count = (
        "import collections, jax; "
        "print(*(f'{n} x {k}' for k, n in "
        "collections.Counter(d.device_kind for d in jax.devices()).items()), sep='\\n')"
    )
    answer = subprocess.run([sys.executable, "-c", count], capture_output=True, text=True)
    if answer.returncode:
        raise RuntimeError(
            f"JAX ended with code {answer.returncode} as it looked for its devices; "
            "JAX_PLATFORMS=cpu has it look for none but the CPU"
        )
    return answer.stdout.splitlines()
