"""Data parallelism and FSDP: the device mesh, and the sharding of state and batches over it."""

import contextlib
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from fnet import TrainState
from fnet.fsdp import shard_fields, shard_state
from train.config import Config, Mesh
from train.errors import UserError


class Layout(NamedTuple):
    """Sharding of train states and batches.

    A batch is sharded over all devices, and the state along ``fsdp``: see `fnet.fsdp.shard_state`.

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
        return shard_state(shapes, self.mesh)

    def fields(self, shapes: dict[str, Any]) -> dict[str, Any]:
        """Return the shapes of some fields of a train state, by name, with shardings."""
        return shard_fields(shapes, self.mesh)


def shardings(shapes: Any) -> Any:
    """Return the shardings of a tree of shapes."""
    return jax.tree.map(lambda a: a.sharding, shapes)


def layout(config: Config, devices: Sequence[jax.Device] | None = None) -> Layout:
    """Return the layout of a config's mesh over devices, by default the first of this machine."""
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
