from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from fnet.memory.timeline import layer_of, timeline

PROGRAMS = Path(__file__).parent


def program(text, *, arguments, outputs=0, aliased=0):
    """A stand-in for a compiled program, with the given text."""
    stats = SimpleNamespace(
        argument_size_in_bytes=arguments, output_size_in_bytes=outputs, alias_size_in_bytes=aliased
    )
    text = "HloModule m, is_scheduled=true" + text
    return SimpleNamespace(as_text=lambda: text, memory_analysis=lambda: stats)


def test_an_array_is_alive_from_its_maker_to_its_last_reader():
    text = (PROGRAMS / "two_layers.hlo").read_text()
    found = timeline(program(text, arguments=100, outputs=100))
    assert found.instructions == ["x", "a", "b", "c", "d"]
    assert found.live_bytes == [200, 400, 700, 800, 500]
    assert (found.peak_index, found.peak_phase) == (3, "backward")
    assert [(b.bytes, b.kind, b.layer, b.phase) for b in found.at_peak] == [
        (300, "temporary", "two", "forward"),
        (200, "temporary", "one", "forward"),
        (100, "argument", "x", ""),
        (100, "output", "", ""),
        (100, "temporary", "two", "backward"),
    ]


def test_a_loop_body_appears_once_and_its_carry_is_dead_between_read_and_write():
    found = timeline(program((PROGRAMS / "loop.hlo").read_text(), arguments=100))
    live = dict(zip(found.instructions, found.live_bytes, strict=True))
    held, counter, carry, whole, inside = 100, 4, 100, 1000, 200
    assert live["w"] == held + counter + carry + whole
    assert live["go"] == held + counter + carry + whole + 1
    assert live["t"] == held + counter + carry + whole + inside
    assert live["k"] == held + counter + whole + inside  # the carry is read, and not yet written
    assert live["next"] == held + counter + carry + whole + inside
    assert live["out"] == held + counter + carry + whole
    assert live["y"] == held + carry
    assert found.instructions.index("go") < found.instructions.index("t")
    assert found.instructions.index("next") < found.instructions.index("out")
    assert {b.instruction: b for b in found.at_peak}["next"].layer == "blocks"  # of its maker


def test_a_slice_written_in_place_takes_no_memory():
    text = (PROGRAMS / "slice.hlo").read_text()
    found = timeline(program(text, arguments=104, outputs=100))
    assert found.live_bytes == [204, 204, 604, 604, 604, 604, 604]


def test_an_output_in_a_donated_buffer_counts_once():
    text = """, input_output_alias={ {0}: (1, {}, may-alias) }

ENTRY %main (g: f32[25], w: f32[25]) -> (f32[25], f32[25]) {
  %g = f32[25]{0} parameter(0), metadata={op_name="g"}
  %w = f32[25]{0} parameter(1), metadata={op_name="state.params[\\'w\\']"}
  %new = f32[25]{0} custom-call(%w, %g)
  %seen = f32[25]{0} custom-call(%new)
  ROOT %both = (f32[25]{0}, f32[25]{0}) tuple(%new, %seen)
}
"""
    found = timeline(program(text, arguments=200, outputs=200, aliased=100))
    assert set(found.live_bytes) == {300}
    assert [(b.kind, b.layer) for b in found.at_peak] == [
        ("argument", "g"),
        ("argument", "state.params['w']"),
        ("output", ""),
    ]


def test_a_temporary_uses_the_buffer_of_an_empty_output_or_of_a_temporary():
    for b, outputs, live in (
        # %a fits into %y before %y is written. %b would overlap with it.
        ("f32[25]{0} custom-call(%a)", 50, [300, 300, 400, 400]),
        ("f32[50]{0} negate(%a)", 25, [200, 400, 400, 400]),
    ):
        text = f"""
ENTRY %main (x: f32[25]) -> f32[{outputs}] {{
  %x = f32[25]{{0}} parameter(0)
  %a = f32[50]{{0}} custom-call(%x)
  %b = {b}
  ROOT %y = f32[{outputs}]{{0}} custom-call(%b)
}}
"""
        found = timeline(program(text, arguments=100, outputs=4 * outputs))
        assert found.live_bytes == live


def test_only_elementwise_instructions_and_sorts_overwrite_their_operand():
    for opcode, dtype, temporary in (
        ("negate", "f32", 0), ("sort", "f32", 0), ("reverse", "f32", 200), ("convert", "s32", 200),
    ):  # fmt: skip
        text = f"""
ENTRY %main (x: f32[25]) -> {dtype}[50] {{
  %x = f32[25]{{0}} parameter(0)
  %a = f32[50]{{0}} custom-call(%x)
  ROOT %y = {dtype}[50]{{0}} {opcode}(%a)
}}
"""
        found = timeline(program(text, arguments=100, outputs=200))
        assert found.live_bytes == [300, 300 + temporary, 300 + temporary]


@pytest.mark.parametrize(
    "branches",
    ["branch_computations={%left, %right}", "true_computation=%left, false_computation=%right"],
)
def test_branches_are_not_alive_at_the_same_time(branches):
    text = (PROGRAMS / "branches.hlo").read_text()
    text = text.replace("BRANCHES", branches)
    found = timeline(program(text, arguments=104, outputs=100))
    live = dict(zip(found.instructions, found.live_bytes, strict=True))
    assert (live["n"], live["r"]) == (204 + 1000, 204 + 2000)
    assert (live["o"], live["s"]) == (204 + 1000 + 100, 204 + 2000 + 100)
    assert live["v"] == 204 + 100


@pytest.mark.parametrize(
    ("start", "done", "read"),
    [
        ("f32[25]{0} call(%a), to_apply=%inner", "f32[25]{0} bitcast(%s)", 0),
        (
            "((f32[25]{0}), f32[25]{0}) async-start(%a), calls=%inner",
            "f32[25]{0} async-done(%s)",
            100,
        ),
    ],
)
def test_a_called_computation_is_part_of_the_timeline(start, done, read):
    # An asynchronous call holds its operand until it is done.
    text = (PROGRAMS / "call.hlo").read_text()
    text = text.replace("START", start).replace("DONE", done)
    found = timeline(program(text, arguments=100))
    live = dict(zip(found.instructions, found.live_bytes, strict=True))
    assert (live["q"], live["y"]) == (100 + 100 + 1000, 100 + 100)
    assert live["r"] == 100 + read + 1000 + 100


def test_a_copy_to_a_tpu_scratchpad_takes_no_main_memory():
    text = """
ENTRY %main (x: f32[8,128]) -> f32[8,128] {
  %x = f32[8,128]{1,0:T(8,128)} parameter(0)
  %go = (f32[8,128]{1,0:T(8,128)S(1)}, f32[8,128]{1,0:T(8,128)}, u32[]{:S(2)}) copy-start(%x)
  %near = f32[8,128]{1,0:T(8,128)S(1)} copy-done(%go)
  %part = ((f32[8,128]{1,0:T(8,128)}), f32[4,128]{1,0:T(4,128)S(1)}, s32[]{:S(2)}) slice-start(%x)
  %few = f32[4,128]{1,0:T(4,128)S(1)} slice-done(%part)
  ROOT %y = f32[8,128]{1,0:T(8,128)} custom-call(%near, %few)
}
"""
    assert set(timeline(program(text, arguments=4096, outputs=4096)).live_bytes) == {8192}


def test_rejects_a_program_without_a_schedule():
    lowered = jax.jit(lambda x: x + 1).lower(jnp.ones(3))
    text = lowered.as_text(dialect="hlo")
    with pytest.raises(ValueError, match=r"expected the text of a compiled program .*HloModule"):
        timeline(SimpleNamespace(as_text=lambda: text))


def test_parses_layer_and_phase_from_op_name():
    for op_name, *expected in (
        ("jit(step)/jvp(stage0)/0/conv/conv_general_dilated", "stage0/0/conv", "forward"),
        ("jit(step)/transpose(jvp(stage0))/0/conv/transpose", "stage0/0/conv", "backward"),
        ("jit(step)/jvp(stage0)/abn/jit(leaky_relu)/jit(_where)/select_n", "stage0/abn", "forward"),
        ("jit(step)/jvp()/reduce_sum", "", "forward"),
        ("jit(step)/jvp(jit(layer))/a/b/cos", "a/b", "forward"),
        ("jit(step)/transpose(jvp(jvp()))/checkpoint/rematted_computation/a/cos", "a", "backward"),
        ("jit(f)/jvp(blocks)/while/body/closed_call/body/act/tanh", "blocks/body/act", "forward"),
        ("jit(f)/transpose(jvp(blocks))/while/body/closed_call", "blocks", "backward"),
        ("jit(f)/jvp(blocks)/while", "blocks", "forward"),
        ("jit(f)/jvp(a)/cond/branch_1_fun/b/sin", "a/b", "forward"),
        ("jit(f)/vmap(jvp(vmap(transpose(jvp(a)))))/b/mul", "a/b", "backward"),
        ("jit(f)/jvp()/shard_map/a/dot_general", "a", "forward"),
        ("jit(h)/jvp(a/b)/c(d)/cos", "a/b/c(d)", "forward"),
        ("jit(step)/optimizer/mul", "optimizer", "optimizer"),
        ("jit(f)/transpose(jvp(a))/b/(reduce_sum:dot_general)", "a/b", "backward"),
        ("jit(f)/(transpose(jvp(a))/b/dot_general:jvp()/reduce_sum)", "", "backward"),
        ("jit(f)/stage0/dot_general", "stage0", ""),
        ("jit(f)/transpose", "", ""),
        ("x", "", ""),
        ("", "", ""),
    ):
        assert layer_of(op_name) == tuple(expected), op_name


def test_a_copy_has_the_layer_of_its_operand():
    text = (PROGRAMS / "copy.hlo").read_text()
    found = timeline(program(text, arguments=100, outputs=20))
    names = {b.instruction: b.layer for b in found.at_peak}
    assert names == {"w": "w", "z": "", "a": "w", "c2": "stage0", "d": "stage1"}
