r"""Train steps of openpi and GraphCast from their public sources, compiled ahead of time.

    git clone https://github.com/Physical-Intelligence/openpi
    git clone https://github.com/google-deepmind/weathernext
    git clone https://github.com/google-deepmind/xarray_jax
    pip install "fnet-jax[target-gpu]" dm-haiku jraph trimesh rtree xarray augmax einops \
        "jaxtyping==0.2.36" "beartype==0.19.0"
    JAX_PLATFORMS=cpu python -m benchmarks.case_studies openpi openpi/src --budget 18.6GiB
    JAX_PLATFORMS=cpu python -m benchmarks.case_studies graphcast weathernext xarray_jax

No weights and no data are needed, and nothing runs. A compile takes minutes.
"""

import sys
import time
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen
import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import optax
from flax import nnx

from benchmarks.claims import argument_parser
from benchmarks.measure import markdown_table
from fnet import memory
from fnet.memory import BudgetError, estimate_cost
from fnet.memory.target import Target, compile_for, describe


class Case(NamedTuple):
    """A loss, its arguments without arrays, and the optimizer of the step."""

    loss: Callable[..., Any]
    args: tuple[Any, ...]
    optimizer: optax.GradientTransformation


def main() -> None:
    parser = argument_parser(__doc__, target=True)
    parser.add_argument("case", choices=CASES)
    parser.add_argument("sources", nargs="+", help="Folders of the sources.")
    parser.add_argument("--budget", help="Bytes of the step; by default, nothing is planned.")
    parser.add_argument("--without-remat", action="store_true", help="Without their own remat.")
    parser.add_argument("--small", action="store_true", help="GraphCast of 1 degree, 13 levels.")
    args = parser.parse_args()
    sys.path[:0] = args.sources
    target = describe(args.target or "rtx4090")
    case = CASES[args.case](args.without_remat, args.small)
    rows = [measure("as published", case.loss, case, target, {})]
    if args.budget:
        try:
            smaller, plan = memory.remat_to_fit(
                case.loss,
                *case.args,
                optimizer=case.optimizer,
                budget=args.budget,
                target=target,
                progress=lambda c: print(c, memory.format_bytes(c.peak.total), file=sys.stderr),
            )
            options = plan.chosen.compiler_options
            rows.append(measure(f"fnet: {plan.chosen}", smaller, case, target, options))
        except BudgetError as error:
            print(error)
    print(markdown_table(rows))


def measure(
    name: str, loss: Callable[..., Any], case: Case, target: Target, options: dict[str, Any]
) -> dict[str, str]:
    """Compile the step of a loss, with donated parameters and optimizer state."""
    params, *others = case.args
    opt_state = jax.eval_shape(case.optimizer.init, params)

    def step(params: Any, opt_state: Any, *others: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params, *others)
        updates, opt_state = case.optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    jitted = jax.jit(step, donate_argnums=(0, 1))
    flops = estimate_cost(jax.make_jaxpr(step)(params, opt_state, *others)).flops
    began = time.perf_counter()
    compiled = compile_for(target, jitted, params, opt_state, *others, compiler_options=options)
    peak = memory.peak(compiled)
    return {
        "step": name,
        "peak GiB": f"{peak.total / 2**30:.2f}",
        "arguments GiB": f"{peak.arguments / 2**30:.2f}",
        "TFLOPs": f"{flops / 1e12:.1f}",
        "compile s": f"{time.perf_counter() - began:.0f}",
    }


def openpi(without_remat: bool, _: bool) -> Case:
    """LoRA fine-tuning of pi-0: the config ``pi0_libero_low_mem_finetune``, 32 examples."""
    for name in ("torch", "torch.nn", "torch.nn.functional", "safetensors", "pi0_pytorch"):
        prefix = "openpi.models_pytorch." if name == "pi0_pytorch" else ""
        sys.modules[prefix + name] = types.ModuleType(name)  # only its PyTorch port needs them
    port = sys.modules["openpi.models_pytorch"] = types.ModuleType("models_pytorch")
    port.pi0_pytorch = sys.modules["openpi.models_pytorch.pi0_pytorch"]  # type: ignore[attr-defined]
    port.pi0_pytorch.PI0Pytorch = object
    torch: Any = sys.modules["torch"]
    torch.Tensor, torch.nn = type("Tensor", (), {}), sys.modules["torch.nn"]
    torch.nn.functional = sys.modules["torch.nn.functional"]
    if without_remat:
        flax.linen.remat = lambda module, **_: module
    from openpi.models import pi0_config  # type: ignore[import-not-found]

    jaxtyping.config.update("jaxtyping_disable", True)  # shapes without arrays are not arrays
    config = pi0_config.Pi0Config(
        paligemma_variant="gemma_2b_lora", action_expert_variant="gemma_300m_lora"
    )
    trainable = nnx.All(nnx.Param, nnx.Not(config.get_freeze_filter()))
    model = nnx.eval_shape(config.create, jax.random.key(0))
    observation, actions = config.inputs_spec(batch_size=32)
    model.train()
    graphdef, params, rest = nnx.split(model, trainable, ...)  # type: ignore[misc]

    def shape(leaf: Any, dtype: Any = None) -> Any:
        return jax.ShapeDtypeStruct(tuple(leaf.shape), dtype or leaf.dtype)

    def frozen(leaf: Any) -> Any:
        return shape(leaf, jnp.bfloat16) if leaf.dtype == jnp.float32 else leaf

    def loss(params: Any, rest: Any, key: Any, observation: Any, actions: Any) -> Any:
        model = nnx.merge(graphdef, params, rest)
        return jnp.mean(model.compute_loss(key, observation, actions, train=True))

    key = jax.eval_shape(lambda: jax.random.key(0))
    batch = jax.tree.map(shape, (observation, actions))
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(2.5e-5, b1=0.9, b2=0.95, weight_decay=1e-10)
    )
    return Case(loss, (params, jax.tree.map(frozen, rest), key, *batch), optimizer)


def graphcast(without_remat: bool, small: bool) -> Case:
    """GraphCast of 0.25 degrees, 37 levels and 16 message-passing steps, one forecast step."""
    import haiku as hk
    import xarray  # type: ignore[import-not-found]
    import xarray_jax  # type: ignore[import-not-found]
    from weathernext.utils import (  # type: ignore[import-not-found]
        autoregressive,
        casting,
        normalization,
        variables,
    )
    from weathernext.weathernext1_graph import graphcast as g  # type: ignore[import-not-found]

    task, degrees, mesh = (g.TASK_13, 1.0, 5) if small else (g.TASK, 0.25, 6)
    config = g.ModelConfig(
        resolution=degrees,
        mesh_size=mesh,
        latent_size=512,
        gnn_msg_steps=16,
        hidden_layers=1,
        radius_query_fraction_edge_length=0.6,
    )
    latitudes = np.arange(-90, 90 + degrees / 2, degrees).astype(np.float32)
    longitudes = np.arange(0, 360, degrees).astype(np.float32)
    levels = np.array(task.pressure_levels)
    grid = {"lat": latitudes, "lon": longitudes}

    def dims(name: str) -> tuple[str, ...]:
        if name in variables.STATIC_VARS:
            return ("lat", "lon")
        if name.startswith(("year", "day")):
            return ("batch", "time", *(("lon",) if name.startswith("day") else ()))
        level = ("level",) if name in g.TARGET_ATMOSPHERIC_VARS else ()
        return ("batch", "time", *level, "lat", "lon")

    def coordinates(steps: list[int]) -> dict[str, Any]:
        hours = (np.array(steps) * np.timedelta64(6, "h")).astype("timedelta64[ns]")
        return {**grid, "level": levels, "time": hours, "batch": np.arange(1)}

    kinds = {
        "inputs": (task.input_variables, coordinates([-1, 0])),
        "targets": (task.target_variables, coordinates([1])),
        "forcings": (task.forcing_variables, coordinates([1])),
    }
    shapes = {
        kind: {
            name: jax.ShapeDtypeStruct(tuple(len(where[d]) for d in dims(name)), jnp.float32)
            for name in names
        }
        for kind, (names, where) in kinds.items()
    }

    def dataset(kind: str, arrays: dict[str, Any]) -> Any:
        used = {d for name in arrays for d in dims(name)}
        where = {d: values for d, values in kinds[kind][1].items() if d in used}
        return xarray_jax.Dataset({n: (dims(n), a) for n, a in arrays.items()}, coords=where)

    ones = {
        name: (("level",), np.ones(len(levels), np.float32))
        if name in g.TARGET_ATMOSPHERIC_VARS
        else ((), np.float32(1))
        for name in task.input_variables
    }
    statistics = xarray.Dataset(ones, coords={"level": levels})

    def forward(arrays: Any) -> Any:
        predictor = casting.Bfloat16Cast(g.GraphCast(config, task))
        predictor = normalization.InputsAndResiduals(
            predictor,
            diffs_stddev_by_level=statistics,
            mean_by_level=statistics,
            stddev_by_level=statistics,
        )
        predictor = autoregressive.Predictor(predictor, gradient_checkpointing=not without_remat)
        value, _ = predictor.loss(*(dataset(kind, arrays[kind]) for kind in kinds))
        return xarray_jax.unwrap_data(value.mean(), require_jax=True)

    model = hk.transform(forward)
    params = jax.eval_shape(model.init, jax.random.key(0), shapes)
    optimizer = optax.chain(
        optax.clip_by_global_norm(32.0), optax.adamw(1e-3, b1=0.9, b2=0.95, weight_decay=0.1)
    )
    return Case(
        lambda params, arrays: model.apply(params, None, arrays), (params, shapes), optimizer
    )


CASES = {"openpi": openpi, "graphcast": graphcast}

if __name__ == "__main__":
    main()
