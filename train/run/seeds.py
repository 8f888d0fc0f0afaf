"""Seeds of a run. With privacy, all but the one of initialization are secret.

Noise that can be computed can be subtracted, and batches that can be computed are not random. The
accountant assumes neither. A private run therefore draws its seeds from the operating system, and
stores them in a file of their own.
"""

import dataclasses
import functools
import hmac
import os
import secrets
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils

from fnet import TrainState
from train.config import Config
from train.errors import UserError, writing
from train.run.run_folder import RunFolder
from train.stored import StoredError, read_bytes

_BYTES = 32
"""Bytes of a secret seed: 16 for the noise key, of which Threefry uses 8, and 16 for sampling."""


class Seeds(NamedTuple):
    """Seeds of a run.

    Attributes:
      data: Seed of batches: their order or sampling, and their augmentation.
      key: Data of the random key of all steps, uint32 [words]; None keeps the one that
        initialization gives.
    """

    data: int
    key: np.ndarray | None = None

    def add_key(self, state: TrainState) -> TrainState:
        """Return a state with the run's key."""
        return state if self.key is None else _with_key(state, self.key)

    def remove_key(self, state: TrainState) -> TrainState:
        """Return a state without a secret key, for a checkpoint: its key is all zeros."""
        return state if self.key is None else _with_key(state, np.zeros_like(self.key))


def create_secret(folder: RunFolder, config: Config) -> None:
    """Draw the secret seed of a new run, into a file that only its owner can read.

    Runs that need no secret get no file.
    """
    if not needs_secret(config):
        return
    path = folder.secret_seed
    with writing(path):
        path.unlink(missing_ok=True)  # of a run that ended before its first step
        # The mode is set on creation, so that the file is never readable by others.
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(file, "w") as writer:
            writer.write(secrets.token_hex(_BYTES) + "\n")


def check_secret(folder: RunFolder, config: Config) -> None:
    """Check that a run can be resumed with its seeds."""
    if needs_secret(config):
        _read_secret(folder.secret_seed)


def read_seeds(folder: RunFolder, config: Config) -> Seeds:
    """Return the seeds of a run. Process 0 reads the secret seed for all processes."""
    if needs_secret(config):
        first = jax.process_index() == 0
        secret = _read_secret(folder.secret_seed) if first else bytes(_BYTES)
        secret = bytes(multihost_utils.broadcast_one_to_all(np.frombuffer(secret, np.uint8)))
        key = np.frombuffer(secret, np.uint32)[: jax.random.key_data(jax.random.key(0)).size]
        return Seeds(int.from_bytes(secret[_BYTES // 2 :], "big"), key)
    if config.is_private:
        seed = config.grad.insecure_noise_seed
        assert seed is not None  # otherwise the run needs a secret
        _, key = jax.random.split(jax.random.key(seed))
        return Seeds(seed, np.asarray(jax.random.key_data(key)))
    return Seeds(config.train.seed)


def describe_seeds(folder: RunFolder, config: Config) -> str:
    """Describe in one line who can compute the noise of a private run."""
    if needs_secret(config):
        return (
            f"noise and sampling follow from {folder.secret_seed}: never publish this file, and "
            "delete it when you will not resume the run"
            + ("" if config.is_release_only else f"; nor publish what is in {folder.private}")
        )
    return (
        f"NO PRIVACY: grad.insecure_noise_seed {config.grad.insecure_noise_seed} is in "
        "config.json, and anybody who knows it can subtract the noise"
    )


def describe_seed(folder: RunFolder, config: Config) -> str:
    """Return the seed of a run, or a code that follows from its secret one and does not tell it."""
    if needs_secret(config):
        return keyed_checksum(folder, config, f"secret seed of {folder.id}")[:16]
    return str(config.train.seed)


def needs_secret(config: Config) -> bool:
    """Whether noise and sampling of a run follow from a secret seed."""
    return config.is_private and config.grad.insecure_noise_seed is None


def keyed_checksum(folder: RunFolder, config: Config, text: str) -> str:
    """Return a code of a text that tells nothing to someone without the secret seed."""
    if needs_secret(config):
        key = _read_secret(folder.secret_seed)
    else:
        key = str(config.grad.insecure_noise_seed).encode()
    return hmac.new(key, text.encode(), "sha256").hexdigest()


def _read_secret(path: Path) -> bytes:
    if not path.exists():
        raise UserError(
            f"{path}: the secret seed of this private run is missing, without which it cannot "
            "continue with the same noise; start a new run with another --out"
        )
    try:
        secret = bytes.fromhex(read_bytes(path).decode())
    except ValueError as error:
        raise StoredError(path, error) from error
    if len(secret) != _BYTES:
        raise StoredError(path, f"expected {_BYTES} bytes, got {len(secret)}")
    return secret


def _with_key(state: TrainState, words: np.ndarray) -> TrainState:
    make = functools.partial(jax.random.wrap_key_data, impl=jax.random.key_impl(state.key))
    key = jax.jit(make, out_shardings=state.key.sharding)(words)
    return dataclasses.replace(state, key=key)
