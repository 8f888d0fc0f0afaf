"""Write a trained image network as a program: StableHLO for JAX, or ONNX."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, export

import fnet
from fnet.losses.segmentation import bilinear_weights
from train.arguments import ExportArguments
from train.config import Config
from train.data import Outputs
from train.data.photos import Photos
from train.errors import TrainingError, UserError, output_file, writing
from train.onnx_program import UnsupportedError, to_onnx
from train.run.model_files import TOLERANCE, difference
from train.run.open_run import OpenRun
from train.run.run_folder import atomic_write
from train.tasks import images, kind_of
from train.tasks.targets import KINDS

PLATFORMS = ("cpu", "cuda", "tpu")
"""Platforms that a StableHLO program runs on."""

_BATCHES = (1, 3)
"""Batch sizes that the written program is run with."""

Apply = Callable[[Array], Array]
_Outputs = Callable[[Array], dict[str, Array]]
_Program = tuple[bytes, Callable[[bytes], Any]]


def export_program(opened: OpenRun, options: ExportArguments) -> tuple[Path, str]:
    """Write the network of a run with its weights, for any batch size, and run what was written.

    The input is float32 [N, H, W, C] with pixels in [0, 1]. Mean and standard deviation of the run
    are in the program. The output are logits [N, classes], or [N, H, W, classes]. An ONNX program
    also has ``predictions``, probabilities [N, classes] or numbers. Its metadata name the classes,
    and say how images are resized. Returns the file, and a line that says how its outputs differ
    from the network's.

    Raises:
      UserError: if the network is not one for images, a library is missing, or the file cannot be
        written.
      TrainingError: if the outputs of the written program differ from the network's.
    """
    kind = options.format
    if not opened.kind.labels_images:
        raise UserError(
            f"--format {kind}: is for networks that label images, not for "
            f"{opened.config.model.name}"
        )
    out = output_file(options.out, opened.folder.path / f"model.{kind}")
    network, shape, outputs, metadata = _network(opened, options)
    if kind == "stablehlo":
        content, run = _stablehlo(network, shape)
    else:
        content, run = _onnx(shape, outputs, metadata)
    with writing(out, "choose --out"):
        atomic_write(out, content)
    written, most = run(out.read_bytes()), 0.0
    for batch in _BATCHES:
        x = np.random.default_rng(batch).random((batch, *shape), np.float32)
        found = difference(np.asarray(written(x)), np.asarray(network(jnp.asarray(x))))
        if not found <= TOLERANCE:
            out.unlink()
            raise TrainingError(
                f"{out}: logits of the written program differ by {found:.1e} of the largest one; "
                "the file was removed"
            )
        most = max(most, found)
    checked = f"ran it on batches of {' and '.join(map(str, _BATCHES))}"
    checked += f": logits differ by at most {most:.1e} of the largest one"
    if kind == "stablehlo" and opened.outputs.scaling:
        checked += "; they are standardized numbers, whose mean and std classes.json has"
    return out, checked


def _network(
    opened: OpenRun, options: ExportArguments
) -> tuple[Apply, tuple[int, ...], _Outputs, dict[str, str]]:
    """Return the network, from pixels to logits in float32, and its images' shape; for ONNX, too.

    An ONNX program has outputs by name, and metadata.
    """
    kind, meaning = opened.kind, opened.outputs
    # The program is float32. The activations of a published model have the config's precision.
    config = images.in_float32(opened.config)
    shape = images.image_shape(config)
    model, (params, state, step) = opened.replace(train=config.train).network(best=options.best)

    def apply(image: Array) -> Array:
        x = images.normalize(config, image).astype(jnp.float32)
        logits, _ = model.apply(params, state, x, train=False)
        if kind.predicts == "masks":  # its loss upsamples
            logits = _upsample(logits, *shape[:2])
        return logits

    def outputs(image: Array) -> dict[str, Array]:
        logits = apply(image)
        if kind.predicts == "masks":
            return {"logits": logits}
        predictions = KINDS[config.data.targets].outputs(logits)
        if meaning.scaling:
            predictions = meaning.scaling.restore(predictions)
        return {"logits": logits, "predictions": predictions}

    metadata = _metadata(config, meaning) | opened.folder.origin(step)
    return apply, shape, outputs, metadata


def _upsample(logits: Array, height: int, width: int) -> Array:
    """Resize bilinearly by two products, which every format has for any batch size."""
    sizes = zip(logits.shape[1:3], (height, width), strict=True)
    with jax.ensure_compile_time_eval():
        rows, columns = (np.asarray(bilinear_weights(*pair, jnp.float32)) for pair in sizes)
    return jnp.einsum("Yy,nyxc,Xx->nYXc", rows, logits, columns)


def _stablehlo(network: Apply, shape: tuple[int, ...]) -> _Program:
    (batch,) = export.symbolic_shape("batch")
    image = jax.ShapeDtypeStruct((batch, *shape), jnp.float32)
    exported = export.export(jax.jit(network), platforms=PLATFORMS)(image)
    return bytes(exported.serialize()), lambda content: export.deserialize(bytearray(content)).call


def _onnx(shape: tuple[int, ...], outputs: _Outputs, metadata: dict[str, str]) -> _Program:
    try:
        import onnxruntime

        content = to_onnx(outputs, shape, metadata)
    except ImportError as error:
        raise UserError(
            f"--format onnx: needs {error.name}, which is not installed: "
            "pip install 'fnet-jax[onnx]'"
        ) from error
    except UnsupportedError as error:
        raise UserError(f"--format onnx: cannot write this network: {error}") from error

    def load(content: bytes) -> Callable[[np.ndarray], np.ndarray]:
        session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
        return lambda x: session.run(["logits"], {"image": x})[0]

    return content, load


def _metadata(config: Config, outputs: Outputs) -> dict[str, str]:
    """Return what the file says about its inputs and outputs: see docs/how_to/export.md."""
    data = config.data
    texts = {
        "fnet_version": fnet.__version__,
        "classes": json.dumps(outputs.names, ensure_ascii=False),
        "targets": "masks" if kind_of(config).predicts == "masks" else data.targets,
        "mean": json.dumps(data.mean),
        "std": json.dumps(data.std),
        "normalization": "in the graph: pass pixels from 0 to 1, RGB, [N, H, W, C]",
    }
    if outputs.label_map:
        texts["mask_values"] = json.dumps(outputs.label_map.mask_values().tolist())
    if isinstance(data, Photos):
        texts |= {
            "resize_shorter_side": str(data.shorter_side),
            "center_crop": str(data.image_size),
            "interpolation": "bilinear with antialiasing, as Pillow's",
        }
    return texts
