"""Handling of SIGINT, SIGTERM and SIGHUP."""

import signal

import pytest
from program_cases import fnet_command

from train.run import loop
from train.run.checkpoints import Checkpoints
from train.run.interruption import Interrupted, Interruption


def test_restores_signal_handlers():
    numbers = signal.SIGINT, signal.SIGTERM, signal.SIGHUP
    before = [signal.getsignal(n) for n in numbers]
    with Interruption() as interruption:
        signal.raise_signal(signal.SIGTERM)
        assert interruption.signal == "SIGTERM"
    assert [signal.getsignal(n) for n in numbers] == before
    with pytest.raises(KeyError), Interruption():
        raise KeyError
    assert [signal.getsignal(n) for n in numbers] == before


@pytest.mark.parametrize("is_ignored", [False, True])
def test_a_terminal_that_closes_stops_a_run_unless_nohup_ignores_it(is_ignored):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN if is_ignored else signal.SIG_DFL)
    try:
        with Interruption() as interruption:
            signal.raise_signal(signal.SIGHUP)
            assert interruption.signal == (None if is_ignored else "SIGHUP")
    finally:
        signal.signal(signal.SIGHUP, before)


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


def test_a_signal_while_the_last_checkpoint_is_written_loses_nothing(workplace, monkeypatch):
    class Signalling(Checkpoints):
        def wait(self):
            signal.raise_signal(signal.SIGINT)
            super().wait()

    monkeypatch.setattr(loop, "Checkpoints", Signalling)
    fnet_command("train", "tiny.py", "--out", "run")
    assert (workplace / "run" / "summary.json").exists()
