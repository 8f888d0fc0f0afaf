"""Compile ahead of time for a device that this machine does not have.

XLA compiles for a GPU from a description of its properties, and for a TPU from its name. The
compiled program reports its memory and never runs.
"""

import contextlib
import functools
import math
import os
import re
from collections.abc import Iterator, Mapping
from importlib import metadata
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import topologies

from fnet.cpu.tracing import traced_for


class Peaks(NamedTuple):
    """Highest rates of a device, as its data sheet gives them; see `fnet.memory.roofline`.

    Attributes:
      flops: Dense matrix products and convolutions, FLOP/s by dtype. ``float32`` is with the
        default precision of JAX: TF32 on a GPU that has it, bfloat16 on a TPU.
      vector: Other operations, float32 elements per second.
      bandwidth: Memory bandwidth in bytes per second.
      link: Bandwidth to the other devices of the host, bytes per second in each direction.
      network: Bandwidth to the devices of other hosts, bytes per second in each direction.
      launch: Seconds that starting a kernel takes.
      cache: Bytes of a cache and its bandwidth. Kernels that move fewer bytes run at that rate.
      host: Bandwidth to the memory of the host, bytes per second in each direction.
    """

    flops: dict[str, float]
    vector: float
    bandwidth: float
    link: float
    network: float
    launch: float
    cache: tuple[float, float] = (0.0, 1.0)
    host: float = 16e9


class Gpu(NamedTuple):
    """Properties of an NVIDIA GPU that XLA's compiler needs, and rates that estimates need.

    Attributes:
      device: Name, as the driver reports it.
      compute_capability: Major and minor number. Further properties follow from it.
      cores: Number of streaming multiprocessors.
      clock_ghz: Highest clock of the multiprocessors.
      memory: Bytes of memory, as the driver reports them. Drivers differ by up to 2 %.
      bandwidth: Memory bandwidth in bytes per second.
      l2_cache: Bytes of L2 cache.
      bf16: Dense bfloat16 FLOP/s of the tensor cores with float32 sums. 0 without them.
      tf32: Dense TF32 FLOP/s of the tensor cores. 0 without them.
      fp16: Dense float16 FLOP/s of the tensor cores, if not as bfloat16.
      host: Bytes per second to the host's memory by PCIe, in each direction, if not as ``link``.
      link: Bytes per second to the host's other GPUs, in each direction: NVLink, or PCIe.
      network: Bytes per second to other hosts, in each direction, of NVIDIA's own servers.
    """

    device: str
    compute_capability: tuple[int, int]
    cores: int
    clock_ghz: float
    memory: int
    bandwidth: int
    l2_cache: int
    bf16: float
    tf32: float
    link: float
    network: float = 3.125e9
    fp16: float = 0.0
    host: float = 0.0

    @property
    def peaks(self) -> Peaks:
        """Rates for estimates."""
        fp32 = 2 * self.cores * _CAPABILITIES[self.compute_capability][3] * self.clock_ghz * 1e9
        flops = {
            "bfloat16": self.bf16 or fp32,
            "float16": self.fp16 or self.bf16 or fp32,
            "float32": self.tf32 or fp32,
            "highest": fp32,
        }
        # A multiply-add counts once as an element.
        rates = self.bandwidth, self.link, self.network, _KERNEL_LAUNCH
        return Peaks(flops, fp32 / 2, *rates, host=self.host or self.link)

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
    """Properties of a TPU that XLA's compiler needs, and rates that estimates need.

    Attributes:
      topology: Smallest slice that is a whole host.
      memory: Bytes of HBM that a program may fill, from the compiler's message for a program that
        is too large.
      bf16: Dense bfloat16 FLOP/s.
      bandwidth: HBM bandwidth in bytes per second.
      link: Bytes per second to the other chips of the slice, in each direction.
    """

    topology: str
    memory: int
    bf16: float
    bandwidth: float
    link: float

    @property
    def peaks(self) -> Peaks:
        """Rates for estimates. Google publishes no rate of the vector unit."""
        flops = {"bfloat16": self.bf16, "float16": self.bf16, "float32": self.bf16}
        flops["highest"] = self.bf16 / _TPU_PASSES
        return Peaks(flops, float("inf"), self.bandwidth, self.link, self.link, 0.0)

    def slice_of(self, chips: int) -> str:
        """Return the smallest known slice with that many chips."""
        name, _, sides = self.topology.partition(":")
        grid = [int(side) for side in sides.split("x")]
        while math.prod(grid) < chips:  # double the shortest side; the last of equal ones
            shortest = max(range(len(grid)), key=lambda k: (-grid[k], k))
            grid[shortest] *= 2
        return f"{name}:{'x'.join(map(str, grid))}"


# Time from the start of one kernel to the next if kernels are empty: about 2 us in a CUDA graph.
_KERNEL_LAUNCH = 2e-6
# float32 products with precision "highest" are sums of six bfloat16 products.
_TPU_PASSES = 6


def _gibibytes(n: float) -> int:
    return int(n * 2**30)


# Sources: "XLA" is openxla/xla, xla/backends/gpu/target_config/specs. "deviceQuery" is published
# output of the CUDA sample, with bandwidth = 2 x memory clock x bus width. FLOP/s and links are of
# NVIDIA's data sheets (A100 80GB SXM, H100 SXM, H200 SXM, HGX B200, L4, T4) and white papers (Ada,
# Blackwell), without sparsity; of Cloud TPU's documentation for TPUs ("TPU v5e", ...). Networks
# are of NVIDIA's DGX servers, one adapter per GPU, else 25 Gb/s.
TARGETS: dict[str, Gpu | Tpu] = {
    # XLA, a100_sxm_80.txtpb: 80 GB, SXM4.
    "a100": Gpu("NVIDIA A100-SXM4-80GB", (8, 0), 108, 1.41, 85_100_068_864, 2_039_040_000_000,
                41_943_040, bf16=312e12, tf32=156e12, link=300e9, network=25e9, host=32e9),
    # XLA, h100_sxm.txtpb.
    "h100": Gpu("NVIDIA H100 80GB HBM3", (9, 0), 132, 1.98, 84_942_979_072, 3_352_320_000_000,
                52_428_800, bf16=989.4e12, tf32=494.7e12, link=450e9, network=50e9, host=64e9),
    # XLA, h200.txtpb, except memory and cache, which are as CUDA reports them (cudaDeviceProp
    # in many published logs). XLA's file has the 141 "GB" of the data sheet in GiB.
    "h200": Gpu("NVIDIA H200", (9, 0), 132, 1.98, 150_109_880_320, 4_800_000_000_000,
                62_914_560, bf16=989.4e12, tf32=494.7e12, link=450e9, network=50e9, host=64e9),
    # XLA, b200.txtpb.
    "b200": Gpu("NVIDIA B200", (10, 0), 148, 1.965, 191_514_411_008, 7_672_320_000_000,
                132_644_864, bf16=2250e12, tf32=1100e12, link=900e9, network=50e9, host=64e9),
    # deviceQuery, CUDA 12.4: 10501 MHz, 384 bit.
    "rtx4090": Gpu("NVIDIA GeForce RTX 4090", (8, 9), 128, 2.52, 25_386_352_640, 1_008_096_000_000,
                   75_497_472, bf16=165.2e12, tf32=82.6e12, link=32e9),
    # deviceQuery, CUDA 12.8 (NVIDIA/nccl issue 1637): 14001 MHz, 512 bit. Clock of NVIDIA's own
    # card (Blackwell architecture white paper).
    "rtx5090": Gpu("NVIDIA GeForce RTX 5090", (12, 0), 170, 2.407, 33_680_457_728,
                   1_792_128_000_000, 100_663_296, bf16=209.5e12, tf32=104.8e12, link=64e9),
    # deviceQuery, CUDA 12.2 (bottlerocket-os/bottlerocket-kernel-kit pull request
    # 139) and 11.8: 6251 MHz, 192 bit.
    "l4": Gpu("NVIDIA L4", (8, 9), 58, 2.04, 23_583_784_960, 300_048_000_000,
              50_331_648, bf16=121e12, tf32=60e12, link=32e9),
    # deviceQuery, CUDA 11.2: 5001 MHz, 256 bit. Memory as reported by driver 580, which CUDA 13
    # needs (cudaDeviceProp on Colab).
    "t4": Gpu("Tesla T4", (7, 5), 40, 1.59, 15_637_086_208, 320_064_000_000,
              4_194_304, bf16=0, tf32=0, fp16=65e12, link=16e9),
    # libtpu 0.0.42: "... exceeds available HBM (15.75G)".
    "v5e": Tpu("v5e:2x2", _gibibytes(15.75), bf16=197e12, bandwidth=819e9, link=100e9),
    "v5p": Tpu("v5p:2x2x1", _gibibytes(95.74), bf16=459e12, bandwidth=2765e9, link=300e9),
    "v6e": Tpu("v6e:2x2", _gibibytes(31.25), bf16=918e12, bandwidth=1640e9, link=224e9),
}  # fmt: skip
"""Devices to compile for, by name."""


class Target(NamedTuple):
    """A device to compile for.

    Attributes:
      name: Name given to `describe` or `from_text`.
      device: Device for shardings. It holds no arrays and runs nothing.
      memory: Bytes of a GPU's memory, or bytes of a TPU's memory that a program may fill.
      compiler_options: XLA options that compiling without the device needs.
      devices: All devices of a mesh, including ``device``. Empty for a single device.
      peaks: Highest rates, for `fnet.memory.roofline`. None if unknown.
    """

    name: str
    device: jax.Device
    memory: int
    compiler_options: dict[str, Any]
    devices: tuple[jax.Device, ...] = ()
    peaks: Peaks | None = None

    @property
    def usable(self) -> int:
        """Bytes of `memory` that a program can use.

        On a GPU, JAX takes three quarters by default (``XLA_PYTHON_CLIENT_MEM_FRACTION``).
        """
        return self.memory * 3 // 4 if self.device.platform == "gpu" else self.memory


def describe(name: str, count: int = 1) -> Target:
    """Return the target of that name, with XLA's compiler for it loaded.

    Without an attached TPU, several processes can compile for a TPU at once. With one, libtpu's
    lock file lets only one process load the compiler.

    Args:
      name: A key of `TARGETS`.
      count: Number of devices, for a mesh. A host has 8 GPUs.

    Returns:
      The target, for `compile_for`, `shapes_on` and `fnet.memory.plan`.

    Raises:
      ValueError: If the name is unknown, or the number is not one that hosts can have. The
        message lists the known names.
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
        return from_text(name, known.as_text(), count)
    return _tpu(name, known, count)


def platform_of(target: Target | None) -> str:
    """The platform of a target, or of this machine's devices."""
    return target.device.platform if target else jax.default_backend()


def peaks_of(target: Target | None) -> Peaks:
    """Rates of a target, or of this machine's device: an H100's if they are unknown."""
    if target and target.peaks:
        return target.peaks
    kind = (target.device if target else jax.devices()[0]).device_kind
    known = (t for t in TARGETS.values() if isinstance(t, Gpu) and t.device == kind)
    return next(known, TARGETS["h100"]).peaks


def from_text(name: str, text: str, count: int = 1) -> Target:
    """Return a target for an NVIDIA GPU that is not in `TARGETS`, from XLA's description of it.

    On a machine with that GPU, run any JAX program with ``XLA_FLAGS=--xla_dump_to=DIR`` and read
    any ``*.gpu_target_config.pbtxt``. The files in XLA's sources
    (``xla/backends/gpu/target_config/specs``) work too.

    Args:
      name: Name for messages.
      text: A ``GpuTargetConfigProto`` in protobuf's text format.
      count: As for `describe`.

    Returns:
      The target.

    Raises:
      ValueError: If the text is not the description of an NVIDIA GPU, or lacks a property that the
        compiler needs. The message names it.
      RuntimeError: As `describe`.
    """
    memory = _checked_memory(name, text)
    hosts = -(-count // _GPUS_PER_HOST)
    if count < 1 or count % hosts:
        raise ValueError(
            f"{name}: expected up to {_GPUS_PER_HOST} GPUs, or as many on each host, got {count}."
        )
    devices = _gpu(name, text, f"1x{hosts}x{count // hosts}")
    known = [gpu for gpu in TARGETS.values() if isinstance(gpu, Gpu) and f'"{gpu.device}"' in text]
    peaks = known[0].peaks if known else None
    return Target(name, devices[0], memory, dict(_WITHOUT_A_GPU), devices, peaks)


def shapes_on(target: Target, tree: Any) -> Any:
    """Return the shapes of a pytree of arrays, placed on a target.

    Args:
      target: A target of `describe` or `from_text`.
      tree: Arrays, typed keys, numbers, or their shapes (``jax.eval_shape``). Shapes with a
        sharding over the target's devices keep it. What is in the host's memory stays there.

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
    single = jax.sharding.SingleDeviceSharding(target.device)
    # JAX knows no memories of a described GPU, and asks an abstract mesh for none.
    mesh = jax.sharding.AbstractMesh((1,), ("one",), (jax.sharding.AxisType.Auto,))
    host = jax.sharding.NamedSharding(mesh, jax.P(), memory_kind="pinned_host")

    def place(leaf: Any, shape: Any) -> jax.ShapeDtypeStruct:
        sharding = getattr(leaf, "sharding", None) or single
        if not sharding.device_set <= {target.device, *target.devices}:
            sharding = host if sharding.memory_kind == "pinned_host" else single
        return jax.ShapeDtypeStruct(
            shape.shape, shape.dtype, sharding=sharding, weak_type=shape.weak_type
        )

    return jax.tree.map(place, tree, jax.eval_shape(lambda t: t, tree))


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
    with traced_for(target.device):
        lowered = jitted.lower(*shapes_on(target, args))
    return compile_lowered(lowered, options)


def compile_lowered(lowered: jax.stages.Lowered, options: Mapping[str, Any]) -> jax.stages.Compiled:
    """Compile a program that was lowered for a target.

    On a GPU, autotuning chooses the tiles of Triton's matrix products. Without the device, XLA
    guesses them, and fails with an internal error where no tiles fit (jaxlib 0.10: 512 tokens of
    width 768 on an RTX 4090). Such a program is compiled with cuBLAS alone.

    Args:
      lowered: The lowered program.
      options: XLA options, including the target's own.

    Returns:
      The compiled program.

    Raises:
      jax.errors.JaxRuntimeError: If XLA fails otherwise.
    """
    try:
        return lowered.compile(compiler_options=dict(options))
    except jax.errors.JaxRuntimeError as error:
        if error.error_code_string != "INTERNAL" or not _WITHOUT_A_GPU.items() <= options.items():
            raise
        return lowered.compile(compiler_options={**options, **_CUBLAS})


_GPUS_PER_HOST = 8

# Autotuning runs kernels.
_WITHOUT_A_GPU: dict[str, Any] = {"xla_gpu_autotune_level": 0}
_CUBLAS = {"xla_gpu_enable_triton_gemm": False}

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
def _gpu(name: str, text: str, topology: str) -> tuple[jax.Device, ...]:
    load = functools.partial(_devices, name, "cuda", target_config=text, topology=topology)
    try:
        try:
            devices = load()
        except NotImplementedError:
            _load_cuda_plugin()
            devices = load()
    except jax.errors.JaxRuntimeError as error:
        if error.error_code_string != "FAILED_PRECONDITION":  # of a description it cannot read
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
    _try_cuda_tools(name, devices[0])
    return devices


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
def _tpu(name: str, known: Tpu, count: int) -> Target:
    """A target for the first chips of the smallest slice that has as many."""
    # JAX sets this variable if it finds no TPU chip.
    attached = "TPU_SKIP_MDS_QUERY" not in os.environ
    try:
        with _environment({} if attached else _TPU_HOST):
            devices = _devices(known.slice_of(count), "tpu")[:count]
    except jax.errors.JaxRuntimeError:
        raise
    except RuntimeError as error:
        raise RuntimeError(
            f'{name}: XLA\'s compiler for TPUs is not installed: pip install "fnet-jax[target-tpu]"'
        ) from error
    return Target(name, devices[0], known.memory, {}, devices, known.peaks)


# libtpu expects a TPU host. Without these variables it searches for one, prints errors, and takes
# a lock that keeps other processes from compiling.
_TPU_HOST = {
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


def _devices(topology_name: str, platform: str, **config: str) -> tuple[jax.Device, ...]:
    return tuple(topologies.get_topology_desc(topology_name, platform, **config).devices)


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
