"""Data parallelism and FSDP: the device mesh, and the sharding of state and batches over it."""

import contextlib
import dataclasses
import functools
import math
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from fnet import TrainState
from train.config import Config, Mesh
from train.errors import UserError

_MIN_SHARDED_SIZE = 2048
"""Smallest number of elements of an array that is sharded. A gather of less is all latency."""

_FROZEN = jax.tree_util.DictKey("frozen")
"""Part of the model state that holds frozen parameters."""


class Layout(NamedTuple):
    """Sharding of train states and batches.

    A batch is sharded over all devices. Parameters, their average and the optimizer state are
    sharded along ``fsdp`` (ZeRO: Rajbhandari et al., SC 2020). The step gathers a layer's
    parameters where they are used, see `fnet.fsdp`. So are frozen parameters in the model state.
    Everything else is replicated.

    Attributes:
      mesh: Devices, with axes ``data`` and ``fsdp``.
    """

    mesh: jax.sharding.Mesh

    @property
    def replicated(self) -> NamedSharding:
        """Sharding of an array that each device has in full."""
        return NamedSharding(self.mesh, PartitionSpec())

    def put(self, batch: Any) -> Any:
        """Convert a batch that every process has to arrays sharded over all devices.

        With one process, the batch is returned unchanged.
        """
        if jax.process_count() == 1:
            return batch
        return jax.tree.map(
            lambda a, to: jax.make_array_from_callback(a.shape, to.sharding, lambda i: a[i]),
            batch,
            self.batch(batch),
        )

    def local_rows(self, rows: int) -> np.ndarray | None:
        """Return which rows of a batch `put` reads in this process, bool [rows]; None for all."""
        if jax.process_count() == 1:
            return None
        is_local = np.zeros(rows, bool)
        sharding = NamedSharding(self.mesh, PartitionSpec(self.mesh.axis_names))
        for index in sharding.addressable_devices_indices_map((rows,)).values():
            assert index is not None  # this process has the device
            is_local[index] = True
        return is_local

    def batch(self, shapes: Any) -> Any:
        """Return the shapes of a batch, with shardings of its rows over all devices."""
        rows = NamedSharding(self.mesh, PartitionSpec(self.mesh.axis_names))
        return jax.tree.map(lambda a: _with_sharding(a, rows), shapes)

    def state(self, shapes: TrainState) -> TrainState:
        """Return the shapes of a train state, with shardings."""
        fields = {f.name: getattr(shapes, f.name) for f in dataclasses.fields(shapes)}
        return dataclasses.replace(shapes, **self.fields(fields))

    def fields(self, shapes: dict[str, Any]) -> dict[str, Any]:
        """Return the shapes of some fields of a train state, by name, with shardings."""
        params = {
            path: leaf.shape
            for path, leaf in jax.tree_util.tree_leaves_with_path(shapes.get("params"))
        }

        def place(name: str, path: tuple[Any, ...], a: Any) -> jax.ShapeDtypeStruct:
            if name == "opt_state":  # with the parameters' paths at the end of its own
                ends = (params.get(path[i:]) for i in range(len(path)))
                param = next((shape for shape in ends if shape is not None), a.shape)
                return _with_sharding(a, self._sharding_like(a.shape, param))
            is_sharded = name in ("params", "ema") or path[:1] == (_FROZEN,)
            return _with_sharding(a, self._sharding(a.shape) if is_sharded else self.replicated)

        return {
            name: jax.tree.map_with_path(functools.partial(place, name), tree)
            for name, tree in shapes.items()
        }

    def _sharding_like(self, shape: tuple[int, ...], param: tuple[int, ...]) -> NamedSharding:
        """Shard an array like the parameter it belongs to, such as the scales of its moments."""
        if shape == param or len(shape) != len(param):
            return self._sharding(shape)
        sharding = self._sharding(param)
        axis = next((i for i, name in enumerate(sharding.spec) if name is not None), None)
        is_divisible = axis is not None and shape[axis] % self.mesh.shape["fsdp"] == 0
        return sharding if is_divisible else self.replicated

    def _sharding(self, shape: tuple[int, ...]) -> NamedSharding:
        """Shard the longest axis that the devices divide, but not the axis of stacked layers."""
        devices = self.mesh.shape["fsdp"]
        first = 1 if len(shape) > 2 else 0  # a gather of a slice would gather the whole stack
        axes = [i for i, n in enumerate(shape) if n % devices == 0 and i >= first]
        if not axes or math.prod(shape) < _MIN_SHARDED_SIZE:
            return self.replicated
        longest = max(axes, key=lambda i: shape[i])
        axis = [None] * longest + ["fsdp"]
        return NamedSharding(self.mesh, PartitionSpec(*axis))


def shardings(shapes: Any) -> Any:
    """Return the shardings of a tree of shapes."""
    return jax.tree.map(lambda a: a.sharding, shapes)


def layout(config: Config, devices: Sequence[jax.Device] | None = None) -> Layout:
    """Return the layout of a config's mesh over devices, by default the first of this machine.

    Raises:
      UserError: if there are too few devices, or they do not divide a batch evenly.
    """
    data, fsdp, batch_size = config.mesh.data, config.mesh.fsdp, config.data.batch_size
    devices, count = devices or jax.devices(), data * fsdp
    if count > len(devices):
        raise UserError(
            f"mesh: {data} x {fsdp} devices are wanted, but this machine has {len(devices)} "
            f"({devices[0].device_kind})"
        )
    if jax.process_count() > 1 and count < len(devices):
        raise UserError(
            f"mesh: {data} x {fsdp} devices are wanted, but the {jax.process_count()} processes "
            f"have {len(devices)}: give a mesh of all of them"
        )
    if batch_size % count:
        larger = -(-batch_size // count) * count
        raise UserError(
            f"mesh: {count} devices do not divide data.batch_size {batch_size}; give a multiple, "
            f"such as --data.batch-size {larger}"
        )
    mesh = jax.make_mesh(
        (data, fsdp),
        ("data", "fsdp"),
        devices=devices[:count],
        axis_types=(AxisType.Auto, AxisType.Auto),
    )
    return Layout(mesh)


def make_cpu_devices(mesh: Mesh, processes: int = 1) -> None:
    """Let JAX split the CPU into the devices of a mesh. Call this before JAX looks for devices.

    Nothing changes if ``XLA_FLAGS`` sets a number of devices. XLA's devices on a CPU share threads,
    and a device that waits for another keeps its thread. With as many threads as cores, or with
    steps that overlap, all threads may wait for each other.
    """
    count = mesh.data * mesh.fsdp // processes
    is_set = "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", "")
    if count > 1 and not is_set:
        os.environ.setdefault("NPROC", str((os.cpu_count() or 1) + 3 * count))  # XLA's threads
        jax.config.update("jax_cpu_enable_async_dispatch", False)
        # RuntimeError: JAX already has devices, whose number `layout` checks.
        with contextlib.suppress(RuntimeError):
            jax.config.update("jax_num_cpu_devices", count)


def _with_sharding(shape: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)
