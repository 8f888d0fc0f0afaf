"""A convolution's kernel: what each example adds to its gradient.

Shapes as in `fnet.autodiff.per_example.products`.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.extend.core import JaxprEqn

from fnet import jaxprs
from fnet.autodiff.per_example import ghost_norm
from fnet.precision import wide


class Convolution(NamedTuple):
    """``conv_general_dilated`` with a kernel that is a parameter.

    Every output position sees a patch of the input: an example's gradient is the
    sum over positions of the outer product of patch and cotangent, per group of
    features (a convolution as a matrix product, `im2col`).

    Attributes:
      data: 0, the images.
      params: the equation's parameters.
      kernel: shape and dtype of the kernel.
    """

    data: int
    params: dict[str, Any]
    kernel: jax.ShapeDtypeStruct
    once: bool = True

    @classmethod
    def of(cls, eqn: JaxprEqn, parameter: int) -> "Convolution | None":
        """Reads the equation; None if the images are the parameter."""
        if parameter != 1 or eqn.params["batch_group_count"] != 1:
            return None
        aval = jaxprs.aval(eqn.invars[1])
        return cls(0, dict(eqn.params), jax.ShapeDtypeStruct(aval.shape, aval.dtype))

    def factors(self, x: Array, ct: Array) -> tuple[Array, Array]:
        """Patches [stacked * groups, batch, positions, window * in] and cotangents.

        Groups are the convolution's feature groups, ``in`` the features of one.
        """
        u, v = self._patches(x), self._positions(ct)
        groups = self.params["feature_group_count"]

        def grouped(a: Array, leading: int) -> Array:
            # [stacked, batch, positions, leading, groups * n] -> [., ., ., leading * n]
            a = a.reshape(*a.shape[:3], leading, groups, -1)
            a = a.transpose(0, 4, 1, 2, 3, 5)
            return a.reshape(-1, *a.shape[2:4], leading * a.shape[-1])

        return grouped(u, math.prod(self._window())), grouped(v, 1)

    def _window(self) -> tuple[int, ...]:
        return tuple(self.kernel.shape[i] for i in self.params["dimension_numbers"].rhs_spec[2:])

    def _patches(self, x: Array) -> Array:
        """[stacked, batch, positions, window * features]."""
        p = self.params
        spec = p["dimension_numbers"].lhs_spec
        x = x.transpose(0, 1, 2, *(3 + spec[0], *(3 + i for i in spec[2:]), 3 + spec[1]))
        x = x.reshape(*x.shape[:2], -1, *x.shape[4:])  # [stacked, batch, images, *space, features]
        padding = [
            (low, high, dilation - 1)
            for (low, high), dilation in zip(p["padding"], p["lhs_dilation"], strict=True)
        ]
        padded = jax.lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, 0)] * 3 + padding + [(0, 0, 0)])
        window = self._window()
        steps, spread = p["window_strides"], p["rhs_dilation"]
        out = [
            (size - (w - 1) * d - 1) // s + 1
            for size, w, d, s in zip(padded.shape[3:-1], window, spread, steps, strict=True)
        ]

        def seen(offset: tuple[int, ...]) -> Array:
            cut = tuple(
                slice(o * d, o * d + (n - 1) * s + 1, s)
                for o, d, n, s in zip(offset, spread, out, steps, strict=True)
            )
            return padded[(slice(None),) * 3 + cut]

        patches = jnp.stack([seen(offset) for offset in np.ndindex(*window)], axis=-2)
        return patches.reshape(*x.shape[:2], -1, math.prod(window) * x.shape[-1])

    def _positions(self, ct: Array) -> Array:
        """[stacked, batch, positions, features]."""
        spec = self.params["dimension_numbers"].out_spec
        ct = ct.transpose(0, 1, 2, *(3 + spec[0], *(3 + i for i in spec[2:]), 3 + spec[1]))
        return ct.reshape(*ct.shape[:2], -1, ct.shape[-1])

    def squared_norms(self, x: Array, ct: Array) -> Array:
        """See `Product`; patches are made for a few examples at a time."""
        u, v = jax.eval_shape(self.factors, x, ct)

        def of(x: Array, ct: Array) -> Array:
            return ghost_norm.squared_norms(*self.factors(x, ct))

        groups, _, time, rows = u.shape
        matrix = min(time * time * 2, rows * v.shape[-1])
        return ghost_norm.by_examples(of, (x, ct), 4 * groups * (time * rows + matrix))

    def per_example(self, x: Array, ct: Array) -> Array:
        """See `Product`."""

        def of(x: Array, ct: Array) -> Array:
            return jnp.moveaxis(
                self._kernels(ghost_norm.per_example(*self.factors(x, ct)), len(x)), 1, 0
            )

        u, _ = jax.eval_shape(self.factors, x, ct)
        found = ghost_norm.by_examples(of, (x, ct), 4 * u.shape[0] * u.shape[2] * u.shape[3])
        return jnp.moveaxis(found, 0, 1)

    def _kernels(self, g: Array, stacked: int) -> Array:
        """[stacked * groups, batch, window * in, out] as the kernel is laid out."""
        window, spec = self._window(), self.params["dimension_numbers"].rhs_spec
        batch, out = g.shape[1], g.shape[-1]
        g = g.reshape(stacked, -1, batch, *window, g.shape[2] // math.prod(window), out)
        n = 3 + len(window)  # [stacked, groups, batch, *window, in, out]
        g = g.transpose(0, 2, 1, n + 1, n, *range(3, n))
        g = g.reshape(stacked, batch, -1, *g.shape[4:])  # [stacked, batch, out, in, *window]
        order = sorted(range(len(spec)), key=lambda i: spec[i])
        return g.transpose(0, 1, *(2 + i for i in order))

    def total(self, x: Array, ct: Array, scales: Array) -> Array:
        """See `Product`: the transposed convolution, as any gradient takes it."""
        # In the kernel's own dtype, if narrow, the sum over the batch would be rounded.
        dtype = wide(x, ct)
        like = jax.ShapeDtypeStruct(self.kernel.shape, dtype)
        p = self.params | {"preferred_element_type": None}
        images, out = p["dimension_numbers"].lhs_spec[0], p["dimension_numbers"].out_spec[0]

        def merged(a: Array, axis: int) -> Array:
            # [batch, times, ...]: all of them are images.
            a = jnp.moveaxis(a, 2 + axis, 2)
            return jnp.moveaxis(a.reshape(-1, *a.shape[3:]), 0, axis)

        def one(x: Array, ct: Array) -> Array:
            x, ct = merged(x, images), merged(ct, out)

            def convolve(kernel: Array) -> Array:
                y: Array = jax.lax.conv_general_dilated_p.bind(x, kernel, **p)
                return y

            kernel: Array
            (kernel,) = jax.linear_transpose(convolve, like)(ct)
            return kernel

        rows = scales.reshape(1, -1, *[1] * (x.ndim - 2))
        x = jnp.where(rows != 0, x, 0).astype(dtype)
        ct = jnp.where(rows != 0, ct.astype(dtype) * rows.astype(dtype), 0)
        if len(x) == 1:
            return one(x[0], ct[0])[None]
        return jnp.stack([one(x[i], ct[i]) for i in range(len(x))])
