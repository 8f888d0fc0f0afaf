"""train.precision: activations in bfloat16; parameters, optimizer, statistics, losses in float32."""

import dataclasses
import json

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from layer_cases import shapes
from pretrained_cases import CONFIGS
from program_cases import fnet_command

import fnet
from fnet import layers
from fnet.interop.huggingface import build_model
from fnet.jaxpr import find_equations
from fnet.layer import stateless
from fnet.layers.causal_conv import causal_conv
from fnet.precision import add, broadcast_like
from train.config import Config, Denoiser, Digits, LanguageModel, Optim, PreactResNet, TextFile
from train.run.setup import setup


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("to be or not to be, that is the question\n" * 50)
    return TextFile(path=str(path), context=16, batch_size=8)


IMAGES = Config(
    data=Digits(batch_size=16),
    model=PreactResNet(widths=(8, 16), blocks_per_stage=1),
    optim=Optim(learning_rate=0.01),
)
DENOISER = dataclasses.replace(IMAGES, model=Denoiser(width=16, blocks=2, heads=2))


def runs(config):
    wide = setup(config)
    train = dataclasses.replace(config.train, precision="bfloat16")
    return wide, setup(dataclasses.replace(config, train=train))


def residual_bytes(run):
    """Return the bytes that the backward pass saves."""

    def loss(params, state, batch):
        return run.task.loss(params, state, batch, jax.random.key(0))[0].mean()

    shapes = run.state_shapes
    residuals = fnet.memory.residuals(loss, shapes.params, shapes.model_state, run.batch_shapes)
    return sum(r.added for r in residuals)


@pytest.mark.parametrize("kind", ["images", "denoiser", "text"])
def test_only_activations_are_bfloat16(kind, text):
    config = {
        "images": IMAGES,
        "denoiser": DENOISER,
        "text": dataclasses.replace(
            IMAGES, data=text, model=LanguageModel(width=16, blocks=2, heads=2)
        ),
    }[kind]
    wide, narrow = runs(config)
    chex.assert_trees_all_equal_shapes_and_dtypes(narrow.state_shapes, wide.state_shapes)

    batch = next(wide.training_batches(0))
    after = [jax.eval_shape(run.step, run.state_shapes, batch) for run in (wide, narrow)]
    chex.assert_trees_all_equal_dtypes(*after)
    if kind == "images":
        losses = [run.step(run.init(jax.random.key(0)), batch)[1]["loss"] for run in (wide, narrow)]
        assert float(losses[1]) == pytest.approx(float(losses[0]), rel=0.02)

    step = jax.make_jaxpr(narrow.step)(narrow.state_shapes, batch)
    products = [
        {a.aval.dtype.name for a in eqn.invars}
        for name, rank_of_kernel in (("conv_general_dilated", 4), ("dot_general", 2))
        for eqn in find_equations(step, name)
        if min(a.aval.ndim for a in eqn.invars) == rank_of_kernel
    ]
    assert len(products) > 5
    assert all(dtypes == {"bfloat16"} for dtypes in products)


def affine(layer, kernel, bias, x):
    return layer.apply({"kernel": kernel, "bias": bias}, {}, x, train=True)[0]


UNMIXED = [layers.Block(stateless(lambda x: x))]
IMAGE = jnp.zeros((2, 64, 64, 3), jnp.bfloat16)
NETWORKS = {
    "swin": {"patch": 2, "window": 4, "blocks": (1, 2)},
    **{name: {} for name in ("resnet9", "efficientnet_b0", "regnet_y_400mf")},
    "deeplab": lambda: fnet.models.deeplab(
        layers.conv(3, 8), 8, num_classes=3, pooling_size=(4, 4)
    ),
    "stack": lambda: layers.stack(3, UNMIXED, condition=1),
    "denoiser": lambda: fnet.models.denoiser(image_shape=(64, 64, 3), width=4, blocks=UNMIXED),
}
CONDITIONS = {"stack": {"condition": np.ones((2, 1))}, "denoiser": {"timestep": np.ones(2)}}
PUBLISHED = "qwen2_moe", "falcon_mamba", "recurrent_gemma", "qwen3_5", "gpt_neox", "gemma4"


@pytest.mark.parametrize("name", [*NETWORKS, *PUBLISHED])
def test_no_sum_of_a_network_is_in_bfloat16(name):
    """Neither in its output nor in its gradient: XLA on CPU says 256 + 1 = 256."""
    build, x = NETWORKS.get(name), IMAGE[:, 0] if name == "stack" else IMAGE
    if name in PUBLISHED:
        model, x = build_model(CONFIGS[name], dtype=jnp.bfloat16), jnp.zeros((1, 8), jnp.int32)
    else:
        model = build() if callable(build) else fnet.models.get(name, num_classes=3, **build)
    params, state = shapes(model)

    def loss(params, state):
        conditions = {"train": name != "deeplab"} | CONDITIONS.get(name, {})
        return model.apply(params, state, x, **conditions)[0].astype(jnp.float32).sum()

    step = jax.make_jaxpr(jax.grad(loss))(params, state)
    for eqn in find_equations(step, ("reduce_sum", "reduce_window_sum")):
        a = eqn.invars[0].aval
        assert a.dtype in (jnp.float32, jnp.int32) or a.size == eqn.outvars[0].aval.size, eqn


EYE = np.eye(2, dtype=np.float32)

SHARED = {
    "a dense layer's bias": lambda v, x: affine(layers.dense(2, 2), EYE, v, x),
    "a convolution's bias": lambda v, x: affine(layers.conv(2, 2, 1), EYE[None, None], v, x[None]),
    "a causal convolution's kernel": lambda v, x: causal_conv(x, v[None])[0],
    "a causal convolution's bias": lambda v, x: causal_conv(x, EYE, v)[0],
    "a context's strength": lambda v, x: fnet.apply_context(x, EYE, v.sum()),
    "an image's mean": lambda v, x: add(x[None], v[None, None, None]),
    "a broadcast array": lambda v, x: broadcast_like(v, x),
}


@pytest.mark.parametrize("name", SHARED)
def test_gradients_of_shared_arrays_are_summed_in_float32(name):
    @jax.jit
    def gradient(v, x, dy):
        y, pull = jax.vjp(lambda v: SHARED[name](v, x), v)
        assert y.dtype == x.dtype
        return pull(dy.reshape(y.shape))[0]

    x = jnp.ones((64, 64, 2), jnp.bfloat16)
    got = gradient(jnp.zeros(2), x, jnp.ones_like(x))
    chex.assert_trees_all_equal(got, jnp.full(2, 64.0 * 64.0))  # in bfloat16 256 + 1 = 256


def test_residuals_take_half_the_bytes():
    data = dataclasses.replace(IMAGES.data, batch_size=256)  # so that copies of kernels matter less
    wide, narrow = map(residual_bytes, runs(dataclasses.replace(IMAGES, data=data)))
    assert narrow < 0.52 * wide


@pytest.mark.slow
def test_bfloat16_run_ends_near_float32_and_is_evaluated(workplace, finished_run):
    fnet_command("train", "tiny.py", "--out", "run", "--train.precision", "bfloat16")
    fnet_command("eval", "run")
    evaluation, ended, in_float32 = (
        json.loads(file.read_text())["metrics"]["test/loss"]
        for file in (
            workplace / "run" / "evaluation.json",
            workplace / "run" / "summary.json",
            finished_run / "summary.json",
        )
    )
    assert evaluation == pytest.approx(ended, rel=1e-3)
    assert ended == pytest.approx(in_float32, rel=0.05)
