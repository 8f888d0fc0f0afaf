"""Parsing and formatting of amounts of memory."""

import numpy as np
import pytest

from fnet.memory import format_bytes, parse_bytes


def test_parses_binary_and_decimal_units():
    for text, expected in (
        ("4GB", 4_000_000_000), ("4GiB", 4 * 2**30), ("4096MiB", 4 * 2**30), ("1.5 gib", 3 * 2**29),
        ("10kb", 10_000), ("8.2 MB", 8_200_000), ("2TiB", 2**41), ("17B", 17), (17, 17), (17.9, 17),
        (0.5 * 2**40, 2**39), (1e3, 1000), (np.int32(4096), 4096), (np.uint64(2**63), 2**63),
        (np.float32(1.5), 1), (2**53 + 1, 2**53 + 1),
    ):  # fmt: skip
        assert parse_bytes(text) == expected


def test_rejects_other_text_and_shows_the_allowed_forms():
    for text in (
        "4", "4G", "four GiB", "", "-1GB", "0GB", 0, True, "GB", "1e3MB", "abc", "4 giga", None,
        np.True_, [1], {}, b"4GB",
    ):  # fmt: skip
        with pytest.raises(ValueError, match=r"4GiB|at least one byte"):
            parse_bytes(text)


def test_rejects_numbers_that_are_no_amount():
    for size in (
        0.5,
        -1,
        float("nan"),
        float("inf"),
        np.nan,
        np.int64(0),
        "9" * 400 + "GB",
        10**400,
        1e30,
    ):
        with pytest.raises(ValueError, match="at least one byte and at most 16 EiB"):
            parse_bytes(size)


def test_formats_with_a_binary_unit():
    assert format_bytes(1536) == "1.50 KiB"
    assert format_bytes(12) == "12 bytes"
    assert format_bytes(None) == "unknown"
    assert format_bytes(5 * 2**40) == "5.00 TiB"
    assert format_bytes(1023) == "1023 bytes"
    assert format_bytes(2**20 - 1) == "1.00 MiB"
    assert format_bytes(-(2**30) + 1) == "-1.00 GiB"


def test_parses_a_share_of_something():
    assert parse_bytes("12.5 %", of=lambda: 1000) == 125
    for text in ("-5%", "0%", "0.01%"):
        with pytest.raises(ValueError, match=f"at least one byte .*, got '{text}'"):
            parse_bytes(text, of=lambda: 1000)
    with pytest.raises(ValueError, match="a number with a unit"):
        parse_bytes("50%")
