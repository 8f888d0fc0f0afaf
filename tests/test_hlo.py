"""The reader of compiled HLO, on a program that is written out."""

from pathlib import Path

import pytest

from fnet import hlo
from fnet.hlo import Array, Window

TEXT = Path(__file__).with_name("program.hlo").read_text()


@pytest.fixture(scope="module")
def module():
    return hlo.read(TEXT)


def test_a_called_computation_is_scheduled_before_its_call(module):
    scheduled = [i.name for i in module.schedule()]
    assert scheduled[6:10] == ["q", "c", "p", "loop"]
    assert len(scheduled) == 15
    assert [i.name for i in module.parameters("elementwise")] == ["a", "b"]
    assert module.root("updates").name == "both"
    assert module.entry == "main"
    assert module.instructions["part"].tuple_index == 0
    assert module.instructions["f1"].op_name == 'jit(f)/a"b/mul'
    assert module.operands(module.instructions["f2"])[2] == [Array(4, (), "int32", "")]


def test_called_computations():
    for opcode, attributes, called in (
        ("while", "condition=%c.1, body=%b.2", ["c.1", "b.2"]),
        ("conditional", "branch_computations={%b, %c}, x", ["b", "c"]),
        ("conditional", "true_computation=%b, false_computation=%c, x", ["b", "c"]),
        ("call", "to_apply=%b, x", ["b"]),
        ("async-start", "calls=%b", ["b"]),
        ("fusion", "calls=%b", []),
    ):
        assert hlo.Instruction("i", opcode, "", (), attributes, False).called_computations == called


def test_elementwise_instructions_have_no_other_operation_between_operand_and_result(module):
    def is_elementwise(name, operand):
        return module.is_elementwise(module.instructions[name], operand)

    assert [is_elementwise("f1", 0), is_elementwise("f1", 1)] == [True, False]
    # An update is elementwise in what it updates alone.
    assert [is_elementwise("f2", i) for i in range(3)] == [False, False, False]
    assert is_elementwise("sum", 0)
    assert is_elementwise("f3", 0)
    assert not is_elementwise("f4", 0)
    assert not is_elementwise("put", 0)


def test_results_that_overwrite_an_operand(module):
    in_place = {name: module.in_place(i) for name, i in module.instructions.items()}
    assert {name: places for name, places in in_place.items() if places} == {
        "new": [((), 0, ())],
        "f2": [((0,), 0, ())],
        "kept": [((0,), 1, ()), ((1,), 0, (2, 3))],
        "put": [((), 0, ())],
    }
    assert module.donated == {(0,): (1, ()), (1, 2): (3, (4,))}


def test_windows():
    for text, windows in (
        ("", []),
        ("window={size=3x2}", [Window(3), Window(2)]),
        ("window={size=3x2 stride=2x4 pad=1_2x0_5}", [Window(3, 2, 1, 2), Window(2, 4, 0, 5)]),
        ("window={size=3 lhs_dilate=2 rhs_dilate=5}", [Window(3, 1, 0, 0, 2, 5)]),
    ):
        assert hlo.window(hlo.Instruction("i", "convolution", "", (), text, False)) == windows
        assert Window(1) == (1, 1, 0, 0, 1, 1)


def test_bytes_of_an_array_have_the_padding_of_its_tiles():
    for text, expected in (
        ("f32[8,4]{1,0}", (128, (8, 4), "float32")),
        ("pred[9]{0}", (9, (9,), "bool")),
        ("bf16[<=5]{0}", (10, (5,), "bfloat16")),
        ("s4[3]{0:E(4)}", (2, (3,), "int4")),
        ("f8e4m3fn[3]{0}", (3, (3,), "float8_e4m3fn")),
        ("token[]", (0, (), "token")),
        # Tiles of 8 x 128 pad the two minor dimensions; layout {0,1} has rows as columns.
        ("f32[3,5,130]{2,1,0:T(8,128)}", (4 * 3 * 8 * 256, (3, 5, 130), "float32")),
        ("f32[130,5]{0,1:T(8,128)}", (4 * 8 * 256, (130, 5), "float32")),
        ("f32[130]{0:T(8,128)}", (4 * 8 * 256, (130,), "float32")),
        ("f32[130]{0:T(1,128)}", (4 * 256, (130,), "float32")),
        ("f32[]{:T(128)}", (512, (), "float32")),
        ("f32[8,128]{1,0:T(8,128)S(1)}", (0, (8, 128), "float32")),
        ("f32[8]{0:S(5)}", (0, (8,), "float32")),
        ("f32[8]{0:S(1)}", (32, (8,), "float32")),
    ):
        layout = text.partition("{")[2].rstrip("}")
        assert hlo.arrays(text) == {(): Array(*expected, layout)}


def test_arrays_of_nested_tuples():
    found = hlo.arrays("(f32[], ((s32[2]{0}, u8[]), c64[2]{0}), /*index=5*/f32[1]{0})")
    assert {path: a.bytes for path, a in found.items()} == {
        (0,): 4, (1, 0, 0): 8, (1, 0, 1): 1, (1, 1): 16, (2,): 4,
    }  # fmt: skip
