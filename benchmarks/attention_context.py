"""Attention context compared with simpler forms, and its cost per block: products, memory, time.

    python -m benchmarks.attention_context

`fnet.apply_context`, value and gradients by ``x`` and ``strength``, is compared with

- autodiff: ``x + strength / D * (x @ context)`` under automatic differentiation, which saves the
  product instead of ``x``;
- source: a custom derivative that saves ``x`` and rematerializes ``x @ context`` in the backward
  pass, as the original component in Rust does.

The table counts the matrix products of the traced forward + backward pass; each has 2 B T D^2
FLOPs. In one program, the compiler merges the source's two equal products and saves the result.
With two programs, as between the two passes of a network, each form saves what is listed above.

The cost per block is measured in a stack of transformer blocks, forward and backward, with and
without contexts. All blocks but the first have one.
"""

import functools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.extend.core import ClosedJaxpr

import fnet
from benchmarks.claims import Claim, argument_parser, publish
from benchmarks.measure import (
    compile_with_each_option,
    fastest,
    interleaved,
    markdown_table,
    temporaries,
)
from fnet import layers
from fnet.memory import compile_min_memory, hlo, peak

BATCH, TOKENS = 8, 256
WIDTHS = (128, 384, 768)
BLOCKS, WIDTH, HEADS = 4, 384, 6

Form = Callable[[Array, Array, Array], Array]


def autodiff(x: Array, context: Array, strength: Array) -> Array:
    return x + strength / x.shape[-1] * (x @ jax.lax.stop_gradient(context))


@jax.custom_vjp
def source(x: Array, context: Array, strength: Array) -> Array:
    return autodiff(x, context, strength)


def _source_fwd(x: Array, context: Array, strength: Array) -> tuple[Array, tuple[Array, ...]]:
    return source(x, context, strength), (x, context, strength)


def _source_bwd(residuals: tuple[Array, ...], dy: Array) -> tuple[Array, Array, Array]:
    x, context, strength = residuals
    dstrength = (dy * (x @ context)).sum() / x.shape[-1]
    dx = dy + strength / x.shape[-1] * (dy @ context.T)
    return dx, jnp.zeros_like(context), dstrength


source.defvjp(_source_fwd, _source_bwd)

FORMS: dict[str, Form] = {"fnet": fnet.apply_context, "autodiff": autodiff, "source": source}


def arrays(width: int) -> tuple[Array, Array, Array, Array]:
    """Random x, context, strength and a cotangent."""
    x, dy = (jax.random.normal(jax.random.key(i), (BATCH, TOKENS, width)) for i in range(2))
    context = 0.5 * jax.random.uniform(jax.random.key(2), (width, width), minval=-1)
    return x, context, jnp.float32(0.7), dy


def forward(form: Form, x: Array, context: Array, strength: Array) -> tuple[Array, Callable]:
    """Value and pullback, which contains the residuals."""
    return jax.vjp(lambda x, strength: form(x, context, strength), x, strength)


def backward(pullback: Callable, dy: Array) -> tuple[Array, Array]:
    return pullback(dy)


def value_and_gradients(form: Form, x: Array, context: Array, strength: Array, dy: Array) -> tuple:
    y, pullback = forward(form, x, context, strength)
    return y, pullback(dy)


def two_programs(forward: Callable, backward: Callable, args: list[Array], dy: Array) -> tuple:
    """Run both passes, with one program each."""
    y, pullback = forward(*args)
    return y, backward(pullback, dy)


def products(traced: ClosedJaxpr) -> int:
    """Count matrix products in a traced function."""
    count = 0
    for equation in traced.jaxpr.eqns:
        count += equation.primitive.name == "dot_general"
        inner = (p for p in equation.params.values() if isinstance(p, ClosedJaxpr))
        count += sum(map(products, inner))
    return count


def compiled_products(program: jax.stages.Compiled) -> int:
    """Count matrix products in a compiled program; on a GPU they are calls of cuBLAS."""
    instructions = [i for c in hlo.read(program.as_text() or "").computations.values() for i in c]
    return sum(i.opcode == "dot" for i in instructions)


def saved_bytes(form: Form, x: Array, context: Array, strength: Array) -> int:
    """Bytes of the saved activations, without x."""
    residuals = fnet.memory.residuals(form, x, context, strength, argnums=(0, 2))
    return sum(r.bytes for r in residuals if r.shape == x.shape and not r.alias_of)


class Measured(NamedTuple):
    """Measurements by form.

    Attributes:
      traced_products: matrix products of the traced forward and backward pass.
      compiled_products: matrix products of the compiled program.
      saved_bytes: bytes of saved activations, without x.
      temporaries: bytes of temporaries.
      one_program: seconds of both passes in one program.
      two_programs: seconds of both passes in two programs.
    """

    traced_products: dict[str, tuple[int, int]]
    compiled_products: dict[str, int]
    saved_bytes: dict[str, int]
    temporaries: dict[str, int]
    one_program: dict[str, float]
    two_programs: dict[str, float]


def measure(width: int, rounds: int) -> Measured:
    """Measure every form at one width."""
    *args, dy = arrays(width)
    traced, compiled, saved, held = {}, {}, {}, {}
    one_program, in_two_programs = {}, {}
    for name, form in FORMS.items():
        first = functools.partial(forward, form)
        jaxpr, (_, pullback) = jax.make_jaxpr(first, return_shape=True)(*args)
        traced[name] = products(jaxpr), products(jax.make_jaxpr(backward)(pullback, dy))
        saved[name] = saved_bytes(form, *args)

        lowered = jax.jit(functools.partial(value_and_gradients, form)).lower(*args, dy)
        smallest = compile_min_memory(lowered)[0]
        compiled[name], held[name] = compiled_products(smallest), temporaries(smallest)
        programs = compile_with_each_option(lowered)
        one_program[name] = [functools.partial(p, *args, dy) for p in programs]
        jitted = jax.jit(first), jax.jit(backward)
        in_two_programs[name] = functools.partial(two_programs, *jitted, args, dy)
    return Measured(
        traced,
        compiled,
        saved,
        held,
        fastest(one_program, rounds),
        interleaved(in_two_programs, rounds),
    )


def row(width: int, name: str, m: Measured) -> dict[str, str]:
    """Build a row of the table."""
    forward_products, backward_products = m.traced_products[name]
    return {
        f"width {width}": name,
        "products": f"{forward_products} + {backward_products}",
        "in one program": f"{m.compiled_products[name]}",
        "saved besides x, C, MB": f"{m.saved_bytes[name] / 1e6:.2f}",
        "temporaries, MB": f"{m.temporaries[name] / 1e6:.2f}",
        "one program, ms": f"{m.one_program[name] * 1e3:.2f}",
        "fnet / one program": f"{m.one_program['fnet'] / m.one_program[name]:.3f}",
        "two programs, ms": f"{m.two_programs[name] * 1e3:.2f}",
        "fnet / two programs": f"{m.two_programs['fnet'] / m.two_programs[name]:.3f}",
    }


def claims(width: int, m: Measured) -> Iterator[Claim]:
    """Compare with the formula under automatic differentiation, and with the source's form."""
    what = f"attention context, width {width}"
    for baseline in ("autodiff", "source"):
        ratio = m.traced_products["fnet"][1] / m.traced_products[baseline][1]
        claim = f"{what}: matrix products of the backward pass"
        yield Claim(claim, baseline, ratio, "<= 0.67", "count")
    for baseline, where, seconds in (
        ("autodiff", "one program", m.one_program),
        ("source", "two programs", m.two_programs),
    ):
        ratio = seconds["fnet"] / seconds[baseline]
        claim = f"{what}, {where}: time forward and backward"
        yield Claim(claim, baseline, ratio, "<= 0.92", "time")
    theirs = f"autodiff: {m.saved_bytes['autodiff']:,} B"
    claim = f"{what}: bytes saved besides x and the context"
    yield Claim(claim, theirs, m.saved_bytes["fnet"], "<= 0")


def cost_per_block(rounds: int) -> list[dict[str, str]]:
    """Compare the gradient of a stack with and without contexts; a row per way to pass them on."""
    x = jax.random.normal(jax.random.key(0), (BATCH, TOKENS, WIDTH))
    totals, calls = {}, {}
    for passing in (None, "lagged", "current"):
        block = layers.Block(
            layers.attention(WIDTH, HEADS, causal=True, rotary=10000.0, bias=False),
            layers.feed_forward(WIDTH, 8 * WIDTH // 3),
        )
        stack = layers.stack(WIDTH, [block] * BLOCKS, context=passing)
        params, state = stack.init(jax.random.key(1))

        def loss(
            params: dict, x: Array, state: dict, stack: fnet.Layer = stack
        ) -> tuple[Array, dict]:
            y, state = stack.apply(params, state, x, train=True)
            return jnp.square(y).mean(), state

        gradient = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True), donate_argnums=2)
        programs = compile_with_each_option(gradient.lower(params, x, state))
        totals[passing] = min(peak(p).total for p in programs)
        calls[passing] = [
            functools.partial(advance, program, params, x, [jax.tree.map(jnp.copy, state)])
            for program in programs
        ]
    seconds = fastest(calls, rounds)
    return [
        {
            f"{BLOCKS} blocks": passing or "without",
            "ms": f"{1e3 * s:.1f}",
            "time": f"{s / seconds[None]:.3f}",
            "share of a block": f"{BLOCKS / (BLOCKS - 1) * (s / seconds[None] - 1):.1%}",
            "peak, MB": f"{totals[passing] / 1e6:.1f}",
            "peak, ratio": f"{totals[passing] / totals[None]:.3f}",
        }
        for passing, s in seconds.items()
    ]


def advance(program: jax.stages.Compiled, params: dict, x: Array, box: list) -> tuple:
    """Compute a gradient and update the contexts in ``box``."""
    (value, box[0]), gradients = program(params, x, box[0])
    return value, gradients


def main() -> None:
    parser = argument_parser(__doc__, rounds=31)
    parser.add_argument("--widths", type=int, nargs="*", default=WIDTHS, help="Values of D.")
    args = parser.parse_args()
    print(f"Apply, value and gradients, {BATCH} x {TOKENS} x width, float32.\n")
    claimed: list[Claim] = []
    for width in args.widths:
        measured = measure(width, args.rounds)
        print(markdown_table([row(width, name, measured) for name in FORMS]) + "\n")
        claimed += claims(width, measured)
    shape = f"{BATCH} x {TOKENS} x {WIDTH}"
    print(f"Apply and update in transformer blocks, value and gradient, {shape}, float32.\n")
    print(markdown_table(cost_per_block(max(args.rounds // 3, 3))))
    publish(claimed, args, "jax", "jaxlib")


if __name__ == "__main__":
    main()
