"""Save checkpoints of a run and restore them. Only this module uses orbax."""

import contextlib
import dataclasses
import functools
import logging
import math
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import tensorstore
from jax import Array
from orbax.checkpoint import checkpoint_managers as managers

from fnet import TrainState
from fnet.cpu.heap import release_free_memory
from train import stored
from train.errors import TrainingError, UserError, is_machine_error, is_out_of_memory, warn
from train.networks.pretrained import Pretrained
from train.networks.published.network import FROZEN, PretrainedNetwork, weights_code
from train.run.distributed import any_process, lost_connection
from train.run.process_memory import IN_FLIGHT
from train.run.run_folder import RunFolder, check_no_pattern, read_sealed, run_name, seal, unseal

_FOREVER = 10**6
"""Seconds. Orbax measures them by the clock of the day, which jumps on a laptop that slept."""

Content = TypeVar("Content")


class Restored(NamedTuple):
    """State after ``step`` steps, the position in the data (None for its beginning), and the log.

    The log is what `RunFolder.logged` returned at that step; None if nothing was said.
    """

    step: int
    state: TrainState
    position: dict[str, Any] | None
    logged: dict[str, list[int]] | None = None


class RestoredNetwork(NamedTuple):
    """Variables restored for inference, after ``step`` steps.

    The parameters are averaged ones if the run has them.
    """

    evaluation_params: Any
    model_state: Any
    step: int


def no_checkpoint(folder: Path) -> UserError:
    """Return the error about a folder that should hold checkpoints and has none."""
    reason = f"no checkpoint in {folder}: none was saved, or they are gone"
    return UserError(why_damaged(folder) or reason)


def why_damaged(folder: Path) -> str | None:
    """Return that all checkpoints of a folder were damaged and moved away; None if none was."""
    last = max(folder.parent.glob("damaged_checkpoint_*"), default=None)
    return f"every checkpoint of {folder.parent} is damaged, such as {last}" if last else None


class Stamp(NamedTuple):
    """What a part of a run was trained with: a seed, or its code, and checksums of the others."""

    seed: str
    config: str
    data: str


class ForeignError(Exception):
    """A checkpoint belongs to another run or another step."""


class Owner(NamedTuple):
    """The id of the run that checkpoints must be of, and all that it was trained with, if known.

    ``base`` is a code of the published weights that adapters belong to; no checkpoint has those.
    """

    run: str | None
    stamps: tuple[Stamp, ...] | None = None
    base: str | None = None

    @classmethod
    def of(cls, folder: RunFolder) -> Self:
        """Return the owner of the checkpoints in a folder, as config.json and data.json say."""
        model = folder.read_config().model if folder.config.is_file() else None
        own = cls(folder.id)
        if isinstance(model, Pretrained) and model.lora_rank is not None:
            own = own._replace(base=weights_code(Path(model.path)))
        try:
            record = read_sealed(folder.data)
            folder.check_owner(record["run"], folder.data)
            return own._replace(stamps=tuple(Stamp(*stamp) for stamp in record["stamps"]))
        except (UserError, TypeError, KeyError):  # `train.run.same_data` reports damage
            return own

    def check(self, content: dict[str, Any], step: int) -> None:
        """Raise `ForeignError` if a checkpoint says that it is of another run or step."""
        run, saved, given = (content.get(name) for name in ("run", "step", "stamp"))
        if run != self.run:
            raise ForeignError(f"of another run: of {run_name(run)}, not of {run_name(self.run)}")
        if saved not in (None, step) or (run and saved is None):
            raise ForeignError(f"of another step: it was saved after step {saved}")
        if step and run and self.stamps and (stamp := tuple(given or "???")) not in self.stamps:
            pairs = zip(Stamp._fields, stamp, self.stamps[-1], strict=True)
            other = next(name for name, its, ours in pairs if its != ours)
            raise ForeignError(f"of another run: it was trained with another {other}")
        if content.get("base", self.base) != self.base:
            raise UserError(
                "model.path: has other weights than those that the adapters were trained with; "
                "restore them"
            )


class Checkpoints:
    """Checkpoints of a run; each is either complete or absent.

    A checkpoint is written in the background from a copy on the host. On CPU, the copy is in the
    same memory as the state. There, a state above 32 MiB is written synchronously, a few arrays at
    a time.

    Checksums of all arrays are saved and compared on reading, and so are the run and the step. If a
    checkpoint is damaged or of another run, the one before it is used.

    Args:
      keep: number of the newest checkpoints to keep; None opens them for reading only.
      shapes: shapes of the states to save, which limit the memory of writing and reading on CPU;
        without them it is not limited.
      best: read the checkpoint with the highest score instead of the newest.
      keep_best: keep the checkpoint with the highest score, too.
      owner: the run that they are of; by default the one of the folder around them.

    Raises:
      UserError: for a folder whose path orbax cannot read.
    """

    def __init__(
        self,
        folder: Path,
        keep: int | None = None,
        log: Callable[[str], None] = warn,
        *,
        shapes: TrainState | None = None,
        best: bool = False,
        keep_best: bool = True,
        owner: Owner | None = None,
    ):
        self._folder, self._log, self._read_only = folder.absolute(), log, keep is None
        self._best, self._scores = best, dict[int, float]()
        self._owner = owner or Owner.of(RunFolder(folder.parent))
        check_no_pattern(folder)
        for path in folder.rglob("*"):  # orbax would wait for the writer of a pipe
            if path.exists() and not (path.is_file() or path.is_dir()):
                raise stored.StoredError(path, "it is not a regular file")
        with contextlib.ExitStack() as settings:
            settings.enter_context(_quiet_libraries())
            if not self._read_only:
                _drop_late_callbacks()
            policies = [managers.LatestN(keep), *[_Best(self._scores)] * keep_best]
            gigabytes = None
            if shapes is not None and jax.default_backend() == "cpu":
                gigabytes = (IN_FLIGHT + max(_sizes(shapes))) / 1e9  # no array may be above it
            try:
                self._manager = ocp.CheckpointManager(
                    self._folder,
                    options=ocp.CheckpointManagerOptions(
                        preservation_policy=managers.AnyPreservationPolicy(policies),
                        cleanup_tmp_directories=not self._read_only,
                        read_only=self._read_only,
                        create=not self._read_only,
                        # On CPU a state that is being written cannot be donated, so that each step
                        # makes another: only a small one is written in the background.
                        enable_async_checkpointing=gigabytes is None
                        or sum(_sizes(shapes)) <= IN_FLIGHT,
                        async_options=ocp.AsyncOptions(timeout_secs=_FOREVER),
                    ),
                    item_handlers={
                        "state": ocp.PyTreeCheckpointHandler(
                            save_concurrent_gb=gigabytes, restore_concurrent_gb=gigabytes
                        ),
                        "data": ocp.JsonCheckpointHandler(),
                    },
                )
            except Exception as error:  # of the metadata of any checkpoint
                if is_machine_error(error):
                    raise
                for path in sorted(folder.glob("*/_CHECKPOINT_METADATA")):
                    stored.read(dict[str, Any], path)
                what = f"_CHECKPOINT_METADATA of a checkpoint in {folder}"
                raise UserError(f"cannot read {what}: {_reason(error)}") from error
            steps = self._manager.all_steps()
            for path in folder.glob("*/_CHECKPOINT_METADATA"):
                if path.parent.name not in {*map(str, steps)} and "-tmp-" not in path.parent.name:
                    log(f"{path.parent}: left out, because its name is not a step")
            for step in steps:
                try:
                    score = self._read_data(step)["score"]
                except UserError:
                    raise
                except Exception as error:  # logged once, when the checkpoint is read
                    if best:
                        self._log_damaged(step, error)
                else:
                    self._scores |= {} if score is None else {step: score}
            self._settings = settings.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # Don't mask an exception that is already propagating.
        with self._settings, contextlib.suppress(Exception) if kind else _saving(self._folder):
            self._manager.close()

    @property
    def latest_step(self) -> int | None:
        """Step of the newest checkpoint, or None."""
        return self._manager.latest_step()

    @property
    def best_score(self) -> float:
        """Highest score of any checkpoint; minus infinity if none has a score."""
        return max(self._scores.values(), default=float("-inf"))

    def save(
        self,
        step: int,
        state: TrainState,
        position: dict[str, Any],
        score: float | None = None,
        logged: dict[str, list[int]] | None = None,
        stamp: Stamp | None = None,
    ) -> None:
        """Start to save a checkpoint. The state may be donated as soon as this returns.

        The best checkpoint is kept by its score. ``logged`` is of `RunFolder.logged`.

        Raises:
          TrainingError: if this checkpoint or the one before cannot be written.
        """
        if self.latest_step == step:
            return
        content: dict[str, Any] = {"position": position, "checksums": checksums(state)}
        content |= {"run": self._owner.run, "step": step, "stamp": stamp and list(stamp)}
        content["base"] = self._owner.base
        data = seal(content | {"score": score, "logged": logged})
        self._scores |= {} if score is None else {step: score}
        with _saving(self._folder):
            self._manager.save(
                step,
                args=ocp.args.Composite(
                    state=ocp.args.PyTreeSave(state), data=ocp.args.JsonSave(data)
                ),
            )
        release_free_memory()

    def wait(self) -> None:
        """Wait until all checkpoints are on disk."""
        with _saving(self._folder):
            self._manager.wait_until_finished()

    def restore(self, shapes: TrainState, model: Any = None) -> Restored | None:
        """Restore the newest intact checkpoint, or return None if there is none at all.

        The shapes may have shardings. A model reads the frozen parameters of a published one.
        """
        saved = without_frozen(shapes)
        target = jax.tree.map(_shape_of, saved)

        def read(step: int) -> Restored:
            self._compare(step, self._manager.item_metadata(step).state.tree, saved)
            state, data = self._read(step, target)
            state = jax.tree.map(to_jax_buffer, state)
            return Restored(step, state, data["position"], data.get("logged"))

        restored = self._newest(read)
        if restored is None or FROZEN not in shapes.model_state:
            return restored
        model_state = restored.state.model_state | {FROZEN: model.read(shapes.model_state[FROZEN])}
        return restored._replace(state=dataclasses.replace(restored.state, model_state=model_state))

    def restore_network(
        self,
        init: Callable[[Array], tuple[Any, Any]] | None = None,
        place: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
    ) -> RestoredNetwork:
        """Restore the network of the newest intact checkpoint.

        Only the variables for inference are read: no optimizer state, and no parameters if there
        are averaged ones. Neither the data nor the optimizer of the run is needed.

        Args:
          init: the network's ``key -> (params, model_state)``, whose names and shapes are
            compared with the checkpoint's; None skips the comparison.
          place: gives shapes their shardings (`train.run.mesh.Layout.fields`). By default all
            arrays are restored to one device.
        """

        def read(step: int) -> RestoredNetwork:
            saved = self._manager.item_metadata(step).state.tree
            params_name = "params" if saved.get("ema") is None else "ema"
            network = {name: saved[name] for name in (params_name, "model_state")}
            if init is not None:
                params, model_state = jax.eval_shape(init, jax.random.key(0))
                self._compare(step, network, {params_name: params, "model_state": model_state})
            target = jax.tree.map(_on_one_device, network, is_leaf=lambda a: hasattr(a, "shape"))
            restored, data = self._read(step, place(target) if place else target)
            if stamp := data.get("stamp"):  # config.json says how the network is used
                folder = RunFolder(self._folder.parent)
                if not folder.has_config(stamp[1]):
                    self._log(f"{folder.config}: changed since the network was saved")
            return RestoredNetwork(restored[params_name], restored["model_state"], step)

        network = self._newest(read)
        if network is None:
            raise no_checkpoint(self._folder)
        return network

    def _read(self, step: int, target: Any) -> tuple[Any, dict[str, Any]]:
        """Read the arrays of a target tree and the rest; compare the arrays' checksums."""
        data = self._read_data(step)
        part = ocp.args.PyTreeRestore(
            target, ocp.checkpoint_utils.construct_restore_args(target), partial_restore=True
        )
        state = self._manager.restore(step, args=ocp.args.Composite(state=part)).state
        actual = checksums(state)
        different = sorted(name for name in actual if data["checksums"].get(name) != actual[name])
        if different:
            raise ValueError(f"{different[0]} is not what was saved")
        return state, data

    def _read_data(self, step: int) -> dict[str, Any]:
        data = self._manager.restore(step, args=ocp.args.Composite(data=ocp.args.JsonRestore()))
        try:
            content = unseal(data.data)
        except ValueError as error:
            raise ValueError(f"its position in the data cannot be used: {error}") from error
        self._owner.check(content, step)
        return content

    def _newest(self, read: Callable[[int], Content]) -> Content | None:
        """Read the newest intact checkpoint, or the best one; all processes take the same."""
        steps = sorted(self._manager.all_steps(), reverse=True)
        which, fix = "", "start a new run with another --out"
        if self._best and steps:
            scores = self._scores
            steps = sorted(scores, key=lambda step: (scores[step], step), reverse=True)
            if not steps:
                raise UserError(f"no checkpoint in {self._folder} has a score; leave out --best")
            which, fix = " with a score", "leave out --best"
        error: Exception | None = None
        for step in steps:
            error = None
            try:
                content = read(step)
            except UserError:
                raise
            except Exception as raised:  # orbax raises many kinds for a damaged file
                error = raised
            if any_process(error is not None and is_machine_error(error)):
                if error and is_out_of_memory(error):
                    raise error
                path = self._folder / str(step)
                reason = _reason(error) if error else "another process cannot"
                raise TrainingError(f"cannot read {path}, which is not changed: {reason}")
            if not any_process(error is not None):
                return content
            self._log_damaged(step, error)
            self._move_damaged(step)
        if steps:
            damaged = "of another run" if isinstance(error, ForeignError) else "damaged"
            raise UserError(f"every checkpoint{which} in {self._folder} is {damaged}; {fix}")
        return None

    def _log_damaged(self, step: int, error: Exception | None) -> None:
        why = _reason(error) if error else "found by another process"
        why = why if isinstance(error, ForeignError) else f"damaged ({why})"
        self._log(f"checkpoint {self._folder / str(step)} is {why}; trying the one before")

    def _move_damaged(self, step: int) -> None:
        if self._read_only:
            return
        if jax.process_index() == 0:
            damaged = self._folder.parent / f"damaged_checkpoint_{step}"
            shutil.rmtree(damaged, ignore_errors=True)
            (self._folder / str(step)).rename(damaged)
        any_process(False)  # the other processes wait here
        self._manager.reload()
        self._scores.pop(step, None)

    def _compare(self, step: int, there: Any, here: Any) -> None:
        """Raise `UserError` if names or shapes of the saved arrays differ from ``here``."""
        saved, expected = _shapes(there), _shapes(here)
        for name in sorted(saved.keys() | expected.keys()):
            if saved.get(name) != expected.get(name):
                raise UserError(
                    f"checkpoint {self._folder / str(step)} is of another model: "
                    f"{name} is {saved.get(name, 'absent')} there, "
                    f"{expected.get(name, 'absent')} here"
                )


@dataclasses.dataclass
class _Best(managers.PreservationPolicy):
    """Preserve the checkpoint with the highest score, of several the newest."""

    scores: Mapping[int, float]

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> Sequence[bool]:
        scored = [(self.scores[c.step], c.step) for c in checkpoints if c.step in self.scores]
        return [(self.scores.get(c.step), c.step) == max(scored, default=None) for c in checkpoints]


def without_frozen(state: TrainState) -> TrainState:
    """Return what a checkpoint holds of a state or of its shapes."""
    if FROZEN not in state.model_state:
        return state
    return dataclasses.replace(state, model_state=_without(state.model_state))


def load_network(
    folder: RunFolder,
    model: Any,
    *,
    best: bool = False,
    place: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
) -> RestoredNetwork:
    """Restore the network of a run, with frozen parameters from the published model.

    A run of a published model without a checkpoint, such as `fnet import` makes, has the published
    parameters. ``best`` and ``place`` are as in `Checkpoints` and its ``restore_network``.
    """
    is_pretrained = isinstance(model, PretrainedNetwork)

    def published() -> Any:
        params, model_state = jax.eval_shape(model.init, jax.random.key(0))
        shapes = {"params": params, "model_state": model_state}
        shapes = place(shapes) if place else shapes
        return model.read(model.pretrained(shapes["params"], shapes["model_state"]))

    def init(key: Array) -> tuple[Any, Any]:
        params, model_state = model.init(key)
        return params, _without(model_state)

    if is_pretrained and not folder.checkpoints.is_dir():
        initial = jax.jit(model.place, donate_argnums=1)
        params, model_state = initial(jax.random.key(0), published())
        return RestoredNetwork(params, model_state, 0)
    with Checkpoints(folder.checkpoints, best=best) as checkpoints:
        network = checkpoints.restore_network(init, place)
    if not (is_pretrained and model.is_frozen):
        return network
    return network._replace(model_state=network.model_state | {FROZEN: published()})


def _without(model_state: Any) -> Any:
    if not isinstance(model_state, dict):
        return model_state
    return {name: value for name, value in model_state.items() if name != FROZEN}


def checksums(tree: Any) -> dict[str, int]:
    """Return a checksum of each array, ``{"params.stem.kernel": 2873465, ...}``.

    It is the sum over all elements, modulo 2^32, of their bits and their index, mixed by a
    bijection (the last step of MurmurHash3). A change of one element always changes it. Arrays
    of any dtype, or typed keys, are neither moved nor copied; each device sums its own shard.
    """
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    # One after the other: on CPU each needs as much memory again as its array.
    return {_dotted(path): int(_checksum_program(_shape_of(leaf))(leaf)) for path, leaf in leaves}


def compile_checksums(shapes: Any) -> None:
    """Compile the checksums of a state, so that no checkpoint has to.

    XLA's compiler takes tens of MiB, which would add to the peak of training.
    """
    for leaf in jax.tree.leaves(shapes):
        _checksum_program(_shape_of(leaf))


@functools.cache
def _checksum_program(shape: jax.ShapeDtypeStruct) -> Callable[[Array], Array]:
    return jax.jit(_checksum).lower(shape).compile()


def _shape_of(a: Any) -> jax.ShapeDtypeStruct:
    if not getattr(a, "sharding", None):
        return _on_one_device(a)
    return jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding)


def _checksum(a: Array) -> Array:
    if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
        a = jax.random.key_data(a)
    if a.dtype == bool:
        a = a.astype(np.uint8)
    if jnp.issubdtype(a.dtype, jnp.complexfloating):
        a = jnp.stack([a.real, a.imag])
    bits = min(a.dtype.itemsize * 8, 32)  # wider dtypes are split on a new axis
    number = jax.lax.bitcast_convert_type(a, np.dtype(f"uint{bits}")).astype(np.uint32)
    index = jnp.zeros(number.shape, np.uint32)
    for axis in range(number.ndim):
        stride = math.prod(number.shape[axis + 1 :]) % 2**32
        index += jax.lax.broadcasted_iota(np.uint32, number.shape, axis) * np.uint32(stride)
    return _mix(number ^ _mix(index)).sum(dtype=np.uint32)


def _mix(h: Array) -> Array:
    """Apply a bijection of 32 bits in which every bit changes half of the others."""
    h = (h ^ (h >> 16)) * np.uint32(0x85EBCA6B)
    h = (h ^ (h >> 13)) * np.uint32(0xC2B2AE35)
    return h ^ (h >> 16)


def to_jax_buffer(leaf: Array) -> Array:
    """Copy a restored array into JAX's own memory and delete the original.

    On CPU most restored arrays are in memory of orbax. JAX cannot donate them, so that the first
    step would hold them twice.
    """
    # Part by part, because `jax.device_put` copies to devices of this process only.
    parts = [
        jax.device_put(part.data, part.device, may_alias=False) for part in leaf.addressable_shards
    ]
    copy = jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, parts)
    jax.block_until_ready(copy)
    leaf.delete()
    release_free_memory()  # otherwise the next array does not quite fit in the space of this one
    return copy


def _sizes(shapes: Any) -> list[int]:
    """Return bytes of whole arrays, because orbax may read all of an array for one shard."""
    return [a.size * a.dtype.itemsize for a in jax.tree.leaves(shapes)]


def _dotted(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")


def _shapes(tree: Any) -> dict[str, str]:
    """Return {path: shape} of all leaves except the typed key, which is saved as its data."""
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    shapes = {_dotted(p): str(tuple(leaf.shape)) for p, leaf in leaves if hasattr(leaf, "shape")}
    return {name: shape for name, shape in shapes.items() if name != "key"}


def _on_one_device(shape: Any) -> jax.ShapeDtypeStruct:
    here = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=here)


@contextlib.contextmanager
def _quiet_libraries() -> Iterator[None]:
    """Settings of other libraries, which are the process's, while checkpoints are open."""
    # Orbax logs each folder it creates, and errors in its threads. Those that matter are raised.
    logger, collect = logging.getLogger("absl"), tensorstore.experimental_collect_matching_metrics
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    # Orbax asks for metrics, only to log them. TensorStore never frees what it answers: more than
    # half of what a checkpoint leaves behind.
    tensorstore.experimental_collect_matching_metrics = lambda *_: []
    try:
        yield
    finally:
        logger.setLevel(level)
        tensorstore.experimental_collect_matching_metrics = collect


@functools.cache
def _drop_late_callbacks() -> None:
    """Print nothing of what is left of a save that failed, such as on a full disk: only its error.

    TensorStore's threads and orbax's coroutines outlive the loop that ran them, and the checkpoints
    that are written: only the program does that, whose process this is.
    """
    warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
    print_error = sys.unraisablehook

    def unraisablehook(raised: Any) -> None:
        if str(raised.exc_value) != "Event loop is closed":
            print_error(raised)

    sys.unraisablehook = unraisablehook


@contextlib.contextmanager
def _saving(folder: Path) -> Iterator[None]:
    """Raise an error in writing a checkpoint as `TrainingError`, except for a lost connection."""
    try:
        yield
    except Exception as error:
        if lost_connection(error):
            raise
        raise TrainingError(
            f"cannot save a checkpoint in {folder}: {_reason(error)}; earlier checkpoints are "
            "intact"
        ) from error


def _reason(error: Exception) -> str:
    """Return the error's first line; only the end of a long one, where the reason is."""
    line = next(iter(str(error).strip().splitlines()), type(error).__name__)
    return line if len(line) <= 200 else f"... {line[-200:]}"
