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
    r"(^|\.)(rotary_emb\.inv_freq|attention\.(bias|masked_bias)|attn\.bias|attn\.masked_bias"
    r"|position_ids|num_batches_tracked)$"
)
_LISTED = 4  # names in an error

SUFFIXES = {
    "kernel": "weight",
    "embedding": "weight",
    "scale": "weight",
    "gamma": "weight",
    "bias": "bias",
    "beta": "bias",
    "running_mean": "running_mean",
    "running_var": "running_var",
}
"""Names of a layer's arrays in torch."""

KERNELS = {2: "ba", 4: "dcab"}
"""Layout of a kernel in torch, by rank: [in, out] is [out, in] there, and HWIO is OIHW."""

Names = dict[str, str | tuple[Any, ...]]
"""Path of a layer, or of one parameter -> its name in the checkpoint. Numbers are ``*`` in both.

A name with one number more than its path stands for one tensor per row of the parameter's first
axis, such as the experts of a layer. A tuple is the name and further fields of `Tensor`: the
layout, ``by_head`` and ``grouped``. A layout of a layer holds for its parameters with as many axes.
"""


class Tensor(NamedTuple):
    """One tensor of a checkpoint, and the parameter that it is.

    Attributes:
      name: name in the checkpoint.
      path: path of the parameter, joined by ``/``.
      shape: shape of the parameter.
      layout: axes of the file's tensor. A letter is an axis of the parameter, ``a`` its first one.
        ``1`` is an axis of length 1 that the parameter lacks. "": the axes of the parameter.
      by_head: number of rows in which the file splits the parameter's only axis; None: not split.
      grouped: ``(axis, n, m)``, if the file has the parts of an axis in another order: it consists
        of n groups of m parts in the file, and of m groups of n parts in the parameter.
      optional: whether the tensor may be missing, because another one holds the same parameter.
      row: which row of the parameter's first axis the tensor is, from which its layout counts;
        None: all.
    """

    name: str
    path: str
    shape: tuple[int, ...]
    layout: str = ""
    by_head: int | None = None
    grouped: tuple[int, int, int] | None = None
    optional: bool = False
    row: int | None = None

    @property
    def _axes(self) -> list[int]:
        return [ord(letter) - ord("a") for letter in self.layout if letter != "1"]

    @property
    def _units(self) -> tuple[int, ...]:
        return tuple(i for i, letter in enumerate(self.layout) if letter == "1")

    def to_param(self, a: np.ndarray) -> np.ndarray:
        """Convert a tensor of the file to the layout of the parameter, without a copy."""
        if self.by_head is not None:
            a = a.reshape(-1)
        if self.grouped is not None:
            axis, n, m = self.grouped
            a = regrouped(a, axis, n, m)
        return a.squeeze(self._units).transpose(np.argsort(self._axes)) if self.layout else a

    def to_file(self, a: np.ndarray) -> np.ndarray:
        """Return the file's tensor of a parameter: the inverse of `to_param`."""
        a = a if self.row is None else a[self.row]
        if self.layout:
            a = np.expand_dims(a.transpose(self._axes), self._units)
        if self.grouped is not None:
            axis, n, m = self.grouped
            a = regrouped(a, axis, m, n)
        return a if self.by_head is None else a.reshape(self.by_head, -1)

    @property
    def file_shape(self) -> tuple[int, ...]:
        """Shape of the tensor in the file."""
        return self.to_file(np.broadcast_to(np.zeros((), bool), self.shape)).shape

    def file_slices(self, index: tuple[slice, ...]) -> tuple[slice, ...] | None:
        """Slices of the file's tensor that hold a part of it; None: all of it."""
        if self.by_head is not None or self.grouped is not None:
            return None
        if not self.layout:
            return index
        return tuple(slice(None) if c == "1" else index[ord(c) - ord("a")] for c in self.layout)


def regrouped(a: np.ndarray, axis: int, n: int, m: int) -> np.ndarray:
    """Order an axis of n groups of m parts as m groups of n parts."""
    shape = a.shape
    parts = a.reshape(*shape[:axis], n, m, -1, *shape[axis + 1 :])
    return parts.swapaxes(axis, axis + 1).reshape(shape)


class PretrainedModel(NamedTuple):
    """A published model: a network, and the names of its tensors.

    Attributes:
      init: ``init(key) -> (params, state)``, as for `fnet.Layer`.
      apply: ``apply(params, state, x, *, key=None, train, ...) -> (logits, state)``.
      decode: incremental decoding of a language model, or None.
      losses: the fused loss of a language model, as for `fnet.models.LanguageModel`, or None.
      tensors: where each tensor of the checkpoint goes.
      kinds: kind of each block of a language model. Equal kinds are equal layers.
      features: what the head reads, as for `fnet.models.LanguageModel`, or None.
      family: its ``model_type``.
    """

    init: Callable[[Array], tuple[Params, State]]
    apply: Callable[..., tuple[Array, State]]
    decode: Decode | None
    losses: Callable[..., tuple[Array, State]] | None
    tensors: tuple[Tensor, ...]
    kinds: tuple[Any, ...] = ()
    features: Callable[..., tuple[Array, State]] | None = None
    family: str = ""


def leaves(tree: Params) -> dict[str, Any]:
    """Return the leaves of nested dicts by path, joined by ``/``."""
    paths = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(p, simple=True, separator="/"): a for p, a in paths}


def name_tensors(shapes: Params, names: Names, root: str) -> tuple[Tensor, ...]:
    """Name each parameter of a network as the checkpoint does. A tied head may be there, too.

    ``root`` replaces ``ROOT`` in names. A parameter without a name is a KeyError.
    """
    tensors = [t for path, a in leaves(shapes).items() for t in _named(path, a.shape, names)]
    if "head" in names and "embedding" in shapes and "head" not in shapes:
        (table,) = (t for t in tensors if t.path == "embedding/embedding")
        tensors.append(table._replace(name=f"{names['head']}.weight", optional=True))
    return tuple(t._replace(name=t.name.replace("ROOT", root)) for t in tensors)


def _named(path: str, shape: tuple[int, ...], names: Names) -> list[Tensor]:
    numbers = re.findall(r"\d+", path)
    pattern = re.sub(r"\d+", "*", path)
    given = names.get(pattern)
    is_layer = given is None
    if given is None:
        given = names[pattern.rpartition("/")[0]]
    name, layout, *further = (given, "") if isinstance(given, str) else given

    def numbered(numbers: Sequence[str]) -> str:
        left = iter(numbers)
        return re.sub(r"\*", lambda _: next(left), name)

    def tensor(numbers: Sequence[str], own_shape: tuple[int, ...]) -> Tensor:
        if not is_layer:
            return Tensor(numbered(numbers), path, shape, layout, *further)
        named = layer_tensor(numbered(numbers), path, own_shape)._replace(shape=shape)
        fits = len(layout.replace("1", "")) == len(own_shape)
        named = named._replace(layout=layout) if layout and fits else named
        _, grouped, *_ = (*further, None, None)
        return named._replace(grouped=grouped)

    if name.count("*") == len(numbers):
        return [tensor(numbers, shape)]
    return [tensor([*numbers, str(row)], shape[1:])._replace(row=row) for row in range(shape[0])]


def layer_tensor(layer: str, path: str, shape: tuple[int, ...]) -> Tensor:
    """Name a parameter of a layer as torch does: ``weight`` or ``bias``, with its layout."""
    last = path.rpartition("/")[2]
    layout = KERNELS.get(len(shape), "") if last == "kernel" else ""
    return Tensor(f"{layer}.{SUFFIXES[last]}", path, tuple(shape), layout)


def match_names(
    tensors: tuple[Tensor, ...],
    names: Sequence[str],
    prefix: str | None,
    others: re.Pattern[str] | None = None,
) -> tuple[Tensor, ...]:
    """Rename a model's tensors as the checkpoint does; ValueError for missing or unknown ones.

    Checkpoints of a network without its head lack the ``prefix`` that the others have, such as
    ``"model."``. ``others`` are tensors of another model in the same checkpoint.
    """
    found = set(names)
    if prefix and not any(name.startswith(prefix) for name in names):
        tensors = tuple(t._replace(name=t.name.removeprefix(prefix)) for t in tensors)
    missing = [t.name for t in tensors if t.name not in found and not t.optional]
    if missing:
        raise ValueError(f"the checkpoint lacks {_listed(missing)}")
    unknown = sorted(found - {t.name for t in tensors})
    unknown = [n for n in unknown if not _BUFFERS.search(n) and not (others and others.search(n))]
    if unknown:
        raise ValueError(
            f"the checkpoint has tensors that the model does not: {_listed(unknown)}; "
            "does config.json belong to this checkpoint?"
        )
    return tuple(t for t in tensors if t.name in found)


def file_shapes(model: PretrainedModel, tensors: Mapping[str, Any]) -> Params:
    """Return the shapes of the parameters with the dtypes of the file.

    Raises ValueError for a tensor of another shape than its parameter, and TypeError for one that
    is not floating.
    """
    shapes: Params = {}
    for t in model.tensors:
        tensor = tensors[t.name]
        if tuple(tensor.shape) != t.file_shape:
            raise ValueError(
                f"{t.name}: expected shape {t.file_shape} by config.json, got {tuple(tensor.shape)}"
            )
        if not jnp.issubdtype(np.dtype(tensor.dtype), jnp.floating):
            raise TypeError(f"{t.name}: expected a floating dtype, got {tensor.dtype}")
        set_leaf(shapes, t.path, jax.ShapeDtypeStruct(t.shape, np.dtype(tensor.dtype)))
    return shapes


def read_params(
    model: PretrainedModel,
    tensors: Mapping[str, Any],
    sharding: Callable[[str, tuple[int, ...]], Sharding] | None,
    convert: Callable[[str, Array], Any] | None,
) -> Params:
    """Read the parameters one at a time, for the arguments of `from_huggingface`.

    Each tensor is read by ``tensor[slices]``, which returns a NumPy array. It is a ValueError if
    two tensors hold the same parameter with different values.
    """
    params: Params = {}
    parts_of: dict[str, list[Tensor]] = {}
    for t in model.tensors:
        if not t.optional:
            parts_of.setdefault(t.path, []).append(t)
    for t in model.tensors:
        everything = (slice(None),) * len(t.shape)
        first, *rows = parts_of[t.path]
        if t.optional:
            read, other = (_reader(a, tensors[a.name]) for a in (t, first))
            if not np.array_equal(read(everything), other(everything)):
                raise ValueError(
                    f"{t.name} differs from {first.name}, but config.json ties them "
                    "(tie_word_embeddings); set it to false"
                )
            continue
        if t is not first:
            continue  # read with the first row
        read = _reader(t, tensors[t.name]) if t.row is None else _rows_reader([t, *rows], tensors)
        if sharding is None:
            # JAX's own memory, which can be donated. `jnp.array` would copy twice.
            value = jax.device_put(read(everything), may_alias=False)
        else:
            value = jax.make_array_from_callback(t.shape, sharding(t.path, t.shape), read)
        value = value if convert is None else convert(t.path, value)
        # One tensor at a time in host memory.
        set_leaf(params, t.path, jax.block_until_ready(value))
    return params


def _reader(t: Tensor, tensor: Any) -> Callable[[tuple[slice, ...] | None], np.ndarray]:

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


def _rows_reader(
    rows: Sequence[Tensor], tensors: Mapping[str, Any]
) -> Callable[[tuple[slice, ...] | None], np.ndarray]:
    """Return a function that reads a part of a parameter whose rows are tensors of their own."""

    def read(index: tuple[slice, ...] | None) -> np.ndarray:
        assert index is not None
        chosen = rows[index[0]]
        for i, t in enumerate(chosen):
            part = _reader(t, tensors[t.name])(index[1:])
            if not i:  # One array for all of them, so that no row is in memory twice.
                array = np.empty((len(chosen), *part.shape), part.dtype)
            array[i] = part
        return array

    return read


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
