"""The devices that train together, and what lies where on them."""

import contextlib
import dataclasses
import math
import os
from typing import Any, NamedTuple

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from fnet import TrainState
from train.config import Config, Mesh
from train.errors import UserError

_SMALL = 1024
"""Elements below which an array is not worth being spread."""


class Layout(NamedTuple):
    """Where a train state and its batches lie.

    Every device takes its share of each batch. Of the parameters, their average and the
    optimizer's state, those along ``fsdp`` hold a share each (ZeRO: Rajbhandari et al., SC 2020);
    XLA gathers a layer's parameters where they are used, and sums its gradients where they are
    kept. Everything else is everywhere.

    Attributes:
      mesh: the devices, with axes ``data`` and ``fsdp``.
    """

    mesh: jax.sharding.Mesh

    @property
    def everywhere(self) -> NamedSharding:
        """All of an array on every device."""
        return NamedSharding(self.mesh, PartitionSpec())

    def put(self, batch: Any) -> Any:
        """A batch that every process has, as arrays of which each holds its devices' rows.

        Where there is one process, the compiled program takes it as it is.
        """
        if jax.process_count() == 1:
            return batch
        return jax.tree.map(
            lambda a, to: jax.make_array_from_callback(a.shape, to.sharding, lambda i: a[i]),
            batch,
            self.batch(batch),
        )

    def batch(self, shapes: Any) -> Any:
        """The shapes of a batch, each placed: rows are spread over all devices."""
        rows = NamedSharding(self.mesh, PartitionSpec(self.mesh.axis_names))
        return jax.tree.map(lambda a: _placed(a, rows), shapes)

    def state(self, shapes: TrainState) -> TrainState:
        """The shapes of a train state, each placed."""

        def spread(tree: Any) -> Any:
            return jax.tree.map(lambda a: _placed(a, self._spread(a.shape)), tree)

        whole = jax.tree.map(lambda a: _placed(a, self.everywhere), shapes)
        return dataclasses.replace(
            whole,
            params=spread(shapes.params),
            opt_state=spread(shapes.opt_state),
            ema=spread(shapes.ema),
        )

    def _spread(self, shape: tuple[int, ...]) -> NamedSharding:
        """Along the longest axis that the devices divide."""
        devices = self.mesh.shape["fsdp"]
        axes = [i for i, n in enumerate(shape) if n % devices == 0]
        if not axes or math.prod(shape) < _SMALL:
            return self.everywhere
        longest = max(axes, key=lambda i: shape[i])
        axis = [None] * longest + ["fsdp"]
        return NamedSharding(self.mesh, PartitionSpec(*axis))


def shardings(shapes: Any) -> Any:
    """Where the arrays of a tree lie whose shapes are placed."""
    return jax.tree.map(lambda a: a.sharding, shapes)


def layout(config: Config) -> Layout:
    """The devices that a config asks for, the first ones of this machine.

    Raises:
      UserError: if there are fewer, or they do not share a batch evenly.
    """
    wanted, batch_size = config.mesh, config.data.batch_size
    devices = jax.devices()
    count = wanted.data * wanted.fsdp
    if count > len(devices):
        raise UserError(
            f"mesh: {wanted.data} x {wanted.fsdp} devices are wanted, {len(devices)} of "
            f"{devices[0].device_kind} {'is' if len(devices) == 1 else 'are'} there"
        )
    if jax.process_count() > 1 and count < len(devices):
        raise UserError(
            f"mesh: {wanted.data} x {wanted.fsdp} devices are wanted, and the "
            f"{jax.process_count()} processes have {len(devices)}: all must be in it"
        )
    if batch_size % count:
        raise UserError(f"mesh: {count} devices do not divide data.batch_size {batch_size}")
    shape = (wanted.data, wanted.fsdp)
    names = ("data", "fsdp")
    kinds = (AxisType.Auto, AxisType.Auto)
    return Layout(jax.make_mesh(shape, names, devices=devices[:count], axis_types=kinds))


def make_cpu_devices(wanted: Mesh, processes: int = 1) -> None:
    """Lets JAX see as many devices on a CPU as are wanted of this process, before it looks.

    Nothing is changed where ``XLA_FLAGS`` says how many there are. XLA's devices on a CPU share
    threads, and one that waits for another keeps its thread: with as many threads as cores, or
    with the next step begun before this one has ended, all may wait for each other.
    """
    count = wanted.data * wanted.fsdp // processes
    told = "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", "")
    if count > 1 and not told:
        os.environ.setdefault("NPROC", str((os.cpu_count() or 1) + 3 * count))  # XLA's threads
        jax.config.update("jax_cpu_enable_async_dispatch", False)
        # JAX has looked if it is used as a library: then `layout` says how many there are.
        with contextlib.suppress(RuntimeError):
            jax.config.update("jax_num_cpu_devices", count)


def _placed(shape: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)
