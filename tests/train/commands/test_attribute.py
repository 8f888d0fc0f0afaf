"""``fnet attribute``, and runs that record scores of their training examples."""

import csv
import types

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from PIL import Image
from program_cases import (
    TINY,
    assert_one_line_error,
    exit_code,
    final_state,
    fnet_command,
    initial_run,
)
from rich.console import Console
from sklearn.datasets import load_digits

from fnet.autodiff import per_example_grad
from train.arguments import AttributeArguments
from train.commands.attribute import attribute
from train.config import Config, ImageFolder, LanguageModel, Mean, TextFile
from train.config.recipes import load
from train.data import Dataset
from train.errors import UserError
from train.gradients.attribution import Attribution
from train.run import attribution, open_run
from train.run.checkpoints import Checkpoints
from train.run.open_run import OpenRun
from train.run.run_folder import RunFolder
from train.run.setup import setup

RECORDED = TINY.replace("PreactResNet(widths=(4,), blocks_per_stage=1)", "Mlp(hidden=(8,))")
RECORDED = RECORDED.replace("PreactResNet", "Mlp, Attribution")
RECORDED = RECORDED.replace("0.05,", '0.05, schedule="constant",')
RECORDED = RECORDED.replace(
    "train=Train", "grad=Attribution(validation_batch=3),\n        train=Train"
)


@pytest.fixture(scope="module")
def recipes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("attribute")
    (folder / "recorded.py").write_text(RECORDED)
    (folder / "tiny.py").write_text(TINY)
    image = load_digits().images[4] * 15
    Image.fromarray(image.astype(np.uint8)).save(folder / "four.png")
    return folder


@pytest.fixture(scope="module")
def recorded(recipes):
    fnet_command("train", recipes / "recorded.py", "--out", recipes / "recorded")
    return recipes / "recorded"


@pytest.fixture(scope="module")
def trained(recipes):
    """A run that recorded nothing."""
    config = load(str(recipes / "recorded.py")).replace(grad=Mean())
    return initial_run(recipes / "plain", config).path


def table(path, place=frozenset({"index"})):
    with path.open() as file:
        rows = list(csv.DictReader(file))
    assert rows[0].keys() == {"row", "example", "label", "loss", "score"} | place
    return rows


def column(rows, name):
    """Values of a column, by row."""
    values = {int(row["row"]): float(row[name]) for row in rows}
    return np.array([values[i] for i in range(len(values))])


def test_a_run_records_scores_of_its_training_examples(recorded, capsys):
    rows = table(recorded / "attribution.csv")
    assert len(rows) == 1437
    seen = [row for row in rows if row["loss"] != "nan"]
    assert len(seen) == 8 * 16  # Eight steps of sixteen examples, without the others.
    assert [float(r["loss"]) for r in seen] == sorted(
        (float(r["loss"]) for r in seen), reverse=True
    )
    (_, _, _, opt_state, *_), _ = final_state(recorded)
    chex.assert_trees_all_close(column(rows, "score"), opt_state.scores, rtol=1e-5)
    assert np.count_nonzero(opt_state.scores) == 8 * 16
    labels = load_digits().target  # as the user has them, before the split
    assert all(row["label"] == str(labels[int(row["index"])]) for row in rows)
    assert (recorded / "attribution.png").is_file()
    before = (recorded / "attribution.csv").read_bytes()
    fnet_command("attribute", recorded, "--top-k", "2")
    assert (recorded / "attribution.csv").read_bytes() == before
    lines = [x for x in capsys.readouterr().out.splitlines() if x.startswith("highest loss")]
    assert [line.split()[2] for line in lines] == [row["example"] for row in rows[:2]]


def test_the_report_shows_the_pictures(recorded, capsys):
    fnet_command("report", recorded)
    assert "may have wrong labels" in (recorded / "report.html").read_text()


def test_a_network_that_mixes_examples_cannot_record(recipes, capsys):
    assert exit_code("train", recipes / "tiny.py", "--grad.mode", "attribution") == 2
    assert_one_line_error(capsys, "grad: InRun: ")


def losses_and_params(folder):
    """The losses of a run in evaluation, its parameters, and all training examples."""
    run = setup(RunFolder(folder).read_config())
    with Checkpoints(RunFolder(folder).checkpoints) as checkpoints:
        network = checkpoints.restore_network(run.task.model.init)

    def losses(params, batch):
        return run.task.measure(params, network.model_state, batch).metrics["loss"]

    rows = attribution.TrainingRows(run)
    parts = [rows.batch(i) for i in range(len(rows))]
    counts = [len(rows.indices(i)) for i in range(len(rows))]
    batch = {
        n: np.concatenate([p[n][:c] for p, c in zip(parts, counts, strict=True)]) for n in parts[0]
    }
    return losses, network.evaluation_params, batch


def explicit(losses, params, batch, query):
    """Inner products with the gradient of one query."""
    grads = jax.jit(per_example_grad(losses))(params, batch)
    of_query = jax.grad(lambda p: losses(p, query).sum())(params)
    products = jax.tree.map(lambda g, q: jnp.tensordot(g, q, q.ndim), grads, of_query)
    return np.asarray(sum(jax.tree.leaves(products)))


def test_scores_of_an_image_are_inner_products_with_its_gradient(trained, recipes, capsys):
    image = recipes / "four.png"
    fnet_command("attribute", trained, "--example", image, "--label", "4", "--method", "tracin")
    rows = table(trained / "attribution" / "image-four.csv")
    losses, params, batch = losses_and_params(trained)
    pixels = (load_digits().images[4:5] * 15).astype(np.uint8) / np.float32(255)
    query = {"image": jnp.asarray(pixels[..., None], jnp.float32), "label": jnp.array([4])}
    expected = explicit(losses, params, batch, query)
    chex.assert_trees_all_close(column(rows, "score"), expected, rtol=1e-3, atol=1e-4)
    chex.assert_trees_all_close(column(rows, "loss"), np.asarray(losses(params, batch)), rtol=1e-4)
    scores = [float(row["score"]) for row in rows]
    assert scores == sorted(scores, reverse=True)
    assert (trained / "attribution" / "image-four.png").is_file()
    out = capsys.readouterr().out
    assert out.count("helpful: ") == out.count("harmful: ") == 10


def test_images_are_scored_as_they_are_without_mixing(tmp_path, monkeypatch):
    seen = {}
    monkeypatch.setattr(open_run, "load", lambda config: seen.update(data=config.data) or 1 / 0)
    run = OpenRun(RunFolder(tmp_path), Config(data=ImageFolder(mixup=0.2, cutmix=1.0)))
    with pytest.raises(ZeroDivisionError):
        attribute(run, AttributeArguments(), Console(quiet=True))
    assert (seen["data"].mixup, seen["data"].cutmix) == (0, 0)


@pytest.mark.slow
def test_a_run_without_records_is_scored_for_its_test_loss(trained, monkeypatch, capsys):
    words = "attribute", trained, "--queries", "20", "--method", "tracin"
    fnet_command(*words)
    first = table(trained / "attribution.csv")
    assert len(first) == 1437
    out = capsys.readouterr().out
    assert "scoring 1,437 training examples of step 0 for the mean loss of 20 test" in out
    # A second call reads the blocks, and computes those that are missing.
    blocks = sorted((trained / "attribution" / "test").glob("*.npy"))
    blocks[3].unlink()
    fnet_command(*words)
    assert table(trained / "attribution.csv") == first
    monkeypatch.setattr(attribution, "augment_rows", None)  # No batch is read any more.
    values = attribution.score_in_blocks(
        trained / "attribution" / "test",
        attribution.read_sealed(trained / "attribution" / "test" / "blocks.json"),
        attribution.TrainingRows(setup(RunFolder(trained).read_config())),
        lambda: pytest.fail("all blocks are there"),
        lambda done, total: None,
    )
    assert values.shape == (1437, 2)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--example", "none.png"), "--example: none.png"),
        (
            ("--example", "four.png", "--label", "ten"),
            "--label: no class ten; expected one of 0, 1",
        ),
        (("--label", "4"), "--label: 4 has no effect with --example None; leave one of them out"),
        (("--prompt", "a"), "--prompt: needs --completion, too"),
        (("--prompt", "a", "--completion", "b"), "mlp, not of text"),
    ],
)
def test_mistakes_are_one_line(trained, recipes, words, message, monkeypatch, capsys):
    monkeypatch.chdir(recipes)
    assert exit_code("attribute", trained, *words) == 2
    assert_one_line_error(capsys, message)


def test_a_completion_is_a_query_of_its_tokens(tmp_path):
    (tmp_path / "text.txt").write_text("the cat sat on the mat. a dog ran to the log. " * 20)
    model = LanguageModel(mixers=("attention",), blocks=1, width=8, heads=1)
    data = TextFile(path=str(tmp_path / "text.txt"), context=8, batch_size=4)
    run = setup(Config(data=data, model=model))
    query = attribution.query_of(run, None, AttributeArguments(prompt="the ", completion="cat"))
    expected = np.frombuffer(b"the cat", np.uint8)[None]
    np.testing.assert_array_equal(query.batch["tokens"], expected)
    assert query.batch["loss_mask"].tolist() == [[False, False, False, True, True, True]]
    long = AttributeArguments(prompt="a", completion="far too long")
    with pytest.raises(UserError, match=r"has 12 tokens; expected 1 to data\.context 8"):
        attribution.query_of(run, None, long)


def test_each_step_is_scored_with_a_sixteenth_of_a_batch_from_256_test_examples():
    config = types.SimpleNamespace(data=types.SimpleNamespace(batch_size=70))
    dataset = Dataset({"x": np.zeros(40)}, {"x": np.arange(600)}, (), augment=None)
    mode, _ = Attribution().build_for(config, optax.sgd(0.1), None, dataset, lambda step: 0.1)
    x = mode.validation["x"]
    assert (len(x), x[0], x[-1], mode.validation_batch, mode.train_size) == (256, 0, 599, 4, 40)
