"""What ``fnet sample`` generates: text or images from a trained model."""

import dataclasses
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
from train.arguments import ImageArguments, TextArguments
from train.data.chat import GenerationSettings, Message, load_generation_settings
from train.data.chat_end import find_end
from train.data.tokenizer import Tokenizer, load_tokenizer
from train.errors import UserError, output_file
from train.networks.pretrained import Pretrained
from train.networks.published import network as published
from train.networks.transformer import Denoiser
from train.output import plots
from train.run.open_run import OpenRun, check_classes
from train.tasks import images, language, load


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
            params, state, model = published.merge(section, params, state), {}, model.base
        self._network = model, params, state

    def encode(self, prompt: str, before: Sequence[Message] = ()) -> np.ndarray:
        """Encode a prompt, or with ``chat`` a user's message, after the messages ``before`` it."""
        if self.template:
            system = self.options.system
            messages: list[Message] = [{"role": "system", "content": system}] if system else []
            messages += [*before, {"role": "user", "content": prompt}]
            text = self.template.render(messages, add_generation_prompt=True)
            return self.tokenizer.encode_pieces([text])[0].ids
        tokens = self.tokenizer.encode_prompt(prompt)
        if not len(tokens):
            raise UserError("--prompt: is empty; give at least one character")
        return tokens

    def answers(self, prompts: Sequence[str]) -> list[str]:
        """Return the answer to each prompt. Batches have prompts of similar length."""
        size, seed = min(self.options.batch_size, len(prompts)), self.options.seed
        encoded = [self.encode(prompt) for prompt in prompts]
        by_length = sorted(range(len(prompts)), key=lambda i: len(encoded[i]))
        answers = [""] * len(prompts)
        for first in range(0, len(prompts), size):
            batch = by_length[first : first + size]
            batch += batch[-1:] * (size - len(batch))  # so that all batches have one program
            parts = self.stream([encoded[i] for i in batch], [seed + i for i in batch])
            for i, text in zip(batch, map("".join, zip(*parts, strict=True)), strict=True):
                answers[i] = text
        return answers

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
    section, outputs = opened.config.model, load(opened.config).outputs
    assert isinstance(section, Denoiser)  # because it generates images
    check_classes(opened.folder, outputs)
    classes = outputs.names
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
    guidance = options.guidance
    if guidance is None:
        guidance = 1.5 if section.label_dropout else 1.0
    steps = options.steps or min(50, section.steps)
    options = dataclasses.replace(options, guidance=guidance, steps=steps)
    model, (params, state, _) = opened.network(best=options.best)
    labels = np.repeat([classes.index(name) for name in names], options.count)
    network = model, images.image_shape(opened.config), len(classes)
    samples = sample_images(section, network, params, state, jnp.asarray(labels), options)
    title = f"{opened.config.name}: {options.sampler}, {steps} steps, guidance {guidance:g}"
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

    The network comes with the shape of an image, and the number of classes. The options must have
    steps and guidance.
    """
    (model, shape, classes), guidance, steps = network, options.guidance, options.steps
    assert guidance is not None
    assert steps is not None
    sampler = diffusion.samplers.get(options.sampler)
    schedule = diffusion.schedules.get(section.schedule, section.steps)

    @jax.jit
    def run(params: Any, state: Any, labels: Array, key: Array) -> Array:
        def denoise(x: Array, t: Array, label: Array) -> Array:
            return model.apply(params, state, x, timestep=t, label=label, train=False)[0]

        init_key, sampler_key = jax.random.split(key)
        x = jax.random.normal(init_key, (len(labels), *shape))
        guided = diffusion.guided(denoise, labels, classes, guidance)
        how: dict[str, Any] = {"predicts": section.predicts, "clip": 1.0, "key": sampler_key}
        return sampler(guided, schedule, x, steps, **how)

    samples = run(params, state, labels.astype(jnp.int32), jax.random.key(options.seed))
    return jnp.clip((samples + 1) / 2, 0, 1)
