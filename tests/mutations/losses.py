"""Cross-entropy of logits, and fused with the linear layer before it."""

from tests.mutations.mutation import changes

_LOGITS = "fnet/losses/classification.py"
_FUSED = "fnet/losses/linear_cross_entropy.py"
_TESTS = "tests/test_linear_cross_entropy.py"

SMOOTHED = changes(
    _LOGITS,
    "tests/test_cross_entropy.py",
    "cross_entropy or smoothing",
    [
        ("labels are smoothed too much", "+ smoothing * evenly", "+ 2 * smoothing * evenly"),
        ("smoothing is left out", "if not smoothing:", "if True:"),
        ("logits stay narrow", "logits = widened(logits)", "pass"),
    ],
)  # fmt: skip

FUSED = [
    *changes(
        _FUSED,
        _TESTS,
        "option_is_its_formula",
        [
            ("the label keeps its whole mass", "logsumexp - (1 - smoothing) * picked", "logsumexp - picked"),
            ("the mean is added", "losses -= smoothing * mean", "losses += smoothing * mean"),
            ("the mean is a sum", "summed / vocabulary", "summed"),
            ("the mean's gradient is a sum's", "cotangents.mean[..., None] / vocabulary", "cotangents.mean[..., None]"),
            ("the z-loss is not squared", "z_loss * jnp.square(logsumexp)", "z_loss * logsumexp"),
            ("the soft cap has no derivative", "            dz *= slope\n", "            pass\n"),
            ("the soft cap's derivative is not squared", "1 - jnp.square(capped)", "1 - capped"),
            ("the soft cap is 1", "self.soft_cap * capped)", "capped)"),
            ("logits are not divided by the cap", "jnp.tanh(z / self.soft_cap)", "jnp.tanh(z)"),
        ],
    ),
    *changes(
        _FUSED,
        _TESTS,
        "those_of_optax",
        [
            ("earlier chunks are not brought to the new top", "total * jnp.exp(top - higher)", "total"),
            ("the bias is taken off", "z += jnp.expand_dims(part", "z -= jnp.expand_dims(part"),
            ("the label is that of the first chunk", "found, picked)", "found, found)"),
            ("the label's gradient is left out", "cotangents.picked[..., None], 0)", "0, 0)"),
            ("probabilities are not normalised", "jnp.exp(z - logsumexp[..., None])", "jnp.exp(z)"),
            ("the last chunk alone gives dx", "dx += _sums(dz", "dx = _sums(dz"),
        ],
    ),
    *changes(
        _FUSED,
        _TESTS,
        "masked_tokens or minus_infinity or far_below or no_word",
        [
            ("masked tokens have a loss", "jnp.where(mask, losses, 0)).reshape", "losses).reshape"),
            ("masked tokens are read", "jnp.where(mask[..., None], x, 0), jnp", "x, jnp"),
            ("the first top is infinite", "jnp.full_like(zero, jnp.finfo(zero.dtype).min)", "jnp.full_like(zero, -jnp.inf)"),
            ("the first top is 0", "jnp.full_like(zero, jnp.finfo(zero.dtype).min)", "zero"),
            ("labels below 0 are words", "(labels >= 0) & (labels < vocabulary)", "labels < vocabulary"),
            ("labels behind the last are words", "(labels >= 0) & (labels < vocabulary)", "labels >= 0"),
        ],
    ),
]  # fmt: skip

MUTATIONS = [*SMOOTHED, *FUSED]
