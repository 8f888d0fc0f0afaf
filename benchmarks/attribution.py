"""Training data attribution: wrong labels found, datamodeling scores, and the price of a step.

    python -m benchmarks.attribution
    python -m benchmarks.attribution --dattri PYTHON --only datamodel

Digits of scikit-learn, 1,437 for training and 360 for testing, with an MLP 64-64-64-10 and SGD.

- ``labels``: 5 % of the training labels are wrong. Each method ranks all training examples, and
  precision is the share of wrong labels among the first 5 %. Means of five seeds.
- ``datamodel``: the linear datamodeling score of Park et al. 2023. Networks are trained on 50
  random halves of the training set with three seeds each. The score is the rank correlation of
  their mean loss on a test example with the sum of the scores of the training examples in the half,
  averaged over 100 test examples. Scores are means over three networks trained on all examples.
- ``time``: a train step with in-run scores, relative to a plain one, in interleaved calls. The
  validation batch is a sixteenth of the batch.

``--dattri`` is a Python with PyTorch and dattri, which scores the same three networks.
"""

import itertools
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from scipy.stats import spearmanr

import fnet
from benchmarks.claims import Claim, argument_parser, publish
from benchmarks.measure import interleaved, markdown_table, step_caller
from fnet import layers
from fnet.attribution import InRun, Scores, ekfac, tracin, trak

SIZES, RATE, BATCH, EPOCHS = (64, 64, 64, 10), 0.1, 64, 20
SUBSETS, SEEDS, QUERIES, CHECKPOINTS = 50, 3, 100, 5
SHARE, LABEL_SEEDS = 0.05, 5
PARTS = ("labels", "datamodel", "time")


def digits() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Training and test images [N, 64] in [0, 1] with labels [N], split within each class."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    data = load_digits()
    x, y = (data.data / 16).astype(np.float32), data.target.astype(np.int32)
    train, test = train_test_split(np.arange(len(y)), test_size=0.2, stratify=y, random_state=0)
    return x[train], y[train], x[test], y[test]


def init(key: Array) -> dict[str, Array]:
    keys = jax.random.split(key, len(SIZES) - 1)
    params = {}
    for i, (n, m) in enumerate(itertools.pairwise(SIZES)):
        params[f"w{i}"] = jax.random.normal(keys[i], (n, m)) / n**0.5
        params[f"b{i}"] = jnp.zeros(m)
    return params


def network(params: dict[str, Array], x: Any) -> Any:
    for i in range(len(SIZES) - 1):
        x = x @ params[f"w{i}"] + params[f"b{i}"][None]
        x = jax.nn.relu(x) if i < len(SIZES) - 2 else x
    return x


def losses(params: dict[str, Array], x: Any, y: Any) -> Array:
    return fnet.losses.cross_entropy(network(params, x), y)


def order(seed: int, count: int) -> np.ndarray:
    """Indices [steps, BATCH] of the batches of a run, shuffled in each epoch."""
    rng = np.random.default_rng(seed)
    epochs = [rng.permutation(count)[: count // BATCH * BATCH] for _ in range(EPOCHS)]
    return np.concatenate(epochs).reshape(-1, BATCH)


@jax.jit
def train(params: Any, rows: Array, x: Array, y: Array, weights: Array) -> Any:
    """Train with SGD, an example counting by its weight; return parameters after each tenth."""

    def step(params: Any, rows: Array) -> tuple[Any, None]:
        def mean(params: Any) -> Array:
            weight = weights[rows]
            return (losses(params, x[rows], y[rows]) * weight).sum() / jnp.maximum(weight.sum(), 1)

        return jax.tree.map(lambda p, g: p - RATE * g, params, jax.grad(mean)(params)), None

    def part(params: Any, rows: Array) -> tuple[Any, Any]:
        params, _ = jax.lax.scan(step, params, rows)
        return params, params

    rows = rows[: len(rows) // 10 * 10].reshape(10, -1, BATCH)
    return jax.lax.scan(part, params, rows)[1]


def in_run(
    params: Any, rows: Array, x: Any, y: Any, validation: dict[str, Array], **options: Any
) -> Any:
    """Train with in-run scores and return the state of `InRun`."""
    x, y = jnp.asarray(x), jnp.asarray(y)
    mode = InRun(validation, len(x), RATE, **options)
    optimizer = mode.wrap_optimizer(optax.sgd(RATE))

    def loss(params: Any, model_state: Any, batch: Any, key: Array) -> Array:
        return losses(params, batch["x"], batch["label"])

    step = fnet.make_step(loss, optimizer, mode)
    state = fnet.TrainState.create(params=params, optimizer=optimizer, key=jax.random.key(0))

    def take(state: Any, rows: Array) -> tuple[Any, None]:
        return step.apply(state, {"x": x[rows], "label": y[rows], "row": rows})[0], None

    return jax.lax.scan(take, state, rows)[0].opt_state


# Wrong labels.


def wrong_labels(seed: int) -> dict[str, tuple[float, float]]:
    """Precision and area under the curve of each ranking, for labels that a seed flips."""
    from sklearn.metrics import roc_auc_score

    x, y, x_test, y_test = digits()
    rng = np.random.default_rng(seed)
    wrong = np.zeros(len(y), bool)
    wrong[rng.choice(len(y), round(SHARE * len(y)), replace=False)] = True
    y = np.where(wrong, (y + rng.integers(1, 10, len(y))) % 10, y).astype(np.int32)
    params, rows = init(jax.random.key(seed)), order(seed, len(y))
    validation = {"x": jnp.asarray(x_test), "label": jnp.asarray(y_test)}
    state = jax.jit(lambda p, r: in_run(p, r, x, y, validation, validation_batch=BATCH // 16))(
        params, rows
    )
    saved = train(params, rows, x, y, jnp.ones(len(y)))
    checkpoints = [jax.tree.map(lambda a, i=i: a[i], saved) for i in range(1, 10, 2)]
    last = checkpoints[-1]
    norms = [fnet.autodiff.per_example_norms(losses)(p, x, y) for p in checkpoints]

    def average(scorer: Callable[..., Array]) -> np.ndarray:
        return -Scores.of(scorer, [(x, y)]).values[:, 0]

    test = (x_test, y_test)
    rankings = {
        "mean loss in the run (InRun.mean_losses)": np.asarray(state.mean_losses),
        "in-run data Shapley (InRun.scores)": -np.asarray(state.scores),
        "TracIn, test loss": average(
            tracin(losses, checkpoints, [RATE] * len(checkpoints), test, average=True)
        ),
        "TracIn, self-influence": sum(np.square(n) for n in norms),
        "EK-FAC influence, test loss": average(ekfac(losses, last, [(x, y)], test, average=True)),
        "EK-FAC self-influence": np.diag(ekfac(losses, last, [(x, y)], (x, y))(x, y)),
        "loss after training": np.asarray(losses(last, x, y)),
        **confident(x, y, seed),
    }
    count = wrong.sum()
    return {
        name: (float(wrong[np.argsort(-r)[:count]].mean()), float(roc_auc_score(wrong, r)))
        for name, r in rankings.items()
    }


def confident(x: np.ndarray, y: np.ndarray, seed: int) -> dict[str, np.ndarray]:
    """Rank by cross-validated probability of the label, as confident learning does."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import cross_val_predict
    from sklearn.neural_network import MLPClassifier

    models = {
        "MLP": MLPClassifier((64, 64), max_iter=EPOCHS, random_state=seed),
        "logistic regression": LogisticRegression(max_iter=2000),
    }
    rankings = {}
    for name, model in models.items():
        p = cross_val_predict(model, x, y, cv=5, method="predict_proba")
        rankings[f"confident learning, {name}, 5 trainings"] = -p[np.arange(len(y)), y]
    return rankings


def labels_part() -> Iterator[Claim]:
    results = [wrong_labels(seed) for seed in range(LABEL_SEEDS)]
    means = {name: np.mean([r[name] for r in results], 0) for name in results[0]}
    rows = [
        {
            "ranking": name,
            "precision at 5 %": f"{precision:.3f}",
            "of each seed": " ".join(f"{r[name][0]:.3f}" for r in results),
            "area under the ROC curve": f"{area:.4f}",
        }
        for name, (precision, area) in means.items()
    ]
    print(f"\nWrong labels: {SHARE:.0%} of the labels of digits\n")
    print(markdown_table(rows))
    best = max(p for name, (p, _) in means.items() if name.startswith("confident"))
    yield Claim(
        "wrong labels of digits: precision of the mean loss in the run",
        "confident learning with its better model, which trains five times",
        means["mean loss in the run (InRun.mean_losses)"][0] / best,
        ">= 1.0",
        "quality",
    )


# Linear datamodeling score.


def datamodel_part(dattri: str | None) -> Iterator[Claim]:
    x, y, x_test, y_test = digits()
    chosen = np.random.default_rng(1).choice(len(y_test), QUERIES, replace=False)
    queries = (jnp.asarray(x_test[chosen]), jnp.asarray(y_test[chosen]))
    subsets: Any = np.stack(
        [np.random.default_rng(100 + i).permutation(len(y)) < len(y) // 2 for i in range(SUBSETS)]
    )
    outputs, saved, finals, starts = [], [], [], []
    for seed in range(SEEDS):
        params, rows = init(jax.random.key(seed)), jnp.asarray(order(seed, len(y)))

        def loss_of(weights: np.ndarray, params: Any = params, rows: Array = rows) -> Array:
            trained = train(params, rows, x, y, weights)
            return losses(jax.tree.map(lambda a: a[-1], trained), *queries)

        outputs.append(jax.lax.map(loss_of, subsets.astype(np.float32), batch_size=10))
        saved.append(train(params, rows, x, y, jnp.ones(len(y))))
        finals.append(jax.tree.map(lambda a: a[-1], saved[-1]))
        starts.append((params, rows))
    observed = np.mean(outputs, 0)

    def score(values: Any) -> float:
        predicted = -(subsets @ np.asarray(values, np.float64))  # [subsets, queries]
        ranks = [spearmanr(predicted[:, q], observed[:, q]).statistic for q in range(QUERIES)]
        return float(np.mean(ranks))

    batches, found = [(x, y)], {}

    def mean_over_seeds(make: Callable[[int], Any]) -> np.ndarray:
        return np.mean([np.asarray(make(seed)) for seed in range(SEEDS)], 0)

    def of_scorer(make: Callable[[int], Callable[..., Array]]) -> np.ndarray:
        return mean_over_seeds(lambda seed: Scores.of(make(seed), batches).values)

    def shapley(seed: int, *, second_order: bool) -> np.ndarray:
        def of_query(query: tuple[Array, Array]) -> Array:
            validation = {"x": query[0][None], "label": query[1][None]}
            return in_run(*starts[seed], x, y, validation, second_order=second_order).scores

        return np.asarray(jax.lax.map(of_query, queries, batch_size=10)).T

    def checkpoints_of(seed: int) -> list[Any]:
        steps = np.linspace(1, 9, CHECKPOINTS).astype(int)
        return [jax.tree.map(lambda a, i=i: a[i], saved[seed]) for i in steps]

    def fisher(seed: int) -> Callable[..., Array]:
        sampled = jax.random.categorical(jax.random.key(seed), network(finals[seed], x))
        return ekfac(losses, finals[seed], [(x, sampled)], queries, damping=0.1)

    print("\nscores: ", end="", flush=True)
    values = {
        "in-run data Shapley, first order": lambda: mean_over_seeds(
            lambda seed: shapley(seed, second_order=False)
        ),
        "in-run data Shapley, second order": lambda: mean_over_seeds(
            lambda seed: shapley(seed, second_order=True)
        ),
        f"TracIn, {CHECKPOINTS} checkpoints": lambda: of_scorer(
            lambda seed: tracin(losses, checkpoints_of(seed), [RATE] * CHECKPOINTS, queries)
        ),
        "inner products, last checkpoint": lambda: of_scorer(
            lambda seed: tracin(losses, [finals[seed]], [1.0], queries)
        ),
        "EK-FAC influence, labels drawn": lambda: of_scorer(fisher),
        "EK-FAC influence, empirical": lambda: of_scorer(
            lambda seed: ekfac(losses, finals[seed], batches, queries)
        ),
        "TRAK, 512 projections": lambda: (
            Scores.of(trak(losses, finals, batches, queries, jax.random.key(0)), batches).values
        ),
        "TRAK, 512 projections, damping 0.1": lambda: (
            Scores.of(
                trak(losses, finals, batches, queries, jax.random.key(0), damping=0.1), batches
            ).values
        ),
        "unrolled gradient through training": lambda: mean_over_seeds(
            lambda seed: unrolled(*starts[seed], x, y, queries)
        ),
    }
    for name, make in values.items():
        found[f"fnet: {name}"] = score(make())
        print(f"{name} {found[f'fnet: {name}']:.3f}; ", end="", flush=True)
    if dattri:
        arrays = {"x": x, "y": y, "qx": queries[0], "qy": queries[1]}
        for seed in range(SEEDS):
            for i, params in enumerate([*checkpoints_of(seed), finals[seed]]):
                arrays |= {f"{n}/{seed}/{i}": a for n, a in params.items()}
        found |= {f"dattri: {n}": score(v) for n, v in of_dattri(dattri, arrays).items()}
    table = [{"method": name, "LDS": f"{value:.3f}"} for name, value in found.items()]
    print(f"\n\nLinear datamodeling score: {SUBSETS} halves x {SEEDS} seeds, {QUERIES} queries\n")
    print(markdown_table(table))
    for kind in ("TracIn", "EK-FAC", "TRAK"):
        theirs = [v for n, v in found.items() if n.startswith(f"dattri: {kind}")]
        ours = max(v for n, v in found.items() if n.startswith(f"fnet: {kind}"))
        if theirs:
            yield Claim(
                f"linear datamodeling score of {kind} on digits", "dattri, the same networks",
                ours / max(theirs), ">= 1.0", "quality",
            )  # fmt: skip


def unrolled(params: Any, rows: Array, x: Any, y: Any, queries: tuple[Array, Array]) -> np.ndarray:
    """Derivative of each query's loss by the weights of training examples, through training."""

    def loss_of(weights: Array) -> Array:
        trained = train(params, rows, x, y, weights)
        return losses(jax.tree.map(lambda a: a[-1], trained), *queries)

    @jax.jit
    def rows_of(cotangents: Array) -> Array:
        _, backward = jax.vjp(loss_of, jnp.ones(len(y)))
        return jax.vmap(lambda ct: backward(ct)[0])(cotangents)

    parts = jnp.split(jnp.eye(QUERIES), 10)
    return -np.concatenate([np.asarray(rows_of(part)) for part in parts]).T


def of_dattri(python: str, arrays: dict[str, Any]) -> dict[str, np.ndarray]:
    """Scores [train, queries] of dattri's methods, computed by another Python."""
    script = Path(__file__).with_name("attribution_dattri.py")
    with tempfile.TemporaryDirectory() as folder:
        given, result = Path(folder) / "given.npz", Path(folder) / "result.npz"
        values: Any = {name: np.asarray(a) for name, a in arrays.items()}
        np.savez(given, **values)
        subprocess.run([python, str(script), str(given), str(result)], check=True)
        with np.load(result) as loaded:
            return dict(loaded)


# Time of a step.


def time_part(rounds: int) -> Iterator[Claim]:
    cases = {
        "MLP 784-1024-1024-10, batch 1,024": (
            layers.mlp((784, 1024, 1024, 10), "relu"), (784,), 1024, 10,
        ),
        "MLP 256-512-512-512-10, batch 512": (
            layers.mlp((256, 512, 512, 512, 10), "relu"), (256,), 512, 10,
        ),
    }  # fmt: skip
    measured = {
        name: step_costs(model, shape, size, classes, rounds)
        for name, (model, shape, size, classes) in cases.items()
    }
    name = "transformer, 4 layers of 256, 16 rows of 128 tokens"
    measured[name] = language_costs(rounds)
    rows = []
    for name, by_kind in measured.items():
        (plain_seconds, plain_flops), *_ = by_kind.values()
        rows += [
            {
                "network": name,
                "step": kind,
                "time": f"{1e3 * seconds:.1f} ms",
                "time / plain": f"{seconds / plain_seconds:.2f}",
                "FLOPs / plain": f"{flops / plain_flops:.2f}",
            }
            for kind, (seconds, flops) in by_kind.items()
        ]
    print("\nA step; the validation batch is a sixteenth of the batch\n")
    print(markdown_table(rows))
    for name, by_kind in measured.items():
        ratio = by_kind["in-run scores"][0] / by_kind["plain"][0]
        claim = f"step with in-run scores, {name}: time"
        yield Claim(claim, "plain step", ratio, "<= 1.15", "time")


def compare_steps(
    loss: Any, params: Any, batch: dict[str, Array], rounds: int, kinds: tuple[bool, ...]
) -> dict[str, tuple[float, float]]:
    """Seconds and FLOPs of a plain step, and of steps with in-run scores of these orders."""
    size = len(batch["row"])
    validation = {name: a[: size // 16] for name, a in batch.items()}
    modes = {"plain": None, "in-run scores": False, "in-run scores, second order": True}
    calls, flops = {}, {}
    for name, second_order in modes.items():
        if second_order is not None and second_order not in kinds:
            continue
        optimizer, mode = optax.adam(1e-3), fnet.autodiff.mean
        if second_order is not None:
            mode = InRun(validation, size, 1e-3, second_order=second_order)
            optimizer = mode.wrap_optimizer(optimizer)
        step = fnet.make_step(loss, optimizer, mode)
        copy = jax.tree.map(jnp.copy, params)
        state = fnet.TrainState.create(params=copy, optimizer=optimizer, key=jax.random.key(0))
        program: Any = fnet.compile_step(step, state, batch)
        flops[name] = float(program.compiled.cost_analysis()["flops"])
        calls[name] = step_caller(program, state, batch)
    seconds = interleaved(calls, rounds)
    return {name: (seconds[name], flops[name]) for name in calls}


def step_costs(
    model: Any, shape: Any, size: int, classes: int, rounds: int
) -> dict[str, tuple[float, float]]:
    def loss(params: Any, model_state: Any, batch: Any, key: Array) -> Array:
        logits, _ = model.apply(params, {}, batch["x"], key=key, train=True)
        return fnet.losses.cross_entropy(logits, batch["label"])

    rng = np.random.default_rng(0)
    batch = {
        "x": jnp.asarray(rng.normal(size=(size, *shape)), jnp.float32),
        "label": jnp.asarray(rng.integers(0, classes, size), jnp.int32),
        "row": jnp.arange(size),
    }
    params, _ = model.init(jax.random.key(0))
    return compare_steps(loss, params, batch, rounds, (False, True))


def language_costs(rounds: int) -> dict[str, tuple[float, float]]:
    width, depth, vocabulary, length, size = 256, 4, 256, 128, 16
    rng = np.random.default_rng(0)
    keys = iter(jax.random.split(jax.random.key(0), 4 * depth + 2))

    def matrix(n: int, m: int) -> Array:
        return jax.random.normal(next(keys), (n, m)) / n**0.5

    params: dict[str, Any] = {"embed": matrix(vocabulary, width), "head": matrix(width, vocabulary)}
    for i in range(depth):
        params |= {f"qkv{i}": matrix(width, 3 * width), f"out{i}": matrix(width, width)}
        params |= {f"up{i}": matrix(width, 4 * width), f"down{i}": matrix(4 * width, width)}

    def norm(x: Array) -> Array:
        return x / jnp.sqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-6)

    def loss(params: Any, model_state: Any, batch: Any, key: Array) -> Array:
        tokens = batch["tokens"]
        x = params["embed"][tokens[:, :-1]]
        shape = (*x.shape[:2], 4, width // 4)
        for i in range(depth):
            q, k, v = (a.reshape(shape) for a in jnp.split(norm(x) @ params[f"qkv{i}"], 3, -1))
            y = jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape)
            x += y @ params[f"out{i}"]
            x += jax.nn.gelu(norm(x) @ params[f"up{i}"]) @ params[f"down{i}"]
        logits = norm(x) @ params["head"]
        return fnet.losses.cross_entropy(logits, tokens[:, 1:]).mean(-1)

    tokens = jnp.asarray(rng.integers(0, vocabulary, (size, length + 1)), jnp.int32)
    return compare_steps(
        loss, params, {"tokens": tokens, "row": jnp.arange(size)}, rounds, (False,)
    )


def main() -> None:
    parser = argument_parser(__doc__, rounds=15)
    parser.add_argument("--only", choices=PARTS, nargs="+", default=PARTS)
    parser.add_argument("--dattri", metavar="PYTHON", help="A Python with PyTorch and dattri.")
    options = parser.parse_args()
    claims: list[Claim] = []
    if "labels" in options.only:
        claims += labels_part()
    if "datamodel" in options.only:
        claims += datamodel_part(options.dattri)
    if "time" in options.only:
        claims += time_part(options.rounds)
    publish(claims, options, "jax", "jaxlib", "scikit-learn")


if __name__ == "__main__":
    main()
