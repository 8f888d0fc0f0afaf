"""Limits: their flag, and what is exactly at one."""

import os

import pytest

from train import limits
from train.errors import UserError
from train.limits import Limit, take_flag


@pytest.fixture(autouse=True)
def variable(monkeypatch):
    monkeypatch.setenv("FNET_LIMITS", "")


@pytest.mark.parametrize(
    ("words", "rest", "factor"),
    [
        (["train", "a"], ["train", "a"], 1),
        (["--limits", "2.5", "train"], ["train"], 2.5),
        (["train", "--limits=0.5", "a"], ["train", "a"], 0.5),
        (["train", "a", "--limits", "3"], ["train", "a"], 3),
        (["--limit", "3"], ["--limit", "3"], 1),
    ],
)
def test_the_flag_may_be_anywhere(words, rest, factor):
    assert take_flag(words) == rest
    assert limits.factor() == factor


def test_a_factor_that_is_no_positive_number_is_refused():
    for words, given in (
        (["--limits"], "nothing"), (["--limits", "0"], "0"), (["--limits=-1"], "-1"),
        (["--limits", "inf"], "inf"), (["--limits", "nan"], "nan"), (["--limits=x"], "x"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=f"--limits: expected a number above 0, got {given}$"):
            take_flag(words)


def test_a_value_at_the_limit_is_read_and_the_next_is_not():
    limit = Limit("the file", 1000, "rows")
    for factor, most in (("", 1000), ("2.5", 2500)):
        os.environ["FNET_LIMITS"] = factor
        limit.check(most, "f")
        twice = f"{2 * float(factor or 1):g}"
        message = f"f: the file has {most + 1:,} rows; at most {most:,} are read .*--limits {twice} allows"
        with pytest.raises(UserError, match=message):
            limit.check(most + 1, "f")


def test_a_file_may_unpack_to_eight_times_its_size(monkeypatch):
    monkeypatch.setattr(limits, "UNPACKED", Limit("the file", 100, "bytes"))
    limits.check_unpacked(800, 100, "f")
    limits.check_unpacked(100, 1, "f")
    with pytest.raises(UserError, match="801 bytes; at most 100"):
        limits.check_unpacked(801, 100, "f")
