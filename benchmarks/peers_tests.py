"""Tests of jax_privacy and optax, run against fnet's per-example clipping.

    python -m benchmarks.peers_tests
    python -m benchmarks.peers_tests --jax-privacy FOLDER --optax FOLDER

Both repositories are fetched with git into a temporary folder, unless you give folders. Their
tests of clipping run unchanged. A small module replaces the functions that they test by
`fnet.interop.jax_privacy.clipped_grad`:

- `clipped_fun` and `clip_pytree` clip values instead of gradients. Here a value v is the gradient
  of the inner product of v with parameters.
- optax's per-example clipping is the same, for values that have a batch axis. Noise of
  `differentially_private_aggregate` stays optax's.

The table lists how many tests pass, and the names of all that fail.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from benchmarks.claims import Claim, argument_parser, publish
from benchmarks.measure import markdown_table
from fnet.interop import jax_privacy

ROOT = Path(__file__).parent.parent


class Repository(NamedTuple):
    """A repository at one commit, and its files of tests."""

    url: str
    commit: str
    tests: tuple[str, ...]


REPOSITORIES = {
    "jax_privacy": Repository(
        "https://github.com/google-deepmind/jax_privacy",
        "8967688c26d46f3b74bfdfe61ef1f984b887abab",
        ("tests/gradient_clipping_test.py", "tests/clipping_test.py"),
    ),
    "optax": Repository(
        "https://github.com/google-deepmind/optax",
        "2edbcbe2390da13983b92cbef94ac0460ecde1c5",
        ("optax/contrib/_privacy_test.py", "optax/transforms/_clipping_test.py"),
    ),
}

SELECTED = {"optax/transforms/_clipping_test.py": "per_example"}
"""Part of the names of tests to run, for files that also test something else."""

SHIM = (
    "from benchmarks.peers_tests import *\nfrom benchmarks.peers_tests import _adjusted_clip_norm\n"
)

CONFTEST = "from benchmarks import peers_tests\n\npeers_tests.replace_clipping_of_optax()\n"

__all__ = ["clip_and_round_to_grid", "clip_pytree", "clipped_fun", "clipped_grad"]

clipped_grad = jax_privacy.clipped_grad


def main() -> None:
    parser = argument_parser(__doc__)
    for name in REPOSITORIES:
        option = "--" + name.replace("_", "-")
        parser.add_argument(option, type=Path, metavar="FOLDER", help=f"A checkout of {name}.")
    args = parser.parse_args()
    rows: list[dict[str, str]] = []
    claims: list[Claim] = []
    with tempfile.TemporaryDirectory() as temporary:
        for name, repository in REPOSITORIES.items():
            folder = getattr(args, name) or fetch(parser, repository, Path(temporary) / name)
            for path in repository.tests:
                results = run(folder, path, Path(temporary) / "tests")
                failures = [test for test, failed in results.items() if failed]
                passed = len(results) - len(failures)
                rows.append(
                    {
                        "tests": f"{name}, {Path(path).name}",
                        "passed": str(passed),
                        "of": str(len(results)),
                    }
                )
                for failure in failures:
                    print(f"{Path(path).name}: {failure} failed")
                what = f"{name}, {Path(path).name}: tests passed of {len(results)}"
                claims.append(Claim(what, name, passed, f">= {len(results)}", "count"))
    print(f"\n{markdown_table(rows)}")
    publish(claims, args, "jax", "jaxlib", "optax")


def fetch(parser: argparse.ArgumentParser, repository: Repository, folder: Path) -> Path:
    """Fetch one commit with git."""
    folder.mkdir()
    for command in (
        ("init", "--quiet"),
        ("fetch", "--quiet", "--depth", "1", repository.url, repository.commit),
        ("checkout", "--quiet", "FETCH_HEAD"),
    ):
        done = subprocess.run(["git", *command], cwd=folder, capture_output=True, text=True)
        if done.returncode:
            reason = done.stderr.strip().splitlines()[-1]
            parser.exit(1, f"peers_tests: cannot fetch {repository.url}: {reason}\n")
    return folder


def run(checkout: Path, path: str, folder: Path) -> dict[str, bool]:
    """Run a file of tests against fnet; return whether each test failed, by name."""
    test = checkout / path
    (folder / "jax_privacy").mkdir(parents=True, exist_ok=True)
    (folder / "jax_privacy" / "__init__.py").write_text("")
    (folder / "jax_privacy" / "clipping.py").write_text(SHIM)
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / test.name).write_text(test.read_text())
    report = folder / "report.xml"
    packages = [folder, ROOT] if path.startswith("tests/") else [folder, ROOT, checkout.resolve()]
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-k",
        SELECTED.get(path, ""),
    ]
    done = subprocess.run(
        [*command, f"--rootdir={folder}", f"--junitxml={report}", test.name],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, packages))},
        capture_output=True,
        text=True,
    )
    if done.returncode not in (0, 1):
        raise RuntimeError(f"{test.name}: pytest failed.\n{done.stdout}{done.stderr}")
    return {
        case.attrib["name"]: case.find("failure") is not None or case.find("error") is not None
        for case in ET.parse(report).iter("testcase")
    }


def clipped_fun(
    fun: Callable[..., Any],
    has_aux: bool = False,
    *,
    batch_argnums: Any = 0,
    return_norms: bool = False,
    l2_clip_norm: Any = 1.0,
    prng_argnum: int | None = None,
    **how: Any,
) -> jax_privacy.BoundedSensitivityCallable:
    """Clip and sum the values of a function, as `jax_privacy.clipping.clipped_fun` does."""
    numbers = (batch_argnums,) if isinstance(batch_argnums, int) else batch_argnums

    def inner_product(params: Any, *args: Any, **kwargs: Any) -> tuple[Array, Any]:
        value, aux = fun(*args, **kwargs) if has_aux else (fun(*args, **kwargs), None)
        products = jax.tree.map(lambda p, v: jnp.sum(p * v), params, value)
        return sum(jax.tree.leaves(products), jnp.zeros(())), aux

    gradient = clipped_grad(
        inner_product,
        has_aux=True,
        batch_argnums=tuple(i + 1 for i in numbers),
        prng_argnum=None if prng_argnum is None else prng_argnum + 1,
        return_grad_norms=True,
        l2_clip_norm=l2_clip_norm,
        **how,
    )

    def clipped(*args: Any, **kwargs: Any) -> Any:
        keep = slice(0, 1) if how.get("keep_batch_dim", True) else 0
        first = [
            jax.tree.map(lambda a: a[keep], a) if i in numbers else a for i, a in enumerate(args)
        ]
        shapes = jax.eval_shape(fun, *first)
        zeros = jax.tree.map(
            lambda v: jnp.zeros(v.shape, v.dtype), shapes[0] if has_aux else shapes
        )
        total, aux = gradient(zeros, *args, **kwargs)
        rest = [aux.aux] * has_aux + [aux.grad_norms] * return_norms
        if not rest:
            return total
        return total, rest[0] if len(rest) == 1 else tuple(rest)

    return jax_privacy.BoundedSensitivityCallable(
        clipped, gradient.l2_norm_bound, has_aux or return_norms
    )


def clip_pytree(
    pytree: Any, clip_norm: Any, rescale_to_unit_norm: bool = False, **how: Any
) -> tuple[Any, Any]:
    """Clip one tree: the sum of a batch of one."""
    clipped, norms = clipped_fun(
        lambda tree: tree,
        keep_batch_dim=False,
        l2_clip_norm=clip_norm,
        rescale_to_unit_norm=rescale_to_unit_norm,
        return_norms=True,
        **how,
    )(jax.tree.map(lambda a: jnp.asarray(a)[None], pytree))
    if "grid_scale" not in how:  # One tree is no sum: it may have the narrow dtype of its input.
        clipped = jax.tree.map(lambda c, a: c.astype(jnp.result_type(a)), clipped, pytree)
    return clipped, jax.tree.map(lambda norm: norm[0], norms)


def clip_and_round_to_grid(
    gradient: Any, l2_clip_norm: float, grid_scale: int
) -> tuple[Any, Array]:
    """Clip one tree and round it to integers."""
    return clip_pytree(gradient, l2_clip_norm, grid_scale=grid_scale)


def _adjusted_clip_norm(l2_clip_norm: float, grid_scale: int, num_params: int) -> float:
    bound: float = jax_privacy._clip_for_grid(l2_clip_norm, grid_scale, num_params)
    return bound


def replace_clipping_of_optax() -> None:
    """Replace per-example clipping in optax's modules."""
    from optax import transforms
    from optax.transforms import _clipping

    for function in (per_example_global_norm_clip, per_example_layer_norm_clip):
        for module in (transforms, _clipping):
            setattr(module, function.__name__, function)


def per_example_global_norm_clip(grads: Any, l2_norm_clip: Any) -> tuple[Any, Array]:
    """Clip and sum trees with a batch axis; also count the clipped ones."""
    sums, norms = _clip_and_sum(grads, l2_norm_clip)
    return sums, jnp.sum(norms > l2_norm_clip)


def per_example_layer_norm_clip(
    grads: Any, global_l2_norm_clip: Any, uniform: bool = True, eps: float = 1e-8
) -> tuple[Any, Any]:
    """Clip each array to its share of a bound, equal or in proportion to the root of its size."""
    del eps
    sizes = [g[0].size for g in grads]
    shares = [1 / len(sizes) if uniform else size / sum(sizes) for size in sizes]
    clips = [float(global_l2_norm_clip) * share**0.5 for share in shares]
    sums, norms = _clip_and_sum(grads, clips)
    return sums, [jnp.sum(norm > clip) for norm, clip in zip(norms, clips, strict=True)]


def _clip_and_sum(grads: Any, clip: Any) -> tuple[Any, Any]:
    jax_privacy._batch_size(grads, {})  # Before `clipped_fun` takes the first example.
    grads = jax.tree.map(lambda g: g.astype(jnp.promote_types(g.dtype, jnp.float32)), grads)
    return clipped_fun(
        lambda tree: tree, keep_batch_dim=False, l2_clip_norm=clip, return_norms=True
    )(grads)


if __name__ == "__main__":
    main()
