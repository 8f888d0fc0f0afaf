"""Handling of SIGINT and SIGTERM."""

import signal

import pytest

from train.run.interruption import Interrupted, Interruption


def test_restores_signal_handlers():
    numbers = signal.SIGINT, signal.SIGTERM
    before = [signal.getsignal(n) for n in numbers]
    with Interruption() as interruption:
        signal.raise_signal(signal.SIGTERM)
        assert interruption.signal == "SIGTERM"
    assert [signal.getsignal(n) for n in numbers] == before
    with pytest.raises(KeyError), Interruption():
        raise KeyError
    assert [signal.getsignal(n) for n in numbers] == before


def test_leaves_the_second_signal_to_the_previous_handler():
    seen = []
    before = signal.signal(signal.SIGINT, lambda *_: seen.append("before"))
    try:
        with Interruption() as interruption:
            signal.raise_signal(signal.SIGINT)
            assert (interruption.signal, seen) == ("SIGINT", [])
            signal.raise_signal(signal.SIGINT)
            assert seen == ["before"]
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_signal_ends_a_wait_but_nothing_else():
    with Interruption() as interruption:
        with interruption.ends_wait():
            pass
        with pytest.raises(Interrupted), interruption.ends_wait():
            signal.raise_signal(signal.SIGTERM)
        with pytest.raises(Interrupted), interruption.ends_wait():  # also after the signal
            pass

    with Interruption() as interruption:
        signal.raise_signal(signal.SIGTERM)
        assert interruption.signal == "SIGTERM"
