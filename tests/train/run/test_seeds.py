"""Seeds of private runs: secret by default, and the same after a resume."""

import contextlib
import dataclasses
import io
import json
import shutil
import stat

import chex
import jax
import numpy as np
import pytest
from program_cases import (
    PRIVATE,
    assert_one_line_error,
    assert_same_private_metrics,
    exit_code,
    final_state,
    fnet_command,
)

from train.config import recipes
from train.run import seeds
from train.run.run_folder import RunFolder
from train.run.setup import setup

INSECURE = "--grad.insecure-noise-seed", 0


@pytest.fixture
def private(workplace):
    (workplace / "private.py").write_text(PRIVATE)
    return workplace


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A private run whose secret is known, and what it printed."""
    folder, printed = tmp_path_factory.mktemp("trained"), io.StringIO()
    (folder / "private.py").write_text(PRIVATE)
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        patch.chdir(folder)
        patch.setattr(seeds.secrets, "token_hex", lambda n: "5a" * n)
        fnet_command("train", "private.py", "--out", "run")
    return folder / "run", printed.getvalue()


def test_the_secret_is_in_no_other_file_and_only_its_owner_can_read_it(trained):
    run, printed = trained
    secret_file = run / "secret_seed"
    assert stat.S_IMODE(secret_file.stat().st_mode) == 0o600
    assert "run/secret_seed: never publish this file" in printed
    secret = bytes.fromhex(secret_file.read_text())
    key, sampling = secret[:8], secret[16:]
    forms = {secret_file.read_text().strip().encode(), key, sampling}
    forms |= {str(word).encode() for word in np.frombuffer(key, np.uint32)}
    forms |= {str(int.from_bytes(sampling, "big")).encode()}
    others = [p for p in run.rglob("*") if p.is_file() and p != secret_file]
    assert len(others) > 10
    for path in others:
        assert not any(form in path.read_bytes() for form in forms), path
    *_, saved_key = final_state(run)[0]
    np.testing.assert_array_equal(saved_key, 0)
    assert json.loads((run / "summary.json").read_text())["privacy"]["secret_noise"] is True


def test_an_insecure_seed_is_warned_about(private):
    config, folder = recipes.load("private.py"), RunFolder(private)
    config = dataclasses.replace(
        config, grad=dataclasses.replace(config.grad, insecure_noise_seed=0)
    )
    seeds.create_secret(folder, config)
    assert not folder.secret_seed.exists()
    assert seeds.describe_seeds(folder, config).startswith(
        "NO PRIVACY: grad.insecure_noise_seed 0 "
    )


def test_a_resumed_run_has_the_same_noise_and_batches(trained, private, monkeypatch):
    monkeypatch.setattr(seeds.secrets, "token_hex", lambda n: "5a" * n)
    fnet_command("train", "private.py", "--out", "parts", "--train.steps", 2)
    monkeypatch.setattr(seeds.secrets, "token_hex", lambda n: "00" * n)
    fnet_command("train", "private.py", "--out", "parts", "--resume")
    chex.assert_trees_all_equal(final_state(trained[0]), final_state(private / "parts"))
    assert_same_private_metrics(trained[0], private / "parts")


def test_refuses_to_resume_without_the_secret(trained, private, capsys):
    shutil.copytree(trained[0], private / "run")
    before = (private / "run" / "config.json").read_bytes()
    (private / "run" / "secret_seed").unlink()
    assert exit_code("train", "run", "--resume", "--train.steps", 6) == 2
    assert_one_line_error(capsys, "the secret seed of this private run is missing")
    assert (private / "run" / "config.json").read_bytes() == before


def test_noise_batches_and_initialization_have_seeds_of_their_own(private):
    config = recipes.load("private.py")
    folder = RunFolder(private)
    seeds.create_secret(folder, config)
    first = seeds.read_seeds(folder, config)
    seeds.create_secret(folder, config)
    second = seeds.read_seeds(folder, config)
    assert first.data != second.data
    assert not np.array_equal(first.key, second.key)
    run = setup(config)
    state = run.init(jax.random.key(config.train.seed))
    with_key = first.add_key(state)
    np.testing.assert_array_equal(jax.random.key_data(with_key.key), first.key)
    chex.assert_trees_all_equal(with_key.params, state.params)
    seed = {"insecure_noise_seed": config.train.seed}
    insecure = dataclasses.replace(config, grad=dataclasses.replace(config.grad, **seed))
    # The half of the split key that did not draw the parameters.
    key = seeds.read_seeds(folder, insecure).key
    np.testing.assert_array_equal(key, jax.random.key_data(state.key))
    without = first.remove_key(with_key)
    np.testing.assert_array_equal(jax.random.key_data(without.key), 0)


def test_runs_without_noise_have_no_secret(private):
    config = recipes.load("digits_mlp")
    seeds.create_secret(RunFolder(private), config)
    assert not (private / "secret_seed").exists()
    assert seeds.read_seeds(RunFolder(private), config) == seeds.Seeds(config.train.seed)


@pytest.mark.parametrize(("content", "message"), [("zz", "non-hexadecimal"), ("00", "got 1")])
def test_a_damaged_secret_is_a_mistake(content, message, private):
    (private / "secret_seed").write_text(content)
    with pytest.raises(seeds.UserError, match=message):
        seeds.check_secret(RunFolder(private), recipes.load("private.py"))


def test_an_insecure_seed_without_noise_is_a_mistake(private, capsys):
    no_noise = "--grad.noise-multiplier", "None", "--grad.delta", "None"
    assert exit_code("train", "private.py", "--out", "run", *no_noise, *INSECURE) == 2
    assert_one_line_error(capsys, "grad.insecure_noise_seed: 0, but there is no noise")


def test_the_key_and_the_order_of_the_data_have_different_halves_of_the_secret(private):
    config, folder = recipes.load("private.py"), RunFolder(private)
    secret = bytes(range(32))
    folder.secret_seed.write_text(secret.hex())
    first = seeds.read_seeds(folder, config)
    np.testing.assert_array_equal(first.key, np.frombuffer(secret[:8], np.uint32))
    assert first.data == int.from_bytes(secret[16:], "big")
