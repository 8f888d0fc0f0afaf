"""Held-out losses of six tasks with and without the attention context, and its cost.

    python -m benchmarks.attention_context --path tinyshakespeare.txt

Each task trains the same network in three forms: without contexts, with lagged contexts and with
current ones (`fnet.layers.stack`). The forms differ by one trained parameter per context.

1. Selection. One seed chooses the learning rate of each form from the same grid. For the two forms
   with contexts it then chooses the rate of the moving average, and a factor of the strengths'
   learning rate. This favors the forms with contexts.
2. Comparison. Five other seeds train each form. A seed sets the examples, their order and the
   initial values, which are equal for the three forms. Held-out examples differ from the
   selection's.
3. Verdict. A form helps or hurts if the 95 % interval of the mean difference to "without" does not
   contain 0 (Student's t, paired by seed), and if it does not for five further seeds either, with
   the same sign. Otherwise there is no difference.

Held-out losses are computed without updating the contexts, as in generation. In the two tasks with
streams, the distribution of the batches changes every 20 steps. Their held-out loss is the loss of
each batch of the second half before the step that trains on it.

With ``--out``, runs are saved there, and an interrupted benchmark resumes.
"""

import functools
import itertools
import json
import statistics
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import scipy.stats
from jax import Array

import fnet
from benchmarks.claims import Claim, argument_parser, publish
from benchmarks.measure import markdown_table
from fnet import diffusion, layers, models
from fnet.layers.attention_context import RATE, Passing
from train.config import Digits

WIDTH, HEADS, TOKENS, ROWS, TEXT_ROWS = 64, 4, 64, 16, 8
HELD_OUT_ROWS = 256
PERIOD = 20
"""Steps between two changes of a stream."""

FORMS: dict[str, Passing | None] = {"none": None, "lagged": "lagged", "current": "current"}
LEARNING_RATES, CONTEXTS = (1e-3, 3e-3), ((RATE, 1.0), (0.3, 30.0))
"""Choices: learning rates, and for forms with contexts, rates and boosts (see `Setting`)."""

WARMUP = 30

QUICK = ("copy", "little", "denoising")
"""Tasks of ``--quick``."""

SELECTION = 0
COMPARISON, CONFIRMATION = range(1, 6), range(6, 11)
"""Seeds."""

Batch = dict[str, np.ndarray]


class Setting(NamedTuple):
    """Choices for each form.

    Attributes:
      rate: weight of the current batch in the moving average.
      boost: factor of the learning rate of the strengths.
      learning_rate: peak of the schedule.
    """

    rate: float
    boost: float
    learning_rate: float


class Task(NamedTuple):
    """A problem and a network for it.

    Attributes:
      name: name of its files.
      what: task and network, for the table.
      build: ``build(context, rate) -> model``.
      losses: ``losses(model, params, state, batch, key, train) -> (losses [B], state)``.
      batches: ``batches(seed, steps)`` returns the batches of a run.
      held_out: ``held_out(seed)`` returns the held-out examples; None for a stream.
      steps: number of train steps.
    """

    name: str
    what: str
    build: Callable[[Passing | None, float], Any]
    losses: Callable[..., tuple[Array, Any]]
    batches: Callable[[int, int], Iterator[Batch]]
    held_out: Callable[[int], Batch] | None
    steps: int


# Tasks


def tasks(path: Path) -> list[Task]:
    """Build all tasks; ``path`` is a text file of 120 kB or more."""
    recall = functools.partial(recall_rows, pairs=8, keys=32)
    copy = functools.partial(copy_rows, items=12, length=51, symbols=16)
    return [
        synthetic("recall", "associative recall, 2 RG-LRU blocks", recall, 64, rg_lru, 1500),
        synthetic("copy", "selective copying, 2 RG-LRU blocks", copy, 18, rg_lru, 1000),
        Task(
            "chains",
            "stream of 2 Markov chains, 2 attention blocks",
            language_model(8, attention, 2),
            token_losses,
            functools.partial(chain_batches, 2 * ROWS, TOKENS // 4, chains=2, symbols=8, alpha=0.5),
            None,
            1200,
        ),
        Task(
            "texts",
            "stream of Shakespeare and Python, 3 attention blocks",
            language_model(256, attention, 3),
            token_losses,
            functools.partial(text_batches, path),
            None,
            800,
        ),
        little_text(path, 600),
        denoising(1000),
    ]


def attention(causal: bool = True) -> fnet.Layer:
    return layers.attention(WIDTH, HEADS, causal=causal, rotary=10_000.0 if causal else None)


def rg_lru() -> fnet.Layer:
    return layers.rg_lru(WIDTH)


def language_model(vocabulary: int, mixer: Callable[[], fnet.Layer], blocks: int) -> Callable:
    """Return ``build`` of a task on tokens."""

    def build(context: Passing | None, rate: float) -> models.LanguageModel:
        block = layers.Block(mixer(), layers.feed_forward(WIDTH, 2 * WIDTH))
        return models.language_model(
            vocabulary=vocabulary,
            width=WIDTH,
            blocks=[block] * blocks,
            context=context,
            context_rate=rate,
        )

    return build


def token_losses(
    model: models.LanguageModel,
    params: Any,
    state: Any,
    batch: Mapping[str, Array],
    key: Array | None,
    train: bool,
) -> tuple[Array, Any]:
    """Compute the mean loss [B] of the scored tokens, by default of all."""
    inputs, labels = batch["tokens"][:, :-1], batch["tokens"][:, 1:]
    losses, state = model.losses(params, state, inputs, labels, key=key, train=train)
    scored = batch.get("scored", jnp.ones_like(losses))
    return (losses * scored).sum(1) / scored.sum(1), state


def synthetic(
    name: str,
    what: str,
    make_rows: Callable[[np.random.Generator, int], Batch],
    vocabulary: int,
    mixer: Callable[[], fnet.Layer],
    steps: int,
) -> Task:
    """Build a task whose rows are drawn as they are needed, for a network of two blocks."""

    def batches(seed: int, steps: int) -> Iterator[Batch]:
        rng = np.random.default_rng([seed, 0])
        return (make_rows(rng, ROWS) for _ in range(steps))

    def held_out(seed: int) -> Batch:
        return make_rows(np.random.default_rng([seed, 1]), HELD_OUT_ROWS)

    build = language_model(vocabulary, mixer, 2)
    return Task(name, what, build, token_losses, batches, held_out, steps)


def recall_rows(rng: np.random.Generator, rows: int, *, pairs: int, keys: int) -> Batch:
    """Draw pairs of key and value, then the same pairs in random order; the values are scored.

    Arora et al. 2023, "Zoology: Measuring and Improving Recall in Efficient Language Models".
    Tokens are int32 [rows, 4 pairs], keys from 0 and values from ``keys``.
    """
    key = np.argsort(rng.random((rows, keys)), 1)[:, :pairs]
    value = keys + rng.integers(0, keys, (rows, pairs))
    order = np.argsort(rng.random((rows, pairs)), 1)
    asked = (np.take_along_axis(a, order, 1) for a in (key, value))
    given, again = (np.stack([*both], -1).reshape(rows, -1) for both in ((key, value), asked))
    tokens = np.concatenate([given, again], 1)
    scored = np.zeros((rows, tokens.shape[1] - 1), np.float32)
    scored[:, 2 * pairs :: 2] = 1
    return {"tokens": tokens.astype(np.int32), "scored": scored}


def copy_rows(
    rng: np.random.Generator, rows: int, *, items: int, length: int, symbols: int
) -> Batch:
    """Draw symbols among blanks, then a separator and the same symbols, which are scored.

    Gu, Dao 2023, "Mamba: Linear-Time Sequence Modeling with Selective State Spaces", 4.1.1.
    Tokens are int32 [rows, length + 1 + items], 0 for a blank and 1 for the separator.
    """
    at = np.sort(np.argsort(rng.random((rows, length)), 1)[:, :items], 1)
    values = 2 + rng.integers(0, symbols, (rows, items))
    scattered = np.zeros((rows, length), np.int64)
    np.put_along_axis(scattered, at, values, 1)
    tokens = np.concatenate([scattered, np.ones((rows, 1), np.int64), values], 1)
    scored = np.zeros((rows, tokens.shape[1] - 1), np.float32)
    scored[:, length:] = 1
    return {"tokens": tokens.astype(np.int32), "scored": scored}


def chain_batches(
    rows: int, steps_per_row: int, seed: int, steps: int, *, chains: int, symbols: int, alpha: float
) -> Iterator[Batch]:
    """Draw from Markov chains with random transitions, another chain every `PERIOD` steps.

    Transitions have a Dirichlet distribution of concentration ``alpha``. Tokens are int32 [rows,
    steps_per_row + 1].
    """
    rng = np.random.default_rng([seed, 2])
    cumulative = rng.dirichlet(np.full(symbols, alpha), (chains, symbols)).cumsum(-1)
    chain = 0
    for step in range(steps):
        if step % PERIOD == 0:
            chain = (chain + int(rng.integers(1, chains))) % chains
        tokens = np.zeros((rows, steps_per_row + 1), np.int32)
        tokens[:, 0] = rng.integers(0, symbols, rows)
        uniform = rng.random((rows, steps_per_row))
        for t in range(steps_per_row):
            below = cumulative[chain, tokens[:, t]] < uniform[:, t, None]
            tokens[:, t + 1] = np.minimum(below.sum(1), symbols - 1)
        yield {"tokens": tokens}


def text_batches(path: Path, seed: int, steps: int) -> Iterator[Batch]:
    """Alternate between a text and Python's standard library; no row comes twice."""
    library = Path(sysconfig.get_path("stdlib"))
    code = b"".join(p.read_bytes() for p in sorted(library.glob("*.py")))[: 2**20]
    rng = np.random.default_rng([seed, 3])
    rows = [_cut(text) for text in (path.read_bytes(), code)]
    rows = [r[rng.permutation(len(r))] for r in rows]
    used = [0, 0]
    for step in range(steps):
        domain = step // PERIOD % 2
        tokens = rows[domain][used[domain] : used[domain] + TEXT_ROWS]
        if len(tokens) < TEXT_ROWS:
            raise SystemExit(f"--path: {path} is too short for {steps} steps; give a longer text")
        yield {"tokens": tokens}
        used[domain] += TEXT_ROWS


def _cut(text: bytes) -> np.ndarray:
    """Cut into rows of `TOKENS` + 1 bytes."""
    whole = len(text) // (TOKENS + 1) * (TOKENS + 1)
    return np.frombuffer(text[:whole], np.uint8).astype(np.int32).reshape(-1, TOKENS + 1)


def little_text(path: Path, steps: int, size: int = 50_000) -> Task:
    """Build the task of a network that sees its text several times; the next part is held out."""
    text = np.frombuffer(path.read_bytes(), np.uint8).astype(np.int32)

    def batches(seed: int, steps: int) -> Iterator[Batch]:
        rng = np.random.default_rng([seed, 4])
        for _ in range(steps):
            starts = rng.integers(0, size - TOKENS - 1, TEXT_ROWS)
            yield {"tokens": text[starts[:, None] + np.arange(TOKENS + 1)]}

    def held_out(seed: int) -> Batch:
        start = size if seed == SELECTION else 2 * size
        return {"tokens": _cut(text[start:].astype(np.uint8).tobytes())[:HELD_OUT_ROWS]}

    what = f"first {size // 1000} kB of Shakespeare, 4 attention blocks"
    build = language_model(256, attention, 4)
    return Task("little", what, build, token_losses, batches, held_out, steps)


def denoising(steps: int) -> Task:
    """Build the task of removing noise from handwritten digits; a fifth of them is held out."""
    data = Digits(max_shift=0).load()
    schedule = diffusion.schedules.get("cosine", 1000)
    shuffled = np.random.default_rng(0).permutation(len(data.test["label"]))
    halves = np.split(shuffled, [len(shuffled) // 2])

    def build(context: Passing | None, rate: float) -> models.Denoiser:
        block = layers.Block(attention(causal=False), layers.feed_forward(WIDTH, 2 * WIDTH))
        return models.denoiser(
            image_shape=(8, 8, 1),
            width=WIDTH,
            blocks=[block] * 3,
            num_classes=10,
            patch=2,
            context=context,
            context_rate=rate,
        )

    def losses(
        model: models.Denoiser,
        params: Any,
        state: Any,
        batch: Mapping[str, Array],
        key: Array | None,
        train: bool,
    ) -> tuple[Array, Any]:
        def denoise(x: Array, t: Array) -> tuple[Array, Any]:
            return model.apply(params, state, x, timestep=t, label=batch["label"], train=train)

        noise = jax.random.key(1) if key is None else key  # held-out digits have the same noise
        images = 2 * batch["image"] - 1
        return diffusion.denoising_losses(denoise, images, noise, schedule, has_aux=True)

    def batches(seed: int, steps: int) -> Iterator[Batch]:
        rng = np.random.default_rng([seed, 5])
        for _ in range(steps):
            rows = rng.integers(0, len(data.train["label"]), 2 * ROWS)
            yield {name: data.train[name][rows] for name in ("image", "label")}

    def held_out(seed: int) -> Batch:
        rows = np.tile(halves[seed != SELECTION], 8)
        return {name: data.test[name][rows] for name in ("image", "label")}

    what = "diffusion of digits, 3 attention blocks"
    return Task("denoising", what, build, losses, batches, held_out, steps)


# Training


class Trainer:
    """A compiled step of a task, for any learning rate and seed."""

    def __init__(self, task: Task, context: Passing | None, rate: float):
        self.task = task
        self.model = model = task.build(context, rate)

        def loss(params: Any, state: Any, batch: Mapping[str, Array], key: Array) -> tuple:
            losses, state = task.losses(model, params, state, batch, key, True)
            return losses, fnet.Aux(state, {})

        @jax.jit
        def evaluate(params: Any, state: Any, batch: Mapping[str, Array]) -> Array:
            return task.losses(model, params, state, batch, None, False)[0].mean()

        self._evaluate = evaluate
        self.first_batch = jax.tree.map(jnp.asarray, next(task.batches(SELECTION, 1)))
        step = fnet.make_step(loss, self._optimizer(LEARNING_RATES[0], 1.0))
        self.step = fnet.compile_step(
            step,
            jax.eval_shape(lambda: self.create(LEARNING_RATES[0], 1.0, SELECTION)),
            self.first_batch,
            compiler_options={},
        )

    def _optimizer(self, learning_rate: float, boost: float) -> optax.GradientTransformation:
        """AdamW; the state holds learning rate and boost, so that one program serves all."""
        warmup = min(WARMUP, self.task.steps // 10)
        shape = (
            optax.warmup_constant_schedule(0.0, 1.0, warmup)
            if self.task.held_out is None
            else optax.warmup_cosine_decay_schedule(0.0, 1.0, warmup, self.task.steps)
        )

        def make(learning_rate: Array, boost: Array) -> optax.GradientTransformation:
            return optax.chain(
                optax.clip_by_global_norm(1.0),
                optax.scale_by_adam(),
                optax.add_decayed_weights(0.01),
                optax.scale_by_schedule(shape),
                optax.scale(-learning_rate),
                optax.masked(optax.scale(boost), _are_strengths),
            )

        return optax.inject_hyperparams(make)(learning_rate=learning_rate, boost=boost)

    def create(self, learning_rate: float, boost: float, seed: int) -> fnet.TrainState:
        """Create the state of a run."""
        optimizer = self._optimizer(learning_rate, boost)
        return fnet.TrainState.create(self.model, optimizer, jax.random.key(seed))

    def run(self, learning_rate: float, boost: float, seed: int) -> dict[str, Any]:
        """Train once; return the held-out loss, the cost, and the size of what contexts add."""
        task, state = self.task, self.create(learning_rate, boost, seed)
        held_out = []
        start = time.process_time()
        for i, batch in enumerate(task.batches(seed, task.steps)):
            if task.held_out is None and 2 * i >= task.steps:
                held_out.append(self._evaluate(state.params, state.model_state, batch))
            state, _ = self.step(state, jax.tree.map(jnp.asarray, batch))
        jax.block_until_ready(state)
        seconds = time.process_time() - start
        if task.held_out is not None:
            batch = task.held_out(seed)
            held_out.append(self._evaluate(state.params, state.model_state, batch))
        cost = self.step.compiled.cost_analysis()
        assert cost is not None  # XLA gives it for CPU, GPU and TPU
        return {
            "loss": statistics.mean(map(float, held_out)),
            "seconds": seconds,
            "steps": task.steps,
            "parameters": self.step.report.parameters,
            "flops": float(cost["flops"]),
            "peak": self.step.report.peak.total,
            "state": sum(a.size for a in jax.tree.leaves(state.model_state)),
            "term": _terms(state.params["blocks"], state.model_state.get("blocks", {})),
        }


def _are_strengths(params: Any) -> Any:
    """Tree of bools: whether a leaf is the strength of a context."""
    return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key == "strength", params)


def _terms(params: Mapping[str, Any], state: Mapping[str, Any]) -> list[float]:
    """Spectral norm of ``strength / D * context``: the most that it changes an input, by block."""
    return [
        float(abs(params[i]["strength"]) / WIDTH * np.linalg.norm(s["context"], 2))
        for i, s in state.items()
        if "context" in s
    ]


# Study


class Study:
    """The runs of one task, which are saved in a folder."""

    def __init__(self, task: Task, out: Path):
        self.task, self.out = task, out
        self.trainers = functools.cache(functools.partial(Trainer, task))

    def run(self, form: str, setting: Setting, seed: int) -> dict[str, Any]:
        """Train, unless that run is saved."""
        name = "-".join(map(str, (self.task.name, form, *setting, seed)))
        file = self.out / f"{name}.json"
        if not file.is_file():
            trainer = self.trainers(FORMS[form], setting.rate)
            result = trainer.run(setting.learning_rate, setting.boost, seed)
            file.write_text(json.dumps(result) + "\n")
            print(f"{name}: {result['loss']:.4f}, {result['seconds']:.1f} s", flush=True)
        return json.loads(file.read_text())

    def choose(self, form: str, quick: bool) -> Setting:
        """Choose the learning rate, then rate and boost, by the loss of the selection's seed."""
        start = Setting(*CONTEXTS[0], LEARNING_RATES[-1])
        if quick:
            return start

        def best(settings: Sequence[Setting]) -> Setting:
            return min(settings, key=lambda s: self.run(form, s, SELECTION)["loss"])

        chosen = best([start._replace(learning_rate=lr) for lr in LEARNING_RATES])
        if form == "none":
            return chosen
        return best([Setting(rate, boost, chosen.learning_rate) for rate, boost in CONTEXTS])

    def compare(self, seeds: Sequence[int], settings: Mapping[str, Setting]) -> dict:
        """Train every form with every seed; return the results by form."""
        results: dict[str, list[dict[str, Any]]] = {form: [] for form in settings}
        for seed, form in itertools.product(seeds, settings):
            results[form].append(self.run(form, settings[form], seed))
        return results


class Comparison(NamedTuple):
    """Results of a task.

    Attributes:
      task: the task.
      settings: chosen setting by form.
      results: by group of seeds, by form, one per seed: results of `Trainer.run`. The second group,
        the confirmation, is only there if the first had a difference.
    """

    task: Task
    settings: dict[str, Setting]
    results: list[dict[str, list[dict[str, Any]]]]

    def losses(self, form: str, group: int = 0) -> list[float]:
        """Held-out losses by seed."""
        return [result["loss"] for result in self.results[group][form]]

    def differences(self, form: str, group: int = 0) -> list[float]:
        """Differences to the form without contexts, by seed."""
        pairs = zip(self.losses(form, group), self.losses("none", group), strict=True)
        return [with_context - without for with_context, without in pairs]

    def cost(self, form: str, figure: str) -> float:
        """Figure of the compiled step, as `Trainer.run` returns it."""
        return self.results[0][form][0][figure]

    def as_json(self) -> dict[str, Any]:
        """Settings and, for each group of seeds, losses by form."""
        losses = [
            {form: self.losses(form, i) for form in self.settings} for i in range(len(self.results))
        ]
        settings = {form: setting._asdict() for form, setting in self.settings.items()}
        return {"settings": settings, "losses": losses}

    def verdict(self, form: str) -> str:
        """Whether contexts help; see the module's docstring."""
        signs = {sign(self.differences(form, group)) for group in range(len(self.results))}
        confirmed = len(self.results) == 2 and len(signs) == 1
        return {-1: "helps", 1: "hurts"}.get(signs.pop() if confirmed else 0, "no difference")


def sign(differences: Sequence[float]) -> int:
    """Sign of the mean, or 0 if its 95 % interval (Student's t) contains 0."""
    n, mean = len(differences), statistics.mean(differences)
    quantile = float(scipy.stats.t.ppf(0.975, n - 1))
    half_width = quantile * statistics.stdev(differences) / n**0.5
    return 0 if abs(mean) <= half_width else 1 if mean > 0 else -1


def compare(task: Task, out: Path, quick: bool) -> Comparison:
    """Choose settings and train every form."""
    study = Study(task, out)
    settings = {form: study.choose(form, quick) for form in FORMS}
    comparison = Comparison(task, settings, [])
    comparison.results.append(study.compare(COMPARISON[: 2 if quick else None], settings))
    if not quick and any(sign(comparison.differences(form)) for form in ("lagged", "current")):
        comparison.results.append(study.compare(CONFIRMATION, settings))
    return comparison


# Report


def rows(comparisons: Sequence[Comparison], group: int = 0) -> list[dict[str, str]]:
    """Build the table of losses, or the table of further seeds, for tasks that needed them."""
    forms = ("lagged", "current")
    return [
        {
            "task and network": c.task.what,
            "without": spread(c.losses("none", group)),
            **{f"{form} - without": spread(c.differences(form, group)) for form in forms},
            **({} if group else {f"verdict, {form}": c.verdict(form) for form in forms}),
        }
        for c in comparisons
        if group < len(c.results)
    ]


def setting_rows(comparisons: Sequence[Comparison]) -> list[dict[str, str]]:
    """Build the table of chosen settings, and of how much the trained contexts change inputs."""
    table = []
    for c, (form, s) in itertools.product(comparisons, FORMS.items()):
        setting, results = c.settings[form], c.results[0][form]
        terms = [max(r["term"]) for r in results if r["term"]]
        table.append(
            {
                "task and network": c.task.what,
                "form": form,
                "learning rate": f"{setting.learning_rate:g}",
                "rate": f"{setting.rate:g}" if s else "",
                "boost": f"{setting.boost:g}" if s else "",
                "parameters": f"{results[0]['parameters']:,}",
                "largest change of an input": f"{statistics.mean(terms):.1%}" if terms else "",
            }
        )
    return table


def cost_rows(comparisons: Sequence[Comparison]) -> list[dict[str, str]]:
    """Build the table of a step's costs, relative to the form without contexts."""
    return [
        {
            "task and network": c.task.what,
            **{
                f"{shown}, {form}": f"{c.cost(form, figure) / c.cost('none', figure):.3f}"
                for shown, figure in (("FLOPs", "flops"), ("peak bytes", "peak"))
                for form in ("lagged", "current")
            },
        }
        for c in comparisons
    ]


def spread(values: Sequence[float]) -> str:
    """Mean and standard deviation."""
    return f"{statistics.mean(values):.4f} ± {statistics.stdev(values):.4f}"


def claims(comparisons: Sequence[Comparison], quick: bool) -> Iterator[Claim]:
    """Claim FLOPs, and losses of runs that were not shortened."""
    for c, form in itertools.product(comparisons, ("lagged", "current")):
        if not quick:
            without = statistics.mean(c.losses("none"))
            ratio = statistics.mean(c.losses(form)) / without
            what = f"{c.task.what}, {form} context: held-out loss ({c.verdict(form)})"
            yield Claim(what, f"without: {without:.4f}", ratio, kind="quality")
        ratio = c.cost(form, "flops") / c.cost("none", "flops")
        what = f"{c.task.what}, {form} context: FLOPs of a compiled step"
        yield Claim(what, "without", ratio, kind="count")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--path", required=True, type=Path, help="Text file.")
    parser.add_argument("--tasks", nargs="+", help="Names of tasks; by default all.")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="Three tasks, 20 steps, two seeds, no selection; this gives FLOPs only.",
    )
    parser.add_argument("--out", type=Path, help="Folder for runs.")
    args = parser.parse_args(argv)
    out = args.out or Path(tempfile.mkdtemp())
    out.mkdir(parents=True, exist_ok=True)
    names = args.tasks or (QUICK if args.quick else None)
    chosen = [task for task in tasks(args.path) if names is None or task.name in names]
    if args.quick:
        chosen = [t._replace(steps=PERIOD) for t in chosen]
    comparisons = [compare(task, out, args.quick) for task in chosen]
    print("\nHeld-out losses, mean and standard deviation over seeds.\n")
    confirmation = functools.partial(rows, group=1)
    tables = [table(comparisons) for table in (rows, confirmation, setting_rows, cost_rows)]
    for table in filter(None, tables):
        print(markdown_table(table) + "\n")
    data = {c.task.name: c.as_json() for c in comparisons}
    publish(claims(comparisons, args.quick), args, "jax", "jaxlib", "optax", data=data)


if __name__ == "__main__":
    main()
