"""Reversible stacks: the coupling, its way back, and the grid that makes both exact."""

from tests.mutations.mutation import changes

_STACK = "fnet/layers/reversible.py"
_TESTS = "tests/test_reversible.py"

COUPLING = changes(
    _STACK,
    _TESTS,
    "within_the_grid or nearest_multiple",
    [
        ("g reads x2", '{}), _value(x1.units, x.dtype))\n        x2', '{}), _value(x2.units, x.dtype))\n        x2'),
        ("f is taken off", "x1 = x1.add(f)", "x1 = x1.add(-f)"),
        ("the halves change places", "for s in (x1, x2)], axis=-1)", "for s in (x2, x1)], axis=-1)"),
        ("the grid is coarse", "GRID = 2.0**-16", "GRID = 2.0**-4"),
    ],
)  # fmt: skip

WAY_BACK = changes(
    _STACK,
    _TESTS,
    "bit_for_bit and 4 or without_a_grid",
    [
        ("g is added once more", "(y - _units(value), dy)", "(y + _units(value), dy)"),
        ("the way back is rounded elsewhere", "(y - _units(value), dy)", "(y + _units(-value * 1.001), dy)"),
        ("a half gives no gradient to its input", "return old, dp, dx + share", "return old, dp, dx"),
        ("the other half's gradient is lost", "return old, dp, dx + share", "return old, dp, share"),
        ("f has g's cotangent", 'undo("f", y2, y1, d1, d2)', 'undo("f", y2, y1, d2, d2)'),
    ],
)  # fmt: skip

STATE = [
    *changes(
        _STACK,
        _TESTS,
        "renewed_once",
        [("f's statistics are lost", "block = block._replace(state=s)", "pass")],
    ),
    *changes(
        _STACK,
        _TESTS,
        "draws_its_own",
        [
            (
                "all blocks draw the same",
                "else jax.random.fold_in(key, i)\n    return",
                "else jax.random.clone(key)\n    return",
            )
        ],
    ),
    *changes(
        _STACK,
        _TESTS,
        "comes_out_as_nan or leaves_the_range",
        [
            ("the range has one side", "(jnp.abs(f) < LIMIT)", "(f < LIMIT)"),
            ("a sum that wraps around is not noticed", " & ~left", ""),
            ("a way out and back is not noticed", "inside = self.inside & jnp", "inside = jnp"),
            ("the second stream may leave", "jnp.where(x1.inside & x2.inside", "jnp.where(x1.inside"),
            ("the first stream may leave", "jnp.where(x1.inside & x2.inside", "jnp.where(x2.inside"),
        ],
    ),
]  # fmt: skip

MUTATIONS = [*COUPLING, *WAY_BACK, *STATE]
