"""``fnet sample``: text or images from a trained model."""

import contextlib
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import fnet
from fnet import diffusion
from fnet.models.denoiser import Denoiser as DenoiserModel
from train import arguments
from train.arguments import ImageArguments, TextArguments, positional
from train.commands.import_run import default_config
from train.data import records, sample_batch, storage
from train.data.chat import GenerationSettings, Message, load_generation_settings
from train.data.chat_end import find_end
from train.data.columns import decode_text
from train.data.model_folder import is_model_folder
from train.data.tokenizer import Tokenizer, load_tokenizer
from train.errors import UserError, output_file, printable
from train.networks import pretrained
from train.networks.pretrained import Pretrained
from train.networks.transformer import Denoiser
from train.output import plots
from train.run.checkpoints import load_network
from train.run.open_run import OpenRun, check_classes
from train.run.run_folder import RunFolder
from train.tasks import images, language, load
from train.tasks.diffusion import build_schedule


def main(argv: list[str]) -> None:
    """Run ``fnet sample RUN``."""
    (given,), flags = positional(argv, "fnet sample RUN", TextArguments, ImageArguments)
    folder, prog = RunFolder.of(given), f"fnet sample {given}"
    opened = OpenRun(folder, default_config(folder.path) if is_model_folder(folder.path) else None)
    generates = opened.kind.generates
    if generates == "text":
        options = arguments.read(TextArguments, flags, prog)
        prompts = read_prompts(options)
        if options.chat and not prompts:
            chat(TextGenerator(opened, options))
        elif len(prompts) > 1 or options.prompts is not None:
            for answer in answer_prompts(TextGenerator(opened, options), prompts):
                print(json.dumps(answer, ensure_ascii=False), flush=True)
        else:
            for text in generate_text(opened, options):
                print(text, end="", flush=True)
            print()
    elif generates == "images":
        path = draw_images(opened, arguments.read(ImageArguments, flags, prog))
        print(printable(str(path)))
    else:
        raise UserError(
            f"{folder.path} is a run of {opened.config.model.name}, which generates nothing; "
            "expected a run of language_model or pretrained (text) or denoiser (images)"
        )


def read_prompts(options: TextArguments) -> list[str]:
    """Return the prompts of the flags or of a file."""
    path = options.prompts
    if path is None:
        return list(options.prompt)
    if options.prompt:
        raise UserError("--prompts: is a file in place of --prompt; give one of them")
    if Path(path.removesuffix(".gz")).suffix in (".jsonl", ".parquet"):
        prompts = [record.text("prompt") for record in records.read(path, "--prompts")]
    else:
        with storage.reported("--prompts", path), storage.open_file(path) as file:
            text = decode_text(file.read(), path, "--prompts", "surrogateescape")
        prompts = [line for line in text.splitlines() if line.strip()]
    if not prompts:
        raise UserError(f"--prompts: {path} holds no prompts")
    return prompts


def generate_text(opened: OpenRun, options: TextArguments) -> Iterator[str]:
    """Yield the prompt, then the text that the model adds to it. An answer comes alone."""
    generator = TextGenerator(opened, options)
    given = options.prompt[0] if options.prompt else "\n"
    prompt = generator.encode(given)
    if not options.chat:
        # The model reads any bytes, but only valid UTF-8 can be printed.
        yield given.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    for (text,) in generator.stream([prompt], [options.seed]):
        yield text


def answer_prompts(generator: "TextGenerator", prompts: Sequence[str]) -> Iterator[dict[str, str]]:
    """Yield each prompt with its answer, in order. Batches have prompts of similar length."""
    size, seed = min(generator.options.batch_size, len(prompts)), generator.options.seed
    encoded = [generator.encode(prompt) for prompt in prompts]
    by_length = sorted(range(len(prompts)), key=lambda i: len(encoded[i]))
    answers: dict[int, str] = {}
    for first in range(0, len(prompts), size):
        batch = by_length[first : first + size]
        batch += batch[-1:] * (size - len(batch))  # so that all batches have one program
        parts = generator.stream([encoded[i] for i in batch], [seed + i for i in batch])
        answers |= dict(zip(batch, map("".join, zip(*parts, strict=True)), strict=True))
    for i, prompt in enumerate(prompts):
        yield {"prompt": prompt, "answer": answers[i]}


def chat(generator: "TextGenerator") -> None:
    """Answer one message per line of the standard input."""
    messages = generator.first_messages()
    is_terminal = sys.stdin is not None and sys.stdin.isatty()
    with contextlib.suppress(EOFError):
        while True:
            message = input("> " if is_terminal else "")
            if not message.strip():
                continue
            messages.append({"role": "user", "content": message})
            answer = ""
            for (part,) in generator.stream(
                [generator.encode_chat(messages)], [generator.options.seed]
            ):
                print(part, end="", flush=True)
                answer += part
            print()
            messages.append({"role": "assistant", "content": answer})


class TextGenerator:
    """Continues texts with the network of a run.

    Attention of a network that fnet initialized reaches back as far as in training: without a
    window of its own, it gets one of the training rows' length.
    """

    def __init__(self, opened: OpenRun, options: TextArguments):
        data = language.text_source(opened.config)
        self.options = options
        self.tokenizer = load_tokenizer(data)
        self.template = language.chat_template(data, self.tokenizer) if options.chat else None
        settings, end = GenerationSettings(), self.tokenizer.end_token()
        if self.tokenizer.folder is not None:
            settings = load_generation_settings(self.tokenizer.folder)
        if settings.temperature is None:  # as there is no generation_config.json
            settings = settings._replace(temperature=0.8)
        for note in settings.not_applied:
            print(f"note: generation_config.json: {note} is not applied", file=sys.stderr)
        taught = find_end(self.template, self.tokenizer) if self.template else None
        ends = *settings.end_tokens, end, taught and taught.token
        self._end_tokens = [token for token in ends if token is not None]
        names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
        given = {name: getattr(options, name) for name in names}
        self._sampling = {n: getattr(settings, n) if v is None else v for n, v in given.items()}
        section = opened.config.model.for_sampling(data.context)
        model, (params, state, _) = opened.replace(model=section).network(best=options.best)
        if isinstance(section, Pretrained):
            params, state, model = pretrained.merge(section, params, state), {}, model.base
        self._network = model, params, state

    def first_messages(self) -> list[dict[str, str]]:
        """Return the messages that begin a chat."""
        system = self.options.system
        return [{"role": "system", "content": system}] if system else []

    def encode(self, prompt: str) -> np.ndarray:
        """Encode a prompt, or with ``chat`` a user's message."""
        if self.options.chat:
            message = {"role": "user", "content": prompt}
            return self.encode_chat([*self.first_messages(), message])
        tokens = self.tokenizer.encode_prompt(prompt)
        if not len(tokens):
            raise UserError("--prompt: is empty; give at least one character")
        return tokens

    def encode_chat(self, messages: Sequence[Message]) -> np.ndarray:
        """Write and encode the messages before an answer."""
        assert self.template is not None
        text = self.template.render(messages, add_generation_prompt=True)
        return self.tokenizer.encode_pieces([text])[0].ids

    def stream(self, prompts: Sequence[np.ndarray], seeds: Sequence[int]) -> Iterator[list[str]]:
        """Yield what is new in the text after each prompt, until all texts have ended."""
        lengths = [len(prompt) for prompt in prompts]
        tokens = np.zeros((len(prompts), max(lengths)), np.int32)
        for row, prompt in zip(tokens, prompts, strict=True):
            row[: len(prompt)] = prompt
        chunks = fnet.stream(
            *self._network,
            jnp.asarray(tokens),
            jnp.stack([jax.random.key(seed) for seed in seeds]),
            self.options.length,
            prompt_lengths=lengths,
            **self._sampling,
        )
        writers = [
            _Writer(self.tokenizer, prompt, self._end_tokens, self.options.stop)
            for prompt in prompts
        ]
        try:
            for chunk in chunks:
                rows = zip(writers, np.asarray(chunk), strict=True)
                yield [writer.add(new) for writer, new in rows]
                if all(writer.has_ended for writer in writers):
                    return
        except ValueError as error:
            raise UserError(f"--length: {error}") from error
        yield [writer.end() for writer in writers]


class _Writer:
    """Turns the tokens of a row into text, as they come, until a token or a text ends it."""

    def __init__(
        self, tokenizer: Tokenizer, prompt: np.ndarray, ends: Sequence[int], stops: Sequence[str]
    ):
        self._decode, self._ends, self._stops = tokenizer.decode, ends, [s for s in stops if s]
        # Decoded from the start each time: the text between two tokens depends on both.
        self._tokens = prompt.tolist()
        self._start = self._printed = len(tokenizer.decode(self._tokens))
        self.has_ended = False

    def add(self, new: np.ndarray) -> str:
        """Return the text that is certain after further tokens, and was not before."""
        if self.has_ended:
            return ""
        ends = np.flatnonzero(np.isin(new, self._ends))
        self._tokens += new[: ends[0] if len(ends) else None].tolist()
        self.has_ended = bool(len(ends))
        return self.end() if self.has_ended else self._print(is_last=False)

    def end(self) -> str:
        return self._print(is_last=True)

    def _print(self, *, is_last: bool) -> str:
        text = self._decode(self._tokens)
        found = [at for stop in self._stops if (at := text.find(stop, self._start)) >= 0]
        if found:
            self.has_ended, end = True, min(found)
        elif is_last:
            end = len(text)
        else:
            # Hold back a character, or a text that ends the answer, whose rest may come.
            whole = text.rstrip("\ufffd")
            halves = (stop[:n] for stop in self._stops for n in range(1, len(stop)))
            end = len(whole) - max((len(h) for h in halves if whole.endswith(h)), default=0)
        new, self._printed = text[self._printed : end], max(self._printed, end)
        return new


def draw_images(opened: OpenRun, options: ImageArguments) -> Path:
    """Sample images, write them as one picture with a row per label and return its path."""
    section, dataset = opened.config.model, load(opened.config)
    assert isinstance(section, Denoiser)  # because it generates images
    check_classes(opened.folder, dataset.outputs)
    classes = dataset.classes
    names = options.labels or classes
    for name in names:
        if name not in classes:
            raise UserError(f"--labels: expected some of {', '.join(classes)}, got {name}")
    if options.steps and options.steps > section.steps:
        raise UserError(
            f"--steps: expected at most model.steps {section.steps}, got {options.steps}"
        )
    if not section.label_dropout and options.guidance not in (None, 1):
        raise UserError(
            f"--guidance: expected 1, got {options.guidance:g}; the run was trained with "
            "model.label_dropout 0"
        )
    path = output_file(options.out, opened.folder.samples)
    model = images.build_network(opened.config, dataset)
    params, state, _ = load_network(opened.folder, model, best=options.best)
    labels = np.repeat([classes.index(name) for name in names], options.count)
    network = model, sample_batch(dataset, 1)["image"].shape[1:], len(classes)
    samples = sample_images(section, network, params, state, jnp.asarray(labels), options)
    title = (
        f"{opened.config.name}: {options.sampler}, {_steps(section, options)} steps, "
        f"guidance {_guidance(section, options):g}"
    )
    rows = np.asarray(samples).reshape(len(names), options.count, *samples.shape[1:])
    try:
        plots.image_grid(rows, names, title, path)
    except (OSError, ValueError, RuntimeError) as error:  # some formats need LaTeX
        raise UserError(f"cannot write {path}: {error}; choose another --out") from error
    return path


def sample_images(
    section: Denoiser,
    network: tuple[DenoiserModel, tuple[int, ...], int],
    params: Any,
    state: Any,
    labels: Array,
    options: ImageArguments,
) -> Array:
    """Sample one image per label [N], float32 [N, H, W, C] in [0, 1].

    The network comes with the shape of an image, and the number of classes.
    """
    model, shape, classes = network
    sampler, schedule = diffusion.samplers.get(options.sampler), build_schedule(section)

    @jax.jit
    def run(params: Any, state: Any, labels: Array, key: Array) -> Array:
        def denoise(x: Array, t: Array, label: Array) -> Array:
            return model.apply(params, state, x, timestep=t, label=label, train=False)[0]

        init_key, sampler_key = jax.random.split(key)
        x = jax.random.normal(init_key, (len(labels), *shape))
        return sampler(
            diffusion.guided(denoise, labels, classes, _guidance(section, options)),
            schedule,
            x,
            _steps(section, options),
            predicts=section.predicts,
            clip=1.0,
            key=sampler_key,
        )

    samples = run(params, state, labels.astype(jnp.int32), jax.random.key(options.seed))
    return jnp.clip((samples + 1) / 2, 0, 1)


def _guidance(section: Denoiser, options: ImageArguments) -> float:
    default = 1.5 if section.label_dropout else 1.0
    return default if options.guidance is None else options.guidance


def _steps(section: Denoiser, options: ImageArguments) -> int:
    return options.steps or min(50, section.steps)
