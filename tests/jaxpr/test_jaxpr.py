"""`fnet.jaxpr`: the interpreter, and what it is built from."""

import contextlib
import weakref

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from jax.extend.core import ClosedJaxpr, Primitive, jaxpr_as_fun
from jax.interpreters import ad

from fnet.jaxpr import (
    AnyPrimitive,
    Dependence,
    called_jaxpr,
    dependencies,
    evaluate_from,
    find_equations,
    has_backward_rule,
    inline,
    inner_jaxprs,
    interpret,
    rewrite,
    scopes,
    source_line,
    splice,
)
from fnet.jaxpr.interpreter import with_bodies


def function(x):
    """Calls, a loop, several results, literals, a constant and an output that nobody reads."""
    table = jnp.asarray([1.0, 2.0, 3.0])
    low, _ = jnp.divmod(x, 2.0)
    with jax.named_scope("layer"):
        x = jax.jit(lambda a: jnp.sin(a) * table)(x)
    x = jax.checkpoint(jnp.exp)(x)
    carry, rows = jax.lax.scan(lambda c, row: (c + row, c * row), x[0], x)
    return carry, rows + low, x, 3.0


X = jnp.asarray([0.5, 1.5, -2.5])


def test_values_are_dropped_after_their_last_use():
    class Value:
        pass

    alive = weakref.WeakSet()

    def count(eqn, inputs):
        outputs = [Value() for _ in eqn.outvars]
        alive.update(outputs)
        assert len(alive) <= 2  # the input, which `inputs` holds, and the output
        del inputs
        return outputs

    closed = jax.make_jaxpr(lambda x: jnp.sin(jnp.cos(jnp.sin(jnp.cos(x)))))(X)
    interpret(closed, [Value()], count)


def test_errors_name_the_innermost_equation_its_scopes_and_its_line():
    def fail(eqn, inputs):
        inner = called_jaxpr(eqn)
        if inner is not None:
            return interpret(inner, inputs, fail)
        raise ValueError("no rule")

    def f(x):
        with jax.named_scope("block"):
            return jax.jit(lambda a: jnp.tanh(a))(x)

    with pytest.raises(ValueError, match="no rule") as caught:
        interpret(jax.make_jaxpr(f)(X), [X], fail)
    (note,) = caught.value.__notes__
    assert note.startswith("fnet interpreted the equation 'tanh'")
    assert "test_jaxpr.py" in note


def test_custom_derivatives_are_entered_only_on_request():
    @jax.custom_jvp
    def f(x):
        return jnp.sin(x)

    f.defjvp(lambda primals, tangents: (f(*primals), 7 * tangents[0]))
    (eqn,) = jax.make_jaxpr(f)(X).eqns
    assert called_jaxpr(eqn) is None
    assert called_jaxpr(eqn, custom_derivatives=True).jaxpr.eqns[0].primitive.name == "sin"


def test_rewriting_reaches_inner_jaxprs_and_leaves_others_alone():
    closed = jax.make_jaxpr(function)(X)
    sines = list(find_equations(closed, "sin"))
    (cosine,) = jax.make_jaxpr(jnp.cos)(X).eqns

    def replace(eqn):
        if eqn.primitive.name != "sin":
            return eqn
        return eqn.replace(primitive=cosine.primitive, params=cosine.params)

    new = rewrite(closed, replace)
    assert len(sines) == 1
    assert not list(find_equations(new, "sin"))
    assert len(list(find_equations(new, "cos"))) == 1
    again = rewrite(new, replace).jaxpr.eqns
    assert all(a is b for a, b in zip(again, new.jaxpr.eqns, strict=True))
    assert isinstance(new, ClosedJaxpr)
    assert not jnp.array_equal(jaxpr_as_fun(new)(X)[2], jaxpr_as_fun(closed)(X)[2])


@pytest.mark.parametrize("custom_derivatives", [False, True])
def test_inlining_replaces_calls_under_their_scopes(custom_derivatives):
    def f(x):
        with jax.named_scope("block"):
            return jax.jit(lambda a: jax.nn.silu(a) + jax.jit(jnp.sin)(a))(x)

    closed = inline(jax.make_jaxpr(f)(X), custom_derivatives=custom_derivatives)
    names = [eqn.primitive.name for eqn in closed.eqns]
    assert "sin" in names
    assert not {"jit", "pjit"} & set(names)
    assert {scopes(eqn)[:1] for eqn in closed.eqns} == {("block",)}
    assert jnp.allclose(jaxpr_as_fun(closed)(X)[0], f(X))


def test_dependencies_stop_at_known_values():
    def f(x, y):
        a = jnp.sin(x)
        b = a * y
        return b, jnp.cos(y)

    jaxpr = jax.make_jaxpr(f)(X, X).jaxpr
    (x, y), (b, c) = jaxpr.invars, jaxpr.outvars
    a = jaxpr.eqns[0].outvars[0]
    inputs, eqns = dependencies(jaxpr, [b])
    assert set(inputs) == {x, y}
    assert [eqn.primitive.name for eqn in eqns] == ["sin", "mul"]
    inputs, eqns = dependencies(jaxpr, [b], known=[a])
    assert set(inputs) == {a, y}
    assert [eqn.primitive.name for eqn in eqns] == ["mul"]
    assert dependencies(jaxpr, [c])[0] == [y]


def test_known_values_are_not_overwritten():
    """An equation with two outputs runs for the other output only."""

    def f(x):
        carry, rows = jax.lax.scan(lambda c, row: (c + row, c * row), 0.0, x)
        return carry * rows

    jaxpr = jax.make_jaxpr(f)(X).jaxpr
    (x,), (scan,) = jaxpr.invars, [e for e in jaxpr.eqns if e.primitive.name == "scan"]
    carry = scan.outvars[0]
    (result,) = evaluate_from(jaxpr, jaxpr.outvars, {x: X, carry: jnp.float32(0.0)})
    assert jnp.array_equal(result, jnp.zeros(3))


def with_inner_programs(x):
    """Every kind of inner jaxpr, each with a sine in it."""
    x = jax.jit(jnp.sin)(x)
    x = jax.checkpoint(lambda a: jnp.sin(a) * a)(x)
    x = jax.lax.scan(lambda c, row: (jnp.sin(c), row), x, None, length=2)[0]
    x = jax.lax.while_loop(lambda c: jnp.sin(c).sum() < 0, lambda c: jnp.sin(c) + 2, x)
    x = jax.lax.cond(x[0] > 0, jnp.sin, lambda a: jnp.sin(a) + 1, x)
    return jax.nn.relu(jnp.sin(x))


def test_bodies_have_the_indices_of_sites():
    found = {}
    for eqn in jax.make_jaxpr(with_inner_programs)(X).eqns:
        visited = []

        def visit(jaxpr, index, visited=visited):
            visited.append((index, jaxpr))
            return jaxpr.replace(eqns=jaxpr.eqns[:0])

        new = with_bodies(eqn, visit)
        found[eqn.primitive.name] = [index for index, _ in visited]
        assert new.invars == eqn.invars
        bodies = [jaxpr for jaxpr in inner_jaxprs(new) if visited]
        assert not any(jaxpr.eqns for jaxpr in bodies[: len(visited)])
    assert sorted(found["while"]) == [(0,), (1,)]
    assert found["cond"] == [(0,), (1,)]
    assert found["scan"] == found["custom_jvp_call"] == [()]
    assert found["sin"] == []


def test_splicing_replaces_each_equation_by_several():
    """Each sine becomes a sine of a sine, at paths that a propagation gives, too."""
    paths = set()

    def replace(eqn, path):
        if eqn.primitive.name != "sin":
            return [eqn]
        paths.add(path)
        between = jax.make_jaxpr(jnp.sin)(*(jnp.ones(v.aval.shape) for v in eqn.invars)).jaxpr
        (inner,) = between.eqns
        return [inner.replace(invars=eqn.invars), eqn.replace(invars=inner.outvars)]

    class Sines(Dependence):
        def equation(self, eqn, states, site):
            sites.update({site.path} if eqn.primitive.name == "sin" else ())
            return super().equation(eqn, states, site)

    closed = jax.make_jaxpr(with_inner_programs)(X)
    spliced = ClosedJaxpr(splice(closed.jaxpr, replace), closed.consts)
    sites = set()
    Sines().run(closed, [True])
    assert paths == sites
    assert len(paths) == len(list(find_equations(closed, "sin")))
    assert len(list(find_equations(spliced, "sin"))) == 2 * len(paths)
    with monkeypatched_sine():
        expected = with_inner_programs(X)
    assert jnp.allclose(jaxpr_as_fun(spliced)(X)[0], expected)


@contextlib.contextmanager
def monkeypatched_sine():
    """Twice the sine."""
    sine = jnp.sin
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jnp, "sin", lambda x: sine(sine(x)))
        yield


def test_an_equation_of_an_installed_layer_has_the_line_of_the_model():
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(3)(x)

    closed = jax.make_jaxpr(lambda x: Model().init_with_output(jax.random.key(0), x)[0])(
        jnp.ones((2, 3))
    )
    (product,) = (e for e in closed.eqns if e.primitive.name == "dot_general")
    assert source_line(product).startswith(f"{__file__}:")
    assert source_line(product).endswith("Model.__call__)")


def test_derivative_rules_and_solves_have_a_backward_rule():
    @jax.custom_jvp
    def by_rule(x):
        return jnp.sin(x)

    by_rule.defjvps(lambda t, y, x: t * jnp.cos(x))

    def f(x):
        x = jax.lax.custom_linear_solve(lambda x: 2 * x, x, lambda _, b: b / 2, symmetric=True)
        return by_rule(jnp.cos(x))

    eqns = jax.make_jaxpr(f)(1.0).eqns
    ruled = [eqn.primitive.name for eqn in eqns if has_backward_rule(eqn)]
    assert ruled == ["custom_linear_solve", "custom_jvp_call"]


def test_policies_meet_equations_with_a_parameter_named_prim():
    named = Primitive("named")
    named.def_impl(lambda x, prim: x)
    named.def_abstract_eval(lambda x, prim: x)
    ad.deflinear2(named, lambda ct, _, prim: [ct])
    dots = jax.checkpoint_policies.dots_saveable

    def gradient(policy):
        f = jax.checkpoint(lambda x: jnp.sin(named.bind(jnp.sin(x), prim=1)), policy=policy)
        return jax.make_jaxpr(jax.grad(f))(1.0)

    with pytest.raises(TypeError, match="prim"):
        gradient(dots)
    assert len(gradient(AnyPrimitive(dots)).eqns) > 1
    assert AnyPrimitive(dots) == AnyPrimitive(dots)
