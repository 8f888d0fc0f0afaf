"""Data parallelism and FSDP: the device mesh, and the sharding of state and batches over it."""

import contextlib
import functools
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

    @property
    def _rows(self) -> NamedSharding:
        return NamedSharding(self.mesh, PartitionSpec(self.mesh.axis_names))

    def put(self, batch: Any) -> Any:
        """Copy a batch that every process has to arrays sharded over all devices.

        On a CPU this waits for the copy: a step whose batch is not there yet would be dispatched
        asynchronously (`make_cpu_devices`).
        """
        if jax.process_count() == 1:
            placed = jax.device_put(batch, self._rows, may_alias=False)
        else:
            placed = jax.tree.map(
                lambda a: jax.make_array_from_callback(a.shape, self._rows, lambda i: a[i]), batch
            )
        return jax.block_until_ready(placed) if jax.default_backend() == "cpu" else placed

    def local_rows(self, rows: int) -> np.ndarray | None:
        """Return which rows of a batch `put` reads in this process, bool [rows]; None for all."""
        if jax.process_count() == 1:
            return None
        is_local = np.zeros(rows, bool)
        for index in self._rows.addressable_devices_indices_map((rows,)).values():
            assert index is not None  # this process has the device
            is_local[index] = True
        return is_local

    def batch(self, shapes: Any) -> Any:
        """Return the shapes of a batch, with shardings of its rows over all devices."""
        new = functools.partial(jax.ShapeDtypeStruct, sharding=self._rows)
        return jax.tree.map(lambda a: new(a.shape, a.dtype), shapes)

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

    The number stays if ``XLA_FLAGS`` sets one. XLA's devices on a CPU share threads, and a device
    that waits for another keeps its thread. With as many threads as cores, or with steps that
    overlap, all threads may wait for each other. On one device a step that is dispatched while the
    last one runs would begin before the temporaries of that are freed: up to 48 MB more at a time
    (ResNet-34, 8 images of 128 x 128).
    """
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    count = mesh.data * mesh.fsdp // processes
    is_set = "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", "")
    if count > 1 and not is_set:
        os.environ.setdefault("NPROC", str((os.cpu_count() or 1) + 3 * count))  # XLA's threads
        # RuntimeError: JAX already has devices, whose number `layout` checks.
        with contextlib.suppress(RuntimeError):
            jax.config.update("jax_num_cpu_devices", count)
