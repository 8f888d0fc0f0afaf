"""Waiting for input: reported with its reason, and never without end."""

import threading

import pytest

from train.data.work import Record, Totals, Work, now
from train.run.input_wait import InputWait, explain

DECODING = Work(seconds=10.0, computing=9.0)
READING = Work(seconds=10.0, computing=1.0)
CROWDED = Work(seconds=10.0, computing=3.0, queued=6.0)


def watch(lines, workers=2, totals=Totals, clock=lambda: 0.0):
    return InputWait(lines.append, workers, 8, clock, totals)


def test_reports_a_long_wait_once_with_its_reason():
    lines, totals = [], [Totals(workers=READING)]
    wait = watch(lines, totals=lambda: totals[-1])
    wait.add(60.0, 0.9)  # the first steps include the start of the workers
    totals.append(Totals(waiting=Work(9.0), workers=READING.plus(DECODING)))
    wait.add(5.0, 0.1)
    assert not lines  # too short an interval
    wait.add(5.0, 0.5)
    wait.add(20.0, 0.9)
    assert lines == [f"input wait: the device waits 30% of the time: {wait.reason}"]
    assert wait.reason == (  # of the interval, not of the time before
        "2 workers decode and augment 90% of their time; give --data.workers 8, one per core"
    )


@pytest.mark.parametrize(
    ("totals", "by"),
    [
        (Totals(READING, Work(8.0), DECODING), "one thread waits for files 90%"),
        (Totals(READING, Work(12.0), DECODING), "2 workers decode and augment 90%"),
    ],
)
def test_the_slower_of_thread_and_workers_is_the_reason(totals, by):
    """A thread that reads shards waits less for its workers than for files, or more."""
    lines, both = [], [Totals()]
    wait = watch(lines, totals=lambda: both[-1])
    wait.add(1.0, 0.0)
    both.append(totals)
    wait.add(10.0, 0.5)
    assert wait.reason.startswith(by)


def test_a_short_wait_is_not_reported():
    lines = []
    wait = watch(lines)
    for _ in range(9):
        wait.add(20.0, 0.2)
    assert (lines, wait.reason) == ([], None)


@pytest.mark.parametrize(
    ("work", "workers", "reason"),
    [
        (DECODING, 0, "one thread decodes and augments 90% of its time; give --data.workers 8, one per core"),
        (DECODING, 8, "8 workers compute 90% of their time, on 8 cores; prepare smaller files"),
        (DECODING, None, "one thread computes 90% of its time, on 8 cores; prepare smaller files"),
        (READING, 2, "2 workers wait for files 90% of their time; copy the data to a faster disk, or give --data.workers 4"),
        (READING, None, "one thread waits for files 90% of its time; copy the data to a faster disk"),
        (CROWDED, 2, "2 workers wait for a free core 60% of their time, on 8 cores; stop other programs"),
    ],
)  # fmt: skip
def test_the_reason_is_what_takes_most_of_the_time(work, workers, reason):
    assert explain(work, workers, 8) == reason


def test_a_batch_that_does_not_come_is_reported_after_each_half_minute():
    lines, clock = [], iter((0.0, 29.0, 30.0, 59.0, 61.0, 62.0))
    wait = watch(lines, clock=lambda: next(clock))
    wait.check()  # nobody waits
    with wait.waiting():
        for _ in range(5):
            wait.check()
    wait.check()
    assert [line.split(":")[0] for line in lines] == ["no batch for 30 s", "no batch for 61 s"]


def test_waiting_for_a_slow_disk_is_not_computing():
    record = Record()
    with record.measured():
        threading.Event().wait(0.05)  # as a read that takes so long
    work = record.totals.thread
    assert work.seconds >= 0.05
    assert work.computing < 0.02 < work.blocked + work.queued


def test_work_is_divided_into_computing_and_waiting():
    record = Record()
    with record.measured():
        sum(range(200_000))
    work = record.totals.thread
    assert 0 < work.computing < work.seconds + 0.01  # the clocks are read one after the other
    assert work.computing + work.queued + work.blocked >= work.seconds - 0.01
    assert work == record.totals.thread.plus(Work())
    assert now().plus(now(), -1).seconds <= 0
    record.add(workers=DECODING)  # of an evaluation, which is not measured
    with record.measured(), record.waiting():
        record.add(workers=DECODING)
        record.add(workers=READING)
        sum(range(200_000))
    own, waited = record.totals.thread.plus(work, -1), record.totals.waiting
    assert own.computing < waited.computing
    assert record.totals.workers == Work(20.0, 10.0, 0.0)
