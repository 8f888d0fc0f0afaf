"""Maxima of patches, and which element of a patch has the gradient."""

from tests.mutations.mutation import changes

MUTATIONS = changes(
    "fnet/layers/pooling.py",
    "tests/test_pooling.py",
    "maxima or max_pool",
    [
        ("of equal maxima the last has it", "candidate > largest", "candidate >= largest"),
        ("a NaN is passed over", "(candidate > largest) | (candidate != candidate)", "candidate > largest"),
        ("the first element is left out", "enumerate(candidates[1:], 1)", "enumerate(candidates[2:], 2)"),
        ("the index does not move", "jnp.where(greater, jnp.asarray(i, where.dtype), where)", "where"),
        ("what is larger is not remembered", "largest = jnp.where(greater, candidate, largest)", "pass"),
        ("padding is 0", "candidates = _shifted(x, window, step, padding, _lowest(x))", "candidates = _shifted(x, window, step, padding, 0)"),
        ("the tangent is padded as the input is", "_shifted(dx, window, step, padding, 0)", "_shifted(dx, window, step, padding, -jnp.inf)"),
        ("rows and columns are swapped", "row[:, :, j : j + w : step] for row in rows for j in range(window)", "row[:, :, j : j + w : step] for j in range(window) for row in rows"),
        ("a step is one more", "x[:, i : i + h : step]", "x[:, i : i + h : step + 1]"),
    ],
)  # fmt: skip
