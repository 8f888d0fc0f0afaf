"""Adam's state in the memory of the host: the peak of a train step on a TPU v5e.

    JAX_PLATFORMS=cpu python -m benchmarks.host_state --target v5e

This needs ``fnet-jax[target-tpu]``, but no device. Compiled for a GPU that is not there, all
arguments are in the memory of the device, whatever their sharding says, so that tells nothing.
`benchmarks.gpu` runs such a step on a GPU.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax

import fnet
from benchmarks.claims import Claim, argument_parser, publish
from benchmarks.measure import markdown_table
from fnet import memory
from fnet.memory.target import compile_for, describe

LAYERS, WIDTH, BATCH = 8, 4096, 64


def layers(params: Any, x: Any) -> Any:
    """Residual layers with a kernel each."""
    for kernel in params.values():
        x = x + jnp.tanh(x @ kernel)
    return x


def stack(params: Any, x: Any) -> Any:
    """The same layers in one array, in a loop."""
    body = jax.checkpoint(lambda x, kernel: (x + jnp.tanh(x @ kernel), None))
    return jax.lax.scan(body, x, params["kernel"])[0]


NETWORKS = {
    "layers": (layers, {str(i): jnp.zeros((WIDTH, WIDTH)) for i in range(LAYERS)}),
    "a stack": (stack, {"kernel": jnp.zeros((LAYERS, WIDTH, WIDTH))}),
}
OPTIMIZERS = {
    "Adam": optax.adam(1e-3),
    "clipping, Adam": optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3)),
}


def losses(network: Any) -> Any:
    """The losses of a network."""
    return lambda params, model_state, batch, key: (network(params, batch["x"]) ** 2).mean(-1)


def peak(target: Any, network: Any, params: Any, optimizer: Any) -> memory.Peak:
    """The peak of a donated train step."""
    state = fnet.TrainState.create(params=params, optimizer=optimizer, key=jax.random.key(0))
    step = fnet.make_step(losses(network), optimizer)
    batch = {"x": jax.ShapeDtypeStruct((BATCH, WIDTH), jnp.float32)}
    return memory.peak(compile_for(target, step.jitted, state, batch))


def main() -> None:
    """Compile all steps."""
    parser = argument_parser(__doc__)
    parser.add_argument("--target", choices=("v5e",), default="v5e", help="Device to compile for.")
    args = parser.parse_args()
    try:
        target = describe(args.target)
    except RuntimeError as error:
        publish([], args, "jax", "jaxlib", "optax", "libtpu", missing=[str(error)])
        return
    rows, claims = [], []
    for name, (network, params) in NETWORKS.items():
        measure = functools.partial(peak, target, network, params)
        unit = memory.tree_bytes(params)
        for label, optimizer in OPTIMIZERS.items():
            plain, ours = measure(optimizer), measure(memory.state_on_host(optimizer))
            rows.append(
                {
                    "": f"{name}, {label}",
                    "on the device": f"{plain.total / unit:.2f}",
                    "on the host": f"{ours.total / unit:.2f}",
                    "ratio": f"{ours.total / plain.total:.2f}",
                }
            )
            what = f"{name}, {label}: peak with the state on the host"
            ratio = ours.total / plain.total
            claims.append(Claim(what, "the state on the device", ratio, "<= 0.6"))
    print(f"{LAYERS} x {WIDTH} x {WIDTH}, float32: peak in parameters.\n")
    print(markdown_table(rows))
    publish(claims, args, "jax", "jaxlib", "optax", "libtpu")


if __name__ == "__main__":
    main()
