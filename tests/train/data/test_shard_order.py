"""Order of rows from shards."""

import numpy as np
import pytest

from train.data.order import MAX_LANES, Rows, ShuffledBatches


def order(*blocks, weights=None, batch_size=16, seed=0, block_bytes=0, budget=2**30):
    sources = [Rows(np.array(sizes), block_bytes) for sizes in blocks]
    return ShuffledBatches(sources, weights or [1] * len(blocks), batch_size, seed, budget)


@pytest.mark.parametrize("blocks", [[1] * 160, [10] * 16, [37, 5, 60, 58]])
def test_each_row_occurs_once_per_epoch(blocks):
    batches = order(blocks)
    for epoch in range(3):
        rows = np.concatenate([batches(10 * epoch + i) for i in range(10)])
        np.testing.assert_array_equal(np.sort(rows), np.arange(160))
        assert (np.diff(rows) != 1).mean() > 0.5


def test_each_row_occurs_equally_often_if_batches_cross_epochs():
    batches = order([1] * 11 + [2] * 13, batch_size=8)
    counts = np.bincount(np.concatenate([batches(i) for i in range(37 * 3)]))
    np.testing.assert_array_equal(counts, [24] * 37)


def test_batches_depend_on_seed_and_number_alone():
    first, second = order([4] * 40), order([4] * 40)
    backwards = [second(i) for i in reversed(range(25))][::-1]
    np.testing.assert_array_equal([first(i) for i in range(25)], backwards)
    assert (order([4] * 40, seed=1)(0) != first(0)).any()


def test_a_lane_reads_few_blocks_at_a_time():
    batches = order([100] * 64, batch_size=32, block_bytes=2**20, budget=2**25)
    assert batches.lanes == MAX_LANES
    counts = []
    for lane in range(8):
        part = slice(4 * lane, 4 * lane + 4)
        rows = np.concatenate([batches(i)[part] for i in range(25)])  # 100 rows
        counts.append(len(np.unique(rows // 100)))
    assert max(counts) == 3  # and one more beyond the end of the window
    tight = order([100] * 64, batch_size=1, block_bytes=2**25, budget=2**20)
    assert len(np.unique([tight(i) // 100 for i in range(100)])) <= 2
    # Blocks that do not fit into memory together get fewer lanes.
    assert order([100] * 64, block_bytes=2**22, budget=2**25).lanes == 4
    assert order([100] * 64, block_bytes=2**30, budget=2**25).lanes == 1


def test_lanes_share_the_rows_of_an_epoch():
    batches = order([37, 5, 98] * 40, batch_size=20)
    assert batches.lanes == 4
    rows = np.array([batches(i) for i in range(280)]).reshape(280, 4, 5)
    lanes = [set(rows[:, lane].ravel().tolist()) for lane in range(4)]
    assert sum(map(len, lanes)) == len(set.union(*lanes)) == 5600


@pytest.mark.parametrize("batch_size", [7, 8, 64])
def test_mixes_sources_by_weight_in_every_stretch_of_batches(batch_size):
    batches = order([1] * 50, [3] * 10, [1] * 9, weights=[0.5, 0.3, 0.2], batch_size=batch_size)
    rows = np.array([batches(i) for i in range(100)])
    source = np.digitize(rows, [50, 80])
    share = [(source == s).mean() for s in range(3)]
    np.testing.assert_allclose(share, [0.5, 0.3, 0.2], atol=0.003)
    for start in range(0, 100, 20):
        part = source[start : start + 20]
        np.testing.assert_allclose([(part == s).mean() for s in range(3)], share, atol=0.03)
    # Each source passes through all its rows before it repeats one.
    for s, count in enumerate((50, 30, 9)):
        seen = np.bincount(rows[source == s] - (0, 50, 80)[s], minlength=count)
        assert seen.max() - seen.min() <= 1


def test_a_batch_may_be_longer_than_the_period_of_a_mixture(monkeypatch):
    monkeypatch.setattr("train.data.order._MIX_PERIOD", 16)
    rows = order([1] * 50, [1] * 90, weights=[1, 3], batch_size=40)(0)
    assert [(rows < 50).sum(), (rows >= 50).sum()] == [10, 30]


def test_mixes_sources_in_every_lane():
    batches = order([1] * 5000, [100] * 45, weights=[1, 3], batch_size=8)
    assert batches.lanes == 8
    source = np.array([batches(i) for i in range(1000)]) >= 5000
    np.testing.assert_allclose(source.mean(1), 0.75)  # of each batch
    np.testing.assert_allclose(source.mean(0), 0.75, atol=0.01)  # of each lane


def test_a_source_of_few_rows_has_few_lanes():
    assert order([1] * 1100, [1] * 10_000, batch_size=8).lanes == 2


@pytest.mark.parametrize("blocks", [[1] * 160, [40] * 4], ids=["rows", "blocks"])
def test_each_epoch_has_an_order_of_its_own(blocks):
    batches = order(blocks)
    epochs = np.array([[batches(10 * epoch + i) for i in range(10)] for epoch in range(3)])
    for other in epochs[1:]:
        assert (epochs[0] != other).mean() > 0.9
    shuffled = order([40], batch_size=40)
    assert (shuffled(0) != shuffled(1)).mean() > 0.9  # the order within blocks, too
    rows = order(blocks, blocks, batch_size=320)(0)  # sources have orders of their own
    assert (rows[rows < 160] != rows[rows >= 160] - 160).mean() > 0.5


def test_lanes_shuffle_their_windows_differently():
    batches = order([640] * 16, batch_size=16)
    rows = np.array([batches(i) for i in range(640)]).reshape(640, batches.lanes, -1)
    places = [rows[:, lane].ravel() % 640 for lane in range(2)]
    assert (places[0] != places[1]).mean() > 0.9


def test_windows_of_at_most_eight_blocks_are_shuffled_differently():
    batches = order([100] * 64, batch_size=1, block_bytes=1)
    rows = np.concatenate([batches(i) for i in range(1600)])
    assert len(np.unique(rows[:800] // 100)) == 8
    assert (rows[:800] % 100 != rows[800:] % 100).mean() > 0.9


def test_a_window_leaves_room_for_one_more_block():
    batches = order([100] * 64, batch_size=1, block_bytes=2**20, budget=2**22)
    rows = np.concatenate([batches(i) for i in range(300)])
    assert len(np.unique(rows // 100)) == 3
