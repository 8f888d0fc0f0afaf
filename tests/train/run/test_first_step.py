"""What a run does before its first step: how often it traces, and what it compiles again."""

import subprocess
import sys
from collections import Counter

import jax
from jax._src import compiler
from rich.console import Console

from train.config import Config, Digits, PreactResNet
from train.data.unreadable import UnreadableFiles
from train.run.mesh import layout
from train.run.planning import compile_programs
from train.run.setup import build_task, setup

CONFIG = Config(data=Digits(batch_size=16), model=PreactResNet(widths=(4,), blocks_per_stage=1))


def compiled_programs_of_a_run():
    run = setup(CONFIG).on(layout(CONFIG))
    return compile_programs(
        run, None, UnreadableFiles(run.task.dataset, print), Console(quiet=True)
    )


def test_a_loss_is_traced_once_and_initial_values_are_not_traced_again(workplace, monkeypatch):
    calls = Counter()

    def counting(name, function):
        return lambda *args: calls.update([name]) or function(*args)

    def build(*args):
        task = build_task(*args)
        model = task.model._replace(init=counting("init", task.model.init))
        loss, measure = counting("loss", task.loss), counting("measure", task.measure)
        return task._replace(model=model, loss=loss, measure=measure)

    monkeypatch.setattr("train.run.setup.build_task", build)
    compiled_programs_of_a_run()
    # `setup` takes the shapes of the initial values, and the trial those of the evaluation.
    assert calls == {"init": 1, "loss": 1, "measure": 2}


def test_a_second_start_compiles_nothing(workplace, monkeypatch):
    compiled, compile_ = [], compiler.backend_compile_and_load
    count = lambda *args, **options: compiled.append(args) or compile_(*args, **options)  # noqa: E731
    monkeypatch.setattr(compiler, "backend_compile_and_load", count)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    for _ in range(2):
        compiled.clear()
        jax.clear_caches()
        compiled_programs_of_a_run().init(jax.random.key(0))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 1)
    assert compiled == []


def test_a_step_waits_for_no_library_that_draws():
    code = "import train.commands.train, sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"matplotlib", "train.report", "fnet.autodiff.per_example"} & {*done.stdout.split()}
