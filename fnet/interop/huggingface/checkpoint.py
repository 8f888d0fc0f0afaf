"""Tensors of a checkpoint and parameters of a network: names, layouts, both directions."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Sharding

from fnet.layer import Decode, Params, State

# Buffers that old checkpoints contain although they are computed.
_BUFFERS = re.compile(
    r"(^|\.)(rotary_emb\.inv_freq|attn\.bias|attn\.masked_bias|position_ids|num_batches_tracked)$"
)
_LISTED = 4  # names in an error


class Tensor(NamedTuple):
    """One tensor of a checkpoint, and the parameter that it is.

    Attributes:
      name: name in the checkpoint.
      path: path of the parameter, joined by ``/``.
      axes: transposition from the file to the parameter; None: none.
      unit_axis: axis or ascending axes of the file's tensor that have length 1 and that the
        parameter lacks.
      by_head: number of rows in which the file splits the parameter's only axis; None: not split.
      optional: whether the tensor may be missing, because another one holds the same parameter.
    """

    name: str
    path: str
    axes: tuple[int, ...] | None = None
    unit_axis: int | tuple[int, ...] | None = None
    by_head: int | None = None
    optional: bool = False

    def to_param(self, a: np.ndarray) -> np.ndarray:
        """Convert a tensor of the file to the layout of the parameter, without a copy."""
        if self.by_head is not None:
            a = a.reshape(-1)
        if self.unit_axis is not None:
            a = a.squeeze(self.unit_axis)
        return a if self.axes is None else a.transpose(self.axes)

    def to_file(self, a: np.ndarray) -> np.ndarray:
        """Invert `to_param`."""
        if self.axes is not None:
            a = a.transpose(np.argsort(self.axes))
        if self.unit_axis is not None:
            a = np.expand_dims(a, self.unit_axis)
        return a if self.by_head is None else a.reshape(self.by_head, -1)

    def file_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Shape in the file of a parameter of the given shape."""
        return self.to_file(np.broadcast_to(np.zeros((), bool), tuple(shape))).shape

    def file_slices(self, index: tuple[slice, ...]) -> tuple[slice, ...] | None:
        """Slices of the file's tensor that hold a part of the parameter; None: all of it."""
        if self.by_head is not None:
            return None
        slices = list(index)
        if self.axes is not None:
            slices = [index[i] for i in np.argsort(self.axes)]
        if self.unit_axis is not None:
            axes = (self.unit_axis,) if isinstance(self.unit_axis, int) else self.unit_axis
            for axis in axes:
                slices.insert(axis, slice(None))
        return tuple(slices)


class PretrainedModel(NamedTuple):
    """A published model: a network, and the names of its tensors.

    Attributes:
      init: ``init(key) -> (params, state)``, as for `fnet.Layer`.
      apply: ``apply(params, state, x, *, key=None, train, ...) -> (logits, state)``.
      decode: incremental decoding of a language model, or None.
      losses: the fused loss of a language model, as for `fnet.models.LanguageModel`, or None.
      tensors: where each tensor of the checkpoint goes.
    """

    init: Callable[[Array], tuple[Params, State]]
    apply: Callable[..., tuple[Array, State]]
    decode: Decode | None
    losses: Callable[..., tuple[Array, State]] | None
    tensors: tuple[Tensor, ...]


def with_found_names(
    model: PretrainedModel,
    names: Sequence[str],
    prefix: str | None,
    others: re.Pattern[str] | None = None,
) -> PretrainedModel:
    """Rename the model's tensors as the checkpoint names them.

    Checkpoints of a network without its head lack the prefix that the others have.

    Args:
      model: a model with the usual names.
      names: names in the checkpoint.
      prefix: what the checkpoint's names may lack, such as ``"model."``.
      others: names of tensors that belong to another model in the same checkpoint.

    Raises:
      ValueError: for missing or unknown tensors.
    """
    found = set(names)
    tensors = model.tensors
    if prefix and not any(name.startswith(prefix) for name in names):
        tensors = tuple(t._replace(name=t.name.removeprefix(prefix)) for t in tensors)
    missing = [t.name for t in tensors if t.name not in found and not t.optional]
    known = {t.name for t in tensors}
    unknown = sorted(
        n
        for n in found - known
        if not _BUFFERS.search(n) and not (others is not None and others.search(n))
    )
    if missing:
        raise ValueError(f"the checkpoint lacks {_listed(missing)}")
    if unknown:
        raise ValueError(
            f"the checkpoint has tensors that the model does not: {_listed(unknown)}; "
            "does config.json belong to this checkpoint?"
        )
    return model._replace(tensors=tuple(t for t in tensors if t.name in found))


def check_shapes(model: PretrainedModel, shapes: Params, tensors: Mapping[str, Any]) -> None:
    """Raise if a tensor has another shape than its parameter, or is not floating."""
    for t in model.tensors:
        expected, tensor = t.file_shape(leaf(shapes, t.path).shape), tensors[t.name]
        if tuple(tensor.shape) != expected:
            raise ValueError(
                f"{t.name}: expected shape {expected} by config.json, got {tuple(tensor.shape)}"
            )
        if not jnp.issubdtype(np.dtype(tensor.dtype), jnp.floating):
            raise TypeError(f"{t.name}: expected a floating dtype, got {tensor.dtype}")


def read_params(
    model: PretrainedModel,
    shapes: Params,
    tensors: Mapping[str, Any],
    sharding: Callable[[str, tuple[int, ...]], Sharding] | None,
    convert: Callable[[str, Array], Any] | None,
) -> Params:
    """Read the parameters one at a time.

    Args:
      model: a model with the names of the checkpoint.
      shapes: shapes of its parameters.
      tensors: ``{name: tensor}``. Each tensor has ``shape`` and ``dtype``, and is read by
        ``tensor[slices]``, which returns a NumPy array.
      sharding: ``(path, shape) -> sharding`` of each parameter; None: the default device.
      convert: ``(path, array) -> leaf``, applied to each parameter right after reading.

    Raises:
      ValueError: if two tensors hold the same parameter with different values.
    """
    params: Params = {}
    for t in model.tensors:
        tensor, shape = tensors[t.name], tuple(leaf(shapes, t.path).shape)

        read = _reader(t, tensor)
        everything = (slice(None),) * len(shape)
        if t.optional:
            first = next(u for u in model.tensors if u.path == t.path)
            expected = _reader(first, tensors[first.name])(everything)
            if not np.array_equal(read(everything), expected):
                raise ValueError(
                    f"{t.name} differs from {first.name}, but config.json ties them "
                    "(tie_word_embeddings); set it to false"
                )
            continue
        if sharding is None:
            # JAX's own memory, which can be donated. `jnp.array` would copy twice.
            value = jax.device_put(read(everything), may_alias=False)
        else:
            value = jax.make_array_from_callback(shape, sharding(t.path, shape), read)
        value = value if convert is None else convert(t.path, value)
        # One tensor at a time in host memory.
        set_leaf(params, t.path, jax.block_until_ready(value))
    return params


def _reader(t: Tensor, tensor: Any) -> Callable[[tuple[slice, ...] | None], np.ndarray]:
    """Return a function that reads a part of a parameter."""

    def read(index: tuple[slice, ...] | None) -> np.ndarray:
        assert index is not None
        slices = t.file_slices(index)
        part = np.asarray(tensor[... if slices is None else slices])
        # NumPy transposes integers many times faster than bfloat16. A mapped file leaves memory
        # right after the copy.
        bits = t.to_param(part.view(f"u{part.dtype.itemsize}"))
        bits = bits[index] if slices is None else bits
        return np.ascontiguousarray(bits).view(part.dtype)

    return read


def to_tensors(model: PretrainedModel, params: Params) -> dict[str, np.ndarray]:
    """Convert parameters to the tensors of a checkpoint, in their own dtypes."""
    return {
        t.name: np.ascontiguousarray(t.to_file(np.asarray(leaf(params, t.path))))
        for t in model.tensors
    }


def leaf(tree: Params, path: str) -> Any:
    """Return the leaf at a path joined by ``/``."""
    for part in path.split("/"):
        tree = tree[part]
    return tree


def set_leaf(tree: Params, path: str, value: Any) -> None:
    """Set the leaf at a path joined by ``/``, and create the dicts on the way."""
    *parents, last = path.split("/")
    for part in parents:
        tree = tree.setdefault(part, {})
    tree[last] = value


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(names[:_LISTED]) + more
