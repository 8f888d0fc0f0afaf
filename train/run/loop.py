"""The training loop, from a config to a trained network."""

import contextlib
import importlib.metadata
import json
import platform
import time
from pathlib import Path
from typing import Any

import jax
from rich.console import Console

import fnet
from fnet import memory
from train.config import Config
from train.data.unreadable import UnreadableFiles
from train.errors import TrainingError, UserError
from train.output import curves, examples, plots
from train.output.progress import Progress, line_printer
from train.output.summary import before_training, describe_results, print_facts, what_next
from train.run import distributed, initial_weights, tracking
from train.run.audit import audit
from train.run.audit import describe as describe_audit
from train.run.checkpoints import Checkpoints, compile_checksums
from train.run.class_names import check_classes, write_classes
from train.run.frozen import load_network, restore, without_frozen
from train.run.input_wait import InputWait
from train.run.interruption import Interrupted, Interruption
from train.run.memory_report import memory_report
from train.run.mesh import layout
from train.run.metrics import NOT_PRIVATE, Meter, input_wait, noise_scale, score_of, throughput
from train.run.model_files import copy_model_files
from train.run.planning import StepCache, check_memory_config, compile_step, overhead
from train.run.process_memory import HighWater, occupy_gaps
from train.run.profiling import Profile
from train.run.run_folder import RunFolder, as_json, atomic_write, quote, read_metrics
from train.run.same_data import check_data, describe_data, write_data
from train.run.seeds import check_secret, create_secret, describe_seeds, needs_secret, read_seeds
from train.run.setup import Setup, check_same_noise, setup
from train.run.skipped_steps import SkippedSteps


def train(config: Config, out: Path, *, resume: bool, console: Console, profile: int = 0) -> None:
    """Train what a config describes and write everything about the run to a folder.

    Args:
      config: config of the run.
      out: folder of the run; `RunFolder` has its files.
      resume: continue the run in the folder, if there is one. The result equals that of an
        uninterrupted run bit for bit.
      console: console for progress.
      profile: number of steps to trace for a profiler.

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
    check_memory_config(run)
    tracking.check(config)

    resumes = resume and RunFolder(out).has_started
    is_saved = resumes and RunFolder(out).saved_steps
    weights = None if is_saved else initial_weights.load_configured(run)
    data = describe_data(run.task.dataset)

    def prepare(folder: RunFolder) -> None:
        if resumes:
            before = folder.read_config()
            check_same_noise(run, before)
            check_classes(folder, run.task.dataset.classes, run.task.dataset.label_map)
            check_secret(folder, before)
            changed = check_data(folder, config, data)
            folder.resume(config)
            if changed:
                log(changed)
            if needs_secret(config) and not needs_secret(before):  # imported, not trained yet
                create_secret(folder, config)
            return
        if resume and not folder.config.is_file():
            log(f"no run in {folder.path} yet: starting a new one")
        folder.create()
        create_secret(folder, config)
        copy_model_files(folder, config)
        folder.write_config(config)
        if weights is not None:
            atomic_write(folder.imported, as_json(weights.as_dict()))

    with distributed.run_folder(out, prepare) as folder:
        for note in run.notes:
            log(note)
        if weights is not None:
            console.print(weights.lines())
        log(f"training {config.name} in {folder.path}")
        write_classes(folder, run.task.dataset.classes, run.task.dataset.label_map)
        write_data(folder, config, data)
        seeds = read_seeds(folder, config)
        # The names of training files are not covered by a guarantee.
        unreadable = UnreadableFiles(
            run.task.dataset,
            _ignore if config.is_release_only else log,
            distributed.union if distributed.has_other_processes() else None,
        )
        unreadable_name = f"{NOT_PRIVATE}/unreadable_files" if run.privacy else "unreadable_files"

        # Compile all programs. Their memory is known before the first step.
        with console.status("compiling") as status:
            planned = compile_step(run, progress=lambda c: status.update(f"compiling: {c}"))
            take_step = StepCache(run, planned, log)
            evaluate = run.compile_evaluation(unreadable, _evaluation_batch_size(run, planned))
            init = run.compile_init(weights.variables if weights else None)
            learning_rate = run.compile_schedule()
            compile_checksums(without_frozen(run.state_shapes))
            report = memory_report(run, planned)
        predicted_bytes = overhead(run).peak(
            memory.tree_bytes(run.state_shapes) // run.devices,
            planned.executable.report.peak.total,
            evaluate.peak,
        )
        earlier = read_metrics(folder.metrics) if resume else []
        print_facts(console, before_training(run, planned, predicted_bytes, earlier))
        if run.privacy:
            log(f"privacy: {run.privacy.describe(run.steps)}")
            log(describe_seeds(folder, config))
        atomic_write(folder.memory, as_json(report.as_dict()))
        plots.memory(report, f"{config.name}: memory of a train step", folder.memory_picture)
        occupy_gaps()
        high_water = HighWater(run.devices // jax.process_count())

        batches = unreadable.watch(run.training_batches(seeds.data))
        with Checkpoints(
            folder.checkpoints,
            config.checkpoint.keep,
            log,
            shapes=without_frozen(run.state_shapes),
            keep_best=config.checkpoint.best,
        ) as checkpoints:
            # Begin with the last checkpoint, or with initial values.
            is_imported = resume and checkpoints.latest_step == 0
            restored = None
            if resume and not is_imported:
                restored = restore(checkpoints, run.task.model, run.state_shapes)
            if is_imported:
                # Only the network counts: the rest follows from the config, which may have changed.
                network = load_network(folder, run.task.model)
                given = network.evaluation_params, network.model_state
                start, state = 0, run.compile_init(given)(jax.random.key(config.train.seed))
            elif restored:
                start, state = restored.step, restored.state
                batches.set_state(restored.position)
                log(f"resumed after step {start} of {run.steps}")
            else:
                start, state = 0, init(jax.random.key(config.train.seed))
            state = seeds.add_key(state)
            folder.drop_metrics_after(start)
            start_time -= folder.seconds_spent()
            step, evaluation, best_score = start, None, checkpoints.best_score
            skipped = SkippedSteps(run, folder.bad_steps, log)
            num_skipped = len(read_metrics(folder.bad_steps))
            eval_every = config.train.eval_every or max(round(run.steps_per_epoch), 1)
            meter = Meter(
                config.data.batch_size,
                private=config.is_private,
                release_only=config.is_release_only,
            )

            failure: BaseException | None = None
            alone = not distributed.has_other_processes()

            with (
                Interruption() as interruption,
                Progress(console, run.steps, start) as progress,
                InputWait(log, getattr(config.data, "workers", None)) as wait,
                folder.metrics.open("a", buffering=1) as metrics_file,
                tracking.tracking(config, folder.path, start) as track,
                contextlib.closing(Profile(profile, folder.profile, start, log)) as profiler,
            ):
                ends_wait = interruption.ends_wait if alone else contextlib.nullcontext

                def next_batch() -> Any:
                    """Return a batch, or None after the last step, a signal or a failure."""
                    nonlocal failure
                    if step == run.steps:
                        return None
                    try:
                        with ends_wait(), wait.waiting():
                            return meter.next_batch(batches)
                    except (Interrupted, Exception) as error:
                        if not alone:  # the others wait for this process
                            raise
                        failure = error
                    return None

                batch = next_batch()
                while batch is not None:
                    step += 1
                    with profiler.step(step, state):
                        skipped.check(state)
                        state, metrics = take_step(state, batch)
                        skipped.add(step, batch, metrics)
                        meter.add(batch, metrics)
                        progress.advance(step)
                        position = batches.get_state()
                        batch = next_batch()  # while the device computes

                    is_last = step == run.steps
                    is_logging = step % config.train.log_every == 0
                    is_stopping = failure is not None
                    is_evaluating = step % eval_every == 0 or is_last
                    if is_stopping and not isinstance(failure, Interrupted):
                        is_evaluating = False  # its input would fail, too
                    if not alone:  # all must stop at the same step
                        is_stopping = is_logging and distributed.any_process(
                            interruption.signal is not None
                        )

                    score = None
                    if is_logging or is_evaluating or is_stopping:
                        unreadable.share()
                        line: dict[str, Any] = {"step": step, "epoch": step / run.steps_per_epoch}
                        # Epsilon is computed while the device still works on the step.
                        epsilon = run.privacy.epsilon(step) if run.privacy else None
                        line["seconds"] = time.perf_counter() - start_time
                        line |= meter.means(step)
                        wait.add(meter.seconds, line["input_wait"])
                        if epsilon is not None:
                            line["privacy/epsilon"] = epsilon
                        num_skipped += int(line.get("train/skipped", 0))
                        num_updates = max(step - 1 - num_skipped, 0)
                        line["train/learning_rate"] = learning_rate(num_updates)
                        if unreadable.count and not config.is_release_only:
                            line[unreadable_name] = unreadable.count
                        if is_evaluating:
                            try:
                                with progress.doing("evaluating"):
                                    evaluation = evaluate(state)
                                unreadable.share()
                            except (UserError, TrainingError) as error:  # unreadable test files
                                if not alone:
                                    raise
                                failure, is_stopping = error, True
                            else:
                                score = score_of(evaluation.metrics)
                                line |= _test_metrics(evaluation.metrics)
                        metrics_file.write(json.dumps(line) + "\n")
                        track(step, line)
                        progress.log(line, high_water.bytes())
                        meter.restart()

                    is_best = config.checkpoint.best and score is not None and score > best_score
                    if step % config.checkpoint.every == 0 or is_best or is_last or is_stopping:
                        skipped.check(state, wait=True)
                        meter.check(step)  # raises if a step that was not skipped is not finite
                        if not skipped.consecutive or is_last or is_stopping:
                            with meter.paused():
                                public = without_frozen(seeds.remove_key(state))
                                checkpoints.save(step, public, position, score)
                            best_score = max(best_score, score) if score is not None else best_score
                    if is_stopping:
                        break
            checkpoints.wait()
        measured_bytes = high_water.bytes()  # before the plots, which are not training

        lines = read_metrics(folder.metrics)
        num_params = planned.executable.report.parameters
        title = f"{config.name}: {num_params:,} parameters, {step} steps"
        curves.save(lines, title, folder.curves)
        if step < run.steps or failure:
            why = "another process was interrupted" if failure is None else "the input failed"
            saved = f"saved after step {step} of {run.steps}" if step else "no step was taken"
            log(f"{interruption.signal or why}: {saved}; continue with")
            log(f"  fnet train {quote(folder.config)} --resume")
            if failure is not None and not isinstance(failure, Interrupted):
                raise failure
            return
        if evaluation is None:  # the run was resumed after its last step
            evaluation = evaluate(state)
        written = [folder.summary, folder.curves, folder.memory_picture]
        if evaluation.confusion is not None:
            classes, title = run.task.dataset.classes, f"{config.name}, step {step}"
            plots.confusion_matrix(evaluation.confusion, classes, title, folder.confusion)
            written.append(folder.confusion)
            if not config.is_release_only:  # the picture shows test images themselves
                examples.draw(run, evaluate, state, title, folder.examples)
                written.append(folder.examples)
        result = None
        if run.canaries:
            # Pretrained weights have other initial values.
            known = not folder.imported.exists()
            result = audit(run, run.canaries, state.params, seeds.data, initial_known=known)
        bad_files = [line.get(unreadable_name, 0) for line in lines]
        summary = {
            "metrics": _test_metrics(evaluation.metrics),
            "privacy": _privacy(run, step),
            "audit": result._asdict() if result else None,
            "noise_scale": noise_scale(lines),
            "unreadable_files": (
                None if config.is_release_only else max([unreadable.count, *bad_files])
            ),
            "steps": step,
            "seconds": time.perf_counter() - start_time,
            "examples_per_second": throughput(lines),
            "input_wait": input_wait(lines),
            "input_wait_reason": wait.reason,
            "parameters": num_params,
            "state_bytes": planned.executable.report.state_bytes,
            "donated_bytes": planned.executable.report.donation.aliased_bytes,
            "quantization_errors": dict(getattr(run.task.model, "errors", dict)()),
            "policy": str(planned.policy),
            "microbatches": planned.microbatches,
            "budget_bytes": planned.plan.budget if planned.plan else None,
            "peak_bytes_predicted": predicted_bytes,
            "peak_bytes_seen": measured_bytes,
            "versions": versions(),
        }
        if step == start:
            summary |= _training_results(folder.summary, step)
        atomic_write(folder.summary, as_json(summary))
        for text in describe_results(run, summary):
            log(text)
        if run.privacy:
            log(f"privacy: {run.privacy.describe(step)}")
            log(describe_seeds(folder, config))
        if result:
            log(describe_audit(result, run.privacy, step))
        for text in what_next(run, folder, written):
            log(text)


def _evaluation_batch_size(run: Setup, planned: Any) -> int:
    """Return the number of test images per batch: a microbatch, divided by crops per image."""
    images = run.config.data.batch_size // planned.microbatches // run.crops
    return max(images // run.devices, 1) * run.devices


def _ignore(line: str) -> None:
    """Print nothing."""


def _test_metrics(metrics: dict[str, float]) -> dict[str, float]:
    return {f"test/{name}": value for name, value in metrics.items()}


def _privacy(run: Setup, step: int) -> dict[str, Any] | None:
    """Return the guarantee for the summary, and whether anyone can compute the noise."""
    if not run.privacy:
        return None
    return run.privacy.as_dict(step) | {"secret_noise": needs_secret(run.config)}


def _training_results(path: Path, step: int) -> dict[str, Any]:
    """Return what only training can measure, from the summary of a run that ended at ``step``."""
    try:
        summary = json.loads(path.read_bytes())
    except (OSError, ValueError):  # absent or damaged
        return {}
    if not isinstance(summary, dict) or summary.get("steps") != step:
        return {}  # the run was killed between its last checkpoint and its summary
    names = "seconds", "unreadable_files", "peak_bytes_seen"
    return {name: summary[name] for name in names if name in summary}


def versions() -> dict[str, str]:
    """Return the versions of fnet, Python and libraries, and the device."""
    packages = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")
    installed = {name: importlib.metadata.version(name) for name in packages}
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        installed["dp-accounting"] = importlib.metadata.version("dp-accounting")
    return {
        "fnet": fnet.__version__,
        "python": platform.python_version(),
        "device": jax.local_devices()[0].device_kind,
    } | installed
