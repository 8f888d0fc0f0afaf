"""The ways to fine-tune a published model in a budget, from headers alone."""

import dataclasses
import json
import re
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from fnet import memory
from fnet.hlo import unwrap
from fnet.layer import Params
from fnet.memory import format_bytes, roofline, tree_bytes
from fnet.memory.remat import policies_for
from fnet.memory.target import Target, platform_of
from train import arguments
from train.arguments import TrainArguments
from train.config import Config, recipes
from train.data.model_folder import DTYPES, SINGLE, ModelFolder, check_tokenizer, read_folder
from train.data.text import Text
from train.errors import UserError, writing
from train.networks.pretrained import Pretrained
from train.networks.published import network as published
from train.output.tables import Table
from train.run import planning
from train.run.mesh import layout
from train.run.run_folder import quote
from train.run.setup import Setup, setup

WAYS: dict[str, tuple[str, tuple[str, ...]]] = {
    "full": ("finetune_full", ("--optim.name", "adamw", "--train.params-dtype", "float32")),
    "compact": ("finetune_full", ()),
    "lora": ("finetune_lora", ()),
    "lora_int8": ("finetune_lora", ("--model.quantize", "int8")),
    "lora_nf4": ("finetune_lora", ("--model.quantize", "nf4")),
}
"""Recipe and flags of each way to train."""

_POLICIES = ("none", "segments", "nested", "offload")
"""Remat policies that are tried where they work, the fastest first."""
_GRADIENT, _BFLOAT16 = 4, 2
"""Bytes of a number in a gradient, and in the input of a block."""
_CONTEXT = 2048
_SHORTEST = 16
"""Contexts are multiples of this, and no shorter one is tried."""


class Shape(NamedTuple):
    """How a step computes its gradient: with which remat policy, and of how many tokens per row."""

    policy: str
    microbatches: int
    context: int

    def __str__(self) -> str:
        return f"context {self.context:,}, {self.policy}, {self.microbatches} microbatches"


class Cost(NamedTuple):
    """Peak of a train step in bytes, and its estimated time; None without rates of the device."""

    peak: float
    seconds: float | None


class Row(NamedTuple):
    """One way to train.

    Attributes:
      state_bytes: Bytes of the train state, frozen parameters included.
      trained: Number of trained parameters.
      trained_bytes: Bytes of trained parameters and of their optimizer state.
      shape: The fastest shape that fits, or the smallest; None if not known, or too large a state.
      longest: Longest context that fits with the most remat; 0 if none does, None if not known yet.
      flags: Flags of ``fnet train``, after the recipe.
    """

    way: str
    state_bytes: int
    trained: int
    trained_bytes: int
    shape: Shape | None = None
    cost: Cost | None = None
    longest: int | None = None
    flags: tuple[str, ...] = ()


class Model(NamedTuple):
    """A published model, as far as its headers describe it.

    Attributes:
      blocks: Number of blocks.
      period: Blocks repeat after so many: sliding windows alternate with full attention.
      positions: Longest context; None for any.
      width: Features of the input of a block.
    """

    folder: ModelFolder
    blocks: int
    period: int
    positions: int | None
    width: int = 0

    def depths(self, exact: bool) -> tuple[int, ...]:
        """Numbers of blocks to compile: all of them, or two numbers to extrapolate from."""
        # The first segment is like no other.
        few = (2 * self.period, 3 * self.period)
        return (self.blocks,) if exact or self.blocks <= few[1] else few


def read_model(path: Path) -> Model:
    """Read config.json and the headers of a model's folder."""
    folder = read_folder(path)
    network, shapes = published.match(folder, "bfloat16")
    if network.losses is None:
        raise UserError(
            f"model.path: {path} is not a language model; for images, give fnet memory "
            f"vit_finetune --model.path {quote(path)} --data.path IMAGES --budget MEMORY"
        )
    positions = folder.config.get("max_position_embeddings", folder.config.get("n_positions"))
    if not (isinstance(positions, int) and positions >= 2):
        positions = None
    width, kinds = shapes["embedding"]["embedding"].shape[1], network.kinds
    return Model(folder, len(kinds), period_of(kinds), positions, width)


def period_of(kinds: Sequence[Hashable]) -> int:
    """Return after how many blocks they repeat."""
    return next(
        p for p in range(1, len(kinds) + 1) if all(k == kinds[i % p] for i, k in enumerate(kinds))
    )


_BLOCK = re.compile(r"(?:^|\.)(?:layers|h)\.(\d+)\.")


def write_shallow(model: Model, depth: int, into: Path) -> None:
    """Write the first blocks of a model to a folder: a config, and a file of headers and holes."""
    config = dict(model.folder.config)
    for name, value in config.items():
        if name in ("num_hidden_layers", "n_layer"):
            config[name] = depth
        elif isinstance(value, list) and len(value) == model.blocks:
            config[name] = value[:depth]
    names = {np.dtype(dtype): name for name, dtype in DTYPES.items()}
    header, end = {}, 0
    for name, tensor in model.folder.tensors.items():
        block = _BLOCK.search(name)
        if block and int(block[1]) >= depth:
            continue
        offsets = [end, end := end + tensor.nbytes]
        fields = {"dtype": names[tensor.dtype], "shape": tensor.shape}
        header[name] = fields | {"data_offsets": offsets}
    text = json.dumps(header).encode()
    with writing(into, "set TMPDIR"):
        into.mkdir()
        (into / "config.json").write_text(json.dumps(config))
        with (into / SINGLE).open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.truncate(8 + len(text) + end)  # takes no space


def limit_of(budget: str | None, target: Target | None) -> int:
    """Return the bytes of a budget, or else of a device."""
    if budget is None:
        if target is None:
            raise UserError("fnet fit: needs --budget, such as --budget 24GB, or --target")
        return target.usable
    try:
        return memory.parse_bytes(budget)
    except ValueError as error:
        raise UserError(f"--budget: {error}") from error


def context_of(context: int | None, model: Model) -> int:
    """Return a context length that the model allows."""
    if context is None:
        return min(_CONTEXT, model.positions or _CONTEXT)
    if model.positions is not None and context > model.positions:
        raise UserError(
            f"--context: {context:,}, but the model has {model.positions:,} positions "
            "(max_position_embeddings)"
        )
    return context


@dataclasses.dataclass(frozen=True)
class Planner:
    """Find the fastest shape of each way that fits a limit of bytes.

    Models of fewer blocks, the depths, are written to the folder ``shallow`` and compiled. Each
    program is a line of the log.
    """

    model: Model
    limit: int
    rank: int
    target: Target | None
    depths: tuple[int, ...]
    shallow: Path
    log: Callable[[str], None]
    status: Callable[[str], None]

    @property
    def is_estimate(self) -> bool:
        """Whether not all blocks are compiled."""
        return self.depths != (self.model.blocks,)

    @property
    def policies(self) -> list[str]:
        """Remat policies to try, the fastest first."""
        return [p for p in _POLICIES if p in policies_for(platform_of(self.target))]

    def fits(self, row: Row) -> bool:
        """Whether a shape of the way is known to fit."""
        return row.cost is not None and row.cost.peak <= self.limit

    def search(
        self, ways: Sequence[str], context: int, batch_size: int, *, all_ways: bool = True
    ) -> Iterator[dict[str, Row]]:
        """Yield the rows by way each time that more is known: states, shapes, longest contexts.

        Unless ``all_ways``, those are left out that cannot be better: another way trains the same
        parameters and fits without remat, and they only save more memory.
        """
        rows = {way: self.state(way, context, batch_size) for way in ways}
        yield rows
        for way, row in [*rows.items()]:
            others = [r for r in rows.values() if WAYS[r.way][0] == WAYS[way][0] and self.fits(r)]
            if not all_ways and "none" in [r.shape.policy for r in others if r.shape]:
                del rows[way]
            elif row.state_bytes <= self.limit:
                rows[way] = self.with_shape(row, context, batch_size)
            yield rows
        for way, row in rows.items():
            if row.shape:
                rows[way] = row._replace(longest=self.longest(row, batch_size))
                yield rows

    def state(self, way: str, context: int, batch_size: int) -> Row:
        """Return what is known of a way without compiling it."""
        shape = Shape(self.policies[0], batch_size, context)
        state = self.setup(way, shape, batch_size).state_shapes
        trained_bytes = tree_bytes((state.params, state.opt_state))
        return Row(way, tree_bytes(state), _size(state.params), trained_bytes)

    def with_shape(self, row: Row, context: int, batch_size: int) -> Row:
        """Search the shapes of a way, the fastest first."""
        shapes = [Shape(policy, batch_size, context) for policy in self.policies]
        if batch_size > 1 and WAYS[row.way][0] == "finetune_full":
            shapes.append(shapes[-1]._replace(microbatches=1))  # without a sum of large gradients
        costs: dict[Shape, Cost] = {}
        for shape in shapes:
            costs[shape] = self.cost(row, shape, batch_size)
            if costs[shape].peak <= self.limit:
                self.log(f"{row.way}: fits with {shape}")
                break
        chosen = min(costs, key=lambda s: (costs[s].peak > self.limit, costs[s].peak))
        flags = self.flags(row.way, self.model.folder.path, chosen, batch_size)
        return row._replace(shape=chosen, cost=costs[chosen], flags=flags)

    def setup(self, way: str, shape: Shape, batch_size: int, depth: int | None = None) -> Setup:
        """Set up a run of a way, with a vocabulary in place of its data."""
        path = self.model.folder.path
        if depth not in (None, self.model.blocks):
            path = self.shallow / str(depth)
            if not path.exists():
                write_shallow(self.model, depth, path)
        return setup(config_of(way, self.flags(way, path, shape, batch_size)), without_data=True)

    def flags(self, way: str, path: Path, shape: Shape, batch_size: int) -> tuple[str, ...]:
        """Return the flags of ``fnet train``, after the recipe."""
        recipe, flags = WAYS[way]
        rank = ("--model.lora-rank", str(self.rank)) if recipe == "finetune_lora" else ()
        return (
            *("--model.path", quote(path), "--data.path", "data.jsonl", *flags, *rank),
            *("--data.context", str(shape.context), "--data.batch-size", str(batch_size)),
            *("--grad.microbatches", str(shape.microbatches), "--memory.policy", shape.policy),
            *("--out", f"runs/{way}"),
        )

    def cost(self, row: Row, shape: Shape, batch_size: int) -> Cost:
        """Compile a step, and extrapolate to the model's number of blocks: linearly in two depths.

        With nested remat, the peak of one or two blocks may be where no input of a block is alive.
        So these are added to one depth, and no time is estimated, because groups run again. With
        offload they are in the memory of the host, so the larger depth has the peak of all blocks.
        """
        way, peaks, times = row.way, list[float](), list[float]()
        # One candidate of the backend instead of all.
        options = dict(memory.CANDIDATE_OPTIONS.get(jax.default_backend(), ({},))[-1])
        if self.target:
            options = self.target.compiler_options
        depths, blocks, is_linear = self.depths, self.model.blocks, True
        if self.is_estimate and shape.policy in ("nested", "offload"):
            depths, is_linear = depths[:1] if shape.policy == "nested" else depths[-1:], False
        for depth in depths:
            programs = f"{depth} of {blocks} blocks, {shape}"
            self.status(f"{way}: compiling {programs}")
            start = time.perf_counter()
            run = self.setup(way, shape, batch_size, depth)
            run = run.on(layout(run.config, self.target.devices if self.target else None))
            planned = planning.analyze(run, shape.policy, self.target, compiler_options=options)
            if self.target and self.target.peaks and is_linear:
                times.append(roofline.estimate(planned.executable, self.target.peaks).seconds)
            rest = planned.executable.report.peak.total - tree_bytes(run.state_shapes)
            peaks.append(rest)
            stats: Any = unwrap(planned.executable).memory_analysis()
            host = f"{format_bytes(stats.host_temp_size_in_bytes)} on the host, "
            self.log(
                f"{way}: {programs}: {format_bytes(rest)} in addition to the state "
                f"({host * (shape.policy == 'offload')}{time.perf_counter() - start:.0f} s)"
            )
        temporaries = _extrapolate(depths, peaks, blocks)
        if not is_linear:
            if shape.policy == "nested":
                inputs = held_inputs(blocks) - held_inputs(depths[0])
                inputs += 2  # the gradient of one, in float32
                tokens = shape.context * batch_size // shape.microbatches
                temporaries += _BFLOAT16 * self.model.width * tokens * inputs
            temporaries += _GRADIENT * (row.trained - _size(run.state_shapes.params))
        seconds = _extrapolate(depths, times, blocks) if times else None
        return Cost(row.state_bytes + temporaries, seconds)

    def longest(self, row: Row, batch_size: int) -> int:
        """Estimate the longest context that fits, from a line through two contexts.

        0 is none. If all positions of the model fit, they need no line.
        """
        assert row.shape is not None  # and its cost is known
        shape = row.shape._replace(policy=self.policies[-1])
        fits, context, most = self.fits(row), shape.context, self.model.positions or 2**31
        other = min(4 * context, most) if fits else context // 2
        if other == context or other < _SHORTEST:
            return context * fits
        second = self.cost(row, shape._replace(context=other), batch_size)
        if other == most and second.peak <= self.limit:
            return most
        cost = (shape == row.shape and row.cost) or self.cost(row, shape, batch_size)
        slope = (second.peak - cost.peak) / (other - context)
        if slope <= 0:  # too short to matter
            return most * fits
        length = int((context + (self.limit - cost.peak) / slope) // _SHORTEST * _SHORTEST)
        return min(max(length, 0), most)

    def table(self, rows: Sequence[Row]) -> Table:
        """Return the ways to train, one a row."""
        about, timed = "~" * self.is_estimate, bool(self.target)
        fits = [self.fits(row) for row in rows]
        cells = []
        for row, is_small in zip(rows, fits, strict=True):
            shape, longest, seconds = "", "", ""
            peak = "too large" if row.state_bytes > self.limit else ""
            if row.shape and row.cost:
                shape = f"{row.shape.policy} / {row.shape.microbatches}"
                peak = f"{about}{format_bytes(int(row.cost.peak))}" + "\ntoo large" * (not is_small)
                longest = f"~{row.longest:,}" if row.longest else "none" * (row.longest == 0)
                seconds = "" if row.cost.seconds is None else f"{about}{row.cost.seconds:.3g}"
            each = f"{row.trained_bytes / row.trained:.1f}"
            sizes = format_bytes(row.state_bytes), peak, longest, _millions(row.trained), each
            cells.append((row.way, shape, *sizes, *[seconds] * timed))
        columns = "state", "peak", "longest\ncontext", "trained", "bytes /\ntrained"
        positions = self.model.positions
        most = f", at most the {positions:,} positions of the model" if positions else ""
        on = f" on {self.target.name}" if self.target else ""
        return Table(
            f"Ways to train within {format_bytes(self.limit)}{on}",
            ("way", "remat / micro-\nbatches", *columns, *["s / step"] * timed),
            cells,
            texts=2,
            caption=(
                "bytes / trained: trained parameters and optimizer state. Longest context: with "
                f"remat {self.policies[-1]}, by a line through two contexts{most}."
            ),
            styles=["" if is_small else "dim" for is_small in fits],
            is_wide=True,
        )

    def notes(self, rows: Sequence[Row]) -> Iterator[str]:
        """Say what training needs besides, and how exact the figures are."""
        target = self.target
        try:
            check_tokenizer(self.model.folder.path)
        except UserError as error:
            yield f"For training, {str(error).removeprefix('model.path: ')}."
        if self.is_estimate and any(row.cost for row in rows):
            few = " and ".join(map(str, self.depths))
            yield (
                f"~ estimated: extrapolated from {few} blocks to {self.model.blocks}. State bytes "
                "are exact. Peaks of full and compact can be too low. Compile all blocks with "
                "--exact."
            )
        if target is None and jax.default_backend() == "cpu":
            yield (
                "Peaks are of this CPU's compiler, which casts bfloat16 weights to float32. A GPU "
                "takes less: give --target."
            )
        if target and target.device.platform == "gpu":
            yield (
                "The time is a lower bound, at the rates of the data sheet. Workspaces that cuDNN "
                "chooses are not included."
            )
            if self.limit > target.usable:
                share = min(self.limit / target.memory, 1.0)
                yield (
                    f"JAX takes three quarters of a GPU's memory, {format_bytes(target.usable)}, "
                    f"unless you set XLA_PYTHON_CLIENT_MEM_FRACTION={share:.2f}."
                )


def _size(params: Params) -> int:
    return sum(a.size for a in jax.tree.leaves(params))


def held_inputs(blocks: int) -> int:
    """Return how many inputs of blocks nested remat holds at once, of equal blocks."""
    return min(-(-blocks // size) + size - 1 for size in range(1, blocks + 1))


def _extrapolate(depths: Sequence[int], values: list[float], depth: int) -> float:
    if len(values) == 1:
        return values[0]
    slope = (values[1] - values[0]) / (depths[1] - depths[0])
    return values[0] + slope * (depth - depths[0])


def config_of(way: str, flags: tuple[str, ...]) -> Config:
    """Return the config that a command trains, with a vocabulary in place of its data."""
    recipe, _ = WAYS[way]
    _, config = arguments.read_with_config(
        TrainArguments, recipes.load(recipe), flags, f"fnet train {recipe}"
    )
    model, text = config.model, config.data
    assert isinstance(model, Pretrained)  # because all ways fine-tune a published model
    assert isinstance(text, Text)
    vocabulary = int(read_folder(Path(model.path)).config["vocab_size"])
    return config.replace(data=text.replace(vocabulary=vocabulary))


def _millions(count: int) -> str:
    if count < 1e6:
        return f"{count:,}"
    return f"{count / 1e6:,.4g} M" if count < 1e9 else f"{count / 1e6:,.0f} M"
