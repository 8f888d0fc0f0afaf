"""Text in rows: what is read, what is told, and what no row crosses."""

import dataclasses

import numpy as np
import pytest

from train.config import (
    Clipped,
    Config,
    LanguageModel,
    TextFile,
)
from train.data import text_file
from train.data.buckets import batches_per_epoch, bucket_lengths, bucketed_batches
from train.data.tokenizer import load_tokenizer
from train.errors import UserError
from train.tasks import build

TEXT = "".join(f"{i:04}" for i in range(250))  # no piece of 17 symbols stands in it twice


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return str(path)


def written(tokens):
    return bytes(tokens.astype(np.uint8)).decode()


def test_rows_are_pieces_of_the_training_part(text):
    data = text_file.load(TextFile(path=text, context=16))
    batch = data.augment(data.train, np.random.default_rng(0))
    assert batch["tokens"].shape == (len(data.train["start"]), 17)
    assert all(written(row) in TEXT[:900] for row in batch["tokens"])
    again = data.augment(data.train, np.random.default_rng(1))
    assert not np.array_equal(again["tokens"], batch["tokens"])


def test_rows_of_private_training_tell_no_token_of_each_other(text):
    model, data = LanguageModel(blocks=1, width=16, heads=2), TextFile(path=text, context=16)
    private = Clipped(noise_multiplier=1.0, delta=1e-5)
    data = build(Config(data=data, model=model, grad=private)).dataset
    tokens = data.augment(data.train, np.random.default_rng(0))["tokens"]
    told = "".join(written(row[1:]) for row in tokens)
    assert told == TEXT[1 : 1 + 16 * len(tokens)]


def test_test_rows_tell_every_held_out_token_but_the_first_exactly_once(text):
    test = text_file.load(TextFile(path=text, context=16)).test
    told = "".join(
        written(t[1 : n + 1]) for t, n in zip(test["tokens"], test["length"], strict=True)
    )
    assert told == TEXT[901:]
    np.testing.assert_allclose(test["weight"], test["length"] / 16)


def test_a_seed_draws_which_part_is_held_out(text):
    parts = [
        text_file.load(TextFile(path=text, context=16, split_seed=s)).test["tokens"][0]
        for s in (0, 0, 1, 2)
    ]
    assert np.array_equal(parts[0], parts[1])
    assert len({p.tobytes() for p in parts}) > 1
    data = text_file.load(TextFile(path=text, context=16, split_seed=1))
    held_out = written(data.test["tokens"][0])
    rows = data.augment(data.train, np.random.default_rng(0))["tokens"]
    start = TEXT.index(held_out)
    pieces = {TEXT[i : i + 17] for i in range(start, start + 84)}
    assert not pieces & {written(r) for r in rows}


def documents(tmp_path, lengths):
    path = tmp_path / "documents.txt"
    path.write_text("|".join(chr(97 + i % 26) * n for i, n in enumerate(lengths)))
    return TextFile(path=str(path), context=64, separator="|", test_fraction=0.25, batch_size=4)


LENGTHS = [3, 10, 17, 30, 40, 64, 65, 70, 130, 200, 5, 9, 33, 90, 12, 60]


def test_no_row_crosses_from_one_document_to_the_next(tmp_path):
    config = documents(tmp_path, LENGTHS)
    data = text_file.load(config)
    batches = bucketed_batches(data, 4, 0, 64)
    for batch, _ in zip(batches, range(30), strict=False):
        for row, n in zip(batch["tokens"], batch["length"], strict=True):
            assert len(set(row[: n + 1].tolist())) <= 1
            assert not row[n + 1 :].any()


def test_batches_have_the_lengths_of_powers_of_two_and_tell_each_token_once_an_epoch(tmp_path):
    data = text_file.load(documents(tmp_path, LENGTHS))
    source = bucketed_batches(data, 4, 0, 64)
    seen, told = set(), 0
    while told < data.train["length"].sum():
        batch = next(source)
        seen.add(batch["tokens"].shape)
        bucket = batch["tokens"].shape[1] - 1
        np.testing.assert_allclose(batch["weight"], batch["length"] / bucket)
        told += batch["length"].sum()
    assert told == data.train["length"].sum()
    assert seen <= {(4, b + 1) for b in (16, 32, 64)}


def test_bucketed_batches_go_on_where_they_stopped(tmp_path):
    data = text_file.load(documents(tmp_path, LENGTHS))
    first = bucketed_batches(data, 4, 0, 64)
    for _ in range(7):
        next(first)
    position = first.get_state()
    second = bucketed_batches(data, 4, 0, 64)
    second.set_state(position)
    for _ in range(9):
        a, b = next(first), next(second)
        assert all(np.array_equal(a[k], b[k]) for k in a)


def test_buckets_are_powers_of_two_within_bounds():
    lengths = np.array([1, 16, 17, 32, 33, 100, 500])
    np.testing.assert_array_equal(bucket_lengths(lengths, 100), [16, 16, 32, 32, 64, 100, 100])


def test_bytes_that_are_no_text_are_read(tmp_path):
    path = tmp_path / "binary"
    path.write_bytes(bytes(range(256)) * 4)
    data = text_file.load(TextFile(path=str(path), context=8))
    assert {*data.test["tokens"].ravel().tolist()} > {200, 255}


def test_without_a_path_there_is_the_standard_library():
    data = text_file.load(TextFile(context=64))
    rows = data.augment({k: v[:2000] for k, v in data.train.items()}, np.random.default_rng(0))
    assert "def " in written(rows["tokens"].ravel()[:20000].clip(0, 127))


@pytest.mark.parametrize("content", ["", "too short"])
def test_a_text_that_is_too_short_is_refused(tmp_path, content):
    path = tmp_path / "short.txt"
    path.write_text(content)
    with pytest.raises(
        UserError, match=rf"short.txt is too short: {len(content)} tokens.*65 tokens"
    ):
        text_file.load(TextFile(path=str(path)))


def test_a_missing_text_is_one_line():
    with pytest.raises(UserError, match=r"cannot read nowhere\.txt: No such file"):
        text_file.load(TextFile(path="nowhere.txt"))


@pytest.fixture
def tokenizers():
    return pytest.importorskip("tokenizers")


@pytest.fixture
def vocabulary_of(tmp_path):
    """``vocabulary_of(tokenizer)``: that of its file."""

    def read(tokenizer):
        tokenizer.save(str(tmp_path / "tokens.json"))
        return load_tokenizer(TextFile(tokenizer=str(tmp_path / "tokens.json")))

    return read


def test_what_a_vocabulary_without_a_word_for_the_unknown_would_drop_is_refused(
    tokenizers, vocabulary_of
):
    pairs = tokenizers.models.BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")])
    tokenizer = vocabulary_of(tokenizers.Tokenizer(pairs))
    assert tokenizer.encode("abba").tolist() == [2, 1, 0]
    with pytest.raises(UserError, match=r"tokens\.json has no token for some of 'abxbay'"):
        tokenizer.encode("abxbay")


@pytest.mark.parametrize(
    ("unknown", "reason"),
    [(2, "has no token for some of 'axb'"), (None, "cannot read 'axb': .*`unk_id` is missing")],
)
def test_what_a_unigram_does_not_know_is_refused(unknown, reason, tokenizers, vocabulary_of):
    scores = [("a", -1.0), ("b", -1.0), ("<unk>", -2.0)]
    made = tokenizers.Tokenizer(tokenizers.models.Unigram(scores, unknown, False))
    tokenizer = vocabulary_of(made)
    assert tokenizer.encode("abba").tolist() == [0, 1, 1, 0]
    with pytest.raises(UserError, match=rf"tokens\.json {reason}"):
        tokenizer.encode("axb")


def test_a_vocabulary_that_leaves_numbers_out_is_as_large_as_its_largest(tokenizers, vocabulary_of):
    words = tokenizers.models.WordLevel({"a": 0, "b": 300}, unk_token="a")
    tokenizer = vocabulary_of(tokenizers.Tokenizer(words))
    assert tokenizer.vocab_size == 301
    assert tokenizer.encode("b").tolist() == [300]


def test_a_text_is_neither_cut_nor_padded_as_its_tokenizer_says(tokenizers, vocabulary_of):
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1, "[PAD]": 2}))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.enable_truncation(3)
    made.enable_padding(length=6, pad_id=2)
    encode = vocabulary_of(made).encode
    assert encode("a b a b a").tolist() == [0, 1, 0, 1, 0]
    assert encode("b").tolist() == [1]


def test_a_prompt_begins_as_a_text_does_and_does_not_end(tokenizers, vocabulary_of):
    parts = tokenizers.processors
    numbers = {"<s>": 0, "</s>": 1, "a": 2, "\u0120": 3}  # the last one is a space
    made = tokenizers.Tokenizer(tokenizers.models.BPE(numbers, []))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    ends = parts.TemplateProcessing("<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)])
    # Trimmed, a space covers as little of the text as what the template adds.
    made.post_processor = parts.Sequence([parts.ByteLevel(trim_offsets=True), ends])
    tokenizer = vocabulary_of(made)
    assert tokenizer.encode("a ").tolist() == [0, 2, 3, 1]
    assert tokenizer.encode_prompt("a ").tolist() == [0, 2, 3]
    assert tokenizer.encode_prompt(" ").tolist() == [0, 3]
    assert tokenizer.encode_prompt("").tolist() == []


def test_batches_of_documents_come_in_another_order_each_epoch_and_for_each_seed(tmp_path):
    data = text_file.load(documents(tmp_path, LENGTHS))
    n = batches_per_epoch(data, 1, 64)

    def rows(seed):
        batches = bucketed_batches(data, 1, seed, 64)
        return [int(next(batches)["row"][0]) for _ in range(2 * n)]

    first, second, other = rows(0)[:n], rows(0)[n:], rows(1)[:n]
    assert sorted(first) == sorted(second) == sorted(other) == list(range(n))
    assert first != second
    assert first != other


def test_a_seed_draws_which_documents_are_held_out(tmp_path):
    config = documents(tmp_path, LENGTHS)
    held_out = [
        {*text_file.load(dataclasses.replace(config, split_seed=s)).test["tokens"].ravel().tolist()}
        for s in (None, 0, 0, 1)
    ]
    assert held_out[1] == held_out[2] != held_out[3]
    assert held_out[0] - {0} == {ord("m"), ord("n"), ord("o"), ord("p")}  # the last four of sixteen


def test_an_epoch_is_as_many_batches_as_tell_each_row_once(tmp_path):
    data = text_file.load(documents(tmp_path, LENGTHS))
    batches, rows = bucketed_batches(data, 4, 0, 64), []
    for _ in range(batches_per_epoch(data, 4, 64)):
        batch = next(batches)
        rows += batch["row"][batch["weight"] > 0].tolist()
    assert sorted(rows) == list(range(len(data.train["length"])))
