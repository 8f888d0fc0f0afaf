import jax
import jax.numpy as jnp
import pytest

from fnet.memory import target


def test_a_device_that_nobody_knows_is_refused_with_those_that_are_known():
    with pytest.raises(ValueError, match=r"expected one of \['h100', 'v5e'\], got 'h900'"):
        target.describe("h900")


@pytest.mark.parametrize(("name", "extra"), [("h100", "cuda"), ("v5e", "tpu")])
def test_a_compiler_that_is_not_installed_is_named_by_its_extra(name, extra, monkeypatch):
    def missing(*_, **__):
        raise RuntimeError("no plugin")

    target._first_device.cache_clear()
    monkeypatch.setattr(target.topologies, "get_topology_desc", missing)
    with pytest.raises(RuntimeError, match=rf'pip install "fnet-jax\[{extra}\]"'):
        target.describe(name)


def here():
    return target.Target("here", jax.local_devices()[1], 2**30, {})


def test_shapes_are_placed_on_the_target_with_their_dtypes():
    tree = {"x": jnp.ones((2, 3), jnp.bfloat16), "key": jax.random.key(0)}
    placed = target.on(here(), tree)
    assert placed["x"].dtype == jnp.bfloat16
    assert all(s.sharding.device_set == {jax.local_devices()[1]} for s in placed.values())


def test_a_program_is_compiled_for_the_target_and_keeps_its_donation():
    from fnet.memory import donation, peak

    f = jax.jit(lambda state, x: ({"w": state["w"] + x.sum()}, x.sum()), donate_argnums=0)
    compiled = target.compile_for(here(), f, {"w": jnp.ones((8, 8))}, jnp.ones(4))
    assert peak(compiled).aliased == donation(compiled).donated_bytes == 256


def test_a_program_without_an_array_has_nowhere_to_go():
    with pytest.raises(ValueError, match="needs an array argument"):
        target.compile_for(here(), jax.jit(lambda: 1))
