"""Words of messages, and errors of the machine."""

import errno

import pytest

from train import errors


def test_an_epsilon_is_rounded_up_to_four_digits():
    for epsilon, text in (
        (7.99832, "7.999"),
        (8.0, "8"),
        (0.12345, "0.1235"),
        (12340.1, "1.235e+04"),
        (1.0001, "1.001"),
    ):
        assert errors.at_most(epsilon) == text
        assert float(errors.at_most(epsilon)) >= epsilon
        assert (errors.at_most(float("inf")), errors.at_most(float("nan"))) == ("inf", "nan")


def test_the_closest_name():
    for name, closest in (
        ("--optim.lr", "--optim.learning-rate"),  # its initials
        ("--optim.leaning-rate", "--optim.learning-rate"),
        ("--optim.name", "--optim.name"),
        ("--zzz", None),
    ):
        known = ["--optim.learning-rate", "--optim.name", "--out"]
        assert errors.closest_name(name, known) == closest
        assert errors.did_you_mean(name, known) == (
            f" (did you mean {closest}?)" if closest else ""
        )


def test_lists_of_names_end_after_a_few():
    assert errors.shorten("abcde") == "a, b, c, d, e"
    assert errors.shorten("abcdefg") == "a, b, c, d, e and 2 more"
    assert (
        errors.list_available("abcdefghijkl", "x")
        == "; there are a, b, c, d, e, f, g, h, i, j, k, l"
    )
    assert errors.list_available("abcdefghijklm", "x").endswith("k, l and 1 more")
    assert errors.list_available("", "names") == "; there are no names"


def caused(error, cause=None, context=None):
    error.__cause__, error.__context__ = cause, context
    return error


def test_errors_of_the_machine_are_no_damage():
    for error, expected in (
        (OSError(errno.EMFILE, "x"), True),
        (OSError(errno.EACCES, "x"), True),
        (OSError(errno.ENOENT, "x"), False),
        (MemoryError(), True),
        (ValueError("PERMISSION_DENIED: x"), True),
        (ValueError("RESOURCE_EXHAUSTED"), False),  # words of a file, not of XLA
        (caused(ValueError("x"), cause=MemoryError()), True),
        (caused(ValueError("x"), context=OSError(errno.ESTALE, "x")), True),
        (caused(ValueError("x"), cause=ValueError("y")), False),
    ):
        assert errors.is_machine_error(error) == expected


def test_an_output_file_is_not_overwritten(tmp_path):
    assert errors.output_file(None, tmp_path / "a") == tmp_path / "a"
    assert errors.output_file(str(tmp_path / "b"), tmp_path / "a") == tmp_path / "b"
    (tmp_path / "b").touch()
    with pytest.raises(
        errors.UserError, match="b exists and is not overwritten; give another name"
    ):
        errors.output_file(str(tmp_path / "b"), tmp_path / "a")
    message = rf"cannot write {tmp_path}: Is a directory; choose another --out"
    with pytest.raises(errors.UserError, match=message), errors.writing(tmp_path):
        tmp_path.write_text("")
