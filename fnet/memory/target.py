"""Compile for a device that is not there: what it would hold, known on any machine."""

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
    """What XLA's compiler asks of an NVIDIA GPU; the rest follows from its compute capability.

    Attributes:
      device: the driver's name of it.
      compute_capability: major and minor.
      cores: streaming multiprocessors.
      clock_ghz: of these, at most.
      memory: bytes of the device, as its driver reports them. They differ by up
        to 2% between drivers.
      bandwidth: of its memory, bytes per second.
      l2_cache: bytes.
    """

    device: str
    compute_capability: tuple[int, int]
    cores: int
    clock_ghz: float
    memory: int
    bandwidth: int
    l2_cache: int

    def as_text(self) -> str:
        """XLA's ``GpuTargetConfigProto``; what is a number here is the same for all of them."""
        major, minor = self.compute_capability
        threads, shared, shared_by_one_block, fp32_lanes = _OF_CAPABILITY[self.compute_capability]
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
              shared_memory_per_block_optin: {shared_by_one_block}
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


# Of a streaming multiprocessor: resident threads, bytes of shared memory, those
# that one block can opt in to, float32 operations a cycle. The CUDA C++
# programming guide, "Compute Capabilities" and "Cost Instructions"; the
# first three are also in libcu++'s cuda/__device/arch_traits.h.
_OF_CAPABILITY = {
    (7, 5): (1024, 65_536, 65_536, 64),
    (8, 0): (2048, 167_936, 166_912, 64),
    (8, 9): (1536, 102_400, 101_376, 128),
    (9, 0): (2048, 233_472, 232_448, 128),
    (10, 0): (2048, 233_472, 232_448, 128),
    (12, 0): (1536, 102_400, 101_376, 128),
}


class Tpu(NamedTuple):
    """What XLA's compiler asks of a TPU: little more than its name.

    Attributes:
      topology: the smallest slice of a whole host, of which one chip is used.
      memory: HBM that the compiler lets a program fill, in bytes, as its own
        message says where one does not fit.
    """

    topology: str
    memory: int


def _gibibytes(n: float) -> int:
    return int(n * 2**30)


# "XLA": openxla/xla, xla/backends/gpu/target_config/specs. "deviceQuery": the
# CUDA sample's output, as published; bandwidth = 2 x memory clock x bus width.
TARGETS: dict[str, Gpu | Tpu] = {
    # XLA, a100_sxm_80.txtpb: the 80 GB one on an SXM4 board.
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
    # XLA, h200.txtpb; but memory and cache as CUDA reports them (cudaDeviceProp,
    # in many published logs): XLA's file has the data sheet's 141 "GB" in GiB.
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
    # deviceQuery, CUDA 12.8 (NVIDIA/nccl issue 1637): 14001 MHz, 512 bit; the clock
    # is that of NVIDIA's own card (Blackwell architecture white paper).
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
    # deviceQuery, CUDA 11.2: 5001 MHz, 256 bit; memory as driver 580, which CUDA
    # 13 needs, reports it (cudaDeviceProp on Colab).
    "t4": Gpu(
        device="Tesla T4",
        compute_capability=(7, 5),
        cores=40,
        clock_ghz=1.59,
        memory=15_637_086_208,
        bandwidth=320_064_000_000,
        l2_cache=4_194_304,
    ),
    # "... exceeds available HBM (15.75G)": libtpu 0.0.42.
    "v5e": Tpu(topology="v5e:2x2", memory=_gibibytes(15.75)),
    "v5p": Tpu(topology="v5p:2x2x1", memory=_gibibytes(95.74)),
    "v6e": Tpu(topology="v6e:2x2", memory=_gibibytes(31.25)),
}
"""The devices that can be described, by name."""


class Target(NamedTuple):
    """A device to compile for, present or not.

    Attributes:
      name: as given to `describe` or `from_text`.
      device: what shardings are made of; it holds no arrays and runs nothing.
      memory: bytes of a GPU's memory; bytes that a TPU's compiler lets a program fill.
      compiler_options: to compile with where the device is not there.
    """

    name: str
    device: jax.Device
    memory: int
    compiler_options: dict[str, Any]

    @property
    def usable(self) -> int:
        """Bytes that a program can have of `memory`.

        Of a GPU's, JAX takes three quarters unless ``XLA_PYTHON_CLIENT_MEM_FRACTION``
        says otherwise.
        """
        return self.memory * 3 // 4 if self.device.platform == "gpu" else self.memory


def describe(name: str) -> Target:
    """The device of that name, from XLA's compiler for it.

    A TPU's compiler is loaded at the first call. Where no TPU is attached,
    several processes may do so at a time; beside an attached one, libtpu's own
    lock file lets only one process load it.

    Args:
      name: one of `TARGETS`.

    Raises:
      ValueError: if the name is unknown; the message lists those there are.
      RuntimeError: if the compiler, or what it needs of CUDA, is not installed;
        the message names the extra to install.
    """
    if name not in TARGETS:
        raise ValueError(
            f"describe: expected one of {list(TARGETS)}, got {name!r}; another NVIDIA GPU is "
            "described by what XLA writes of it: see fnet.memory.target.from_text, or --target FILE"
        )
    known = TARGETS[name]
    if isinstance(known, Gpu):
        return from_text(name, known.as_text())
    return _tpu(name, known)


def from_text(name: str, text: str) -> Target:
    """A GPU that `TARGETS` does not have, from what XLA says of it.

    Where there is one, XLA writes the text beside what it compiles: run anything
    with ``XLA_FLAGS=--xla_dump_to=DIR`` and take any ``*.gpu_target_config.pbtxt``.
    Those in XLA's sources (``xla/backends/gpu/target_config/specs``) serve too.

    Args:
      name: how messages call it.
      text: a ``GpuTargetConfigProto`` in protobuf's text format.

    Raises:
      ValueError: if the text is not one of an NVIDIA GPU, or lacks what the
        compiler needs; the message says what.
      RuntimeError: as for `describe`.
    """
    memory = _checked_memory(name, text)
    return Target(name, _gpu(name, text), memory, dict(_WITHOUT_A_GPU))


def shapes_on(target: Target, tree: Any) -> Any:
    """The shapes of a tree of arrays, placed on the target.

    Args:
      target: from `describe`.
      tree: arrays, typed keys, numbers, or the shapes of any (``jax.eval_shape``).

    Returns:
      The same tree of `jax.ShapeDtypeStruct`, to be given to ``jitted.lower``.
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
    """Compiles a program for the target; the result tells its memory and never runs.

    `fnet.memory.peak` and `fnet.memory.donation` read it like any other. What
    it says of a GPU leaves out the workspaces that cuDNN would choose by trying
    them. A TPU's figures are of its main memory alone, with arrays padded to
    its tiles: small ones live on the chip and count nothing.

    Where a program does not fit, XLA itself starts to recompute, as it would on
    the device: past three quarters of its memory on a GPU. Below that, GPUs
    differ little: their peaks are of what the program keeps.

    Args:
      target: from `describe` or `from_text`.
      jitted: ``jax.jit(f, donate_argnums=...)``, without static arguments.
      *args: its arguments, or their shapes: at least one array.
      compiler_options: added to the target's own.

    Raises:
      ValueError: without an array among the arguments.
      jax.errors.JaxRuntimeError: ``RESOURCE_EXHAUSTED``, where a TPU's compiler
        finds that the program does not fit. A GPU's compiles it all the same:
        compare its peak with ``target.usable``.
    """
    if not jax.tree.leaves(args):
        raise ValueError("compile_for: needs an array argument, which is what is put on the target")
    options = target.compiler_options | dict(compiler_options or {})
    return jitted.lower(*shapes_on(target, args)).compile(compiler_options=options)


# Autotuning would run kernels.
_WITHOUT_A_GPU: dict[str, Any] = {"xla_gpu_autotune_level": 0}

# Without any one of these XLA's compiler fails, divides by zero, or reckons with
# zeros; all are above zero.
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
    """The size of a GPU's memory in its description, which is checked."""
    string = r'"(?:\\.|[^"\\\n])*"'
    without_comments = re.sub(rf"({string})|#[^\n]*", lambda m: m[1] or "", text)
    platform = re.search(r'\bplatform_name\s*:\s*"(\w*)"', without_comments)
    if platform and platform[1].upper() != "CUDA":
        raise ValueError(
            f'{name}: expected platform_name: "CUDA", got "{platform[1]}"; only NVIDIA\'s GPUs can '
            "be described by text"
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
    describe_gpu = functools.partial(
        _first_device, name, "cuda", target_config=text, topology="1x1x1"
    )
    try:
        try:
            device = describe_gpu()
        except NotImplementedError:
            _load_cuda_plugin()
            device = describe_gpu()
    except jax.errors.JaxRuntimeError as error:
        if "GpuTargetConfigProto" not in str(error):
            raise
        raise ValueError(
            f"{name}: XLA's compiler (jax {jax.__version__}) cannot read the GPU's properties: on "
            "stderr it says which field is misspelt, written twice, or of another version of XLA"
        ) from error
    except RuntimeError as error:
        raise RuntimeError(
            f"{name}: XLA's compiler for NVIDIA's GPUs is not there: "
            'pip install "fnet-jax[target-gpu]"'
        ) from error
    _try_cuda_tools(name, device)
    return device


def _load_cuda_plugin() -> None:
    """Loads JAX's CUDA plugin, if there is one, where JAX did not.

    JAX drops it where one of CUDA's libraries is missing, unless ``JAX_PLATFORMS``
    names other platforms; compiling needs none of them, and no driver.
    """
    # JAX chooses its own devices first: it shall not try to run on this one. What
    # it has to say of them it says to whoever uses them.
    with contextlib.suppress(Exception):
        jax.devices()
    for plugin in metadata.entry_points(group="jax_plugins"):
        if "cuda" in plugin.name:
            with _environment({"JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}):
                plugin.load().initialize()


def _try_cuda_tools(name: str, device: jax.Device) -> None:
    """Compiles something tiny that takes both of CUDA's tools: its assembler and libdevice."""
    x = jax.ShapeDtypeStruct((8,), jnp.float32, sharding=jax.sharding.SingleDeviceSharding(device))
    try:
        jax.jit(jnp.exp).lower(x).compile(compiler_options=_WITHOUT_A_GPU)
    except jax.errors.JaxRuntimeError as error:
        said = re.split(r"\. |\.?\n", str(error))[0]
        raise RuntimeError(
            f"{name}: CUDA's ptxas or libdevice is missing or does not know this GPU ({said}): "
            'pip install "fnet-jax[target-gpu]" brings those of CUDA 13, for compute capability '
            "7.5 and later"
        ) from error


@functools.cache
def _tpu(name: str, known: Tpu) -> Target:
    """One chip of the slice."""
    # JAX sets this variable when it finds no TPU chip.
    attached = "TPU_SKIP_MDS_QUERY" not in os.environ
    try:
        with _environment({} if attached else _TPU_HOST):
            device = _first_device(known.topology, "tpu")
    except jax.errors.JaxRuntimeError:
        raise
    except RuntimeError as error:
        raise RuntimeError(
            f'{name}: XLA\'s compiler for TPUs is not there: pip install "fnet-jax[target-tpu]"'
        ) from error
    return Target(name, device, known.memory, {})


# libtpu expects a TPU's host: without these it searches for one, complains on
# stderr, and takes a lock that keeps other processes from compiling.
_TPU_HOST = {
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


def _first_device(topology_name: str, platform: str, **config: str) -> jax.Device:
    return topologies.get_topology_desc(topology_name, platform, **config).devices[0]


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Sets those that are not set, for as long as a compiler is loaded."""
    added = {k: v for k, v in variables.items() if k not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for variable in added:
            del os.environ[variable]
