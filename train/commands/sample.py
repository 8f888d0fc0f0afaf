"""``fnet sample``: text or images from a trained model."""

import dataclasses
from collections.abc import Iterator
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
from train.config import ChatFile, Config, Denoiser, LanguageModel, TextFile
from train.data import Dataset, sample_batch
from train.data.tokenizer import load_tokenizer
from train.errors import UserError
from train.output import plots
from train.output.progress import printable
from train.run.checkpoints import Checkpoints
from train.run.class_names import check_classes
from train.run.run_folder import RunFolder
from train.tasks import language
from train.tasks.diffusion import build_network, build_schedule


def main(argv: list[str]) -> None:
    """Run ``fnet sample RUN``."""
    (given,), flags = positional(argv, "fnet sample RUN", TextArguments, ImageArguments)
    folder, prog = RunFolder.of(given), f"fnet sample {given}"
    config = folder.read_config()
    if isinstance(config.model, LanguageModel):
        for text in generate_text(folder, config, arguments.read(TextArguments, flags, prog)):
            print(text, end="", flush=True)
        print()
    elif isinstance(config.model, Denoiser):
        path = draw_images(folder, config, arguments.read(ImageArguments, flags, prog))
        print(printable(str(path)))
    else:
        raise UserError(
            f"{folder.path} is a run of {config.model.name}, which generates nothing; "
            "expected a run of language_model (text) or denoiser (images)"
        )


def generate_text(folder: RunFolder, config: Config, options: TextArguments) -> Iterator[str]:
    """Yield the prompt, then the text that the model adds to it.

    Attention reaches back as far as in training: without a window of its own, the model gets
    one of the training rows' length.

    Raises:
      UserError: for an empty prompt, one outside the vocabulary, or a run without a checkpoint.
    """
    data, section = config.data, config.model
    assert isinstance(data, TextFile | ChatFile)
    assert isinstance(section, LanguageModel)
    tokenizer = load_tokenizer(data)
    prompt = tokenizer.encode_prompt(options.prompt)
    if not len(prompt):
        raise UserError("--prompt: is empty; give at least one character")
    window = min(section.window or data.context, data.context)
    section = dataclasses.replace(section, window=window)
    model = language.build_network(dataclasses.replace(config, model=section))
    with Checkpoints(folder.checkpoints, best=options.best) as checkpoints:
        params, state, _ = checkpoints.restore_network(model.init)

    stream = fnet.stream(
        model,
        params,
        state,
        jnp.asarray(prompt.astype(np.int32))[None],
        jax.random.key(options.seed),
        options.length,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
    )
    # The model reads any bytes, but only valid UTF-8 can be printed.
    yield options.prompt.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    # Decode from the start each time: the text between two tokens depends on both.
    tokens = prompt.tolist()
    printed = len(tokenizer.decode(tokens))
    for chunk in stream:
        tokens += np.asarray(chunk)[0].tolist()
        # Hold back a character whose last bytes come with the next chunk.
        text = tokenizer.decode(tokens).rstrip("\ufffd")
        yield text[printed:]
        printed = max(printed, len(text))
    yield tokenizer.decode(tokens)[printed:]


def draw_images(folder: RunFolder, config: Config, options: ImageArguments) -> Path:
    """Sample images, write them as one picture with a row per label and return its path.

    Raises:
      UserError: for an option that does not fit the run, data whose classes changed, a run
        without a checkpoint, or a picture that cannot be written.
    """
    section = config.model
    assert isinstance(section, Denoiser)
    dataset, model = build_network(config)
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
    with Checkpoints(folder.checkpoints, best=options.best) as checkpoints:
        params, state, _ = checkpoints.restore_network(model.init)
    labels = np.repeat([dataset.classes.index(name) for name in names], options.count)
    images = sample_images(config, (dataset, model), params, state, jnp.asarray(labels), options)
    path = Path(options.out) if options.out else folder.path / "samples.png"
    title = (
        f"{config.name}: {options.sampler}, {_steps(section, options)} steps, "
        f"guidance {_guidance(section, options):g}"
    )
    rows = np.asarray(images).reshape(len(names), options.count, *images.shape[1:])
    try:
        plots.image_grid(rows, names, title, path)
    except (OSError, ValueError, RuntimeError) as error:  # some formats need LaTeX
        raise UserError(f"cannot write {path}: {error}; choose another --out") from error
    return path


def sample_images(
    config: Config,
    network: tuple[Dataset, DenoiserModel],
    params: Any,
    state: Any,
    labels: Array,
    options: ImageArguments,
) -> Array:
    """Sample one image per label.

    Args:
      config: config of the run.
      network: its dataset and model (`train.tasks.diffusion.build_network`).
      params: model parameters.
      state: model state; attention contexts are read as in training.
      labels: class indices [N].
      options: sampler, steps, guidance and seed.

    Returns:
      Images [N, H, W, C] in [0, 1], float32.
    """
    section = config.model
    assert isinstance(section, Denoiser)
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

    images = run(params, state, labels.astype(jnp.int32), jax.random.key(options.seed))
    return jnp.clip((images + 1) / 2, 0, 1)


def _guidance(section: Denoiser, options: ImageArguments) -> float:
    default = 1.5 if section.label_dropout else 1.0
    return default if options.guidance is None else options.guidance


def _steps(section: Denoiser, options: ImageArguments) -> int:
    return options.steps or min(50, section.steps)
