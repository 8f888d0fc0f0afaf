"""Time of a compiled program at the highest rates of a device, from its instructions."""

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from fnet.memory import roofline
from fnet.memory.target import TARGETS, Gpu, Peaks, Tpu

PROGRAMS = Path(__file__).parent
PEAKS = Peaks({"float32": 1e12, "bfloat16": 2e12}, 1e12, 1e11, 1e10, 1e9, 0.0)


def estimate(f, *shapes, peaks=PEAKS, dtype=jnp.float32):
    args = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
    return roofline.estimate(jax.jit(f).lower(*args).compile(), peaks)


def test_counts_every_iteration_of_a_loop():
    def f(w, x):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0]

    e = estimate(f, (7, 64, 64), (32, 64))
    assert e.total_flops == 7 * 2 * 32 * 64 * 64
    weights, activations = 7 * 64 * 64 * 4, 32 * 64 * 4
    # Reads the weights once, not the whole stack in every iteration.
    assert weights <= e.bytes < 3 * weights + 7 * 6 * activations < 7 * weights


def test_each_kernel_of_each_iteration_is_launched():
    def f(x):
        return jax.lax.fori_loop(0, 7, lambda i, x: jnp.sort(jnp.sin(x)), x)

    once, launched = (
        estimate(f, (64,), peaks=PEAKS._replace(launch=seconds)) for seconds in (0.0, 1.0)
    )
    assert launched.seconds - once.seconds >= 7
    assert launched.share["launch"] == pytest.approx(1, abs=1e-6)
    for e in (once, launched):
        assert sum(e.share.values()) == pytest.approx(1)


def test_a_product_is_limited_by_compute_and_a_sum_by_memory():
    product = estimate(lambda a, b: a @ b, (1024, 1024), (1024, 1024))
    assert product.seconds == pytest.approx(2 * 1024**3 / 1e12)
    assert product.share["compute"] == 1
    total = estimate(lambda a, b: a + b, (1024, 1024), (1024, 1024))
    assert total.seconds == pytest.approx(3 * 4 * 1024**2 / 1e11)
    assert total.share["memory"] == 1
    slow = estimate(lambda a, b: a + b, (1024,), (1024,), peaks=PEAKS._replace(vector=1e3))
    assert slow.seconds == pytest.approx(1.024)


def test_small_kernels_run_in_the_cache():
    cached = PEAKS._replace(cache=(1e6, 1e12))
    small, large = (256, 256), (1024, 1024)
    for shape, rate in ((small, 1e12), (large, 1e11)):
        e = estimate(lambda a: a + 1, shape, peaks=cached)
        assert e.seconds == pytest.approx(e.bytes / rate)


def test_flops_of_a_convolution_skip_padding_and_holes():
    def f(x, w):
        return jax.lax.conv_general_dilated(
            x, w, (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )

    x, w = (2, 9, 9, 4), (3, 3, 4, 8)
    forward = estimate(f, x, w)
    # On each side, 5 positions x 3 taps, of which the first and the last reach the padding.
    assert forward.total_flops == 2 * 13**2 * 2 * 4 * 8
    both = estimate(lambda x, w, y: jax.vjp(f, x, w)[1](y), x, w, (2, 5, 5, 8))
    assert both.total_flops == pytest.approx(2 * forward.total_flops)


@pytest.mark.parametrize("factor", [1, 2], ids=["alone", "in a fusion"])
def test_an_update_in_place_writes_the_update_alone(factor):
    def f(x, row):
        return jax.lax.dynamic_update_slice(x, factor * row, (3, 0))

    args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((4096, 256), (1, 256))]
    compiled = jax.jit(f, donate_argnums=0).lower(*args).compile()
    read = written = 4 * 256
    indices = roofline.estimate(compiled, PEAKS).bytes - read - written
    assert 0 <= indices <= 8


def test_a_conditional_counts_its_slowest_branch():
    def f(x):
        return jax.lax.cond(x[0, 0] > 0, lambda x: x @ x @ x, lambda x: x @ x, x)

    assert estimate(f, (64, 64)).total_flops == 2 * 2 * 64**3


def test_counts_the_bytes_that_devices_exchange():
    devices = jax.local_devices()[:4]
    mesh = jax.make_mesh((4,), ("x",), devices=devices, axis_types=(AxisType.Auto,))
    rows, whole = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in (("x",), ()))
    a = jax.ShapeDtypeStruct((64, 128), jnp.float32, sharding=rows)
    total = jax.jit(lambda a: a.T @ a, out_shardings=whole).lower(a).compile()
    e = roofline.estimate(total, PEAKS)
    assert e.total_flops == 2 * 128 * 128 * 16  # of one device
    assert e.link_bytes == 2 * 3 / 4 * 128 * 128 * 4  # an all-reduce
    assert e.seconds >= e.link_bytes / PEAKS.link
    gathered = jax.jit(lambda a: a * 2, out_shardings=whole).lower(a).compile()
    assert roofline.estimate(gathered, PEAKS).link_bytes == 3 / 4 * 64 * 128 * 4


GPU_PROGRAM = (PROGRAMS / "gpu_program.hlo").read_text()


def test_reads_library_calls_and_overlapping_messages_of_a_gpu_program():
    e = roofline.estimate(GPU_PROGRAM, PEAKS)
    taps = 16 * 3 - 2
    assert e.flops == {"bfloat16": 2 * 512 * 256 * 128, "float32": 2 * taps**2 * 8 * 4 * 32}
    assert e.link_bytes == 7 / 8 * 4096 * 256 * 2
    assert e.seconds == pytest.approx(e.link_bytes / PEAKS.link)  # it outlasts both kernels
    assert e.share["link"] < 1


ATTENTION = (PROGRAMS / "attention.hlo").read_text()


def test_counts_the_scores_of_cudnn_attention():
    causal = ATTENTION.replace("NO_MASK", "CAUSAL")
    for program, scores in (
        (ATTENTION, 4096 * 4096),
        (causal, 4096 * 4097 / 2),
        (causal.replace('length":0', 'length":100'), 100 * 101 / 2 + 3996 * 100),
    ):
        # Its backward pass computes the scores again, and four products of their size.
        assert roofline.estimate(program, PEAKS).flops == {"bfloat16": 2 * 5 * 8 * 16 * scores * 64}
        forward = roofline.estimate(program.replace("Backward", ""), PEAKS)
        assert forward.flops == {"bfloat16": 2 * 2 * 8 * 16 * scores * 64}


def test_counts_a_message_in_a_computation_of_its_own():
    program = (PROGRAMS / "gather.hlo").read_text()
    e = roofline.estimate(program, PEAKS)
    assert e.link_bytes == 7 / 8 * 4096 * 256 * 4
    assert e.seconds == pytest.approx(e.link_bytes / PEAKS.link)


TPU_PROGRAM = (PROGRAMS / "tpu_program.hlo").read_text()


def test_counts_the_messages_inside_fusions_of_a_tpu_program_once():
    e = roofline.estimate(TPU_PROGRAM, PEAKS)
    assert e.link_bytes == 3 / 4 * 128 * 128 * 2
    assert e.seconds == pytest.approx(e.link_bytes / PEAKS.link)


def test_utilization_is_relative_to_the_dtype_of_most_flops():
    e = roofline.Estimate(1.0, {"float32": 1.0, "bfloat16": 2.0}, 0.0, 0.0, {})
    assert roofline.utilization(5e11, 1.0, e, PEAKS) == 0.25


def test_known_devices_have_rates():
    for device in TARGETS.values():
        peaks = device.peaks
        assert all(rate > 0 for rate in peaks.flops.values())
        assert peaks.flops["bfloat16"] >= peaks.flops["highest"] > 1e12
        assert 1e11 < peaks.bandwidth < 1e13
        assert 1e9 < peaks.network <= peaks.link < peaks.bandwidth
        assert isinstance(device, Gpu | Tpu)


def test_slices_of_a_tpu_grow_by_their_shortest_side():
    assert [TARGETS["v5e"].slice_of(n) for n in (1, 4, 8, 16, 32)] == [
        *("v5e:2x2", "v5e:2x2", "v5e:2x4", "v5e:4x4", "v5e:4x8")
    ]
    assert [TARGETS["v5p"].slice_of(n) for n in (1, 8, 16, 64)] == [
        *("v5p:2x2x1", "v5p:2x2x2", "v5p:2x2x4", "v5p:4x4x4")
    ]


def test_rejects_a_program_without_a_schedule():
    with pytest.raises(ValueError, match="has no schedule"):
        roofline.estimate("HloModule f", PEAKS)


SCATTER = (PROGRAMS / "scatter.hlo").read_text()


def test_a_scatter_in_a_fusion_reads_and_writes_its_updates_alone():
    indices, updates = 8 * 4, 8 * 256 * 4
    assert roofline.estimate(SCATTER, PEAKS).bytes == indices + 2 * updates


UNFUSED = (PROGRAMS / "unfused.hlo").read_text()
X, U, ROW_INDICES = 64 * 8 * 4, 3 * 8 * 4, 3 * 4
INSTRUCTIONS = {
    "f32[5,8]{1,0} slice(%x), slice={[0:5], [0:8]}": (2 * 5 * 8 * 4, 0),
    "f32[64,8]{1,0} dynamic-update-slice(%x, %u, %z, %z)": (2 * U, 0),
    "f32[64,8]{1,0} scatter(%x, %i, %u), update_window_dims={1}": (3 * U + ROW_INDICES, 512),
    "f32[64,8]{1,0} sort(%x), dimensions={0}": (2 * X, 512 * 9),
    "f32[3,8]{1,0} multiply(%u, %u)": (3 * U, 24),
    "f32[3,8]{1,0} tanh(%u)": (2 * U, 8 * 24),
    "f32[8]{0} reduce(%x, %z), dimensions={0}": (X + 4 + 8 * 4, 512),
    "f32[8]{0} reduce-window(%x, %z), window={size=64x2 pad=0_0x0_1}": (X + 4 + 8 * 4, 1024),
}


def test_traffic_and_operations_of_instructions_outside_of_fusions():
    for text, (bytes_, operations) in INSTRUCTIONS.items():
        program = UNFUSED.replace("@", text)
        slow_memory, slow_lanes = PEAKS._replace(bandwidth=1.0), PEAKS._replace(vector=1.0)
        # A kernel that moves fewer bytes than the cache has runs at its rate.
        for size, seconds in ((0, bytes_), (bytes_, bytes_), (bytes_ + 1, bytes_ / 8)):
            cached = slow_memory._replace(cache=(size, 8.0), vector=1e30)
            assert roofline.estimate(program, cached).seconds == seconds, text
        e = roofline.estimate(program, slow_lanes)
        assert (e.bytes, e.total_flops) == (bytes_, 0)
        if operations:
            assert e.seconds == pytest.approx(operations), text


HOST_COPIES = (PROGRAMS / "host_copies.hlo").read_text()


def test_copies_to_and_from_the_host_overlap_and_those_of_one_direction_do_not():
    def seconds(program):
        return roofline.estimate(program, PEAKS._replace(host=4.0)).seconds

    copied = 1024, 2048  # arrays of four bytes, at four bytes a second
    assert seconds(HOST_COPIES) == pytest.approx(max(copied), rel=1e-3)
    both = HOST_COPIES.replace("%a = f32[1024]{0}", "%a = f32[1024]{0:S(5)}")
    both = both.replace("%to = (f32[1024]{0:S(5)}", "%to = (f32[1024]{0}")
    assert seconds(both) == pytest.approx(sum(copied), rel=1e-3)
    waits = HOST_COPIES.split("  %to")[0] + "  ROOT %got = f32[2048]{0} copy(%h)\n}\n"
    assert seconds(waits) == pytest.approx(copied[1], rel=1e-3)


def test_iterations_of_a_loop_are_known_or_the_constant_that_it_is_compared_with():
    program = (PROGRAMS / "while.hlo").read_text()
    assert roofline.estimate(program, PEAKS).total_flops == 7 * 2 * 8**3
    known = ', backend_config={"known_trip_count":{"n":"5"}}\n}'
    known = program.replace("body=%body\n}", f"body=%body{known}")
    assert roofline.estimate(known, PEAKS).total_flops == 5 * 2 * 8**3
