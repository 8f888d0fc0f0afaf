"""Train steps: one immutable spec, jitted once with the state donated, compiled within a budget."""

import dataclasses
import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import optax
from jax import Array

from fnet import checks, hlo
from fnet.autodiff.accumulate import as_mode
from fnet.autodiff.coupling import find_coupling
from fnet.autodiff.mean import Gradient, Loss, losses_and_aux, mean
from fnet.autodiff.update import Mode
from fnet.cpu.convolutions import count_cpus, for_cpus
from fnet.fsdp import gather_at_use
from fnet.loop_sums import late_sums
from fnet.memory import REMAT_POLICIES, BudgetError, Policy, format_bytes, tree_bytes
from fnet.memory.donation import Donation, read_donation
from fnet.memory.peak import Peak, compile_min_memory, read_peak
from fnet.memory.plan import Candidate, Plan, plan
from fnet.memory.target import Target, platform_of, shapes_on
from fnet.state import TrainState, check_state

Metrics = dict[str, Array]


@dataclasses.dataclass(frozen=True, eq=False)
class Step:
    """A train step ``step(state, batch) -> (state, metrics)``, returned by `make_step`.

    The spec is immutable: `replace` returns another step. It is jitted once, when it is first
    called, traced or lowered, and donates its state.

    Attributes:
      loss, optimizer, ema_decay, average, state_sharding: As for `make_step`.
      skip_nonfinite, remat, gather_axes: As for `make_step`.
      mode: How losses become an update; see `fnet.autodiff`.
    """

    loss: Loss
    optimizer: optax.GradientTransformation
    mode: Mode
    ema_decay: float | None = None
    state_sharding: Any = None
    skip_nonfinite: bool = False
    remat: str | Policy = "none"
    gather_axes: Sequence[str] | None = None
    average: Callable[[optax.OptState, Any], Any] | None = None

    def __post_init__(self) -> None:
        checks.optimizer("make_step", self.optimizer)
        checks.signature("make_step: loss", self.loss, "params", "model_state", "batch", "key")
        if self.ema_decay is not None and not 0 <= self.ema_decay < 1:
            raise ValueError(f"make_step: ema_decay must be in [0, 1), got {self.ema_decay}")
        if self.ema_decay is not None and self.average is not None:
            raise ValueError(
                f"make_step: average and ema_decay={self.ema_decay} both set state.ema; give one"
            )
        if isinstance(self.remat, str) and self.remat not in REMAT_POLICIES:
            raise ValueError(
                f"make_step: remat must be one of {list(REMAT_POLICIES)}, got {self.remat!r}"
            )
        if self.skip_nonfinite and not self.mode.whole_gradient:
            raise ValueError(
                "make_step: skip_nonfinite needs the whole gradient before the update, "
                f"which {self.mode} never has"
            )
        if self.skip_nonfinite and self.mode.noise_multiplier:
            raise ValueError(
                "make_step: skip_nonfinite is not private, because a skipped step reveals its "
                "examples; private modes leave out single examples instead"
            )

    @property
    def microbatches(self) -> int:
        """Number of equal parts of the batch, computed one after the other."""
        return self.mode.microbatches

    def replace(self, *, microbatches: int | None = None, **changes: Any) -> "Step":
        """Return the same step with other settings.

        Args:
          microbatches: Number of microbatches, a divisor of the batch size.
          **changes: Any other field of the step.

        Returns:
          A new step; the old one is unchanged.

        Raises:
          ValueError: As `make_step`.
        """
        mode = as_mode(changes.pop("mode", self.mode))
        if microbatches is not None:
            mode = mode.split(microbatches)
        return dataclasses.replace(self, mode=mode, **changes)

    def apply(self, state: TrainState, batch: dict[str, Array]) -> tuple[TrainState, Metrics]:
        """Take one step without jit or donation: the pure function behind ``__call__``."""
        check_state("make_step", state)
        _check_optimizer(self.optimizer, state)
        if (state.ema is None) != (self.ema_decay is None and self.average is None):
            raise ValueError(
                f"make_step: ema_decay={self.ema_decay}, but the state "
                f"{'has no' if state.ema is None else 'has an'} average; "
                "TrainState.create(ema=True) and make_step(ema_decay=...) go together"
            )
        if not isinstance(batch, Mapping):
            got = jax.typeof(batch) if isinstance(batch, Array) else type(batch).__name__
            raise TypeError(f"make_step: the batch must be a dict of arrays, got {got}")
        if self.state_sharding is None:
            return self._apply(state, batch)
        # Data comes in, state and metrics go out. Only parameters are gathered: trained ones, and
        # frozen ones in the model state.
        sharding = dataclasses.replace(
            jax.tree.map(lambda _: None, self.state_sharding),
            params=self.state_sharding.params,
            model_state=self.state_sharding.model_state,
        )
        apply = gather_at_use(
            self._apply, (sharding, None), (self.state_sharding, None), axes=self.gather_axes
        )
        meshes = [s.mesh for s in jax.tree.leaves(self.state_sharding) if hasattr(s, "mesh")]
        # The mode asks for the mesh in scope, to split a batch into parts of every device.
        with jax.sharding.use_abstract_mesh(meshes[0].abstract_mesh) if meshes else nullcontext():
            new_state, metrics = apply(state, batch)
        return jax.lax.with_sharding_constraint(new_state, self.state_sharding), metrics

    def _apply(self, state: TrainState, batch: dict[str, Array]) -> tuple[TrainState, Metrics]:
        optimizer = self.optimizer
        if self.state_sharding is not None:
            # Not in loops over parts of an array, which cut across its shards.
            whole = functools.partial(
                optax.with_extra_args_support(optimizer).update, chunked=False
            )
            optimizer = optax.GradientTransformationExtraArgs(optimizer.init, whole)
        update = self.mode.update_with(self.loss, optimizer, REMAT_POLICIES[self.remat].apply)
        key = self.mode.step_key(state.key, state.step)
        params, opt_state, model_state, metrics = update(
            state.params, state.opt_state, state.model_state, batch, key
        )
        ema = state.ema
        if self.ema_decay is not None:
            # Written so that the average of a parameter that does not change is that parameter.
            decay = self.ema_decay
            ema = jax.tree.map(lambda new, old: new + decay * (old - new), params, ema)
        if self.average is not None:
            ema = self.average(opt_state, params)
        new = {"params": params, "model_state": model_state, "opt_state": opt_state, "ema": ema}
        if self.skip_nonfinite:
            finite = jnp.isfinite(metrics["loss"]) & jnp.isfinite(metrics["grad_norm"])
            old = {name: getattr(state, name) for name in new}
            # The loss may pass arrays on, such as frozen parameters.
            new = jax.tree.map(lambda a, b: b if a is b else jnp.where(finite, a, b), new, old)
            metrics |= {"skipped": (~finite).astype(jnp.float32)}
        return dataclasses.replace(state, step=state.step + 1, **new), metrics

    @functools.cached_property
    def jitted(self) -> jax.stages.Wrapped:
        """The jitted step, ``(state, batch)``. The static argument ``cpus`` is for `for_cpus`; 0:
        an accelerator, where `late_sums` begin.
        """

        def step(
            state: TrainState, batch: dict[str, Array], cpus: int = 0
        ) -> tuple[TrainState, Metrics]:
            apply = for_cpus(self.apply, cpus) if cpus else late_sums(self.apply)
            return cast(tuple[TrainState, Metrics], apply(state, batch))

        # jit drops arguments that are never read, and with them their donation.
        return jax.jit(step, static_argnames="cpus", donate_argnums=0, keep_unused=True)

    def __call__(self, state: TrainState, batch: dict[str, Array]) -> tuple[TrainState, Metrics]:
        """Take one step; ``state`` is donated. RuntimeError if it was donated before."""
        cpus = count_cpus((state.step, batch))
        with _explain_donation():
            return cast(tuple[TrainState, Metrics], self.jitted(state, batch, cpus=cpus))

    def trace(self, state: TrainState, batch: dict[str, Array]) -> jax.stages.Traced:
        """Trace the step for these arguments or their shapes; see ``jax.jit(f).trace``."""
        return self.jitted.trace(state, batch, cpus=count_cpus((state.step, batch)))

    def lower(self, state: TrainState, batch: dict[str, Array]) -> jax.stages.Lowered:
        """Lower the step for these arguments or their shapes; see ``jax.jit(f).lower``."""
        lowered: jax.stages.Lowered = self.trace(state, batch).lower()
        return lowered


def make_step(
    loss: Loss,
    optimizer: optax.GradientTransformation,
    mode: Mode | Callable[[Loss], Gradient] = mean,
    *,
    ema_decay: float | None = None,
    average: Callable[[optax.OptState, Any], Any] | None = None,
    state_sharding: Any = None,
    skip_nonfinite: bool = False,
    remat: str | Policy = "none",
    microbatches: int | None = None,
    gather_axes: Sequence[str] | None = None,
) -> Step:
    """Make a jitted train step ``step(state, batch) -> (state, metrics)`` that donates its state.

    The new state reuses the buffers of the old one, which must not be used again. The randomness
    of step i is ``fold_in(state.key, i)``.

    Args:
      loss: ``loss(params, model_state, batch, key) -> losses [batch]``, or ``(losses, Aux)`` for
        a loss with model state or metrics.
      optimizer: An optax gradient transformation.
      mode: How losses become an update: `fnet.autodiff.mean`, `fnet.autodiff.clipped`, ..., or a
        function ``loss -> gradient``.
      ema_decay: Decay of the moving average ``state.ema``, in [0, 1). Required exactly when the
        state has one and there is no ``average``.
      average: ``(opt_state, params) -> average``, which computes ``state.ema`` in place of a decay,
        such as `fnet.optim.schedule_free_params`.
      state_sharding: Sharding of the state for FSDP: a tree of `jax.sharding.Sharding` with the
        structure of the state. Each layer gathers its parameters where it uses them; see
        `fnet.fsdp.gather_at_use`. By default XLA decides.
      skip_nonfinite: If the loss or the gradient's norm is not finite, change nothing but
        ``state.step``, and report the metric ``skipped`` as 1, otherwise 0. The step then
        holds the whole gradient before it updates anything.
      remat: Remat policy (gradient checkpointing) of the loss: a key of
        `fnet.memory.REMAT_POLICIES`, or a policy that `plan_step` chose.
      microbatches: Gradient accumulation: number of equal parts of the batch, computed one after
        the other. By default the mode decides: 1 for `fnet.autodiff.mean`.
      gather_axes: Mesh axes over which parameters are gathered. By default all axes of
        ``state_sharding``. Leave out axes of tensor parallelism.

    Returns:
      The step. Its metrics are scalars: ``loss``, ``grad_norm``, the means of the loss's metrics,
      and the metrics of the mode.

    Raises:
      ValueError: If ``ema_decay`` is out of range or comes with ``average``, the remat policy is
        unknown, the mode cannot be split, or ``skip_nonfinite`` is set for a mode that has no
        whole gradient or adds noise. When called: if ``state.ema`` does not match ``ema_decay``.
      TypeError: If ``mode`` is not a mode, ``optimizer`` not one of optax, or ``loss`` takes other
        arguments. When called: if the loss returns anything but losses or
        ``(losses, Aux)``, or the batch is not a dict.

    Example:
      >>> import jax, jax.numpy as jnp, optax, fnet
      >>> def loss(params, model_state, batch, key):
      ...     return (batch["x"] @ params["w"] - batch["y"]) ** 2
      >>> optimizer = optax.sgd(0.1)
      >>> params, key = {"w": jnp.zeros(3)}, jax.random.key(0)
      >>> state = fnet.TrainState.create(params=params, optimizer=optimizer, key=key)
      >>> step = fnet.make_step(loss, optimizer, microbatches=2)
      >>> state, metrics = step(state, {"x": jnp.ones((4, 3)), "y": jnp.ones(4)})
      >>> sorted(metrics), int(state.step)
      (['grad_norm', 'loss'], 1)
    """
    mode = as_mode(mode)
    if microbatches is not None:
        mode = mode.split(microbatches)
    options = ema_decay, state_sharding, skip_nonfinite, remat, gather_axes, average
    return Step(loss, optimizer, mode, *options)


@contextmanager
def _explain_donation() -> Iterator[None]:
    """Say what to do where JAX says that an array of the state or of the batch is deleted."""
    try:
        yield
    except (RuntimeError, ValueError) as error:  # by the way the step is called
        if "has been deleted" not in str(error):
            raise
        raise RuntimeError(
            "make_step: the state, or an array of the batch, was donated to an earlier step: use "
            f"the state that the step returned, or pass a copy ({error})"
        ) from error


def _check_optimizer(optimizer: optax.GradientTransformation, state: TrainState) -> None:
    own = jax.eval_shape(optimizer.init, state.params)
    names = [
        " ".join(dict.fromkeys(re.findall(r"\w+State\b", str(jax.tree.structure(s))))) or "no state"
        for s in (own, state.opt_state)
    ]
    if names[0] != names[1]:
        raise ValueError(
            f"make_step: the optimizer has {names[0]}, and the train state {names[1]}: it was "
            "created with another optimizer"
        )


class Report(NamedTuple):
    """Cost of a compiled step, known before it runs. On several devices, bytes are per device.

    Attributes:
      parameters: Number of trained parameters.
      state_bytes: Bytes of the whole state.
      peak: Bytes of arguments, outputs, aliased buffers and temporaries, and their peak.
      donation: Proof that the state is updated in place.
      compiler_options: XLA options the step was compiled with.
    """

    parameters: int
    state_bytes: int
    peak: Peak
    donation: Donation
    compiler_options: dict[str, Any]

    def as_dict(self) -> dict[str, Any]:
        """Return the report as plain nested dicts."""
        return self._asdict() | {"peak": self.peak.as_dict(), "donation": self.donation._asdict()}


class Executable(NamedTuple):
    """A compiled step and its cost; call it like the step.

    Attributes:
      compiled: The compiled program.
      report: Its memory, known before it runs.
      step: The step that was compiled. With a budget, its ``remat`` and ``microbatches`` are the
        chosen ones.
    """

    compiled: jax.stages.Compiled
    report: Report
    step: Any

    def __call__(self, state: TrainState, batch: dict[str, Array]) -> tuple[TrainState, Metrics]:
        """Take one step in the buffers of ``state``; TypeError for other shapes or dtypes."""
        with _explain_donation():
            return cast(tuple[TrainState, Metrics], self.compiled(state, batch))


def compile_step(
    step: Step | jax.stages.Wrapped,
    state: TrainState,
    batch: dict[str, Array],
    *,
    budget: float | str | None = None,
    compiler_options: Mapping[str, Any] | None = None,
    progress: Callable[[Candidate], None] | None = None,
) -> Executable:
    """Compile a step ahead of time and prove that it updates the state in place.

    Nothing runs, so shapes are enough. With a budget, it chooses what the backward pass saves and
    the number of microbatches: the lowest estimated time whose peak fits. See
    `fnet.step.plan_step` to see or restrict the candidates.

    Args:
      step: A step of `make_step`. Without a budget, any jitted function of state and batch.
      state: The state, or its shapes (``jax.eval_shape``).
      batch: A batch, or its shapes.
      budget: Limit on the bytes of the compiled step per device, such as "4GiB", "4GB" or an int.
        Parts of the loss that keep rows of the batch apart run in chunks; what mixes rows runs
        whole, so the gradient does not change.
      compiler_options: XLA options to compile with. By default, it compiles with each of the
        backend's `fnet.memory.CANDIDATE_OPTIONS` and returns the smallest program.
      progress: Called with each candidate for the budget after it is compiled. ``print`` is enough.

    Returns:
      An executable ``(state, batch) -> (state, metrics)`` with ``.report``, ``.compiled`` and
      ``.step``. With a budget, ``report.peak.total <= budget``.

    Raises:
      DonationError: If a leaf of the state is not updated in place. The message names the leaf,
        its shape and dtype before and after, and the reason.
      BudgetError: If nothing fits the budget. The message names the operation that keeps the
        batch from being split, if there is one.
      ValueError: If the budget cannot be read, or comes with ``compiler_options``.
      TypeError: If a budget is given for a step that is not from `make_step`.

    Example:
      >>> import jax, jax.numpy as jnp, optax, fnet
      >>> def loss(params, model_state, batch, key):
      ...     return (jnp.tanh(batch["x"] @ params["w"]) ** 2).sum(-1)
      >>> optimizer = optax.adam(1e-3)
      >>> params, key = {"w": jnp.ones((64, 64))}, jax.random.key(0)
      >>> state = fnet.TrainState.create(params=params, optimizer=optimizer, key=key)
      >>> step, batch = fnet.make_step(loss, optimizer), {"x": jnp.ones((32, 64))}
      >>> step = fnet.compile_step(step, state, batch, budget="1MiB")
      >>> step.report.peak.total <= 2**20, step.report.parameters
      (True, 4096)
      >>> state, metrics = step(state, batch)
    """
    if budget is not None:
        if compiler_options is not None:
            raise ValueError("compile_step: a budget chooses the compiler options; give only one")
        found = plan_step(step, state, batch, budget, progress=progress)
        chosen = found.chosen
        step = cast(Step, step).replace(remat=chosen.policy, microbatches=chosen.microbatches)
        compiler_options = chosen.compiler_options
    lowered = step.lower(state, batch)
    if compiler_options is None:
        compiled, options = compile_min_memory(lowered)
    else:
        options = dict(compiler_options)
        compiled = lowered.compile(compiler_options=options)
    program = hlo.unwrap(compiled)
    read = program, program.as_text() or "", program.memory_analysis()
    report = Report(
        parameters=sum(leaf.size for leaf in jax.tree.leaves(state.params)),
        state_bytes=tree_bytes(state),
        peak=read_peak(*read),
        donation=read_donation(*read),
        compiler_options=options,
    )
    if budget is not None and report.peak.total > (found.budget or 0):
        raise BudgetError(
            f"compile_step: planned within {format_bytes(found.budget)}, but the final "
            f"program needs {format_bytes(report.peak.total)}"
        )
    return Executable(compiled, report, step)


def plan_step(
    step: Step | jax.stages.Wrapped,
    state: TrainState,
    batch: dict[str, Array],
    budget: float | str | None = None,
    *,
    policies: Sequence[str | Policy] | None = None,
    microbatch_choices: Iterable[int] | None = None,
    reserve: int = 0,
    target: Target | None = None,
    progress: Callable[[Candidate], None] | None = None,
) -> Plan:
    """Find the fastest way to take a train step within a budget, without running one.

    `compile_step` with a budget is the short form. Here you see all candidates, restrict the
    choice, or plan for another device. Apply the result with ``step.replace(remat=chosen.policy,
    microbatches=chosen.microbatches)`` and
    ``compile_step(..., compiler_options=chosen.compiler_options)``.

    Args:
      step, state, batch: As for `compile_step`. It must be a step of `make_step`.
      budget: Bytes, or text as ``4GiB``, ``4GB``, ``4096MiB``. None for no limit.
      policies: Keys of `fnet.memory.REMAT_POLICIES` to choose from. By default every array is
        planned; see `fnet.memory.plan`.
      microbatch_choices: Numbers of microbatches to choose from. By default the step's own number
        on a CPU: a budget runs parts of the loss in chunks instead, which changes no gradient; see
        `fnet.memory.regions`. Accelerators, and modes and shardings without chunks, choose from
        multiples of the step's number that divide the batch; see `divisors`. Numbers other than the
        step's own are dropped if the loss of an example is not shown to depend on this example
        alone, and if they leave too few examples for the network.
      reserve: Bytes of the budget that are needed outside of the compiled step.
      target: A device to plan for. By default this machine's.
      progress: Called with each candidate after it is compiled.

    Returns:
      The plan: ``chosen``, and all candidates that were compiled.

    Raises:
      BudgetError: If the budget is below the state's size, or nothing fits. The message names
        the operation that keeps the batch from being split, if there is one.
      ValueError: If the budget cannot be read, a policy is unknown, there is nothing to choose
        from, or the mode or the loss cannot be split.
      TypeError: If the step is not from `make_step`.

    Example:
      >>> import jax, jax.numpy as jnp, optax, fnet
      >>> def loss(params, model_state, batch, key):
      ...     return (jnp.tanh(batch["x"] @ params["w"]) ** 2).sum(-1)
      >>> optimizer = optax.sgd(0.1)
      >>> params, key = {"w": jnp.ones((8, 8))}, jax.random.key(0)
      >>> state = fnet.TrainState.create(params=params, optimizer=optimizer, key=key)
      >>> step, batch = fnet.make_step(loss, optimizer), {"x": jnp.ones((4, 8))}
      >>> plan = fnet.plan_step(step, state, batch, policies=("none", "dots"))
      >>> plan.chosen.policy.name, plan.chosen.microbatches, len(plan.candidates) >= 2
      ('none', 1, True)
    """
    if not isinstance(step, Step):
        raise TypeError(
            "plan_step: a plan changes remat policy and microbatches, so it needs a step of "
            f"fnet.make_step, got {type(step).__name__}; for a step of your own, give its loss to "
            "fnet.memory.remat_to_fit"
        )
    meshes = [s.mesh for s in jax.tree.leaves(step.state_sharding) if hasattr(s, "mesh")]
    regions = step.mode.differentiates_mean and all(mesh.size == 1 for mesh in meshes)
    regions = regions and step.microbatches == 1 and microbatch_choices is None
    if microbatch_choices is None:
        # On an accelerator, the kernels of microbatches are larger than those of rows in chunks.
        is_split = budget is not None and (not regions or platform_of(target) != "cpu")
        microbatch_choices = _microbatch_choices(step, batch) if is_split else (step.microbatches,)
    if policies is None and not step.mode.whole_gradient:
        policies = (step.remat,)
    choices = tuple(microbatch_choices)
    step.replace(microbatches=max(choices, default=1))  # rejects a mode that cannot be split
    coupling = None  # why microbatches change the gradient or the model state
    if {*choices} - {step.microbatches} and not step.mode.per_example:
        updated = _updated_model_state(step, state, batch)
        given = state.params, state.model_state, batch, state.key
        coupling = f"the loss updates {updated}" if updated else find_coupling(step.loss, *given)
    if coupling:
        choices = tuple(n for n in choices if n == step.microbatches)
        if not choices:
            raise ValueError(
                "plan_step: microbatch_choices must have the step's own number, "
                f"{step.microbatches}, because others change the gradient: {coupling}"
            )

    def build(policy: Policy, microbatches: int) -> jax.stages.Traced:
        args: tuple[Any, Any] = (state, batch)
        candidate = step.replace(remat=policy, microbatches=microbatches)
        return candidate.trace(*(shapes_on(target, args) if target else args))

    try:
        return plan(
            build,
            budget,
            policies=policies,
            microbatches=choices,
            regions=regions,
            state_bytes=tree_bytes(state),
            reserve=reserve,
            target=target,
            progress=progress,
        )
    except BudgetError as error:
        if coupling:
            text = f"{error}; the batch is not split, because {coupling}"
            raise BudgetError(text, error.floor) from error
        raise


def _updated_model_state(step: Step, state: TrainState, batch: Any) -> str:
    """The first array of the model state that the loss does not return unchanged; "" if none."""
    if not jax.tree.leaves(state.model_state):
        return ""
    updated: list[str] = []

    def loss(params: Any, model_state: Any, batch: Any, key: Array) -> None:
        _, aux = losses_and_aux(step.loss(params, model_state, batch, key), model_state)
        passed_on = dict(jax.tree_util.tree_leaves_with_path(model_state))
        leaves = jax.tree_util.tree_leaves_with_path(aux.model_state)
        updated.extend(
            f"model_state{jax.tree_util.keystr(path)}"
            for path, leaf in leaves
            if leaf is not passed_on.get(path)
        )

    jax.eval_shape(loss, state.params, state.model_state, batch, state.key)
    return next(iter(updated), "")


def divisors(rows: int, first: int = 1) -> list[int]:
    """Divisors of a number of rows from ``first`` on, each a multiple of the one before.

    Each step multiplies by the smallest prime factor that is left: 1, 2, 4, 12 of 12. If ``first``
    does not divide the rows, it is the only one.
    """
    found, prime = [first], 2
    while (rest := rows // found[-1]) > 1 and rows % first == 0:
        while rest % prime:
            prime = prime + 1 if prime * prime <= rest else rest
        found.append(found[-1] * prime)
    return found


def _microbatch_choices(step: Step, batch: Any) -> list[int]:
    sizes: set[Any] = {getattr(leaf, "shape", ())[:1] for leaf in jax.tree.leaves(batch)}
    if not step.mode.splittable or len(sizes) != 1 or () in sizes:  # scalars cannot be split
        return [step.microbatches]
    (rows,) = sizes.pop()
    return divisors(rows, step.microbatches)
