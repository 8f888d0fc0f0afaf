"""Few files outside of `fnet.jaxpr` know primitives: the others ask its readers and rows."""

import ast
from pathlib import Path

import pytest
from equation_cases import WITHOUT_ROW
from jax.extend.core import Primitive, primitives

from fnet.jaxpr.axes import ROWS

ROOT = Path(__file__).parents[2]
KNOW = {
    "fnet/cpu/convolutions.py": "the parameters of a convolution are the key of its program",
    "fnet/represented.py": "it has a rule for each primitive that a weight in parts passes through",
    "fnet/memory/estimate.py": "it is a model of what XLA does with each primitive",
    "fnet/loop_sums.py": "it looks for what the sums of loops are filled with",
    "train/onnx_program.py": "it has a writer for each primitive",
}
"""Files that may, at most 5, and why."""
VARIABLES = {name: p.name for name, p in vars(primitives).items() if isinstance(p, Primitive)}
NAMES = {*VARIABLES.values(), *ROWS, *" ".join(WITHOUT_ROW.values()).split()}
LOOK_UPS = ("find_equations", "startswith", "get", "split")


def primitives_known(text):
    """Names of primitives in tables, comparisons and look-ups, and "params" if they are read."""
    known, names, asks = set(), set(), False
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Attribute(value=ast.Name(id="eqn" | "e"), attr="params"):
                known.add("params")
            case ast.Attribute(value=ast.Name(id="lax" | "primitives"), attr=name):
                known |= {VARIABLES[name]} if name in VARIABLES else set()
            case ast.Attribute(attr="primitive") | ast.Name(id="find_equations"):
                asks = True
            case ast.Compare(left=left, comparators=others):
                names |= strings([left, *others])
            case ast.Dict(keys=items) | ast.Set(elts=items) | ast.Tuple(elts=items):
                names |= strings(items)
            case ast.Call(func=function, args=args) if ast.unparse(function).endswith(LOOK_UPS):
                names |= strings([*args, getattr(function, "value", None)])
    return known | (names & NAMES if asks else set())


def strings(nodes):
    values = (node.value for node in nodes if isinstance(node, ast.Constant))
    return {word for value in values if isinstance(value, str) for word in value.split()}


@pytest.mark.parametrize(
    ("text", "known"),
    [
        ("eqn.primitive.name == 'dot_general'", {"dot_general"}),
        ("eqn.primitive.name in {'sin', 'x'} or e.primitive.name in ('cos',)", {"sin", "cos"}),
        ("RULES = {'gather': read}\nrule = RULES.get(eqn.primitive.name)", {"gather"}),
        ("TABLE = 'exp log of'.split()\nname = eqn.primitive.name", {"exp", "log"}),
        ("next(find_equations(closed, 'while'))", {"while"}),
        ("e.params['length']\neqn.primitive is lax.add_p", {"params", "add"}),
        ("state.params['scan'], modes == {'max'}", set()),
        ("f'{eqn.primitive.name} is a scan', getattr(e, 'name')", set()),
    ],
)
def test_a_file_that_knows_primitives_is_found(text, known):
    assert primitives_known(text) == known


def test_only_the_listed_files_know_primitives():
    paths = [path for top in ("fnet", "train") for path in (ROOT / top).rglob("*.py")]
    known = {
        path.relative_to(ROOT).as_posix(): primitives_known(path.read_text()) for path in paths
    }
    others = {name: k for name, k in known.items() if k and not name.startswith("fnet/jaxpr/")}
    assert others.keys() == KNOW.keys(), others
    assert len(KNOW) <= 5
