"""Frequencies of rotary embeddings by their formulas, as in transformers' modeling_rope_utils."""

import numpy as np
import pytest

from fnet.interop.huggingface.rotary import rotary_embedding

D, BASE, MOST = 64, 500.0, 256
PLAIN = BASE ** (-np.arange(0, D, 2) / D)
TURNS = 32 * PLAIN / (2 * np.pi)  # within an original context of 32
SHORT, LONG = np.linspace(1, 2, D // 2), np.linspace(3, 9, D // 2)


def llama3(factor, low, high):
    smooth = ((TURNS - low) / (high - low)).clip(0, 1)
    return (1 - smooth) * PLAIN / factor + smooth * PLAIN


def yarn(factor, fast=32, slow=1, truncate=True, original=32):
    def feature(turns):
        return D * np.log(original / (turns * 2 * np.pi)) / (2 * np.log(BASE))

    first, last = feature(fast), feature(slow)
    if truncate:
        first, last = np.floor(first), np.ceil(last)
    first, last = max(first, 0), min(last, D - 1)
    ramp = ((np.arange(D // 2) - first) / (last - first)).clip(0, 1)
    return ramp * PLAIN / factor + (1 - ramp) * PLAIN


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}


def test_frequencies_and_their_scale():
    for parameters, frequencies, scale in (
        ({}, PLAIN, 1),
        ({"rope_type": None, "type": "default"}, PLAIN, 1),
        ({"partial_rotary_factor": 0.25}, BASE ** (-np.arange(0, 16, 2) / 16), 1),
        ({"rope_type": "linear", "factor": 8.0}, PLAIN / 8, 1),
        ({"rope_type": "proportional"}, PLAIN, 1),
        (
            {"rope_type": "proportional", "partial_rotary_factor": 0.25, "factor": 2.0},
            np.where(np.arange(32) < 8, PLAIN / 2, 0),
            1,
        ),
        (
            {"rope_type": "dynamic", "alpha": 1000.0, "mscale": 1.0, "beta_fast": 32},
            (BASE * 1000 ** (D / (D - 2))) ** (-np.arange(0, D, 2) / D),
            1,
        ),
        (
            {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 0.5, "high_freq_factor": 3.0}
            | {"original_max_position_embeddings": 32},
            llama3(8, 0.5, 3),
            1,
        ),
        (YARN, yarn(4), 0.1 * np.log(4) + 1),
        (YARN | {"beta_fast": 3.0, "beta_slow": 0.1}, yarn(4, 3, 0.1), 0.1 * np.log(4) + 1),
        (YARN | {"beta_fast": 3.0, "truncate": False}, yarn(4, 3, truncate=False), 0.1 * np.log(4) + 1),
        (YARN | {"attention_factor": 1.25}, yarn(4), 1.25),
        (YARN | {"factor": None}, yarn(8), 0.1 * np.log(8) + 1),  # 256 / 32
        (
            YARN | {"mscale": 2.0, "mscale_all_dim": 0.5},
            yarn(4),
            (0.2 * np.log(4) + 1) / (0.05 * np.log(4) + 1),
        ),
        (YARN | {"factor": 0.5}, yarn(0.5), 1),
    ):  # fmt: skip
        rotary = rotary_embedding("m", D, {"rope_theta": BASE} | parameters, MOST)
        np.testing.assert_allclose(rotary.base, frequencies, rtol=1e-9)
        assert rotary.scale == pytest.approx(scale)
        assert rotary_embedding("m", 4, {}, 0).base == (1.0, 0.01)  # the default base is 10,000


@pytest.mark.parametrize(
    ("options", "scale"),
    [
        ({"original_max_position_embeddings": 32}, np.sqrt(1 + np.log(8) / np.log(32))),
        ({"original_max_position_embeddings": 32, "factor": 2.0}, np.sqrt(1 + np.log(2) / np.log(32))),
        ({"original_max_position_embeddings": 32, "attention_factor": 1.5}, 1.5),
        ({"original_max_position_embeddings": 256}, 1),
    ],
)  # fmt: skip
def test_factors_of_longrope_depend_on_the_length(options, scale):
    given = {"rope_type": "su", "short_factor": SHORT, "long_factor": LONG, "rope_theta": BASE}
    rotary = rotary_embedding("m", D, given | options, MOST)
    original = options["original_max_position_embeddings"]
    np.testing.assert_allclose(rotary.base(original), PLAIN / SHORT)
    np.testing.assert_allclose(rotary.base(original + 1), PLAIN / LONG)
    assert rotary.scale == pytest.approx(scale)
    assert rotary.restart_lengths == (original,)
