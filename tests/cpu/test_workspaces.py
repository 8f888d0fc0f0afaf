"""Compiler options for CPUs, and the memory that operations allocate while they run."""

import functools
import subprocess
import sys
from importlib.metadata import version

import jax
import jax.numpy as jnp
import pytest

from fnet.cpu import workspaces
from fnet.memory import CANDIDATE_OPTIONS, peak

OPTIONS = CANDIDATE_OPTIONS["cpu"]
X = jax.ShapeDtypeStruct((64, 64), jnp.float32)


def compiled(f, *args, options=OPTIONS[0], **jit):
    return jax.jit(f, **jit).lower(*args).compile(compiler_options=options)


@pytest.mark.skipif(
    not version("jaxlib").startswith("0.10."), reason="only jaxlib 0.10 gives it convolutions"
)
@pytest.mark.parametrize("options", OPTIONS)
def test_ynnpack_computes_products_but_no_convolutions(options):
    x = jax.ShapeDtypeStruct((2, 8, 8, 4), jnp.float32)
    kernel = jax.ShapeDtypeStruct((3, 3, 4, 8), jnp.float32)

    def f(x, kernel):
        numbers = ("NHWC", "HWIO", "NHWC")
        y = jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=numbers)
        return y @ y.reshape(-1, 8).T

    text = compiled(f, x, kernel, options=options).as_text()
    assert text.count('"__ynn_fusion"') == 1
    assert "convolution(" in text[text.index("ENTRY") :]


def convolution(x, kernel, dilation=1, stride=1, groups=1):
    return jax.lax.conv_general_dilated(
        *(x, kernel, (stride, stride), "SAME"),
        rhs_dilation=(dilation, dilation),
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        feature_group_count=groups,
    )


@pytest.fixture(params=[False, True], ids=["whole inputs", "tiles"])
def has_tiles(request, monkeypatch):
    """As jaxlib 0.10, and as later versions."""
    monkeypatch.setattr(workspaces, "_HAS_TILES", request.param)
    return request.param


def test_workspace_of_a_convolution_in_ynnpack_is_its_kernel_or_its_padded_input(has_tiles):
    x = jax.ShapeDtypeStruct((8, 64, 64, 64), jnp.float32)
    kernel = jax.ShapeDtypeStruct((3, 3, 64, 64), jnp.float32)
    program = compiled(convolution, x, kernel, options={})
    assert "__ynn_fusion" in program.as_text()
    p = peak(program)
    assert p.workspace == (4 * kernel.size if has_tiles else 4 * 8 * 66 * 66 * 64)
    assert p.total == p.assigned + p.workspace
    assert peak(compiled(lambda x, y: x @ y, X, X)).workspace == 0
    large = jax.ShapeDtypeStruct((3, 3, 64, 256), jnp.float32)
    x = jax.ShapeDtypeStruct((1, 16, 16, 64), jnp.float32)
    p = peak(compiled(functools.partial(convolution, dilation=12), x, large, options={}))
    assert p.workspace == 4 * (large.size + (not has_tiles) * 2 * (16 + 24) ** 2 * 64)
    column = jax.ShapeDtypeStruct((8, 4096, 1, 64), jnp.float32)  # one pixel wide
    tall = jax.ShapeDtypeStruct((3, 1, 64, 64), jnp.float32)
    p = peak(compiled(convolution, column, tall, options={}))
    assert p.workspace == 4 * (tall.size if has_tiles else 8 * 4098 * 64)
    photos = jax.ShapeDtypeStruct((8, 30, 30, 3), jnp.float32)  # three channels are copied
    kernel = jax.ShapeDtypeStruct((3, 3, 3, 64), jnp.float32)
    p = peak(compiled(convolution, photos, kernel, options={}))
    assert p.workspace == 4 * (8 * 32 * 32 * 3 + has_tiles * kernel.size)


def test_workspace_of_a_convolution_in_eigen():
    x = jax.ShapeDtypeStruct((8, 16, 16, 64), jnp.float32)
    kernel = jax.ShapeDtypeStruct((3, 3, 64, 32), jnp.float32)
    assert eigen_workspace(convolution, x, kernel) == 0
    half = jax.ShapeDtypeStruct((8, 8, 8, 32), jnp.float32)

    def by_input(kernel, y):
        strided = functools.partial(convolution, stride=2)
        return jax.linear_transpose(lambda x: strided(x, kernel), x)(y)[0]

    # The product of each input with all elements and features.
    assert eigen_workspace(by_input, kernel, half) == 4 * (8 * 8 * 8) * (3 * 3) * 64
    for groups in (2, 4):
        grouped = jax.ShapeDtypeStruct((3, 3, 64 // groups, 64), jnp.float32)
        in_groups = functools.partial(convolution, groups=groups)
        patches = 4 * 8 * 16 * 16 * 9 * 64 // groups
        assert eigen_workspace(in_groups, x, grouped) == groups * min(patches, 2**21)


def eigen_workspace(f, *args):
    [options, _] = CANDIDATE_OPTIONS["cpu"]
    program = compiled(f, *args, options=options)
    if "__ynn_fusion" in program.as_text():
        pytest.skip("this jaxlib gives convolutions to YNNPACK")
    return peak(program).workspace


SMALL_LOOP = """
import jax, jax.numpy as jnp
from fnet.memory import compile_min_memory

@jax.checkpoint
def iteration(carry, row, weight):
    return jnp.tanh(carry @ weight) + row

def loss(weight, rows):
    body = lambda carry, row: (iteration(carry, row, weight), None)
    return (jax.lax.scan(body, jnp.zeros((2, 2)), rows)[0] ** 2).sum()

for dtype in ("float32", "bfloat16"):
    lowered = jax.jit(jax.grad(loss)).lower(jnp.eye(2), jnp.ones((8, 2, 2), dtype))
    compile_min_memory(lowered)
print("compiled")
"""


def test_a_small_loop_with_rematerialization_compiles():
    # XLA's pass that hoists small loops ends the process at a barrier, so another process tries.
    run = subprocess.run([sys.executable, "-c", SMALL_LOOP], capture_output=True, text=True)
    assert run.stdout == "compiled\n", run.stderr[-1000:]


def test_workspace_of_matrix_products_in_succession(has_tiles):
    def chain(batch, *matrices):
        for m in matrices:
            batch = jnp.tanh(batch @ m)
        return batch

    large = jax.ShapeDtypeStruct((4, 512, 512), jnp.float32)  # 4 MiB, packed
    for count in (1, 2, 3, 5):
        p = peak(compiled(chain, large, *[large] * count))
        assert p.workspace == (min(count, 2) * 2**20 if has_tiles else min(count, 3) * 2**22)
    # Weights of a layer are packed in small blocks, and so are small batches.
    assert (
        peak(compiled(jnp.matmul, large, jax.ShapeDtypeStruct((512, 512), jnp.float32))).workspace
        == 0
    )
    small = jax.ShapeDtypeStruct((4, 64, 64), jnp.float32)
    assert peak(compiled(chain, small, small)).workspace == 0
    # The gradient of weights is a product with a transposed matrix.
    x, y = (jax.ShapeDtypeStruct((4096, n), jnp.float32) for n in (256, 512))
    p = peak(compiled(lambda x, y: x.T @ y, x, y))
    assert p.workspace == (not has_tiles) * 4 * (4096 * 256 + 256 * 512)


def test_only_the_largest_of_large_workspaces_counts(monkeypatch):
    matrices = [jax.ShapeDtypeStruct((4, n, n), jnp.float32) for n in (1152, 1280)]
    sizes = [4 * m.size for m in matrices]
    assert min(sizes) > 2**24
    monkeypatch.setattr(workspaces, "_HAS_TILES", False)
    # Both products are independent, so their order does not matter.
    p = peak(compiled(lambda x, y: (x @ x, y @ y), *matrices))
    assert p.workspace == sizes[1]
