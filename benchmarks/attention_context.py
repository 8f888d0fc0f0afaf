"""The attention context against naive forms, and its share of a block: products, memory, time.

    python -m benchmarks.attention_context

`fnet.apply_context`, value and gradients by ``x`` and ``strength``, against

- autodiff: ``x + strength / D * (x @ context)`` under automatic differentiation, which keeps
  the product for the backward pass, in place of ``x``;
- source: a rule of its own that keeps ``x`` and multiplies ``x @ context`` once more in the
  backward pass, as the component in Rust does.

Products as traced are counted forward + backward; each is 2 B T D^2 operations. In one
program, a compiler that sees the source's two equal products makes one of them, and keeps
it. Between two programs, as between the two passes of a network, each side has what it
says it keeps.

A block's share: a stack of transformer blocks under a train gradient, with contexts and
without; all blocks but the first have one.
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
from benchmarks.measure import compiled_each_way, fastest, interleaved, markdown, temporaries
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


def _source_bwd(kept: tuple[Array, ...], dy: Array) -> tuple[Array, Array, Array]:
    x, context, strength = kept
    dstrength = (dy * (x @ context)).sum() / x.shape[-1]
    dx = dy + strength / x.shape[-1] * (dy @ context.T)
    return dx, jnp.zeros_like(context), dstrength


source.defvjp(_source_fwd, _source_bwd)

FORMS: dict[str, Form] = {"fnet": fnet.apply_context, "autodiff": autodiff, "source": source}


def arrays(width: int) -> tuple[Array, Array, Array, Array]:
    """x, context, strength and a cotangent."""
    x, dy = (jax.random.normal(jax.random.key(i), (BATCH, TOKENS, width)) for i in range(2))
    context = 0.5 * jax.random.uniform(jax.random.key(2), (width, width), minval=-1)
    return x, context, jnp.float32(0.7), dy


def forward(form: Form, x: Array, context: Array, strength: Array) -> tuple[Array, Callable]:
    """The value, and the backward pass with all that it keeps."""
    return jax.vjp(lambda x, strength: form(x, context, strength), x, strength)


def backward(pull: Callable, dy: Array) -> tuple[Array, Array]:
    return pull(dy)


def both(form: Form, x: Array, context: Array, strength: Array, dy: Array) -> tuple:
    y, pull = forward(form, x, context, strength)
    return y, pull(dy)


def in_turn(ahead: Callable, back: Callable, given: list[Array], dy: Array) -> tuple:
    """Both passes, a program each."""
    y, pull = ahead(*given)
    return y, back(pull, dy)


def products(traced: ClosedJaxpr) -> int:
    """Matrix products in a traced function."""
    count = 0
    for equation in traced.jaxpr.eqns:
        count += equation.primitive.name == "dot_general"
        inner = (p for p in equation.params.values() if isinstance(p, ClosedJaxpr))
        count += sum(map(products, inner))
    return count


def compiled_products(program: jax.stages.Compiled) -> int:
    """Matrix products in a compiled program; on a GPU they are calls of cuBLAS."""
    instructions = [i for c in hlo.read(program.as_text() or "").computations.values() for i in c]
    return sum(i.opcode == "dot" for i in instructions)


def kept_bytes(form: Form, x: Array, context: Array, strength: Array) -> int:
    """Bytes of the activations that are kept for the backward pass, but for x."""
    kept = fnet.memory.residuals(form, x, context, strength, argnums=(0, 2))
    return sum(r.bytes for r in kept if r.shape == x.shape and not r.alias_of)


class Applied(NamedTuple):
    """Of each form: products traced forward and backward and in one program; bytes; seconds."""

    counts: dict[str, tuple[int, int]]
    dots: dict[str, int]
    kept: dict[str, int]
    held: dict[str, int]
    one: dict[str, float]
    two: dict[str, float]


def applied(width: int, rounds: int) -> Applied:
    """Every form, at one width."""
    *given, dy = arrays(width)
    counts, dots, kept, held, in_one, in_two = {}, {}, {}, {}, {}, {}
    for name, form in FORMS.items():
        first = functools.partial(forward, form)
        traced, pull = jax.make_jaxpr(first, return_shape=True)(*given)
        counts[name] = products(traced), products(jax.make_jaxpr(backward)(pull[1], dy))
        kept[name] = kept_bytes(form, *given)

        lowered = jax.jit(functools.partial(both, form)).lower(*given, dy)
        smallest = compile_min_memory(lowered)[0]
        dots[name], held[name] = compiled_products(smallest), temporaries(smallest)
        in_one[name] = [functools.partial(p, *given, dy) for p in compiled_each_way(lowered)]

        in_two[name] = functools.partial(in_turn, jax.jit(first), jax.jit(backward), given, dy)
    one, two = fastest(in_one, rounds), interleaved(in_two, rounds)
    return Applied(counts, dots, kept, held, one, two)


def row(width: int, name: str, a: Applied) -> dict[str, str]:
    """A line of the table."""
    ahead, back = a.counts[name]
    return {
        f"width {width}": name,
        "products": f"{ahead} + {back}",
        "in one program": f"{a.dots[name]}",
        "kept but x, C, MB": f"{a.kept[name] / 1e6:.2f}",
        "temporaries, MB": f"{a.held[name] / 1e6:.2f}",
        "one program, ms": f"{a.one[name] * 1e3:.2f}",
        "fnet / this": f"{a.one['fnet'] / a.one[name]:.3f}",
        "two programs, ms": f"{a.two[name] * 1e3:.2f}",
        "fnet / it": f"{a.two['fnet'] / a.two[name]:.3f}",
    }


def claims(width: int, a: Applied) -> Iterator[Claim]:
    """Beside the same formula under automatic differentiation, and the source's form."""
    what = f"attention context, width {width}"
    for peer in ("autodiff", "source"):
        backward = a.counts["fnet"][1] / a.counts[peer][1]
        yield Claim(f"{what}: products of the backward pass", peer, backward, "<= 0.67", "count")
    for peer, where, seconds in (
        ("autodiff", "one program", a.one),
        ("source", "two programs", a.two),
    ):
        ratio = seconds["fnet"] / seconds[peer]
        yield Claim(f"{what}, {where}: time forward and backward", peer, ratio, "<= 0.92", "time")
    theirs = f"autodiff: {a.kept['autodiff']:,} B"
    yield Claim(f"{what}: bytes kept beyond x and the context", theirs, a.kept["fnet"], "<= 0")


def share_of_a_block(rounds: int) -> list[dict[str, str]]:
    """A row for each way to pass contexts on: a stack's gradient beside the one without."""
    x = jax.random.normal(jax.random.key(0), (BATCH, TOKENS, WIDTH))
    totals, calls = {}, {}
    for way in (None, "lagged", "current"):
        block = layers.Block(
            layers.attention(WIDTH, HEADS, causal=True, rotary=10000.0, bias=False),
            layers.feed_forward(WIDTH, 8 * WIDTH // 3),
        )
        stack = layers.stack(WIDTH, [block] * BLOCKS, context=way)
        params, state = stack.init(jax.random.key(1))

        def loss(
            params: dict, x: Array, state: dict, stack: fnet.Layer = stack
        ) -> tuple[Array, dict]:
            y, state = stack.apply(params, state, x, train=True)
            return jnp.square(y).mean(), state

        gradient = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True), donate_argnums=2)
        programs = compiled_each_way(gradient.lower(params, x, state))
        totals[way] = min(peak(p).total for p in programs)
        calls[way] = [
            functools.partial(advance, program, params, x, [jax.tree.map(jnp.copy, state)])
            for program in programs
        ]
    seconds = fastest(calls, rounds)
    without, with_none = totals[None], seconds[None]
    return [
        {
            f"{BLOCKS} blocks": way or "without",
            "ms": f"{1e3 * seconds[way]:.1f}",
            "time": f"{seconds[way] / with_none:.3f}",
            "of a block": f"{BLOCKS / (BLOCKS - 1) * (seconds[way] / with_none - 1):.1%}",
            "peak, MB": f"{totals[way] / 1e6:.1f}",
            "peak, ratio": f"{totals[way] / without:.3f}",
        }
        for way in totals
    ]


def advance(program: jax.stages.Compiled, params: dict, x: Array, box: list) -> tuple:
    """One gradient, which renews the contexts in the box."""
    (value, box[0]), gradients = program(params, x, box[0])
    return value, gradients


def main() -> None:
    parser = argument_parser(__doc__, rounds=31)
    parser.add_argument("--widths", type=int, nargs="*", default=WIDTHS)
    args = parser.parse_args()
    print(f"Apply, value and gradients, {BATCH} x {TOKENS} x width, float32.\n")
    claimed: list[Claim] = []
    for width in args.widths:
        found = applied(width, args.rounds)
        print(markdown([row(width, name, found) for name in FORMS]) + "\n")
        claimed += claims(width, found)
    shape = f"{BATCH} x {TOKENS} x {WIDTH}"
    print(f"Apply and update in transformer blocks, value and gradient, {shape}, float32.\n")
    print(markdown(share_of_a_block(max(args.rounds // 3, 3))))
    publish(claimed, args, "jax", "jaxlib")


if __name__ == "__main__":
    main()
