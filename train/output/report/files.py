"""What a report reads of the JSON in a run's folder, with the types that it is checked for."""

from dataclasses import dataclass, field
from typing import Annotated

from annotated_types import Ge, Lt
from pydantic import FiniteFloat

Amount = Annotated[int, Ge(0), Lt(2**63)]


@dataclass(frozen=True)
class Summary:
    """What a report reads of summary.json."""

    steps: Amount
    seconds: FiniteFloat
    metrics: dict[str, float] = field(default_factory=dict)
    noise_scale: float | None = None
    parameters: Amount | None = None
    budget_bytes: Amount | None = None
    peak_bytes_predicted: Amount | None = None
    peak_bytes_seen: Amount | None = None
    versions: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Peak:
    """Bytes of a compiled step, see `fnet.memory.Peak`."""

    arguments: Amount
    outputs: Amount
    aliased: Amount
    temporaries: Amount
    total: Amount
    workspace: Amount = 0


@dataclass(frozen=True)
class Kept:
    """Bytes that the backward pass keeps of a layer."""

    layer: str
    bytes: Amount
    arrays: Amount


@dataclass(frozen=True)
class Buffer:
    """An array that is alive at the peak."""

    bytes: Amount
    shape: tuple[Amount, ...]
    dtype: str
    kind: str
    layer: str
    phase: str
    instruction: str


@dataclass(frozen=True)
class Memory:
    """What a report reads of memory.json."""

    parameters: Amount
    state_bytes: Amount
    peak: Peak
    policy: str
    microbatches: Amount
    kept: tuple[Kept, ...]
    largest_at_peak: tuple[Buffer, ...] = ()
    live_bytes: tuple[Amount, ...] | None = None


@dataclass(frozen=True)
class ClassScores:
    """A class in evaluation.json: examples and accuracy, or pixels and IoU."""

    name: str
    examples: Amount | None = None
    accuracy: float | None = None
    pixels: Amount | None = None
    iou: float | None = None


@dataclass(frozen=True)
class Evaluated:
    """What a report reads of evaluation.json, which `fnet eval` writes."""

    step: Amount
    metrics: dict[str, float] = field(default_factory=dict)
    classes: tuple[ClassScores, ...] = ()


@dataclass(frozen=True)
class BadStep:
    """A line of bad_steps.jsonl: a step that was left out."""

    step: Amount
    loss: str
    grad_norm: str
    origin: str
    examples: tuple[str, ...] = ()
