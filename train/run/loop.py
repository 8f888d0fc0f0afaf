"""The training loop, from a config to a trained network."""

import contextlib
import dataclasses
import json
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console

import fnet
from fnet.cpu.heap import occupy_gaps
from fnet.memory import format_bytes
from train import output
from train.config import Config
from train.data import num_examples
from train.data.unreadable import UnreadableFiles
from train.errors import TrainingError, UserError
from train.output.logged import BadStep, read_log, read_metrics
from train.output.memory_tables import PHASES, StepMemory
from train.output.progress import Progress, line_printer
from train.output.rows import as_csv
from train.run import distributed, examples, results, tracking, weight_files
from train.run import seeds as run_seeds
from train.run.attribution import TrainingRows, columns_of, write_losses
from train.run.checkpoints import Checkpoints, Restored, load_network, without_frozen
from train.run.evaluation import Evaluation
from train.run.examples import describe_undefined
from train.run.input_wait import InputWait
from train.run.interruption import Interrupted, Interruption
from train.run.mesh import layout
from train.run.metrics import Meter, best_metric, score_of
from train.run.open_run import begin, check_classes, write_classes
from train.run.planning import Programs, check_memory_config, compile_programs, overhead
from train.run.process_memory import HighWater
from train.run.profiling import Profile
from train.run.run_folder import RunFolder, atomic_write
from train.run.same_data import check_data, check_saved, describe_data, stamp_of, write_data
from train.run.seeds import Seeds
from train.run.setup import Setup, check_resumed_length, setup
from train.run.skipped_steps import SkippedSteps


def train(
    config: Config,
    out: Path,
    *,
    resume: bool,
    console: Console,
    profile: int = 0,
    command: str = "",
    run_id: str | None = None,
) -> bool:
    """Train what a config describes and write everything about the run to a folder.

    With ``resume``, the run in the folder goes on, if there is one. The result equals an
    uninterrupted run's bit for bit. ``profile`` steps are traced. ``command`` are the words of
    ``fnet train`` that continue it, by default those of this run. A new run has the id ``run_id``.

    Returns:
      Whether the run has ended, and was not interrupted.

    Raises:
      UserError: for a mistake in config or folder, before anything is written, or for too many
        unreadable files.
      TrainingError: if loss or gradient is not finite, or a checkpoint cannot be written.
      DonationError: if the step would not update the state in place.
    """
    start_time = time.perf_counter()
    log = line_printer(console)
    run = setup(config)
    run = run.on(layout(config))
    dataset, size = run.task.dataset, config.data.batch_size
    if not run.privacy and size > num_examples(dataset.train) * config.data.repeats:
        raise UserError(
            f"data.batch_size: {size:,} is more than the {num_examples(dataset.train):,} training "
            f"{dataset.rows}; give a smaller one"
        )
    check_memory_config(run)
    tracking.check(config)

    resumes = resume and RunFolder(out).has_started
    is_saved = resumes and RunFolder(out).saved_steps
    weights = None if is_saved else weight_files.load_configured(run)
    data = describe_data(run.task.dataset, config.data, private=config.is_private)
    distributed.wait_for_all("data")
    distributed.check_same_data(data)

    def prepare(folder: RunFolder) -> None:
        if resumes:
            _reopen_folder(folder, run, data, log)
            return
        if resume and not folder.config.is_file():
            log(f"no run in {folder.path} yet: starting a new one")
        imported = None if weights is None else weights.as_dict()
        begin(folder, config, data, imported, run_id=run_id)

    with distributed.run_folder(out, prepare) as folder, contextlib.ExitStack() as stack:
        for note in run.notes:
            log(note)
        if weights is not None:
            console.print(weights.lines())
        log(f"training {config.name} in {folder.path}")
        write_classes(folder, run.task.dataset.outputs)
        seeds = run_seeds.read_seeds(folder, config)
        union = distributed.union if distributed.has_other_processes() else None
        if config.is_release_only:  # The names of training files are not covered by a guarantee.
            unreadable = UnreadableFiles(dataset, lambda line: None, union)
        else:
            unreadable = UnreadableFiles(
                dataset, log, union, lambda rows: atomic_write(folder.unreadable, as_csv(rows))
            )
        unreadable.look()
        run.task.before_batches(None if config.is_release_only else folder.reference)
        programs = compile_programs(run, weights, unreadable, console)
        last = max(folder.saved_steps, default=0)  # later lines are dropped
        earlier = [x for x in read_metrics(folder.metrics) if x["step"] <= last] if resume else []
        results.print_facts(console, results.before_training(programs, earlier))
        if run.privacy:
            log(f"privacy: {run.privacy.describe(run.steps)}")
            log(run_seeds.describe_seeds(folder, config))
        occupy_gaps()
        high_water = HighWater(run.devices // jax.process_count())
        distributed.wait_for_all("compiled")

        with Checkpoints(
            folder.checkpoints,
            config.checkpoint.keep,
            log,
            shapes=without_frozen(run.state_shapes),
            keep_best=config.checkpoint.best,
        ) as checkpoints:
            start = _first_state(run, folder, checkpoints, programs, resume=resume)
            if start.step:
                log(f"resumed after step {start.step} of {run.steps}")
                if start.step == run.steps:
                    length = "steps" if config.train.steps else "epochs"
                    log(f"all steps are done; to train longer, raise train.{length}")
            for changed in folder.drop_metrics_after(start.step, start.logged):
                log(changed)
            start_time -= folder.seconds_spent()
            loop = _Loop(
                run, folder, programs, seeds, unreadable, checkpoints, start, start_time, log, data,
                high_water,
            )  # fmt: skip
            tracker = stack.enter_context(tracking.tracking(config, folder, start.step))
            with loop.interruption:  # also while the last checkpoint is written
                loop.take_steps(console, profile, tracker)
                checkpoints.wait()
                loop.mark_saved()
        measured_bytes = high_water.bytes()  # before the plots, which are not training

        num_params = programs.planned.executable.report.parameters
        title = f"{config.name}: {num_params:,} parameters, {loop.step} steps"
        output.plots.curves(read_metrics(folder.metrics), title, folder.curves)
        if loop.ended_early and not loop.failure:
            log(
                f"the run ends early: {best_metric(config) or 'the score'} got no better in "
                f"{loop.since_best} evaluations; to train longer, raise train.patience and --resume"
            )
            loop.run = run._replace(steps=loop.step)
        if loop.step < loop.run.steps or loop.failure:
            loop.report_stop(command or folder.as_config)
            return False
        loop.finish(measured_bytes)
        for picture in (folder.confusion, folder.examples):
            tracker.draw(loop.step, picture)
        return True


def tested(line: Mapping[str, Any]) -> dict[str, float]:
    """Return the test metrics of a line of metrics.jsonl, by their names in an evaluation."""
    values = {k.removeprefix("test/"): v for k, v in line.items() if k.startswith("test/")}
    return {name: math.nan if value is None else value for name, value in values.items()}


def _reopen_folder(
    folder: RunFolder, run: Setup, data: dict[str, Any], log: Callable[[str], None]
) -> None:
    begins_again = check_saved(folder)
    logged = max((line["step"] for line in folder.read_log(folder.metrics).lines), default=0)
    before = folder.read_config()
    check_resumed_length(run, before, logged - max(folder.saved_steps, default=0))
    check_classes(folder, run.task.dataset.outputs)
    run_seeds.check_secret(folder, before)
    changed = check_data(folder, run.config, data)
    folder.resume(run.config, run.steps)
    for line in filter(None, (begins_again, *changed)):
        log(line)
    needs_secret = run_seeds.needs_secret
    if needs_secret(run.config) and not needs_secret(before):  # imported, not trained yet
        run_seeds.create_secret(folder, run.config)
    write_data(folder, run.config, data, begins=True)


def _first_state(
    run: Setup, folder: RunFolder, checkpoints: Checkpoints, programs: Programs, *, resume: bool
) -> Restored:
    """Return the last checkpoint, or initial values before the beginning of the data."""
    init = programs.init
    if resume and checkpoints.latest_step == 0:
        # An imported network: the rest follows from the config, which may have changed.
        network = load_network(folder, run.task.model)
        init = run.compile_init((network.evaluation_params, network.model_state))
    elif resume and (restored := checkpoints.restore(run.state_shapes, run.task.model)):
        return restored
    return Restored(0, init(jax.random.key(run.config.train.seed)), None)


@dataclasses.dataclass
class _Loop:
    """Steps of a run, with metrics, evaluations and checkpoints.

    ``failure`` is the error or signal that ended the loop before its last step. ``interruption``
    records a signal while it is entered, which `run` and the last save need.
    """

    run: Setup
    folder: RunFolder
    programs: Programs
    seeds: Seeds
    unreadable: UnreadableFiles
    checkpoints: Checkpoints
    start: Restored
    start_time: float
    log: Callable[[str], None]
    data: dict[str, Any]
    high_water: HighWater

    def __post_init__(self) -> None:
        run, config = self.run, self.run.config
        self._is_first = jax.process_index() == 0  # the others have no files
        self._stamp = stamp_of(self.folder, config, self.data) if self._is_first else None
        self.step, self.state = self.start.step, self.seeds.add_key(self.start.state)
        self.evaluation: Evaluation | None = None
        self.failure: BaseException | None = None
        self.wait = InputWait(self.log, config.data.workers)
        self._position: Any = self.start.position
        self._batches = self.unreadable.watch(run.training_batches(self.seeds.data))
        if self._position is not None:
            self._batches.set_state(self._position)
        self._best_score = self.checkpoints.best_score
        self._best_seen, self.since_best = -math.inf, 0
        for line in read_metrics(self.folder.metrics):
            if "test/loss" in line:
                self._judge(tested(line))
        self._skipped = SkippedSteps(run, self.folder.bad_steps, self.log)
        self._num_skipped = len(read_log(self.folder.bad_steps, BadStep).lines)
        self._eval_every = config.train.eval_every or max(round(run.steps_per_epoch), 1)
        private = {"private": config.is_private, "release_only": config.is_release_only}
        self._meter = Meter(config.data.batch_size, **private)
        self.interruption = Interruption()
        self._is_alone = not distributed.has_other_processes()

    def take_steps(self, console: Console, profile: int, tracker: tracking.Tracker) -> None:
        """Take steps until the last one, a signal or a failure, and trace ``profile`` of them."""
        run, folder, first = self.run, self.folder, self.step
        with (
            Progress(console, run.steps, first, shorten=run.what_shortens) as progress,
            self.wait,
            folder.metrics.open("a", buffering=1) as metrics_file,
            contextlib.closing(Profile(profile, folder.profile, first, self.log)) as profiler,
        ):

            def write(line: dict[str, Any]) -> None:
                if not metrics_file.tell():
                    stamp = self._stamp._asdict() if self._stamp else {}
                    metrics_file.write(json.dumps({"run": folder.id} | stamp) + "\n")
                metrics_file.write(json.dumps(line) + "\n")
                tracker.log(self.step, line)
                progress.log(line, self.high_water.bytes())

            batch = None if self.ended_early else self._next_batch()
            while batch is not None:
                self.step += 1
                with profiler.step(self.step, self.state):
                    self._skipped.check(self.state)
                    self.state, metrics = self.programs.take_step(self.state, batch)
                    self._skipped.add(self.step, batch, metrics)
                    self._meter.add(batch, metrics)
                    progress.advance(self.step)
                    self._position = self._batches.get_state()
                    batch = self._next_batch()  # while the device computes
                if self.step == first + 1:
                    self._describe_step(progress, tracker)
                if self._end_step(progress, write):
                    break

    def _describe_step(self, progress: Progress, tracker: tracking.Tracker) -> None:
        """Do what the first step did not wait for."""
        jax.block_until_ready(self.state)
        with self._meter.paused(), progress.doing("describing"), self.high_water.without():
            report, folder = self.programs.finish(), self.folder
            folder.write(folder.memory, report)
            stored, picture = StepMemory.model_validate(report), folder.memory_picture
            output.plots.memory(stored, f"{self.run.config.name}: memory of a train step", picture)
            self.log(f"memory of a step{PHASES.get(stored.peak_phase, '')}: {picture}")
            examples.draw_augmented(self.run, folder.augmented)
            tracker.draw(self.start.step, folder.augmented)

    @property
    def ended_early(self) -> bool:
        """Whether the run ends before its last step, because its score got no better."""
        patience = self.run.config.train.patience
        return patience is not None and self.since_best >= patience

    def _judge(self, metrics: Mapping[str, float]) -> float | None:
        """Return the score of an evaluation, and count how long it got no better."""
        score = score_of(metrics, best_metric(self.run.config))
        if score is not None and score > self._best_seen:
            self._best_seen, self.since_best = score, 0
        else:
            self.since_best += 1
        return score

    def finish(self, peak_bytes: int | None) -> None:
        """Write the summary and the pictures of the whole run, and print its results."""
        run, folder, programs, state = self.run, self.folder, self.programs, self.state
        if self._num_skipped:
            what = f"{self._num_skipped:,} of {self.step:,} steps were skipped"
            rows = f"their examples are in {folder.bad_steps}"
            if self._num_skipped >= self.step:
                raise TrainingError(f"{what}, so that nothing was trained; {rows}")
            self.log(f"{what}; {rows}")
        evaluation = self.evaluation or programs.evaluate(state)  # resumed after its last step
        written = [folder.summary, folder.curves, folder.memory_picture]
        title = f"{run.config.name}, step {run.steps}"
        written += examples.write(run, programs.evaluate, state, evaluation, title, folder).values()
        if isinstance(state.opt_state, fnet.attribution.InRunState):
            training_rows = TrainingRows(run)
            written += write_losses(folder, training_rows, columns_of(state.opt_state))
        audited = None
        if run.canaries:  # Pretrained weights have other initial values.
            is_known, seed = not folder.imported.exists(), self.seeds.data
            audited = results.audit(run, run.canaries, state.params, seed, initial_known=is_known)
        lines = read_metrics(folder.metrics)
        unreadable = None
        if not run.privacy:  # summary.json may be published
            counts = (line.get(results.unreadable_name(run)) or 0 for line in lines)
            unreadable = max([self.unreadable.count, *counts])
        summary = results.summary_of(run, lines, programs, evaluation) | {
            "audit": audited._asdict() if audited else None,
            "unreadable_files": unreadable,
            "ended_early": self.ended_early,
            "input_wait_reason": self.wait.reason,
            "peak_bytes_seen": peak_bytes,
            "seconds": time.perf_counter() - self.start_time,
            "logged": None if run.privacy else folder.logged,
        }
        if self.step == self.start.step:
            summary |= results.measured_before(folder, run.steps)
        folder.write(folder.summary, summary)
        for text in (*results.describe_results(run, summary), *describe_undefined(run, evaluation)):
            self.log(text)
        if run.privacy:
            self.log(f"privacy: {run.privacy.describe(run.steps)}")
            self.log(run_seeds.describe_seeds(folder, run.config))
        if audited:
            self.log(results.describe_audit(audited, run.privacy, run.steps))
        for text in results.what_next(run, folder, written):
            self.log(text)
        if not np.isfinite(loss := evaluation.metrics.get("loss", 0)):
            raise TrainingError(
                f"test loss is {loss} after the last step: the network is of no use"
            )

    def report_stop(self, command: str) -> None:
        """Report where a run stopped, and how to continue it; raise what was no signal."""
        why = "another process was interrupted" if self.failure is None else "the input failed"
        saved = f"saved after step {self.step} of {self.run.steps}"
        saved = saved if self.step else "no step was taken"
        self.log(f"{self.interruption.signal or why}: {saved}; continue with")
        self.log(f"  fnet train {command} --resume")
        if not self._is_alone:
            self.log("  in every process, with the options that connect them, as before")
        if self.failure is not None and not isinstance(self.failure, Interrupted):
            raise self.failure

    def _next_batch(self) -> Any:
        if self.step >= self.run.steps:
            return None
        ends_wait = self.interruption.ends_wait if self._is_alone else contextlib.nullcontext
        try:
            with ends_wait():
                return self._meter.next_batch(self._batches, self.wait.waiting())
        except (Interrupted, Exception) as error:
            if not self._is_alone:  # the others wait for this process
                raise
            self.failure = error
        return None

    def _end_step(self, progress: Progress, write: Callable[[dict[str, Any]], None]) -> bool:
        config, is_last = self.run.config, self.step >= self.run.steps
        is_logging = self.step % config.train.log_every == 0
        is_evaluating = self.step % self._eval_every == 0 or is_last
        if self._is_alone:
            is_stopping = self.failure is not None
        else:  # all must stop at the same step
            is_stopping = is_logging and distributed.any_process(
                self.interruption.signal is not None
            )
        if self.failure is not None and not isinstance(self.failure, Interrupted):
            is_evaluating = False  # its input would fail, too

        score = None
        if is_logging or is_evaluating or is_stopping:
            self.unreadable.share()
            line = self._training_line()
            if is_evaluating and self._evaluate(progress):
                assert self.evaluation is not None
                score = self._judge(self.evaluation.metrics)
                line |= self.evaluation.test_metrics
            is_stopping = is_stopping or self.failure is not None
            write(line)
            self._meter.restart()

        is_last = is_last or self.ended_early
        is_best = config.checkpoint.best and score is not None and score > self._best_score
        if self.step % config.checkpoint.every == 0 or is_best or is_last or is_stopping:
            self._save(score, even_if_skipped=is_last or is_stopping)
        return is_stopping or self.ended_early

    def _training_line(self) -> dict[str, Any]:
        run, step = self.run, self.step
        line: dict[str, Any] = {"step": step, "epoch": step / run.steps_per_epoch}
        # Epsilon is computed while the device still works on the step.
        epsilon = run.privacy.spent(step, run.steps) if run.privacy else None
        line["seconds"] = time.perf_counter() - self.start_time
        line |= self._meter.means(step)
        self.wait.add(self._meter.seconds, line["input_wait"])
        if epsilon is not None:
            line["privacy/epsilon"] = epsilon
        self._num_skipped += int(line.get("train/skipped", 0))
        num_updates = max(step - 1 - self._num_skipped, 0)
        line["train/learning_rate"] = self.programs.learning_rate(num_updates)
        if self.unreadable.count and not run.config.is_release_only:
            line[results.unreadable_name(run)] = self.unreadable.count
        return line

    def _evaluate(self, progress: Progress) -> bool:
        evaluate = self.programs.evaluate
        if not evaluate.is_compiled:
            jax.block_until_ready(self.state)
            with progress.doing("compiling the evaluation"), self.high_water.without():
                needed = overhead(self.run).always + evaluate.peak
            if needed > self.programs.predicted_bytes:
                self.log(f"memory: {format_bytes(needed)} predicted, most of it to evaluate")
                self.programs = self.programs._replace(predicted_bytes=needed)
        try:
            with progress.doing("evaluating"):
                self.evaluation = evaluate(self.state)
            self.unreadable.share()
        except (UserError, TrainingError) as error:
            if not self._is_alone:
                raise
            self.failure = error
            return False
        return True

    def _save(self, score: float | None, *, even_if_skipped: bool) -> None:
        """Save a checkpoint, unless the last steps were skipped. The others must be finite."""
        self._skipped.check(self.state, wait=True)
        self._meter.check(self.step)
        if self._skipped.consecutive and not even_if_skipped:
            return
        with self._meter.paused():
            public = without_frozen(self.seeds.remove_key(self.state))
            logged = self.folder.logged
            self.checkpoints.save(self.step, public, self._position, score, logged, self._stamp)
            self.mark_saved()  # for the checkpoints before, which are on disk
        if score is not None:
            self._best_score = max(self._best_score, score)

    def mark_saved(self) -> None:
        """Describe the data in data.json, once a checkpoint that was trained with them is saved."""
        if self._is_first and max(self.folder.saved_steps, default=0) > self.start.step:
            write_data(self.folder, self.run.config, self.data)
