"""Schedules and optimizers by name."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fnet
from fnet import models


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("constant", [0.0, 0.5, 1.0, 1.0, 1.0]),
        ("linear", [0.0, 0.5, 1.0, 0.5, 0.0]),
        ("cosine", [0.0, 0.5, 1.0, 0.5, 0.0]),
    ],
)
def test_schedules_rise_and_fall(name, expected):
    schedule = fnet.optim.make_schedule(name, 1.0, steps=8, warmup_steps=4)
    got = [float(schedule(step)) for step in (0, 2, 4, 6, 8)]
    np.testing.assert_allclose(got, expected, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "decay_steps", "expected"),
    [
        # At once every three steps, from the beginning of the run.
        ("step", (3,), [0.0, 0.5, 1.0, 0.5, 0.5, 0.5, 0.25, 0.25, 0.25, 0.125]),
        ("multistep", (4, 7), [0.0, 0.5, 1.0, 1.0, 0.5, 0.5, 0.5, 0.25, 0.25, 0.25]),
        # Two that fall into one step are both counted.
        ("multistep", (4.2, 4.4), [0.0, 0.5, 1.0, 1.0, 0.25, 0.25, 0.25, 0.25, 0.25, 0.25]),
        ("exponential", (2,), [0.0, 0.5, *[0.5 ** (i / 2) for i in range(8)]]),
    ],
)
def test_decays_multiply_the_rate(name, decay_steps, expected):
    schedule = fnet.optim.make_schedule(
        name, 1.0, steps=10, warmup_steps=2, decay_steps=decay_steps, decay_rate=0.5
    )
    np.testing.assert_allclose([float(schedule(i)) for i in range(10)], expected, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "decay_steps", "message"),
    [
        ("step", (), r"step needs one decay_steps above 0, got \(\)"),
        ("step", (2, 3), r"step needs one decay_steps above 0, got \(2, 3\)"),
        ("exponential", (0,), r"exponential needs one decay_steps above 0, got \(0,\)"),
        ("multistep", (2, -1), r"multistep needs some decay_steps above 0, got \(2, -1\)"),
    ],
)
def test_decays_that_cannot_be_are_refused(name, decay_steps, message):
    with pytest.raises(ValueError, match=message):
        fnet.optim.make_schedule(name, 1.0, 10, decay_steps=decay_steps)


@pytest.mark.parametrize("name", fnet.optim.OPTIMIZERS)
def test_the_classifier_can_have_a_learning_rate_of_its_own(name):
    params = {"layer1": {"kernel": jnp.ones((2, 2))}, "fc": {"kernel": jnp.ones((2, 2))}}
    gradient = jax.tree.map(lambda a: 0.3 * a, params)

    def update(learning_rate, scale):
        rule = fnet.optim.make_optimizer(
            name, learning_rate, weight_decay=0.1, classifier_scale=scale
        )
        changes, _ = rule.update(gradient, rule.init(params), params)
        return optax.apply_updates(params, changes)

    both = update(0.1, 5.0)
    chex.assert_trees_all_close(both["layer1"], update(0.1, None)["layer1"], rtol=1e-6)
    chex.assert_trees_all_close(both["fc"], update(0.5, None)["fc"], rtol=1e-6)


@pytest.mark.parametrize(
    "name", ["preact_resnet", "revnet", "resnet18", "resnext50", "densenet121", "wider_resnet16"]
)
def test_every_classifier_is_known_as_one(name):
    params, _ = jax.eval_shape(models.get(name, num_classes=7).init, jax.random.key(0))
    chosen = jax.tree.leaves_with_path(fnet.optim.in_classifier(params))
    assert any(of_it for _, of_it in chosen)
    assert not all(of_it for _, of_it in chosen)
