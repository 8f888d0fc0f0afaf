"""Runs on shards with two processes."""

import re

import pytest
from shard_cases import png, write_tar

from tests.train.run.test_distributed import together

pytestmark = pytest.mark.slow

RECIPE = """
from train.config import Checkpoint, Config, ImageShards, Optim, PreactResNet, Train

def config():
    return Config(
        name="shards",
        data=ImageShards(path=("data",), batch_size=8, image_size=8, crop="padded", padding=1),
        model=PreactResNet(widths=(4,), blocks_per_stage=1),
        optim=Optim(learning_rate=0.05, schedule="constant"),
        train=Train(steps=12, log_every=1, eval_every=6),
        checkpoint=Checkpoint(every=5, best=False),
    )
"""


@pytest.fixture
def shards(workplace, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(workplace / "cache"))
    (workplace / "recipe.py").write_text(RECIPE)
    for k in range(2):
        write_tar(workplace / "data" / f"train-{k}.tar", range(24 * k, 24 * k + 24))
    write_tar(workplace / "data" / "val-0.tar", range(48, 64))
    return workplace / "data"


def test_processes_report_a_damaged_image_together(shards, workplace):
    def write(damaged):
        def files(i):
            return {"png": b"no image" if i in damaged else png(i), "cls": str(i % 3).encode()}

        for k in range(2):
            write_tar(shards / f"train-{k}.tar", range(24 * k, 24 * k + 24), files=files)

    words = "recipe.py", "--mesh.data", 2, "--train.steps", 6, "--data.max-bad-fraction", 0.03
    write((5, 30))  # a tenth of few files is tolerated
    output, codes = together(2, *words, "--out", "few")
    assert codes == [0, 0], output
    assert sum(line.startswith("cannot read data/train-") for line in output[0].splitlines()) == 2
    write((5, 11, 17, 30, 36, 42))
    output, codes = together(2, *words, "--out", "many")
    assert codes == [2, 2], output
    for text in output:
        assert re.search("so far [56] of the 48 training files are unreadable", text)
