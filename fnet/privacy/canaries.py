"""Gradient canaries: training examples whose gradient is one entry of one weight matrix."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fnet.autodiff.mean import Aux, Loss, losses_and_aux
from fnet.privacy.batch_names import CANARY


@dataclasses.dataclass(frozen=True)
class GradientCanaries:
    """Canaries for an audit of privacy, for any network with a dense layer.

    The gradient of canary i is ``sign_i * norm`` at one entry of a weight matrix and 0 elsewhere::

        loss_i = sign_i norm W[row_i, column_i]

    After clipping it moves the entry as far as an example can. Whether the canary was included
    shows in that entry, up to noise and the movement by other examples ("Dirac canaries"). No two
    canaries share an entry, so they have almost no effect on what the network learns.

    A private run must count canaries as training examples, also those that are not included.

    Attributes:
      path: Path of the weight matrix in the parameters.
      rows: Row of each canary [m].
      columns: Column of each canary [m].
      signs: 1.0 or -1.0 [m].
      norm: Norm of each gradient; choose more than the clip.

    Example:
      >>> import jax.numpy as jnp, numpy as np, fnet
      >>> from fnet.privacy.canaries import GradientCanaries
      >>> params = {"kernel": jnp.zeros((3, 2))}
      >>> canaries = GradientCanaries.draw(params, count=4, seed=0, norm=10.0)
      >>> def loss(params, model_state, batch, key):
      ...     return (batch["x"] @ params["kernel"]).sum(1)
      >>> def losses(params, batch):
      ...     return canaries.add_to(loss)(params, {}, batch, None)[0]
      >>> batch = {"x": jnp.ones((2, 3)), "canary": jnp.array([3, -1])}
      >>> total, info = fnet.clipped_grad(losses, 1.0)(params, batch)
      >>> [round(float(norm), 3) for norm in info.norms]
      [10.0, 2.449]

    References: Steinke, Nasr and Jagielski 2023, "Privacy auditing with one (1) training run",
      section 6, arXiv:2305.08846.
    """

    path: tuple[Any, ...]
    rows: np.ndarray
    columns: np.ndarray
    signs: np.ndarray
    norm: float

    @classmethod
    def draw(cls, params: Any, count: int, seed: int, norm: float) -> "GradientCanaries":
        """Draw canaries in the largest matrix named ``kernel``, or else in the largest matrix.

        Args:
          params: Tree of parameters, or of their shapes.
          count: Number of canaries m.
          seed: Seed, which may be public.
          norm: Norm of each gradient.

        Raises:
          ValueError: If there is no matrix, or it has fewer than ``count`` entries.
        """
        leaves = jax.tree_util.tree_leaves_with_path(params)
        matrices = [(path, leaf.shape) for path, leaf in leaves if len(leaf.shape) == 2]
        if not matrices:
            raise ValueError("GradientCanaries.draw: the parameters have no matrix")

        def rank(matrix: tuple[tuple[Any, ...], tuple[int, ...]]) -> tuple[bool, int]:
            path, shape = matrix
            return "kernel" in jax.tree_util.keystr(path[-1:]), shape[0] * shape[1]

        path, shape = max(matrices, key=rank)
        if count > shape[0] * shape[1]:
            raise ValueError(
                f"GradientCanaries.draw: count must be at most {shape[0] * shape[1]}, the entries "
                f"of {jax.tree_util.keystr(path)}, got {count}"
            )
        generator = np.random.default_rng(seed)
        entries = generator.choice(shape[0] * shape[1], count, replace=False)
        rows, columns = np.unravel_index(entries, shape)
        signs = generator.choice(np.array([-1, 1], np.float32), count)
        return cls(tuple(path), rows, columns, signs, norm)

    def add_to(self, loss: Loss) -> Loss:
        """Return a loss for batches with ``canary`` [batch], in which canaries have their own loss.

        The loss of a canary has the value 0.
        """

        def with_canaries(
            params: Any, model_state: Any, batch: dict[str, Array], key: Array
        ) -> tuple[Array, Aux]:
            number = batch[CANARY]
            others = {name: a for name, a in batch.items() if name != CANARY}
            losses, aux = losses_and_aux(loss(params, model_state, others, key), model_state)
            own = self._values(params, jnp.maximum(number, 0)).astype(losses.dtype)
            own = self.norm * (own - jax.lax.stop_gradient(own))
            return jnp.where(number >= 0, own, losses), aux

        return with_canaries

    def values(self, params: Any) -> Array:
        """Return each canary's entry times its sign, [m].

        Training on a canary decreases its value. A score for `audit_epsilon` is the value of the
        initial parameters minus the value of the final ones.
        """
        return self._values(params, jnp.arange(len(self.rows)))

    def _values(self, params: Any, number: Array) -> Array:
        # As a product of vectors, per-example gradients need not be materialized.
        leaves = jax.tree_util.tree_leaves_with_path(params)
        (matrix,) = (leaf for path, leaf in leaves if path == self.path)
        row = jax.nn.one_hot(jnp.asarray(self.rows)[number], matrix.shape[0], dtype=matrix.dtype)
        column = jax.nn.one_hot(
            jnp.asarray(self.columns)[number], matrix.shape[1], dtype=matrix.dtype
        )
        entries: Array = ((row @ matrix) * column).sum(1)
        return jnp.asarray(self.signs)[number] * entries
