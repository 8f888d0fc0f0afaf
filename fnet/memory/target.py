"""Compile ahead of time for a device that this machine does not have.

XLA compiles for a GPU from a description of its properties, and for a TPU from its name. The
compiled program reports its memory and never runs.
"""

import contextlib
import functools
import os
import re
from collections.abc import Iterator, Mapping
from importlib import metadata
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import topologies


class Gpu(NamedTuple):
    """Properties of an NVIDIA GPU that XLA's compiler needs.

    Attributes:
      device: Name, as the driver reports it.
      compute_capability: Major and minor number. Further properties follow from it.
      cores: Number of streaming multiprocessors.
      clock_ghz: Highest clock of the multiprocessors.
      memory: Bytes of memory, as the driver reports them. Drivers differ by up to 2 %.
      bandwidth: Memory bandwidth in bytes per second.
      l2_cache: Bytes of L2 cache.
    """

    device: str
    compute_capability: tuple[int, int]
    cores: int
    clock_ghz: float
    memory: int
    bandwidth: int
    l2_cache: int

    def as_text(self) -> str:
        """Format as XLA's ``GpuTargetConfigProto``. Literal numbers are the same for all GPUs."""
        major, minor = self.compute_capability
        threads, shared, shared_per_block, fp32_lanes = _CAPABILITIES[self.compute_capability]
        return f"""
            gpu_device_info {{
              name: "{self.device}"
              cuda_compute_capability {{ major: {major} minor: {minor} }}
              core_count: {self.cores}
              fpus_per_core: {fp32_lanes}
              clock_rate_ghz: {self.clock_ghz}
              device_memory_size: {self.memory}
              memory_bandwidth: {self.bandwidth}
              l2_cache_size: {self.l2_cache}
              shared_memory_per_core: {shared}
              shared_memory_per_block: 49152
              shared_memory_per_block_optin: {shared_per_block}
              registers_per_core_limit: 65536
              registers_per_block_limit: 65536
              threads_per_core_limit: {threads}
              threads_per_block_limit: 1024
              threads_per_warp: 32
              thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
              block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
              driver_version: "13.0.0"
              runtime_version: "12.9.0"
              compile_time_toolkit_version: "12.9.0"
              dnn_version: "9.10.0"
            }}
            platform_name: "CUDA"
            dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
            device_description_str: "{self.device}"
        """


# Per streaming multiprocessor: resident threads, bytes of shared memory, bytes of shared memory for
# one block (opt-in), and float32 operations per cycle. Source: CUDA C++ programming guide, "Compute
# Capabilities" and "Arithmetic Instructions". The first three are also in libcu++,
# cuda/__device/arch_traits.h.
_CAPABILITIES = {
    (7, 5): (1024, 65_536, 65_536, 64),
    (8, 0): (2048, 167_936, 166_912, 64),
    (8, 9): (1536, 102_400, 101_376, 128),
    (9, 0): (2048, 233_472, 232_448, 128),
    (10, 0): (2048, 233_472, 232_448, 128),
    (12, 0): (1536, 102_400, 101_376, 128),
}


class Tpu(NamedTuple):
    """Properties of a TPU that XLA's compiler needs.

    Attributes:
      topology: Smallest slice that is a whole host. One of its chips is used.
      memory: Bytes of HBM that a program may fill, from the compiler's message for a program that
        is too large.
    """

    topology: str
    memory: int


def _gibibytes(n: float) -> int:
    return int(n * 2**30)


# Sources: "XLA" is openxla/xla, xla/backends/gpu/target_config/specs. "deviceQuery" is published
# output of the CUDA sample, with bandwidth = 2 x memory clock x bus width.
TARGETS: dict[str, Gpu | Tpu] = {
    # XLA, a100_sxm_80.txtpb: 80 GB, SXM4.
    "a100": Gpu(
        device="NVIDIA A100-SXM4-80GB",
        compute_capability=(8, 0),
        cores=108,
        clock_ghz=1.41,
        memory=85_100_068_864,
        bandwidth=2_039_040_000_000,
        l2_cache=41_943_040,
    ),
    # XLA, h100_sxm.txtpb.
    "h100": Gpu(
        device="NVIDIA H100 80GB HBM3",
        compute_capability=(9, 0),
        cores=132,
        clock_ghz=1.98,
        memory=84_942_979_072,
        bandwidth=3_352_320_000_000,
        l2_cache=52_428_800,
    ),
    # XLA, h200.txtpb, except memory and cache, which are as CUDA reports them (cudaDeviceProp
    # in many published logs). XLA's file has the 141 "GB" of the data sheet in GiB.
    "h200": Gpu(
        device="NVIDIA H200",
        compute_capability=(9, 0),
        cores=132,
        clock_ghz=1.98,
        memory=150_109_880_320,
        bandwidth=4_800_000_000_000,
        l2_cache=62_914_560,
    ),
    # XLA, b200.txtpb.
    "b200": Gpu(
        device="NVIDIA B200",
        compute_capability=(10, 0),
        cores=148,
        clock_ghz=1.965,
        memory=191_514_411_008,
        bandwidth=7_672_320_000_000,
        l2_cache=132_644_864,
    ),
    # deviceQuery, CUDA 12.4: 10501 MHz, 384 bit.
    "rtx4090": Gpu(
        device="NVIDIA GeForce RTX 4090",
        compute_capability=(8, 9),
        cores=128,
        clock_ghz=2.52,
        memory=25_386_352_640,
        bandwidth=1_008_096_000_000,
        l2_cache=75_497_472,
    ),
    # deviceQuery, CUDA 12.8 (NVIDIA/nccl issue 1637): 14001 MHz, 512 bit. Clock of NVIDIA's own
    # card (Blackwell architecture white paper).
    "rtx5090": Gpu(
        device="NVIDIA GeForce RTX 5090",
        compute_capability=(12, 0),
        cores=170,
        clock_ghz=2.407,
        memory=33_680_457_728,
        bandwidth=1_792_128_000_000,
        l2_cache=100_663_296,
    ),
    # deviceQuery, CUDA 12.2 (bottlerocket-os/bottlerocket-kernel-kit pull request
    # 139) and 11.8: 6251 MHz, 192 bit.
    "l4": Gpu(
        device="NVIDIA L4",
        compute_capability=(8, 9),
        cores=58,
        clock_ghz=2.04,
        memory=23_583_784_960,
        bandwidth=300_048_000_000,
        l2_cache=50_331_648,
    ),
    # deviceQuery, CUDA 11.2: 5001 MHz, 256 bit. Memory as reported by driver 580, which CUDA 13
    # needs (cudaDeviceProp on Colab).
    "t4": Gpu(
        device="Tesla T4",
        compute_capability=(7, 5),
        cores=40,
        clock_ghz=1.59,
        memory=15_637_086_208,
        bandwidth=320_064_000_000,
        l2_cache=4_194_304,
    ),
    # libtpu 0.0.42: "... exceeds available HBM (15.75G)".
    "v5e": Tpu(topology="v5e:2x2", memory=_gibibytes(15.75)),
    "v5p": Tpu(topology="v5p:2x2x1", memory=_gibibytes(95.74)),
    "v6e": Tpu(topology="v6e:2x2", memory=_gibibytes(31.25)),
}
"""Devices to compile for, by name."""


class Target(NamedTuple):
    """A device to compile for.

    Attributes:
      name: Name given to `describe` or `from_text`.
      device: Device for shardings. It holds no arrays and runs nothing.
      memory: Bytes of a GPU's memory, or bytes of a TPU's memory that a program may fill.
      compiler_options: XLA options that compiling without the device needs.
    """

    name: str
    device: jax.Device
    memory: int
    compiler_options: dict[str, Any]

    @property
    def usable(self) -> int:
        """Bytes of `memory` that a program can use.

        On a GPU, JAX takes three quarters by default (``XLA_PYTHON_CLIENT_MEM_FRACTION``).
        """
        return self.memory * 3 // 4 if self.device.platform == "gpu" else self.memory


def describe(name: str) -> Target:
    """Return the target of that name, with XLA's compiler for it loaded.

    Without an attached TPU, several processes can compile for a TPU at once. With one, libtpu's
    lock file lets only one process load the compiler.

    Args:
      name: A key of `TARGETS`.

    Returns:
      The target, for `compile_for`, `shapes_on` and `fnet.memory.plan`.

    Raises:
      ValueError: If the name is unknown. The message lists the known names.
      RuntimeError: If the compiler or a CUDA tool is not installed. The message names the extra to
        install.

    Example:
      >>> from fnet.memory import target
      >>> list(target.TARGETS)[:4]
      ['a100', 'h100', 'h200', 'b200']
      >>> target.describe("h900")  # doctest: +ELLIPSIS
      Traceback (most recent call last):
        ...
      ValueError: describe: expected one of ['a100', ..., 'v6e'], got 'h900'; ...
    """
    if name not in TARGETS:
        raise ValueError(
            f"describe: expected one of {list(TARGETS)}, got {name!r}; for another NVIDIA GPU use "
            "the description that XLA writes: see fnet.memory.target.from_text, or --target FILE."
        )
    known = TARGETS[name]
    if isinstance(known, Gpu):
        return from_text(name, known.as_text())
    return _tpu(name, known)


def from_text(name: str, text: str) -> Target:
    """Return a target for an NVIDIA GPU that is not in `TARGETS`, from XLA's description of it.

    On a machine with that GPU, run any JAX program with ``XLA_FLAGS=--xla_dump_to=DIR`` and read
    any ``*.gpu_target_config.pbtxt``. The files in XLA's sources
    (``xla/backends/gpu/target_config/specs``) work too.

    Args:
      name: Name for messages.
      text: A ``GpuTargetConfigProto`` in protobuf's text format.

    Returns:
      The target.

    Raises:
      ValueError: If the text is not the description of an NVIDIA GPU, or lacks a property that the
        compiler needs. The message names it.
      RuntimeError: As `describe`.
    """
    memory = _checked_memory(name, text)
    return Target(name, _gpu(name, text), memory, dict(_WITHOUT_A_GPU))


def shapes_on(target: Target, tree: Any) -> Any:
    """Return the shapes of a pytree of arrays, placed on a target.

    Args:
      target: A target of `describe` or `from_text`.
      tree: Arrays, typed keys, numbers, or their shapes (``jax.eval_shape``).

    Returns:
      The same tree of `jax.ShapeDtypeStruct`, for ``jitted.lower``.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from fnet.memory import target
      >>> this_cpu = target.Target("cpu", jax.local_devices()[0], 2**30, {})
      >>> shapes = target.shapes_on(this_cpu, {"w": jnp.zeros((2, 3))})
      >>> shapes["w"].shape, shapes["w"].sharding.device_set == {this_cpu.device}
      ((2, 3), True)
    """
    sharding = jax.sharding.SingleDeviceSharding(target.device)
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=sharding, weak_type=leaf.weak_type
        ),
        jax.eval_shape(lambda t: t, tree),
    )


def compile_for(
    target: Target,
    jitted: jax.stages.Wrapped,
    *args: Any,
    compiler_options: Mapping[str, Any] | None = None,
) -> jax.stages.Compiled:
    """Compile a program for a target. The result reports its memory and never runs.

    `fnet.memory.peak` and `fnet.memory.donation` read it like any other program. Three things
    differ from the device:

    - GPU numbers do not include workspaces that cuDNN chooses by running kernels.
    - TPU numbers are of main memory alone, with arrays padded to tiles. Small arrays live on the
      chip and do not count.
    - If a program does not fit, XLA rematerializes by itself, on a GPU above three quarters of
      its memory. Below that, the same program has about the same peak on all GPUs.

    Args:
      target: A target of `describe` or `from_text`.
      jitted: ``jax.jit(f, donate_argnums=...)``, without static arguments.
      *args: Arguments of the program or their shapes, with at least one array.
      compiler_options: XLA options in addition to the target's own.

    Returns:
      The compiled program.

    Raises:
      ValueError: If no argument is an array.
      jax.errors.JaxRuntimeError: ``RESOURCE_EXHAUSTED`` if the program does not fit a TPU. A GPU
        compiler does not check it: compare the peak with ``target.usable``.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from fnet import memory
      >>> from fnet.memory import target
      >>> this_cpu = target.Target("cpu", jax.local_devices()[0], 2**30, {})
      >>> compiled = target.compile_for(this_cpu, jax.jit(jnp.sin), jnp.zeros(8))
      >>> memory.peak(compiled).total <= this_cpu.usable
      True
    """
    if not jax.tree.leaves(args):
        raise ValueError("compile_for: needs an array argument, to place it on the target.")
    options = target.compiler_options | dict(compiler_options or {})
    return jitted.lower(*shapes_on(target, args)).compile(compiler_options=options)


# Autotuning runs kernels.
_WITHOUT_A_GPU: dict[str, Any] = {"xla_gpu_autotune_level": 0}

# Without any of these, or with a zero, XLA's compiler crashes or computes with zeros.
_NEEDED = (
    "device_memory_size",
    "core_count",
    "fpus_per_core",
    "clock_rate_ghz",
    "memory_bandwidth",
    "shared_memory_per_block_optin",
    "threads_per_warp",
    "block_dim_limit_x",
)


def _checked_memory(name: str, text: str) -> int:
    """Check a GPU's description and return its bytes of memory."""
    string = r'"(?:\\.|[^"\\\n])*"'
    without_comments = re.sub(rf"({string})|#[^\n]*", lambda m: m[1] or "", text)
    platform = re.search(r'\bplatform_name\s*:\s*"(\w*)"', without_comments)
    if platform and platform[1].upper() != "CUDA":
        raise ValueError(
            f'{name}: expected platform_name: "CUDA", got "{platform[1]}"; only NVIDIA GPUs can be '
            "described by text."
        )
    fields = re.sub(string, "", without_comments)
    numbers = dict(re.findall(r"\b(\w+)\s*:\s*(\d+(?:\.\d+)?)", fields))
    missing = [field for field in _NEEDED if not float(numbers.get(field, 0))]
    if not re.search(r"\bcuda_compute_capability\s*:?\s*\{[^}]*\bmajor\s*:\s*[1-9]", fields):
        missing.append("cuda_compute_capability { major }")
    if not platform:
        missing.append("platform_name")
    if missing:
        raise ValueError(
            f"{name}: expected a GPU's properties as XLA writes them (a GpuTargetConfigProto in "
            "text, DIR/*.gpu_target_config.pbtxt of XLA_FLAGS=--xla_dump_to=DIR); missing: "
            + (", ".join(missing) if numbers else "all of it")
        )
    return int(numbers["device_memory_size"])


@functools.cache
def _gpu(name: str, text: str) -> jax.Device:
    load = functools.partial(_first_device, name, "cuda", target_config=text, topology="1x1x1")
    try:
        try:
            device = load()
        except NotImplementedError:
            _load_cuda_plugin()
            device = load()
    except jax.errors.JaxRuntimeError as error:
        # XLA's errors differ in their message alone.
        if "GpuTargetConfigProto" not in str(error):
            raise
        raise ValueError(
            f"{name}: XLA's compiler (jax {jax.__version__}) cannot read the GPU's properties; "
            "stderr shows which field is misspelled, repeated, or of another version of XLA."
        ) from error
    except RuntimeError as error:
        raise RuntimeError(
            f"{name}: XLA's compiler for NVIDIA GPUs is not installed: "
            'pip install "fnet-jax[target-gpu]"'
        ) from error
    _try_cuda_tools(name, device)
    return device


def _load_cuda_plugin() -> None:
    """Load JAX's CUDA plugin, if it is installed but JAX skipped it.

    JAX skips it if a CUDA library is missing, unless ``JAX_PLATFORMS`` names other platforms.
    Compiling needs no CUDA library and no driver.
    """
    # JAX must choose its own devices first, so that it never runs on this one. Its errors are for
    # callers that use these devices.
    with contextlib.suppress(Exception):
        jax.devices()
    for plugin in metadata.entry_points(group="jax_plugins"):
        if "cuda" in plugin.name:
            with _environment({"JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}):
                plugin.load().initialize()


def _try_cuda_tools(name: str, device: jax.Device) -> None:
    """Compile a tiny program that needs both CUDA tools: ptxas and libdevice."""
    x = jax.ShapeDtypeStruct((8,), jnp.float32, sharding=jax.sharding.SingleDeviceSharding(device))
    try:
        jax.jit(jnp.exp).lower(x).compile(compiler_options=_WITHOUT_A_GPU)
    except jax.errors.JaxRuntimeError as error:
        reason = re.split(r"\. |\.?\n", str(error))[0]
        raise RuntimeError(
            f"{name}: CUDA's ptxas or libdevice is missing or does not know this GPU ({reason}): "
            'pip install "fnet-jax[target-gpu]" installs them from CUDA 13, for compute '
            "capability 7.5 and later"
        ) from error


@functools.cache
def _tpu(name: str, known: Tpu) -> Target:
    """A target for one chip of the slice."""
    # JAX sets this variable if it finds no TPU chip.
    attached = "TPU_SKIP_MDS_QUERY" not in os.environ
    try:
        with _environment({} if attached else _TPU_HOST):
            device = _first_device(known.topology, "tpu")
    except jax.errors.JaxRuntimeError:
        raise
    except RuntimeError as error:
        raise RuntimeError(
            f'{name}: XLA\'s compiler for TPUs is not installed: pip install "fnet-jax[target-tpu]"'
        ) from error
    return Target(name, device, known.memory, {})


# libtpu expects a TPU host. Without these variables it searches for one, prints errors, and takes
# a lock that keeps other processes from compiling.
_TPU_HOST = {
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


def _first_device(topology_name: str, platform: str, **config: str) -> jax.Device:
    return topologies.get_topology_desc(topology_name, platform, **config).devices[0]


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set the variables that are not set, while a compiler is loaded."""
    added = {k: v for k, v in variables.items() if k not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for variable in added:
            del os.environ[variable]
