"""Checkpoints of a run: the only place that knows orbax."""

import contextlib
import json
import logging
import math
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax import Array
from orbax.checkpoint.checkpoint_managers import AnyPreservationPolicy, BestN, LatestN

from fnet import TrainState
from train.errors import TrainingError, UserError, is_machine_error, is_out_of_memory
from train.run.distributed import any_process
from train.run.process_memory import release_free_memory
from train.run.run_folder import check_no_pattern

# Orbax tells of every directory it makes, and of an error in each of its threads; what matters
# is raised, and said by the loop.
logging.getLogger("absl").setLevel(logging.CRITICAL)

IN_FLIGHT = 32 * 2**20
"""Bytes of a state, beside its largest array, that go to disk or come from it at a time."""

Found = TypeVar("Found")


class Restored(NamedTuple):
    """A checkpoint: the state after ``step`` steps, and where the data stood."""

    step: int
    state: TrainState
    position: dict[str, Any]


class RestoredNetwork(NamedTuple):
    """What of a checkpoint a trained network is: averaged parameters where they are kept."""

    evaluation_params: Any
    model_state: Any
    step: int


class DamagedError(Exception):
    """A checkpoint whose arrays are not those that were saved."""


class Checkpoints:
    """The checkpoints of a run, each of them whole or absent.

    They are written in the background, from a copy on the host. On CPU, where the copy lies in
    the same memory as the state, one of more than 32 MiB is written at once, a few arrays at a
    time.

    With each, the checksums of its arrays are kept, and compared when it is read: of a
    damaged one, whatever the damage, the one before is taken.

    Args:
      folder: where they are.
      keep: how many of the newest are kept; None: they are only read.
      say: shows a line; on stderr by default.
      shapes: of the states that will be saved; None: writing, and reading, takes what memory
        it will.
      best: read that of the highest score, not the newest.
      keep_best: keep that of the highest score beside the newest.

    Raises:
      UserError: for a folder whose path orbax cannot read.
    """

    def __init__(
        self,
        folder: Path,
        keep: int | None = None,
        say: Callable[[str], None] = lambda words: print(f"fnet: {words}", file=sys.stderr),
        *,
        shapes: TrainState | None = None,
        best: bool = False,
        keep_best: bool = True,
    ):
        best_of_all = BestN(get_metric_fn=_score, n=1, keep_checkpoints_without_metrics=False)
        options = ocp.CheckpointManagerOptions(
            preservation_policy=AnyPreservationPolicy([LatestN(keep), *[best_of_all] * keep_best]),
            best_fn=_score,  # without it, orbax writes no metrics
            cleanup_tmp_directories=keep is not None,
            read_only=keep is None,
            create=keep is not None,
            lightweight_initialize=keep is None,  # else it reads all scores, damaged or not
            enable_async_checkpointing=_in_background(shapes),
        )
        self._folder, self._say, self._only_read = folder.absolute(), say, keep is None
        self._best = best
        check_no_pattern(folder)
        self._some_put_aside = self._put_unread_scores_aside()
        gigabytes = _at_a_time(shapes)
        self._manager = ocp.CheckpointManager(
            self._folder,
            options=options,
            item_handlers={
                "state": ocp.PyTreeCheckpointHandler(
                    save_concurrent_gb=gigabytes, restore_concurrent_gb=gigabytes
                ),
                "data": ocp.JsonCheckpointHandler(),
            },
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # Of a save that fails while something else is on its way, that is told.
        with contextlib.suppress(Exception) if kind else _saving(self._folder):
            self._manager.close()

    @property
    def latest_step(self) -> int | None:
        """The newest checkpoint's step, or None."""
        return self._manager.latest_step()

    @property
    def best_score(self) -> float:
        """The highest score that a checkpoint was saved with; minus infinity without any."""
        return max(self._scores().values(), default=float("-inf"))

    def save(
        self, step: int, state: TrainState, position: dict[str, Any], score: float | None = None
    ) -> None:
        """Starts to save; the state may be donated as soon as this returns.

        Args:
          step: how many steps were taken.
          state: after them.
          position: of the data.
          score: how good the state is; the best one is kept.

        Raises:
          TrainingError: if this one or the one before cannot be written.
        """
        if self.latest_step == step:
            return
        sums = checksums(state)
        with _saving(self._folder):
            self._manager.save(
                step,
                args=ocp.args.Composite(
                    state=ocp.args.PyTreeSave(state),
                    data=ocp.args.JsonSave({"position": position, "checksums": sums}),
                ),
                metrics=None if score is None else {"score": score},
            )
        release_free_memory()

    def wait(self) -> None:
        """Returns when everything is on disk.

        Raises:
          TrainingError: if it cannot be written.
        """
        with _saving(self._folder):
            self._manager.wait_until_finished()

    def restore(self, like: TrainState) -> Restored | None:
        """The newest checkpoint that is not damaged, or None if there is none at all.

        Args:
          like: the shapes of such a state, placed (`train.run.mesh`) or for one device.

        Raises:
          UserError: if the checkpoint's arrays have other names or shapes, or all are damaged.
        """
        target = jax.tree.map(_placed, like)

        def read(step: int) -> Restored:
            self._compare(step, self._manager.item_metadata(step).state.tree, like)
            state, position = self._read(step, target)
            return Restored(step, jax.tree.map(to_jax_buffer, state), position)

        return self._newest(read)

    def restore_network(
        self, init: Callable[[Array], tuple[Any, Any]] | None = None
    ) -> RestoredNetwork:
        """The network of the newest checkpoint that is not damaged.

        Needs neither the data nor the optimizer that they were made with, and reads neither the
        optimizer's state nor, beside averaged parameters, those they are the average of.

        Args:
          init: the network's, ``key -> (params, model_state)``, to compare with; None: what is
            there is taken.

        Raises:
          UserError: if there is no checkpoint, its arrays have other names or shapes, or all
            are damaged.
        """

        def read(step: int) -> RestoredNetwork:
            tree = self._manager.item_metadata(step).state.tree
            averaged = "params" if tree.get("ema") is None else "ema"
            there = {name: tree[name] for name in (averaged, "model_state")}
            if init is not None:
                params, model_state = jax.eval_shape(init, jax.random.key(0))
                self._compare(step, there, {averaged: params, "model_state": model_state})
            like = jax.tree.map(_on_one_device, there, is_leaf=lambda a: hasattr(a, "shape"))
            network, _ = self._read(step, like)
            return RestoredNetwork(network[averaged], network["model_state"], step)

        found = self._newest(read)
        if found is None:
            raise UserError(f"no checkpoint in {self._folder}: the run has not saved one yet")
        return found

    def _read(self, step: int, like: Any) -> tuple[Any, dict[str, Any]]:
        """The part of a state that is asked for, compared with its checksums, and the position."""
        self._score_of(step)  # raises where it is damaged
        part = ocp.args.PyTreeRestore(
            like, ocp.checkpoint_utils.construct_restore_args(like), partial_restore=True
        )
        restored = self._manager.restore(
            step, args=ocp.args.Composite(state=part, data=ocp.args.JsonRestore())
        )
        saved, found = restored.data["checksums"], checksums(restored.state)
        wrong = sorted(name for name in found if saved.get(name) != found[name])
        if wrong:
            raise DamagedError(f"{wrong[0]} is not what was saved")
        return restored.state, restored.data["position"]

    def _newest(self, read: Callable[[int], Found]) -> Found | None:
        """What is read of the newest checkpoint, or the best, of which it can be."""
        steps = sorted(self._manager.all_steps(), reverse=True)
        among, mend = "", "start anew with --out"
        if self._best and steps:
            scores = self._scores()
            steps = sorted(scores, key=lambda step: (scores[step], step), reverse=True)
            if not steps:
                raise UserError(f"no checkpoint in {self._folder} has a score; leave out --best")
            among, mend = " that has a score", "leave out --best"
        for step in steps:
            failed: Exception | None = None
            try:
                found = read(step)
            except UserError:
                raise
            except Exception as error:  # whatever orbax makes of a damaged file
                failed = error
            wrong = _reason(failed) if failed else "as another process found"
            if any_process(failed is not None and is_machine_error(failed)):
                if failed and is_out_of_memory(failed):
                    raise failed
                path = self._folder / str(step)
                raise TrainingError(f"cannot read {path}, which is left as it is: {wrong}")
            if not any_process(failed is not None):
                return found
            self._say_damaged(step, wrong)
            self._put_aside(step)
        if steps or self._some_put_aside:
            raise UserError(f"every checkpoint in {self._folder}{among} is damaged; {mend}")
        return None

    def _scores(self) -> dict[int, float]:
        """Of the checkpoints that were saved with one, by step."""
        found = {}
        for step in self._manager.all_steps():
            try:
                if (score := self._score_of(step)) is not None:
                    found[step] = score
            except ValueError as error:
                if self._best:  # else it is said where the checkpoint is read
                    self._say_damaged(step, str(error))
        return found

    def _score_of(self, step: int) -> float | None:
        metrics = self._manager.metrics(step)
        return None if metrics is None else _score(metrics)

    def _put_unread_scores_aside(self) -> bool:
        """Whether there were checkpoints with a damaged score: orbax would not begin, or save."""
        if self._only_read:
            return False
        found = False
        if jax.process_index() == 0:
            for path in sorted(self._folder.glob("*/metrics/metrics")):
                folder = path.parents[1]
                try:
                    _score(json.loads(path.read_bytes()))
                except ValueError as error:
                    if folder.name.isdecimal():  # no save that a kill has cut off
                        step = int(folder.name)
                        self._say_damaged(step, str(error))
                        self._rename(step)
                        found = True
        return any_process(found)  # the others wait until they are there

    def _say_damaged(self, step: int, why: str) -> None:
        self._say(f"checkpoint {self._folder / str(step)} is damaged ({why}); the next is taken")

    def _put_aside(self, step: int) -> None:
        """Makes room for a checkpoint of the same step, without losing what was there."""
        if self._only_read:
            return
        if jax.process_index() == 0:
            self._rename(step)
        any_process(False)  # the others wait until it is there
        self._manager.reload()

    def _rename(self, step: int) -> None:
        aside = self._folder.parent / f"damaged_checkpoint_{step}"
        shutil.rmtree(aside, ignore_errors=True)
        (self._folder / str(step)).rename(aside)

    def _compare(self, step: int, there: Any, here: Any) -> None:
        """Refuses a checkpoint whose arrays are not those that are here."""
        found, wanted = _shapes(there), _shapes(here)
        for name in sorted(found.keys() | wanted.keys()):
            if found.get(name) != wanted.get(name):
                raise UserError(
                    f"checkpoint {self._folder / str(step)} is another model's: "
                    f"{name} is {found.get(name, 'absent')} there, "
                    f"{wanted.get(name, 'absent')} here"
                )


def _shapes(tree: Any) -> dict[str, str]:
    """{path: shape} of all leaves but the typed key, which is saved as its data."""
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    shapes = {dotted(p): str(tuple(leaf.shape)) for p, leaf in leaves if hasattr(leaf, "shape")}
    return {name: shape for name, shape in shapes.items() if name != "key"}


def _score(metrics: Any) -> float:
    """What was saved as ``{"score": ...}``; raises ValueError for anything else."""
    score = metrics.get("score") if isinstance(metrics, dict) else None
    if not isinstance(score, int | float) or not -math.inf < score < math.inf:
        raise ValueError(f"its score is {score}, not a finite number")
    return score


def _placed(shape: Any) -> jax.ShapeDtypeStruct:
    return shape if shape.sharding else _on_one_device(shape)


def _on_one_device(shape: Any) -> jax.ShapeDtypeStruct:
    here = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=here)


@contextlib.contextmanager
def _saving(folder: Path) -> Iterator[None]:
    """What goes wrong while a checkpoint is written, as one line."""
    try:
        yield
    except Exception as error:
        raise TrainingError(
            f"cannot save a checkpoint in {folder}: {_reason(error)}; those that were "
            "saved before are whole"
        ) from error


def _reason(error: Exception) -> str:
    """Its first line, of a long one the end: there the reason is, behind paths within paths."""
    line = next(iter(str(error).strip().splitlines()), type(error).__name__)
    return line if len(line) <= 200 else f"... {line[-200:]}"


def _in_background(shapes: Any) -> bool:
    """Whether there is room to go on with the training while such a state is written.

    On CPU a state that is being written cannot be donated: each step makes another one. That of
    a small network is less than `IN_FLIGHT`.
    """
    return jax.default_backend() != "cpu" or sum(_sizes(shapes)) <= IN_FLIGHT


def _at_a_time(shapes: Any) -> float | None:
    """Gigabytes of arrays that may be on their way at a time; None: any number."""
    if shapes is None or jax.default_backend() != "cpu":
        return None
    return (IN_FLIGHT + max(_sizes(shapes))) / 1e9  # each array must be below orbax's limit


def to_jax_buffer(leaf: Array) -> Array:
    """A restored array, copied into JAX's own memory, in place of the one that was read.

    On CPU most lie where orbax read them to. These cannot be donated: the first step would hold
    them twice.
    """
    copy = jax.block_until_ready(jax.device_put(leaf, leaf.sharding, may_alias=False))
    leaf.delete()
    release_free_memory()  # what is free now is too small for the next one by a few bytes
    return copy


def _sizes(shapes: Any) -> list[int]:
    """Bytes of whole arrays: orbax may read one whole of which a device has a part."""
    return [a.size * a.dtype.itemsize for a in jax.tree.leaves(shapes)]


def checksums(tree: Any) -> dict[str, int]:
    """``{"params.stem.kernel": 2873465, ...}`` of every array of a tree.

    The sum over all elements, modulo 2^32, of their bits and their place, mixed by a bijection
    (the last step of MurmurHash3): one changed element is always seen. No array is moved or
    copied; of one that is spread over devices each sums its own part.

    Args:
      tree: of arrays or typed keys of any dtype.
    """
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    # One after the other: on CPU each takes as much memory again as its array.
    return {dotted(path): int(_sum(leaf)) for path, leaf in leaves}


def dotted(path: Any) -> str:
    """A leaf's path, ``"opt_state.0.mu"``, the same for attributes, keys and positions."""
    parts = (getattr(p, a) for p in path for a in ("key", "name", "idx") if hasattr(p, a))
    return ".".join(str(p) for p in parts)


@jax.jit
def _sum(a: Array) -> Array:
    if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
        a = jax.random.key_data(a)
    if a.dtype == bool:
        a = a.astype(np.uint8)
    if jnp.issubdtype(a.dtype, jnp.complexfloating):
        a = jnp.stack([a.real, a.imag])
    bits = min(a.dtype.itemsize * 8, 32)  # of wider ones the halves, on an axis of their own
    number = jax.lax.bitcast_convert_type(a, np.dtype(f"uint{bits}")).astype(np.uint32)
    place = jnp.zeros(number.shape, np.uint32)
    for axis in range(number.ndim):
        after = math.prod(number.shape[axis + 1 :]) % 2**32
        place += jax.lax.broadcasted_iota(np.uint32, number.shape, axis) * np.uint32(after)
    return _mixed(number ^ _mixed(place)).sum(dtype=np.uint32)


def _mixed(h: Array) -> Array:
    """A bijection of 32 bits in which every bit changes half of the others."""
    h = (h ^ (h >> 16)) * np.uint32(0x85EBCA6B)
    h = (h ^ (h >> 13)) * np.uint32(0xC2B2AE35)
    return h ^ (h >> 16)
