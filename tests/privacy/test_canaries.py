"""Gradient canaries, and the audit of a run with them."""

import json

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from program_cases import assert_one_line_error, exit_code, fnet_command

import fnet
from fnet.privacy import PoissonSampling
from fnet.privacy.audit import Audit
from fnet.privacy.canaries import GradientCanaries
from train.config import Clipped, Config, LanguageModel, TextFile, Train, recipes
from train.data import Dataset, num_examples
from train.data.canaries import add_canaries, draw_included, exclude
from train.data.poisson import poisson_batches
from train.privacy import Privacy
from train.run.results import describe_audit
from train.run.setup import setup

PARAMS = {"dense": {"kernel": jnp.ones((4, 3)), "bias": jnp.zeros(3)}, "table": jnp.ones((9, 9))}


def loss(params, model_state, batch, key):
    logits = batch["x"] @ params["dense"]["kernel"] + params["dense"]["bias"][None]
    return fnet.losses.cross_entropy(logits, batch["label"])


def test_a_canary_moves_its_entry_by_the_clip_and_nothing_else():
    canaries = GradientCanaries.draw(PARAMS, count=12, seed=0, norm=5.0)
    entries = set(zip(canaries.rows.tolist(), canaries.columns.tolist(), strict=True))
    assert len(entries) == 12  # every entry of the kernel
    x = jax.random.normal(jax.random.key(0), (5, 4))
    batch = {"x": x, "label": jnp.arange(5) % 3, "canary": jnp.array([-1, 7, -1, 0, -1])}
    clip = 0.5

    def losses(params, batch):
        return canaries.add_to(loss)(params, {}, batch, None)[0]

    total, info = jax.jit(fnet.clipped_grad(losses, clip))(PARAMS, batch)
    real = {n: batch[n][jnp.array([0, 2, 4])] for n in ("x", "label")}
    plain = fnet.clipped_grad(lambda p, b: loss(p, {}, b, None), clip)
    expected, real_info = jax.jit(plain)(PARAMS, real)
    kernel = np.array(expected["dense"]["kernel"])
    for i in (7, 0):
        kernel[canaries.rows[i], canaries.columns[i]] += clip * canaries.signs[i]
    expected["dense"]["kernel"] = kernel
    chex.assert_trees_all_close(total, expected, atol=1e-6)
    np.testing.assert_allclose(info.norms[jnp.array([1, 3])], 5.0, rtol=1e-6)
    np.testing.assert_allclose(info.losses[jnp.array([1, 3])], 0)
    np.testing.assert_allclose(info.norms[jnp.array([0, 2, 4])], real_info.norms, rtol=1e-5)


def test_refuses_networks_without_room_for_canaries():
    with pytest.raises(ValueError, match="the parameters have no matrix"):
        GradientCanaries.draw({"bias": jnp.ones(3)}, 2, 0, 1.0)
    message = r"count must be at most 12, the entries of \['dense'\]\['kernel'\], got 13"
    with pytest.raises(ValueError, match=message):
        GradientCanaries.draw(PARAMS, 13, 0, 1.0)


def dataset(examples=20):
    rows = {"id": np.arange(examples, dtype=np.int32)}

    def augment(rows, generator):
        image = (1 + rows["id"][:, None]) * np.ones((1, 3), np.float32)
        return rows | {"image": image}

    return Dataset(train=rows, test=rows, classes=("a", "b"), augment=augment)


def test_canaries_are_rows_of_zeros_with_a_number():
    data = add_canaries(dataset(), 6)
    assert (num_examples(data.train), data.canaries, data.name(22)) == (26, 6, "canary 2")
    batch = data.augment(data.train, np.random.default_rng(0))
    assert batch["canary"].tolist() == [-1] * 20 + list(range(6))
    assert batch["id"].tolist() == [*range(20)] + [-1] * 6
    assert not batch["image"][20:].any()
    assert (batch["image"][:20] == 1 + np.arange(20)[:, None]).all()
    assert batch["weight"].tolist() == [1.0] * 26
    data = add_canaries(dataset()._replace(users=np.arange(20) // 2), 6)
    assert data.users.tolist() == [*np.repeat(np.arange(10), 2), *range(10, 16)]


def test_a_coin_flip_includes_each_canary():
    flips = np.array([draw_included(50, seed) for seed in range(400)])
    assert np.abs(flips.mean(0) - 0.5).max() < 4.5 * 0.5 / 20
    assert np.abs(np.corrcoef(flips.T)[~np.eye(50, dtype=bool)]).max() < 5 / 20


def test_excluded_canaries_change_no_other_row():
    data = add_canaries(dataset(), 20)
    included = draw_included(20, 0)
    sampling = PoissonSampling(40, 15)
    plain = poisson_batches(data, sampling, 0)
    batches = poisson_batches(exclude(data, included), sampling, 0)
    for _ in range(5):
        before, after = next(plain), next(batches)
        is_excluded = (before["weight"] == 1) & (before["canary"] >= 0)
        is_excluded &= ~included[before["canary"]]
        assert is_excluded.any()
        np.testing.assert_array_equal(after["weight"], np.where(is_excluded, 0, before["weight"]))
        np.testing.assert_array_equal(after["image"], before["image"])


RECIPE = """
from train.config import Clipped, Config, Digits, Mlp, Optim, Train

def config():
    return Config(
        name="audited",
        data=Digits(batch_size=512, max_shift=0),
        model=Mlp(hidden=(128,), activation="tanh"),
        optim=Optim(name="sgd", learning_rate=0.6, momentum=0.9, schedule="constant"),
        grad=Clipped(
            clip=0.15, noise_multiplier=2.0, delta=1e-5, audit=300, insecure_noise_seed=0
        ),
        train=Train(steps=40, log_every=40, eval_every=40),
    )
"""
NO_NOISE = (
    *("--grad.noise-multiplier", "None", "--grad.delta", "None"),
    *("--grad.insecure-noise-seed", "None"),
)


@pytest.fixture
def audited(workplace):
    (workplace / "audited.py").write_text(RECIPE)
    return workplace


def summary_of(folder):
    return json.loads((folder / "summary.json").read_text())


@pytest.mark.slow
def test_a_private_run_prints_both_bounds(audited, capsys):
    fnet_command("train", "audited.py", "--out", "run")
    summary = summary_of(audited / "run")
    audit, upper = summary["audit"], Privacy(2.0, PoissonSampling(1437 + 300, 512), 1e-5)
    assert summary["privacy"]["epsilon"] == upper.epsilon(40)
    assert 0 < audit["epsilon"] < upper.epsilon(40)
    assert (audit["canaries"], audit["confidence"], audit["delta"]) == (300, 0.95, 1e-5)
    printed = capsys.readouterr().out
    assert f"audit: epsilon is at least {audit['epsilon']:.3g} with 95% confidence" in printed
    assert f"and at most {upper.epsilon(40):.4g} (" in printed
    fnet_command("report", "run")
    page = (audited / "run/private/report.html").read_text()
    assert "epsilon, at least" in page
    fnet_command("train", "audited.py", "--out", "run", "--resume")  # after the last step
    assert summary_of(audited / "run")["audit"] == audit


def test_a_run_with_less_noise_than_it_claims_is_caught():
    claimed = Privacy(4.0, PoissonSampling(1000, 100), 1e-5)
    result = describe_audit(Audit(3.4, 1e-5, 0.95, 300, 128, 128), claimed, 10)
    assert "THE GUARANTEE IS BROKEN" in result
    assert "BROKEN" not in describe_audit(Audit(0.1, 1e-5, 0.95, 300, 128, 70), claimed, 10)


@pytest.mark.slow
def test_canaries_can_be_users(audited):
    digits = np.random.default_rng(0)
    np.savez(
        audited / "digits.npz",
        x=digits.random((200, 8, 8), np.float32),
        y=np.arange(200) % 10,
        writer=np.arange(200) % 25,
    )
    data = "ArrayFile(path='digits.npz', user='writer', examples_per_user=4, batch_size=8)"
    text = RECIPE.replace("Digits(batch_size=512, max_shift=0)", data).replace(
        "import Clipped", "import ArrayFile, Clipped"
    )
    (audited / "users.py").write_text(text)
    run = setup(recipes.load("users.py"))
    assert run.privacy.sampling.examples == 22 + 300  # of 25 users, 3 are held out
    batches = run.training_batches(0)
    batch = next(b for b in batches if b["example_weight"].any())  # has a canary that is included
    _, metrics = run.step(run.init(jax.random.key(0)), batch)
    assert np.isfinite(metrics["loss"])
    assert metrics["norm_max"] == pytest.approx(1.5, rel=1e-5)  # of a canary


@pytest.mark.slow
def test_a_language_model_can_be_audited(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("".join(f"{i:04}" for i in range(500)))
    config = Config(
        data=TextFile(path=str(path), context=16, batch_size=30),
        model=LanguageModel(blocks=1, width=16, heads=2),
        grad=Clipped(noise_multiplier=1.0, delta=1e-5, audit=100),
        train=Train(steps=2),
    )
    run = setup(config)
    _, metrics = run.step(run.init(jax.random.key(0)), next(run.training_batches(0)))
    assert np.isfinite(metrics["grad_norm"])
    assert metrics["norm_max"] >= 9.99


def test_a_mistake_about_an_audit_is_one_line(audited, capsys):
    for canaries, delta, message in (
        (4, 1e-5, "grad.audit: expected greater than or equal to 8, got 4"),
        (1001, 5e-4, "grad.audit: 1001 canaries are too many at"),
        (9000, 1e-6, "count must be at most 8192, the entries of"),
    ):
        words = "--grad.delta", delta, "--grad.audit", canaries
        assert exit_code("train", "audited.py", "--out", "run", *words) == 2
        assert_one_line_error(capsys, message)
