"""Compile for a device that is not there: what it would hold, known on any machine."""

import contextlib
import functools
import os
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
from jax.experimental import topologies


class Target(NamedTuple):
    """A device to compile for, present or not.

    Attributes:
      name: as given to `describe`.
      device: what shardings are made of; it holds no arrays and runs nothing.
      memory: bytes it has for programs. Of a GPU's, JAX takes three quarters
        unless ``XLA_PYTHON_CLIENT_MEM_FRACTION`` says otherwise.
      compiler_options: to compile with where the device is not there.
    """

    name: str
    device: jax.Device
    memory: int
    compiler_options: dict[str, Any]


def describe(name: str) -> Target:
    """The device of that name, from XLA's compiler for it.

    A TPU's compiler is loaded at the first call. Where no TPU is attached,
    several processes may do so at a time; beside an attached one, libtpu's own
    lock file lets only one process load it.

    Args:
      name: one of `TARGETS`.

    Raises:
      ValueError: if the name is unknown; the message lists those there are.
      RuntimeError: if the compiler is not installed; the message names the
        extra to install.
    """
    if name not in TARGETS:
        raise ValueError(f"describe: expected one of {list(TARGETS)}, got {name!r}")
    return TARGETS[name].target(name)


def on(target: Target, tree: Any) -> Any:
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

    Args:
      target: from `describe`.
      jitted: ``jax.jit(f, donate_argnums=...)``, without static arguments.
      *args: its arguments, or their shapes: at least one array.
      compiler_options: added to the target's own.

    Raises:
      ValueError: without an array among the arguments.
      jax.errors.JaxRuntimeError: ``RESOURCE_EXHAUSTED``, where a TPU's compiler
        finds that the program does not fit. A GPU's compiles it all the same:
        compare its peak with ``target.memory``.
    """
    if not jax.tree.leaves(args):
        raise ValueError("compile_for: needs an array argument, which is what is put on the target")
    options = target.compiler_options | dict(compiler_options or {})
    return jitted.lower(*on(target, args)).compile(compiler_options=options)


class Gpu(NamedTuple):
    """What XLA's GPU compiler asks of a device; sizes in bytes, as the CUDA driver reports them.

    Attributes:
      device: the driver's name of it.
      compute_capability: major and minor.
      cores: streaming multiprocessors.
      threads_per_core: resident at most.
      memory: of the device.
      bandwidth: of its memory, bytes per second.
      l2_cache: of the device.
      shared_per_core: shared memory of a streaming multiprocessor.
      shared_per_block: of it, what one block can opt in to.
      clock_ghz: of the streaming multiprocessors.
    """

    device: str
    compute_capability: tuple[int, int]
    cores: int
    threads_per_core: int
    memory: int
    bandwidth: int
    l2_cache: int
    shared_per_core: int
    shared_per_block: int
    clock_ghz: float

    def target(self, name: str) -> Target:
        """One such GPU, alone in its machine."""
        device = _first_device(name, "cuda", "1x1x1", self._as_text())
        # Autotuning would run kernels.
        return Target(name, device, self.memory, {"xla_gpu_autotune_level": 0})

    def _as_text(self) -> str:
        """XLA's GpuTargetConfigProto; what is a number here is the same for all GPUs so far."""
        major, minor = self.compute_capability
        return f"""
            gpu_device_info {{
              name: "{self.device}"
              cuda_compute_capability {{ major: {major} minor: {minor} }}
              core_count: {self.cores}
              fpus_per_core: 128
              clock_rate_ghz: {self.clock_ghz}
              device_memory_size: {self.memory}
              memory_bandwidth: {self.bandwidth}
              l2_cache_size: {self.l2_cache}
              shared_memory_per_core: {self.shared_per_core}
              shared_memory_per_block: 49152
              shared_memory_per_block_optin: {self.shared_per_block}
              registers_per_core_limit: 65536
              registers_per_block_limit: 65536
              threads_per_core_limit: {self.threads_per_core}
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


class Tpu(NamedTuple):
    """What XLA's TPU compiler asks of a device: little more than its name.

    Attributes:
      topology: the smallest slice of a whole host, of which one chip is used.
      memory: HBM that its compiler lets a program fill, in bytes.
    """

    topology: str
    memory: int

    def target(self, name: str) -> Target:
        """One chip of the slice."""
        with _without_a_tpu_host():
            return Target(name, _first_device(name, "tpu", self.topology), self.memory, {})


TARGETS: dict[str, Gpu | Tpu] = {
    "h100": Gpu(
        device="NVIDIA H100 80GB HBM3",
        compute_capability=(9, 0),
        cores=132,
        threads_per_core=2048,
        memory=84_942_979_072,
        bandwidth=3_352_320_000_000,
        l2_cache=52_428_800,
        shared_per_core=233_472,
        shared_per_block=232_448,
        clock_ghz=1.98,
    ),
    "v5e": Tpu(topology="v5e:2x2", memory=int(15.75 * 2**30)),
}
"""The devices that can be described, by name."""


@functools.cache
def _first_device(name: str, platform: str, topology: str, config: str | None = None) -> jax.Device:
    gpu = {"target_config": config, "topology": topology} if config else {}
    try:
        slice_ = topologies.get_topology_desc(name if gpu else topology, platform, **gpu)
    except jax.errors.JaxRuntimeError:
        raise
    except RuntimeError as error:  # the plugin is not there, or JAX dropped it
        install = f"{name}: XLA's {platform.upper()} compiler is not there: pip install "
        hint = '"fnet-jax[tpu]"'
        if gpu:
            hint = '"fnet-jax[cuda]" and, without a GPU, set JAX_PLATFORMS=cpu before JAX starts'
        raise RuntimeError(install + hint) from error
    return slice_.devices[0]


# libtpu expects a TPU's host: without these it searches for one, complains on
# stderr, and takes a lock that keeps other processes from compiling.
_TPU_HOST = {
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


@contextlib.contextmanager
def _without_a_tpu_host() -> Iterator[None]:
    """Satisfies libtpu while it is loaded, unless a TPU is attached."""
    # JAX sets this variable when it finds no TPU chip.
    attached = "TPU_SKIP_MDS_QUERY" not in os.environ
    added = {} if attached else {k: v for k, v in _TPU_HOST.items() if k not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for variable in added:
            del os.environ[variable]
