"""All programs of a run, compiled before its first step, so that their memory is known."""

from collections.abc import Callable
from typing import Any, NamedTuple

from jax import Array
from rich.console import Console

from fnet import TrainState, memory
from train.data.unreadable import UnreadableFiles
from train.errors import UserError
from train.output.memory_tables import describe_candidate
from train.output.progress import compiling, line_printer
from train.run.checkpoints import compile_checksums, without_frozen
from train.run.evaluation import Evaluator
from train.run.initial_weights import InitialWeights
from train.run.metrics import best_metric, score_of
from train.run.planning import Planned, StepCache, compile_step, memory_report, overhead
from train.run.setup import Setup


class Programs(NamedTuple):
    """Compiled programs of a run.

    Attributes:
      planned: Train step with its report.
      take_step: Function ``(state, batch) -> (state, metrics)``.
      evaluate: Function ``state -> Evaluation``.
      init: Function ``key -> TrainState``.
      learning_rate: Function ``number of updates -> learning rate``.
      report: Contents of memory.json.
      predicted_bytes: Predicted peak memory of the run, per device.
    """

    planned: Planned
    take_step: StepCache
    evaluate: Evaluator
    init: Callable[[Array], TrainState]
    learning_rate: Callable[[int], float]
    report: dict[str, Any]
    predicted_bytes: int


def compile_programs(
    run: Setup, weights: InitialWeights | None, unreadable: UnreadableFiles, console: Console
) -> Programs:
    """Compile the programs of a run, which begins with pretrained weights if they are given.

    Raises:
      UserError: for a metric that the evaluation has not or that is undefined, a budget that
        nothing fits, or a policy that this device does not support.
      DonationError: if the step would not update the state in place.
    """
    with compiling(console) as show:
        # A wrong name costs a trace, not a compilation.
        metric = best_metric(run.config)
        if score_of(run.evaluation(unreadable, run.devices).trial(), metric) is None:
            raise UserError(
                f"checkpoint.metric: {metric} is undefined on these test examples, whose labels do "
                "not differ; give another metric, or other splits"
            )
        planned = compile_step(run, progress=lambda *c: show(describe_candidate(*c)))
        # With several crops per image, fewer images make a batch of the size of a microbatch.
        images = run.config.data.batch_size // planned.microbatches // run.config.data.crops
        evaluate = run.evaluation(unreadable, images)
        compile_checksums(without_frozen(run.state_shapes))
        state_bytes = memory.tree_bytes(run.state_shapes) // run.devices
        step_bytes = planned.executable.report.peak.total
        return Programs(
            planned,
            StepCache(planned, line_printer(console)),
            evaluate,
            run.compile_init(weights.variables if weights else None),
            run.compile_schedule(),
            memory_report(planned),
            overhead(run).peak(state_bytes, step_bytes, evaluate.peak),
        )
