import functools
import types

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fnet
from fnet import layers, serial
from fnet.memory import target
from fnet.memory.peak import CANDIDATE_OPTIONS, peak
from fnet.memory.remat import RematError, check_remat, flops

DEFAULT: dict = {}
KEEP, FOR_MEMORY = CANDIDATE_OPTIONS["cpu"]
F32 = jnp.float32
N, WIDTH, BLOCKS = 256, 64, 6
PRODUCT = 2 * N * WIDTH * WIDTH
X = jax.ShapeDtypeStruct((N, WIDTH), F32)
WEIGHTS = [jax.ShapeDtypeStruct((WIDTH, WIDTH), F32)] * BLOCKS


def gradient(f, *args, options):
    return jax.jit(jax.grad(f)).lower(*args).compile(compiler_options=dict(options))


def dense_blocks(each=lambda f: f, around=lambda f: f):
    block = each(lambda w, x: jnp.sin(x @ w))

    def apply(ws, x):
        for w in ws:
            x = block(w, x)
        return x

    return lambda ws, x: jnp.square(around(apply)(ws, x)).mean()


def both(wrap, options):
    return [gradient(dense_blocks(w), WEIGHTS, X, options=options) for w in (lambda f: f, wrap)]


def test_a_checkpoint_per_block_repeats_the_forward_pass_and_saves_memory():
    # Two products per block in the backward pass, but one for the first block.
    found = check_remat(*both(jax.checkpoint, KEEP))
    assert found.flops_before == pytest.approx((3 * BLOCKS - 1) * PRODUCT, rel=0.06)
    assert found.flops_after - found.flops_before == pytest.approx(BLOCKS * PRODUCT, rel=0.01)
    assert found.flops_ratio == found.flops_after / found.flops_before
    assert found.temporaries_ratio == found.temporaries_after / found.temporaries_before
    # A sine and a cosine per block before, one of them after.
    assert found.temporaries_ratio < 0.75
    assert found.bytes_after > found.bytes_before > 0


@pytest.mark.skipif(jax.__version_info__ >= (0, 11), reason="the compiler keeps the barriers")
def test_rejects_remat_that_the_cpu_compiler_undoes():
    with pytest.raises(RematError) as error:
        check_remat(*both(jax.checkpoint, DEFAULT))
    message = str(error.value)
    assert "FLOPs times 1.0" in message
    assert "cse_barrier_expander" in message
    assert f"compile with compiler_options={KEEP}" in message


def test_without_a_barrier_xla_merges_it_with_any_options():
    policy = functools.partial(jax.checkpoint, prevent_cse=False)
    with pytest.raises(RematError, match=r"times 1\.000.*\(prevent_cse=False\)"):
        check_remat(*both(policy, KEEP))


def test_one_checkpoint_around_everything_saves_no_memory():
    plain = gradient(dense_blocks(), WEIGHTS, X, options=KEEP)
    whole = gradient(dense_blocks(around=jax.checkpoint), WEIGHTS, X, options=KEEP)
    assert flops(whole) > 1.3 * flops(plain)
    with pytest.raises(RematError, match="wrap each block by itself"):
        check_remat(plain, whole)


def abn_stack(activation, wrap):
    block = serial(conv=layers.conv(8, 8, bias=False), abn=layers.abn(8, activation=activation))
    layer = serial(*[block] * 4)
    params, state = jax.eval_shape(layer.init, jax.random.key(0))
    apply = wrap(lambda p, s, x: layer.apply(p, s, x, train=True)[0])
    images = jax.ShapeDtypeStruct((4, 8, 8, 8), F32)
    return gradient(
        lambda p, s, x: jnp.square(apply(p, s, x)).mean(), params, state, images, options=FOR_MEMORY
    )


def test_recompute_repeats_activation_functions_but_no_convolution():
    found = check_remat(abn_stack("gelu", lambda f: f), abn_stack("gelu", fnet.recompute))
    assert 1 < found.flops_ratio < 1.05
    assert found.temporaries_ratio < 0.75


@pytest.mark.parametrize("wrap", [fnet.recompute, fnet.memory.remat_in_segments])
def test_strings_and_bools_by_keyword_are_static(wrap):
    model = serial(dense=layers.dense(4, 4), drop=layers.dropout(0.5))
    params, state = model.init(jax.random.key(0))
    x = jax.random.normal(jax.random.key(1), (2, 4))

    def gradient(apply, train):
        key = jax.random.key(2) if train else None
        loss = lambda p: jnp.sin(apply(p, state, x, key=key, train=train)[0]).sum()  # noqa: E731
        return jax.grad(loss)(params)

    for train in (True, False):
        chex.assert_trees_all_close(
            gradient(wrap(model.apply), train), gradient(model.apply, train), rtol=1e-6
        )

    def f(x, scale, *, how, where=None):
        assert (how, where) == ("mean", None)
        return (scale * x).mean()

    assert wrap(f)(x, scale=jnp.float32(2), how="mean", where=None) == 2 * x.mean()
    assert wrap(f).__name__ == "f"


def test_rejects_a_policy_that_drops_no_residual():
    programs = [abn_stack("leaky_relu", wrap) for wrap in (lambda f: f, fnet.recompute)]
    with pytest.raises(RematError, match="no residuals that the policy drops"):
        check_remat(*programs)


def test_remat_inside_a_scan_needs_no_options_and_counts_one_iteration():
    def loss(wrap):
        step = wrap(lambda x, w: (jnp.sin(x @ w), None))
        return lambda ws, x: jnp.square(jax.lax.scan(step, x, ws)[0]).mean()

    stacked = jax.ShapeDtypeStruct((BLOCKS, WIDTH, WIDTH), F32)
    programs = [
        gradient(loss(wrap), stacked, X, options=DEFAULT) for wrap in (lambda f: f, jax.checkpoint)
    ]
    found = check_remat(*programs)
    assert found.flops_after - found.flops_before == pytest.approx(PRODUCT, rel=0.05)
    assert found.temporaries_ratio < 0.75


# Printed by XLA for an H100, shortened.
GPU_TEXT = """HloModule m, is_scheduled=true
ENTRY %main (x: f32[4,16,16,16], k: f32[16,3,3,16], dy: f32[4,16,16,16]) -> f32[8,512,1024] {
  %x = f32[4,16,16,16]{3,2,1,0} parameter(0)
  %k = f32[16,3,3,16]{3,2,1,0} parameter(1)
  %dy = f32[4,16,16,16]{3,2,1,0} parameter(2)
  %a = bf16[8,512,256]{2,1,0} parameter(3)
  %b = bf16[8,256,1024]{2,1,0} parameter(4)
  %conv.12 = (f32[4,16,16,16]{3,2,1,0}, u8[0]{0}) custom-call(%x, %k), window={size=3x3 pad=1_1x1_1}, dim_labels=b01f_o01i->b01f, custom_call_target="__cudnn$convForward"
  %dk.11 = (f32[16,3,3,16]{3,2,1,0}, u8[0]{0}) custom-call(%x, %dy), window={size=3x3 pad=1_1x1_1}, dim_labels=b01f_o01i->b01f, custom_call_target="__cudnn$convBackwardFilter"
  %dx.5 = (f32[4,16,16,16]{3,2,1,0}, u8[0]{0}) custom-call(%dy, %k), window={size=3x3 pad=1_1x1_1}, dim_labels=b01f_o01i->b01f, custom_call_target="__cudnn$convBackwardInput"
  %gemm = (bf16[8,512,1024]{2,1,0}, s8[4096]{0}) custom-call(%a, %b), custom_call_target="__cublas$gemm", backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["2"],"rhs_contracting_dimensions":["1"],"lhs_batch_dimensions":["0"]}}}
  ROOT %dot.29 = f32[8,512,1024]{2,1,0} dot(%a, %b), lhs_batch_dims={0}, lhs_contracting_dims={2}, rhs_batch_dims={0}, rhs_contracting_dims={1}
}
"""


def test_flops_without_a_cost_analysis_are_those_of_products():
    gpu = types.SimpleNamespace(cost_analysis=lambda: None, as_text=lambda: GPU_TEXT)
    # Along an axis, 14 outputs meet three elements, and 2 meet padding and two elements.
    pairs = (14 * 3 + 2 * 2) ** 2
    convolution, product = 2 * (4 * pairs * 16) * 16, 2 * (8 * 512 * 1024) * 256
    assert flops(gpu) == 3 * convolution + 2 * product


def test_remat_for_a_gpu_compiled_ahead_of_time():
    try:
        gpu = target.describe("h100")
    except RuntimeError as error:
        pytest.skip(str(error))
    programs = [
        target.compile_for(gpu, jax.jit(jax.grad(dense_blocks(each))), WEIGHTS, X)
        for each in (lambda f: f, jax.checkpoint)
    ]
    found = check_remat(*programs)
    assert found.flops_before == (3 * BLOCKS - 1) * PRODUCT
    assert found.flops_after == (4 * BLOCKS - 1) * PRODUCT
    assert found.bytes_before is None
    assert found.temporaries_ratio < 0.75


def test_flops_of_products_agree_with_the_cost_analysis():
    def loss(kernels, x):
        x = jnp.sin(fnet.layers.conv(4, 8, 3).apply({"kernel": kernels[0]}, {}, x, train=True)[0])
        return jnp.sin(x.reshape(8, -1) @ kernels[1]).sum()

    kernels = [jax.ShapeDtypeStruct(s, F32) for s in ((3, 3, 4, 8), (8 * 8 * 8, 32))]
    images = jax.ShapeDtypeStruct((8, 8, 8, 4), F32)
    compiled = gradient(loss, kernels, images, options=KEEP)
    silent = types.SimpleNamespace(cost_analysis=lambda: None, as_text=compiled.as_text)
    # The compiler also counts sums.
    assert flops(silent) == pytest.approx(flops(compiled), rel=0.1)


def test_a_program_compared_with_itself_saves_no_memory():
    compiled = both(jax.checkpoint, KEEP)[1]
    with pytest.raises(RematError, match=r"FLOPs times 1\.000") as error:
        check_remat(compiled, compiled)
    held = f"{peak(compiled).temporaries:,}"
    assert f"temporaries {held} bytes before, {held} after" in str(error.value)


def test_rejects_programs_without_temporaries():
    compiled = jax.jit(lambda x: x + 1).lower(X).compile()
    with pytest.raises(RematError, match="temporaries 0 bytes before, 0 after"):
        check_remat(compiled, compiled)


@pytest.mark.slow
@pytest.mark.skipif("jax_remat3" not in jax.config.values, reason="this JAX has one checkpoint")
def test_the_next_implementation_of_checkpoint_is_followed():
    def losses(params, x):
        for w in params:
            x = jax.checkpoint(lambda w, x: jnp.tanh(x @ w) + x)(w, x)
        return jnp.square(x).mean(-1)

    params = [0.1 * jnp.eye(64) for _ in range(6)]
    adam, batch = optax.adam(1e-3), {"x": jnp.ones((512, 64))}
    state = fnet.TrainState.create(params=params, optimizer=adam, key=jax.random.key(0))
    step = fnet.make_step(lambda params, _, batch, key: losses(params, batch["x"]), adam)
    peaks, norms = [], []
    before = jax.config.values["jax_remat3"]
    try:
        for switch in (False, True):
            jax.config.update("jax_remat3", switch)
            plain = fnet.compile_step(step, state, batch).report.peak.total
            fitted = fnet.compile_step(step, state, batch, budget=int(0.8 * plain))
            clipped = fnet.autodiff.clipped_grad(losses, 1.0)
            peaks.append((plain, fitted.report.peak.total))
            norms.append(clipped(params, batch["x"][:4])[1].norms)
    finally:
        jax.config.update("jax_remat3", before)
    assert all(fitted <= 0.8 * plain for plain, fitted in peaks)
    np.testing.assert_allclose(norms[0], norms[1], rtol=1e-5)
