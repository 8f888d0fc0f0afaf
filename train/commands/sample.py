"""``fnet sample``: text or images from a trained model."""

import dataclasses
import sys
from collections.abc import Callable, Iterator
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
from train.arguments import ImageArguments, TextArguments
from train.commands.positional import positional
from train.config import Config
from train.data import Dataset, sample_batch
from train.data.chat import GenerationSettings, load_generation_settings
from train.data.tokenizer import Tokenizer, load_tokenizer
from train.errors import UserError, output_file, printable
from train.networks import pretrained
from train.networks.denoiser import Denoiser
from train.output import plots
from train.run.checkpoints import Checkpoints
from train.run.class_names import check_classes
from train.run.frozen import load_network
from train.run.model_files import check_model, with_model_files
from train.run.run_folder import RunFolder
from train.tasks import images, kind_of, language
from train.tasks import load as load_data
from train.tasks.diffusion import build_schedule


def main(argv: list[str]) -> None:
    """Run ``fnet sample RUN``."""
    (given,), flags = positional(argv, "fnet sample RUN", TextArguments, ImageArguments)
    folder, prog = RunFolder.of(given), f"fnet sample {given}"
    config = check_model(folder, folder.read_config())
    generates = kind_of(config).generates
    if generates == "text":
        options = arguments.read(TextArguments, flags, prog)
        if options.chat:
            chat(folder, config, options)
            return
        for text in generate_text(folder, config, options):
            print(text, end="", flush=True)
        print()
    elif generates == "images":
        path = draw_images(folder, config, arguments.read(ImageArguments, flags, prog))
        print(printable(str(path)))
    else:
        raise UserError(
            f"{folder.path} is a run of {config.model.name}, which generates nothing; "
            "expected a run of language_model or pretrained (text) or denoiser (images)"
        )


def generate_text(folder: RunFolder, config: Config, options: TextArguments) -> Iterator[str]:
    """Yield the prompt, then the text that the model adds to it.

    Raises:
      UserError: for an empty prompt, one outside the vocabulary, or a run without a checkpoint.
    """
    tokenizer, continue_text = load_generator(folder, config, options)
    given = "\n" if options.prompt is None else options.prompt
    prompt = tokenizer.encode_prompt(given)
    if not len(prompt):
        raise UserError("--prompt: is empty; give at least one character")
    # The model reads any bytes, but only valid UTF-8 can be printed.
    yield given.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    yield from continue_text(prompt)


def chat(folder: RunFolder, config: Config, options: TextArguments) -> None:
    """Answer a message, or one message per line of the standard input.

    Raises:
      UserError: if the model has no chat template, or as `generate_text`.
    """
    tokenizer, continue_text = load_generator(folder, config, options)
    template = language.chat_template(language.text_source(config), tokenizer)
    messages = [{"role": "system", "content": options.system}] if options.system else []
    is_terminal = sys.stdin is not None and sys.stdin.isatty()

    def read_messages() -> Iterator[str]:
        if options.prompt is not None:
            yield options.prompt
            return
        while True:
            try:
                yield input("> " if is_terminal else "")
            except EOFError:
                return

    for message in read_messages():
        if not message.strip():
            continue
        messages.append({"role": "user", "content": message})
        text = template.render(messages, add_generation_prompt=True)
        prompt = tokenizer.encode_pieces([text])[0].ids
        answer = ""
        for part in continue_text(prompt):
            print(part, end="", flush=True)
            answer += part
        print()
        messages.append({"role": "assistant", "content": answer})


def load_generator(
    folder: RunFolder, config: Config, options: TextArguments
) -> tuple[Tokenizer, Callable[[np.ndarray], Iterator[str]]]:
    """Return the tokenizer of a run, and a function that continues tokens [T].

    The function yields text until a token ends it. Attention of a network that fnet initialized
    reaches back as far as in training: without a window of its own, it gets one of the training
    rows' length.

    Raises:
      UserError: for a run without a checkpoint, or later if the text is longer than the model's
        positions.
    """
    config = with_model_files(folder, config)
    data = language.text_source(config)
    tokenizer = load_tokenizer(data)
    settings = GenerationSettings(0.8)
    if tokenizer.folder is not None:
        # A run without generation_config.json has fnet's settings.
        stored = load_generation_settings(tokenizer.folder)
        settings = stored if stored != GenerationSettings() else settings
        if (end := tokenizer.end_token()) is not None:
            settings = settings._replace(end_tokens=(*settings.end_tokens, end))
    given = {name: getattr(options, name) for name in ("temperature", "top_k", "top_p")}
    settings = settings._replace(**{n: v for n, v in given.items() if v is not None})
    config = dataclasses.replace(config, model=config.model.for_sampling(data.context))
    model: Any = language.build_network(config)
    params, state, _ = load_network(folder, model, best=options.best)
    if (section := config.model.published) is not None:
        params, state, model = pretrained.merge(section, params, state), {}, model.base

    def continue_text(prompt: np.ndarray) -> Iterator[str]:
        stream = fnet.stream(
            model,
            params,
            state,
            jnp.asarray(prompt.astype(np.int32))[None],
            jax.random.key(options.seed),
            options.length,
            temperature=1.0 if settings.temperature is None else settings.temperature,
            top_k=settings.top_k,
            top_p=settings.top_p,
        )
        # Decode from the start each time: the text between two tokens depends on both.
        tokens = prompt.tolist()
        printed = len(tokenizer.decode(tokens))
        try:
            for chunk in stream:
                new = np.asarray(chunk)[0]
                ends = np.flatnonzero(np.isin(new, settings.end_tokens))
                tokens += new[: ends[0] if len(ends) else None].tolist()
                # Hold back a character whose last bytes come with the next chunk.
                text = tokenizer.decode(tokens).rstrip("\ufffd")
                yield text[printed:]
                printed = max(printed, len(text))
                if len(ends):
                    break
        except ValueError as error:
            raise UserError(f"--length: {error}") from error
        yield tokenizer.decode(tokens)[printed:]

    return tokenizer, continue_text


def draw_images(folder: RunFolder, config: Config, options: ImageArguments) -> Path:
    """Sample images, write them as one picture with a row per label and return its path.

    Raises:
      UserError: for an option that does not fit the run, data whose classes changed, a run
        without a checkpoint, or a picture that cannot be written.
    """
    section = config.model.denoiser
    assert section is not None  # because it generates images
    dataset = load_data(config)
    model = images.build_network(config, dataset)
    check_classes(folder, dataset.classes)
    names = options.labels or dataset.classes
    for name in names:
        if name not in dataset.classes:
            raise UserError(f"--labels: expected some of {', '.join(dataset.classes)}, got {name}")
    if options.steps and options.steps > section.steps:
        raise UserError(
            f"--steps: expected at most model.steps {section.steps}, got {options.steps}"
        )
    if not section.label_dropout and options.guidance not in (None, 1):
        raise UserError(
            f"--guidance: expected 1, got {options.guidance:g}; the run was trained with "
            "model.label_dropout 0"
        )
    path = output_file(options.out, folder.path / "samples.png")
    with Checkpoints(folder.checkpoints, best=options.best) as checkpoints:
        params, state, _ = checkpoints.restore_network(model.init)
    labels = np.repeat([dataset.classes.index(name) for name in names], options.count)
    network = dataset, model
    samples = sample_images(section, network, params, state, jnp.asarray(labels), options)
    title = (
        f"{config.name}: {options.sampler}, {_steps(section, options)} steps, "
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
    network: tuple[Dataset, DenoiserModel],
    params: Any,
    state: Any,
    labels: Array,
    options: ImageArguments,
) -> Array:
    """Sample one image per label.

    Args:
      section: the section ``model`` of the run's config.
      network: its dataset and model.
      params: model parameters.
      state: model state; attention contexts are read as in training.
      labels: class indices [N].
      options: sampler, steps, guidance and seed.

    Returns:
      Images [N, H, W, C] in [0, 1], float32.
    """
    dataset, model = network
    # Rows of most datasets are paths, so that the shape of an image is known from a batch.
    shape, classes = sample_batch(dataset, 1)["image"].shape[1:], len(dataset.classes)
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
