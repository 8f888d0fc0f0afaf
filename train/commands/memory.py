"""``fnet memory``: predict the memory of training, without training."""

from pathlib import Path

from rich.console import Console

from fnet.memory import format_bytes, parse_bytes, tree_bytes
from fnet.memory.target import Target
from train import config as configs
from train.arguments import MemoryArguments
from train.config import Config
from train.errors import UserError, writing
from train.output import plots
from train.output.memory_tables import StepMemory, memory_tables, plan_summary, plan_table
from train.output.progress import line_printer, showing
from train.output.tables import to_rich
from train.platform import use_cpu
from train.run import planning
from train.run.mesh import make_cpu_devices
from train.run.planning import Planned, predict_on, target_of
from train.run.run_folder import as_json, atomic_write
from train.run.setup import setup

_NOT_COUNTED = (
    "Not included, because only the device knows it: workspaces that cuDNN chooses at run time, "
    "and a TPU's small on-chip arrays."
)


def main(words: list[str], options: MemoryArguments, config: Config) -> None:
    """Run ``fnet memory CONFIG``."""
    if options.target:
        use_cpu()  # nothing runs, so an accelerator of this machine does not matter
    else:
        make_cpu_devices(config.mesh)
    predict_memory(config, options, Console())


def predict_memory(config: Config, options: MemoryArguments, console: Console) -> None:
    """Print the predicted memory of a train step and write memory.json, memory.png and plan.png."""
    log = line_printer(console)
    count = config.mesh.data * config.mesh.fsdp
    targets: list[Target | None] = [None]
    if options.target is not None:
        targets = [target_of(name, count) for name in options.target.split(",")]
    if options.budget is not None:
        config = config.replace(memory=config.memory.replace(budget=options.budget))
    find_batch_size = options.batch_size == "auto"
    if options.batch_size is not None and not find_batch_size:
        batch_size = _batch_size(options.batch_size)
        config = config.replace(data=config.data.replace(batch_size=batch_size))
    run = setup(configs.check(config, "command line"), without_data=True)
    for note in run.notes:
        log(note)

    with showing(console, "compiling; a large network takes minutes on a CPU") as show:
        predictions = [
            predict_on(run, target, largest=find_batch_size, progress=show) for target in targets
        ]
        first = predictions[0]
        report = planning.memory_report(first)
    memory, plan = StepMemory.model_validate(report), first.plan
    process = planning.overhead(first.run, first.target)
    if len(predictions) == 1:
        console.print(*memory_tables(memory, first.run.devices), sep="\n")
        if plan:
            console.print(to_rich(plan_table(plan, process.always)))
            for text in plan_summary(plan, process.always).splitlines():
                log(text)
        elif config.memory.budget and not find_batch_size:
            within = format_bytes(parse_bytes(config.memory.budget))
            log(f"fits {within} without a plan, so no other way was compiled")
    if process.always:
        state_bytes = tree_bytes(first.run.state_shapes) // first.run.devices
        what = "each device, with the runtime" if first.run.devices > 1 else "the process"
        predicted = format_bytes(process.peak(state_bytes, first.peak.total))
        log(f"Peak of {what}: {predicted} ({process})")
    if options.target:
        console.print(to_rich(planning.devices_table(predictions)))
        log(_NOT_COUNTED)
    if find_batch_size and len(predictions) == 1:
        log(_largest_batch(first))

    out = Path(options.out or f"runs/{config.name}-memory")
    content = report | {"predictions": [p.as_dict() for p in predictions]}
    with writing(out):
        out.mkdir(parents=True, exist_ok=True)
        atomic_write(out / "memory.json", as_json(content))
        plots.memory(memory, f"{config.name}: memory of a train step", out / "memory.png")
        if plan:
            title = f"{config.name}: peak memory and compute"
            plots.plan(plan, process.always, title, out / "plan.png")
    log(f"memory: {out / 'memory.json'}")
    log(f"plot: {out / 'memory.png'}{', plan.png' if plan else ''}")


def _largest_batch(p: Planned) -> str:
    size, devices, budget = p.run.config.data.batch_size, p.run.devices, p.run.config.memory.budget
    way = f"--memory.budget {budget}" if budget else f"--memory.policy {p.policy}"
    each = f", {size // devices} for each of {devices} devices" if devices > 1 else ""
    return f"largest batch size that fits: {size}{each}; train with --data.batch-size {size} {way}"


def _batch_size(text: str) -> int:
    try:
        size = int(text)
    except ValueError:  # not a number, or one of thousands of digits
        size = 0
    if size < 1:
        raise UserError(f"--batch-size: expected a number of examples or auto, got {text}")
    return size
