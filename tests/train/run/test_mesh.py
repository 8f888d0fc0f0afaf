"""Several devices: the same training as on one device, with a shard of the state on each."""

import dataclasses
import os
import subprocess
import sys
from types import SimpleNamespace

import chex
import jax
import numpy as np
import pytest
from program_cases import assert_one_line_error, exit_code

from fnet import memory
from train import config as configs
from train.data.unreadable import UnreadableFiles
from train.errors import UserError
from train.run.checkpoints import Checkpoints
from train.run.mesh import Layout, layout
from train.run.planning import compile_step, reserve, residuals_by_layer
from train.run.setup import setup

CONFIG = configs.Config(
    data=configs.Digits(batch_size=32),
    model=configs.PreactResNet(widths=(8,), blocks_per_stage=1),
    optim=configs.Optim(learning_rate=0.05, nesterov=True, ema_decay=0.9),
)


def on(mesh, config=CONFIG):
    config = dataclasses.replace(config, mesh=mesh)
    return setup(config).on(layout(config))


def trained(run, steps=3):
    """Return the compiled step, the state after some steps, and each step's metrics."""
    planned = compile_step(run)
    state, batches = run.compile_init()(jax.random.key(0)), run.training_batches(0)
    metrics = []
    for _ in range(steps):
        state, result = planned.executable(state, next(batches))
        metrics.append(jax.tree.map(np.asarray, result))
    return planned, state, metrics


def arrays(state):
    return jax.tree.map(np.asarray, (state.params, state.model_state, state.opt_state, state.ema))


@pytest.fixture(scope="module")
def alone():
    return trained(on(configs.Mesh()))


def test_losses_and_states_equal_those_of_one_device(alone):
    _, state, metrics = trained(on(configs.Mesh(data=2, fsdp=2)))
    chex.assert_trees_all_close(metrics, alone[2], rtol=1e-5, atol=1e-5)
    # Batch statistics are global; those of a quarter of the batch would differ by 10 %.
    chex.assert_trees_all_close(arrays(state), arrays(alone[1]), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_each_device_holds_its_shard():
    config = dataclasses.replace(
        CONFIG, model=configs.Mlp(hidden=(256, 256)), data=configs.Digits(batch_size=512)
    )
    whole, by_data, by_fsdp = (
        trained(on(mesh, config), steps=1)
        for mesh in (configs.Mesh(), configs.Mesh(data=4), configs.Mesh(fsdp=4))
    )
    state_bytes = [
        planned.executable.report.state_bytes for planned, *_ in (whole, by_data, by_fsdp)
    ]
    assert state_bytes[1] == state_bytes[0] == memory.tree_bytes(whole[1])
    assert state_bytes[2] < state_bytes[0] / 4 * 1.05
    peaks = [planned.executable.report.peak for planned, *_ in (whole, by_data, by_fsdp)]
    assert peaks[1].temporaries < 0.6 * peaks[0].temporaries
    assert peaks[2].total < 0.5 * peaks[0].total
    for planned, state, _ in (by_data, by_fsdp):
        held = sum(a.addressable_shards[0].data.nbytes for a in jax.tree.leaves(state.params))
        assert held == memory.tree_bytes(state.params)
        assert planned.executable.report.donation.leaves == len(jax.tree.leaves(state))


def transformer(width):
    return configs.Config(
        data=configs.TextFile(context=64, batch_size=32),
        model=configs.LanguageModel(mixers=("attention",), blocks=2, width=width, heads=4),
        optim=configs.Optim(name="adamw", learning_rate=1e-3, clip_norm=1.0),
    )


def test_no_device_holds_the_whole_initial_state():
    run = on(configs.Mesh(fsdp=4), transformer(512))
    init, shapes = run.lower_init().compile(), setup(run.config).state_shapes
    peak = memory.peak(init)
    assert peak.outputs < 0.26 * memory.tree_bytes(shapes)
    assert peak.total < 0.5 * memory.tree_bytes(shapes)
    matrices = {a.shape for a in jax.tree.leaves(run.state_shapes.params) if any(a.sharding.spec)}
    assert len(matrices) >= 4
    for shape in matrices:  # not even one array exists as a whole
        assert f"[{','.join(map(str, shape))}]" not in init.as_text()


def test_evaluation_gathers_parameters_where_it_uses_them():
    config = transformer(512)
    peaks = {}
    for mesh in (configs.Mesh(data=4), configs.Mesh(fsdp=4)):
        run = on(mesh, config)
        evaluate = run.evaluation(UnreadableFiles(run.task.dataset, print), 32)
        peaks[mesh] = evaluate.peak - memory.tree_bytes(run.state_shapes)
    block = memory.tree_bytes(on(configs.Mesh(), config).state_shapes.params["blocks"]["0"])
    assert peaks[configs.Mesh(fsdp=4)] <= peaks[configs.Mesh(data=4)] + 2 * block


@pytest.mark.slow
def test_evaluation_does_not_depend_on_devices(alone):
    result = []
    for run in (on(configs.Mesh()), on(configs.Mesh(data=2, fsdp=2))):
        unreadable = UnreadableFiles(run.task.dataset, print)
        evaluate = run.evaluation(unreadable, run.config.data.batch_size)
        state = jax.device_put(alone[1], jax.tree.map(lambda a: a.sharding, run.state_shapes))
        result.append(evaluate(state))
    chex.assert_trees_all_close(result[1].metrics, result[0].metrics, rtol=1e-5)
    np.testing.assert_array_equal(result[1].confusion, result[0].confusion)


@pytest.mark.slow
def test_resumes_on_other_devices(tmp_path):
    two, four = on(configs.Mesh(data=2)), on(configs.Mesh(fsdp=4))
    state = two.compile_init()(jax.random.key(0))
    with Checkpoints(tmp_path / "c", keep=1, shapes=two.state_shapes) as checkpoints:
        checkpoints.save(1, state, {})
        checkpoints.wait()
        restored = checkpoints.restore(four.state_shapes).state
    chex.assert_trees_all_equal(arrays(restored), arrays(state))
    placed, expected = (
        jax.tree.map(lambda a: a.sharding, t) for t in (restored, four.state_shapes)
    )
    assert jax.tree.leaves(placed.params) == jax.tree.leaves(expected.params)


@pytest.mark.slow
def test_a_budget_is_per_device(workplace):
    free = on(configs.Mesh(data=2))
    need = compile_step(free).executable.report.peak.total
    budget = f"{need + reserve(free)}B"
    planned = compile_step(
        on(configs.Mesh(data=2), dataclasses.replace(CONFIG, memory=configs.Memory(budget=budget)))
    )
    chosen = planned.plan.chosen
    assert (chosen.policy.name, chosen.microbatches, chosen.peak.total) == ("none", 1, need)
    assert all(32 % (2 * c.microbatches) == 0 for c in planned.plan.candidates)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--mesh.data", 5), "mesh: 5 x 1 devices are wanted, but this machine has 4 (cpu)"),
        (("--mesh.data", 3), "data.batch_size 16; give a multiple, such as --data.batch-size 18"),
        (
            ("--mesh.data", 4, "--grad.mode", "microbatch", "--grad.microbatches", 8),
            "grad.microbatches: 8 on 4 devices do not divide data.batch_size 16",
        ),
    ],
)
def test_refuses_unsuitable_meshes(words, message, workplace, capsys):
    assert exit_code("train", "tiny.py", *words) == 2
    assert_one_line_error(capsys, message)


def test_refuses_a_mesh_with_a_target(workplace, capsys):
    assert exit_code("memory", "tiny.py", "--mesh.data", 2, "--target", "h100") == 2
    assert "--target" in capsys.readouterr().err


def test_rows_of_a_process_are_those_of_its_devices(monkeypatch):
    """Of 16 rows on 2 x 2 devices, a process with the last two devices reads the second half."""
    rows = layout(
        configs.Config(mesh=configs.Mesh(data=2, fsdp=2), data=configs.Digits(batch_size=16))
    )
    assert rows.local_rows(16) is None
    own = dict.fromkeys(jax.devices()[2:])
    indices = rows._rows.devices_indices_map((16,))
    sharding = SimpleNamespace(
        addressable_devices_indices_map=lambda shape: {d: indices[d] for d in own}
    )
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(Layout, "_rows", sharding)
    assert rows.local_rows(16).tolist() == [False] * 8 + [True] * 8


def test_makes_cpu_devices_for_the_mesh():
    code = (
        "import jax; from train.config import Mesh; from train.run.mesh import make_cpu_devices;"
        "make_cpu_devices(Mesh(data=3)); print(len(jax.devices()))"
    )
    env = os.environ | {"XLA_FLAGS": "", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, "3"), done.stderr


def test_refuses_a_mesh_without_all_devices_of_the_processes(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    config = configs.Config(mesh=configs.Mesh(data=2), data=configs.Digits(batch_size=16))
    with pytest.raises(UserError, match="the 2 processes have 4: give a mesh of all of them"):
        layout(config)


def test_reports_residuals_with_one_example_per_device():
    model = configs.PreactResNet(widths=(4, 4, 4, 4), blocks_per_stage=1)  # one pixel at the end
    config = configs.Config(data=configs.Digits(batch_size=4), model=model)
    of_one, whole = (
        sum(layer.bytes for layer in residuals_by_layer(on(mesh, config), "none", 1))
        for mesh in (configs.Mesh(data=4), configs.Mesh())
    )
    assert of_one == pytest.approx(whole / 4, rel=0.05)
