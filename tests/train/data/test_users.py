"""Privacy per user: losses, batches and sources of users with several examples each."""

import json

import array_cases
import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from array_cases import make_images, make_labels, write_npz
from image_cases import write_class_folders, write_image
from program_cases import assert_one_line_error, exit_code
from sklearn.datasets import load_digits

import fnet
from fnet.privacy import PoissonSampling
from fnet.privacy.users import per_user
from train.config import ArrayFile, ImageFolder, TextFile, recipes
from train.data import Dataset, num_examples
from train.data.poisson import user_batches
from train.data.splits import hold_out_users
from train.errors import UserError
from train.privacy import Privacy
from train.run.setup import setup

USERS, K = 7, 3
USER_OF_ROW = np.repeat(np.arange(USERS), [1, 2, 3, 4, 5, 8, 9])


def loss(params, model_state, batch, key):
    hidden = jnp.tanh(batch["x"] @ params["w"] + params["b"][None])
    losses = fnet.losses.cross_entropy(hidden, batch["label"])
    return losses, fnet.Aux(model_state, {"label": batch["label"].astype(jnp.float32)})


@pytest.fixture(scope="module")
def problem():
    """Parameters and a batch of users; the weights mark 0 to 3 examples of each."""
    keys = jax.random.split(jax.random.key(0), 3)
    params = {"w": jax.random.normal(keys[0], (4, 5)), "b": jnp.zeros(5)}
    count = np.array([0, 1, 2, 3, 3, 2, 1])
    batch = {
        "x": 3 * jax.random.normal(keys[1], (USERS, K, 4)),
        "label": jax.random.randint(keys[2], (USERS, K), 0, 5),
        "example_weight": jnp.asarray(np.arange(K) < count[:, None], jnp.float32),
    }
    return params, batch, count


@jax.jit
def clipped_sum(params, batch, clip):
    def losses(params, batch):
        return per_user(loss)(params, {}, batch, None)[0]

    return fnet.clipped_grad(losses, 1.0)(params, batch, clip=clip)


@jax.jit
def gradient_of_mean(params, examples):
    return jax.grad(lambda p: loss(p, {}, examples, None)[0].mean())(params)


def test_clips_the_mean_gradient_of_each_users_examples(problem):
    params, batch, count = problem
    clip, expected, norms = 0.4, jax.tree.map(jnp.zeros_like, params), []
    for user in range(USERS):
        own = {n: batch[n][user, : count[user]] for n in ("x", "label")}
        zeros = jax.tree.map(jnp.zeros_like, params)
        grad = gradient_of_mean(params, own) if count[user] else zeros
        norms.append(float(optax.tree.norm(grad)))
        scale = min(1.0, clip / max(norms[-1], 1e-30))
        expected = jax.tree.map(lambda s, g, a=scale: s + a * g, expected, grad)
    assert min(norms[1:]) < clip < max(norms)
    total, info = clipped_sum(params, batch, clip)
    chex.assert_trees_all_close(total, expected, atol=1e-6)
    np.testing.assert_allclose(info.norms, norms, rtol=1e-5, atol=1e-7)


def test_padding_whose_derivative_is_nan_changes_nothing():
    def norms(params, state, batch, key):
        return jnp.linalg.norm(batch["x"] * params["w"][None], axis=-1), fnet.Aux(state, {})

    x = jnp.array([[[3.0, 4.0], [0.0, 0.0]], [[1.0, 0.0], [0.0, 2.0]]])
    batch = {"x": x, "example_weight": jnp.array([[1.0, 0.0], [1.0, 1.0]])}

    def losses(params, batch):
        return per_user(norms)(params, {}, batch, None)[0]

    total, _ = fnet.clipped_grad(losses, 1e6)({"w": jnp.ones(2)}, batch)
    chex.assert_trees_all_close(total["w"], jnp.array([9 / 5 + 0.5, 16 / 5 + 1.0]))


def test_a_user_changes_the_sum_by_at_most_the_clip(problem):
    params, batch, count = problem
    clip = 0.1
    total, _ = clipped_sum(params, batch, clip)
    for user in np.flatnonzero(count):
        weight = batch["example_weight"].at[user].set(0)
        without, _ = clipped_sum(params, batch | {"example_weight": weight}, clip)
        change = optax.tree.norm(jax.tree.map(jnp.subtract, total, without))
        assert 0 < change <= clip * 1.0001


def test_rejects_a_batch_without_weights_of_examples(problem):
    params, batch, _ = problem
    batch = {name: array for name, array in batch.items() if name != "example_weight"}
    with pytest.raises(ValueError, match=r"needs example_weight \[users, k\], 0 for padding"):
        per_user(loss)(params, {}, batch, None)


def test_metrics_are_means_over_a_users_examples(problem):
    params, batch, count = problem
    _, aux = per_user(loss)(params, {}, batch, None)
    for user in range(USERS):
        own = batch["label"][user, : count[user]]
        assert float(aux.metrics["label"][user]) == pytest.approx(
            float(own.mean()) if own.size else 0
        )


def dataset(weight=lambda rows: {}):
    rows = {"value": np.arange(len(USER_OF_ROW), dtype=np.float32)}
    return Dataset(
        train=rows,
        test=rows,
        classes=(),
        augment=lambda rows, generator: (
            rows | {"noise": generator.random(len(rows["value"]))} | weight(rows)
        ),
        users=USER_OF_ROW,
    )


def take(n, seed=0, batch_size=3, after=None, **options):
    batches = user_batches(dataset(**options), PoissonSampling(USERS, batch_size), K, seed)
    if after is not None:
        batches.set_state(after)
    return [next(batches) for _ in range(n)], batches


def examples_of(batch):
    """User of each sampled row of a batch, with their distinct examples."""
    drawn = []
    for u in np.flatnonzero(batch["weight"]):
        values = batch["value"][u][batch["example_weight"][u] == 1].astype(int)
        (user,) = set(USER_OF_ROW[batch["value"][u].astype(int)])
        drawn.append((user, values))
    return drawn


def test_batches_hold_up_to_k_distinct_examples_of_each_sampled_user():
    seen = set()
    for batch in take(60)[0]:
        assert batch["value"].shape == batch["example_weight"].shape == (len(batch["weight"]), K)
        drawn = examples_of(batch)
        assert len({user for user, _ in drawn}) == len(drawn)
        for user, values in drawn:
            assert len(set(values)) == len(values) == min(K, (user == USER_OF_ROW).sum())
            seen |= set(values)
        assert not batch["example_weight"][batch["weight"] == 0].any()
    assert seen == set(range(len(USER_OF_ROW)))  # also of users with more than k


def test_users_are_sampled_independently_with_one_probability():
    steps = 1500
    joined = np.zeros((steps, USERS))
    for row, batch in zip(joined, take(steps)[0], strict=True):
        row[[user for user, _ in examples_of(batch)]] = 1
    probability = 3 / USERS
    spread = np.sqrt(probability * (1 - probability) / steps)
    assert np.abs(joined.mean(0) - probability).max() < 4.5 * spread
    correlation = np.corrcoef(joined.T)[~np.eye(USERS, dtype=bool)]
    assert np.abs(correlation).max() < 5 / np.sqrt(steps)


def test_batches_depend_on_seed_and_step_and_resume():
    first, batches = take(3)
    position = json.loads(json.dumps(batches.get_state()))
    rest = [next(batches) for _ in range(2)]
    again = take(2, after=position)[0]
    chex.assert_trees_all_equal(rest, again)
    assert not np.array_equal(first[0]["value"], take(1, seed=1)[0][0]["value"])
    assert len({b["value"].tobytes() for b in (*first, *rest)}) == 5


def test_choice_and_augmentation_share_no_randomness():
    def augment(rows, generator):
        orders.append(generator.permutation(5))
        return rows

    orders, rows = [], {"value": np.arange(5)}
    one = Dataset(train=rows, test=rows, classes=(), augment=augment, users=np.zeros(5, int))
    batches = user_batches(one, PoissonSampling(1, 1), 5, seed=0)
    chosen = [next(batches)["value"][0] for _ in range(30)]
    assert len({tuple(order) for order in orders}) > 15  # of 120
    assert sum(map(np.array_equal, chosen, orders)) < 5


def test_unreadable_examples_are_left_out_of_a_users_mean():
    def weight(rows):
        return {"weight": (rows["value"] != 0).astype(np.float32)}  # the one example of user 0

    for batch in take(20, weight=weight)[0]:
        weights = batch["example_weight"]
        assert not weights[(batch["value"] == 0)].any()
        own = (batch["weight"] == 1) & (batch["value"][:, 0] != 0)
        assert (weights[own].sum(1) >= 1).all()


def test_a_split_has_no_user_in_both_parts():
    config = ArrayFile(test_fraction=0.3)
    is_test = hold_out_users(config, USER_OF_ROW)
    train, test = set(USER_OF_ROW[~is_test]), set(USER_OF_ROW[is_test])
    assert train
    assert test
    assert not train & test
    with pytest.raises(UserError, match=r"data.user: all examples are of the user ann"):
        hold_out_users(config, np.array(["ann", "ann"]))


def test_one_more_user_moves_no_other():
    users, config = np.array([f"user {i}" for i in range(1, 60)]), ArrayFile()
    before = dict(zip(users, hold_out_users(config, users), strict=True))
    more = np.array(["a new one, the first by name", *users])
    after = dict(zip(more, hold_out_users(config, more), strict=True))
    assert after | before == after


def test_an_array_names_the_users(tmp_path):
    ids = np.array(["ann", "bob", "cy", "dee", "ev\u00eb"])[np.arange(30) % 5]
    written = np.where(np.arange(30) < 15, np.char.replace(ids, "\u00eb", "e\u0308"), ids)  # Macs
    path = write_npz(tmp_path / "data.npz", x=make_images(), y=make_labels(), writer=written)
    data = array_cases.load(path, user="writer", examples_per_user=2)
    assert len(data.users) == num_examples(data.train)
    train = {user: set(ids[data.train["id"][data.users == user]]) for user in range(4)}
    assert [len(names) for names in train.values()] == [1] * 4
    held_out = set(ids[data.test["id"]])
    assert held_out | set.union(*train.values()) == set(ids)
    assert not held_out & set.union(*train.values())


@pytest.mark.parametrize(
    ("user", "message"),
    [
        ("writers", "data.user: no array writers in "),
        ("few", "is int64 of shape (3,); expected one integer or string for each of the 30"),
        ("real", "is float64 of shape (30,); expected one integer or string"),
    ],
)
def test_refuses_arrays_that_do_not_name_users(tmp_path, user, message):
    others = {"writer": np.arange(30), "few": np.arange(3), "real": np.ones(30)}
    path = write_npz(tmp_path / "data.npz", x=make_images(), y=make_labels(), **others)
    assert message in array_cases.load_error(path, user=user, examples_per_user=2)


def test_folders_in_classes_are_users(tmp_path):
    for i, name in enumerate(["cat/ann/1", "cat/ann/2", "cat/bob/1", "dog/ann/3", "dog/cy/deep/1"]):
        write_image(tmp_path / "train" / f"{name}.png", i)
    write_class_folders(tmp_path, train=0)
    options = {"image_size": 8, "crop": "center", "user": "folder", "examples_per_user": 2}
    data = ImageFolder(path=str(tmp_path), **options).load()
    assert data.users.tolist() == [0, 0, 1, 0, 2]  # a folder's name is one user in all classes
    for i in range(30):
        write_image(tmp_path / "whole" / ("cat", "dog")[i % 2] / f"user {i // 3}" / f"{i}.png", i)
    data = ImageFolder(path=str(tmp_path / "whole"), **options).load()
    train, test = len(data.users), num_examples(data.test)
    held_out = {data.test_name(i).split("/")[-2] for i in range(test)}
    assert held_out.isdisjoint(data.name(i).split("/")[-2] for i in range(train))
    write_image(tmp_path / "train" / "cat" / "loose.png")
    with pytest.raises(UserError, match=r"cat/loose.png is in no folder of a user"):
        ImageFolder(path=str(tmp_path), **options).load()


def test_documents_are_users(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("|".join(["a" * 40, "b" * 10, "c" * 25, "d" * 30]))
    options = {"context": 8, "separator": "|", "test_fraction": 0.25, "examples_per_user": 2}
    data = TextFile(path=str(path), user="document", **options).load()
    tokens = data.augment(data.train, np.random.default_rng(0))["tokens"]
    assert [chr(row[0]) for row in tokens] == ["a"] * 5 + ["b"] * 2 + ["c"] * 3
    assert data.users.tolist() == [0] * 5 + [1] * 2 + [2] * 3
    with pytest.raises(UserError, match=r"data.user: document needs data.separator"):
        TextFile(path=str(path), user="document", context=8).load()


RECIPE = """
from train.config import ArrayFile, Clipped, Config, Mlp, Optim, Train

def config():
    return Config(
        name="users",
        data=ArrayFile(path="digits.npz", user="writer", examples_per_user=8, batch_size=20),
        model=Mlp(hidden=()),
        optim=Optim(learning_rate=0.5, momentum=0.0),
        grad=Clipped(noise_multiplier=1.0, delta=1e-3, insecure_noise_seed=0),
        train=Train(steps=6, log_every=3, eval_every=6),
    )
"""


WRITERS = 83
"""Of 100 writers, a hash of the name holds 17 out for testing."""


@pytest.fixture
def digits_of_writers(workplace):
    digits = load_digits()
    writers = np.random.default_rng(0).integers(0, 100, len(digits.target))
    images = digits.images.astype(np.float32) / 16
    np.savez(workplace / "digits.npz", x=images, y=digits.target, writer=writers)
    (workplace / "users.py").write_text(RECIPE)
    return workplace


@pytest.mark.slow
def test_a_run_accounts_for_users(digits_of_writers):
    privacy = setup(recipes.load("users.py")).privacy
    assert (privacy.unit, privacy.sampling.probability) == ("user", 20 / WRITERS)
    assert privacy.epsilon(6) == Privacy(1.0, PoissonSampling(WRITERS, 20), 1e-3).epsilon(6)
    assert "at delta 0.001 after 6 steps for each user (" in privacy.describe(6)


def test_a_users_run_updates_by_clipped_users(digits_of_writers):
    """A step moves the parameters as much as its users, each at most clip / batch_size."""
    config = recipes.load("users.py")
    run = setup(config)
    assert run.steps_per_epoch == WRITERS / 20
    batch = next(run.training_batches(0))
    assert {n: a.shape[:2] for n, a in run.batch_shapes.items()} == {
        n: a.shape[:2] for n, a in batch.items()
    }
    state = run.init(jax.random.key(0))
    one = batch | {"weight": np.eye(1, len(batch["weight"]), dtype=np.float32)[0]}
    none = batch | {"weight": np.zeros_like(batch["weight"])}
    after = [run.step(jax.tree.map(jnp.copy, state), b)[0].params for b in (one, none)]
    moved = float(optax.tree.norm(jax.tree.map(jnp.subtract, *after)))
    assert 0 < moved <= 0.5 * 1.0 / 20 * 1.001  # learning rate * clip / batch_size


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--data.user", "None"), "data.examples_per_user: 8, but there are no users"),
        (("--data.examples-per-user", "None"), "data.examples_per_user: data.user needs it, too"),
        (("--grad.mode", "mean"), "data.user: writer, but users are protected by noise only"),
        (("--grad.delta", "0.02"), "grad.delta: 0.02 would allow publishing one of 83 users"),
        (("--data.batch-size", "84"), "data.batch_size: 84 is more than the 83 users"),
    ],
)
def test_a_mistake_about_users_is_one_line(words, message, digits_of_writers, capsys):
    assert exit_code("train", "users.py", "--out", "run", *words) == 2
    assert_one_line_error(capsys, message)
