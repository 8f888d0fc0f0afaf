"""Rows of text for language models, length bucketing, and tokenizers."""

import dataclasses
import os

import jax
import numpy as np
import pytest
import tokenizers

from train.config import Clipped, Config, LanguageModel, TextFile
from train.data import num_examples
from train.data.buckets import bucket_lengths, bucketed_batches
from train.data.tokenizer import load_tokenizer
from train.errors import UserError
from train.tasks import build

TEXT = "".join(f"{i:04}" for i in range(250))  # no 17 symbols occur in it twice


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return str(path)


def as_text(tokens):
    return bytes(tokens.astype(np.uint8)).decode()


def test_rows_are_pieces_of_the_training_text(text):
    data = TextFile(path=text, context=16).load()
    batch = data.augment(data.train, np.random.default_rng(0))
    assert batch["tokens"].shape == (len(data.train["start"]), 17)
    assert all(as_text(row) in TEXT[:900] for row in batch["tokens"])
    again = data.augment(data.train, np.random.default_rng(1))
    assert not np.array_equal(again["tokens"], batch["tokens"])
    assert data.notes == ()


def test_private_training_rows_share_no_targets(text):
    model, data = LanguageModel(blocks=1, width=16, heads=2), TextFile(path=text, context=16)
    private = Clipped(noise_multiplier=1.0, delta=1e-5)
    data = build(Config(data=data, model=model, grad=private)).dataset
    tokens = data.augment(data.train, np.random.default_rng(0))["tokens"]
    targets = "".join(as_text(row[1:]) for row in tokens)
    assert targets == TEXT[1 : 1 + 16 * len(tokens)]


def test_test_rows_predict_every_test_token_but_the_first_once(text):
    test = TextFile(path=text, context=16).load().test
    targets = "".join(
        as_text(t[1 : n + 1]) for t, n in zip(test["tokens"], test["length"], strict=True)
    )
    assert targets == TEXT[901:]
    np.testing.assert_allclose(test["weight"], test["length"] / 16)


def test_a_seed_chooses_the_test_part(text):
    parts = [
        TextFile(path=text, context=16, split_seed=s).load().test["tokens"][0] for s in (0, 0, 1, 2)
    ]
    assert np.array_equal(parts[0], parts[1])
    assert len({p.tobytes() for p in parts}) > 1
    data = TextFile(path=text, context=16, split_seed=1).load()
    test = as_text(data.test["tokens"][0])
    rows = data.augment(data.train, np.random.default_rng(0))["tokens"]
    start = TEXT.index(test)
    pieces = {TEXT[i : i + 17] for i in range(start, start + 84)}
    assert not pieces & {as_text(r) for r in rows}


def documents(tmp_path, lengths):
    path = tmp_path / "documents.txt"
    path.write_text("|".join(chr(97 + i % 26) * n for i, n in enumerate(lengths)))
    return TextFile(path=str(path), context=64, separator="|", test_fraction=0.25, batch_size=4)


LENGTHS = [3, 10, 17, 30, 40, 64, 65, 70, 130, 200, 5, 9, 33, 90, 12, 60]


def test_no_row_crosses_a_document_boundary(tmp_path):
    config = documents(tmp_path, LENGTHS)
    data = config.load()
    batches = bucketed_batches(data, 4, 0, 64)
    for batch, _ in zip(batches, range(30), strict=False):
        for row, n in zip(batch["tokens"], batch["length"], strict=True):
            assert len(set(row[: n + 1].tolist())) <= 1
            assert not row[n + 1 :].any()


def test_bucketed_batches_are_full_and_have_power_of_two_lengths_and_every_row_as_often(tmp_path):
    data = documents(tmp_path, LENGTHS).load()
    source = bucketed_batches(data, 4, 0, 64)
    shapes, rows = set(), []
    n = num_examples(data.train)
    for _ in range(n * -(-n // 4)):  # whole windows, and whole epochs
        batch = next(source)
        shapes.add(batch["tokens"].shape)
        bucket = batch["tokens"].shape[1] - 1
        np.testing.assert_allclose(batch["weight"], batch["length"] / bucket)
        assert batch["weight"].all()
        rows += batch["row"].tolist()
    assert shapes <= {(4, b + 1) for b in (16, 32, 64)}
    assert set(np.bincount(rows)) == {4 * -(-n // 4)}


def test_a_batch_is_full_even_if_there_are_fewer_rows(tmp_path):
    data = documents(tmp_path, [3, 10, 17, 30]).load()
    assert (next(bucketed_batches(data, 24, 0, 64))["weight"] > 0).sum() == 24


def test_bucket_lengths_are_powers_of_two_within_bounds():
    lengths = np.array([1, 16, 17, 32, 33, 100, 500])
    np.testing.assert_array_equal(bucket_lengths(lengths, 100), [16, 16, 32, 32, 64, 100, 100])


def test_a_vocabulary_may_be_larger_than_the_tokenizers_but_not_smaller(text):
    data = TextFile(path=text, context=8, vocabulary=300)
    params, _ = build(Config(data=data, model=LanguageModel(blocks=1))).model.init(
        jax.random.key(0)
    )
    assert jax.tree.leaves(params["embedding"])[0].shape[0] == 300
    small = dataclasses.replace(data, vocabulary=100)
    with pytest.raises(UserError, match=r"has 256 tokens of text, but the vocabulary has 100"):
        small.load()


def test_reads_bytes_that_are_not_utf8(tmp_path):
    path = tmp_path / "binary"
    path.write_bytes(bytes(range(256)) * 4)
    data = TextFile(path=str(path), context=8).load()
    assert {*data.test["tokens"].ravel().tolist()} > {200, 255}


def test_reads_the_standard_library_without_a_path():
    data = TextFile(context=64).load()
    rows = data.augment({k: v[:2000] for k, v in data.train.items()}, np.random.default_rng(0))
    assert "def " in as_text(rows["tokens"].ravel()[:20000].clip(0, 127))


@pytest.mark.parametrize("content", ["", "too short"])
def test_refuses_texts_that_are_too_short(tmp_path, content):
    path = tmp_path / "short.txt"
    path.write_text(content)
    with pytest.raises(
        UserError, match=rf"short.txt is too short: {len(content)} tokens.*65 tokens"
    ):
        TextFile(path=str(path)).load()


def test_refuses_missing_texts():
    with pytest.raises(UserError, match=r"nowhere\.txt does not exist"):
        TextFile(path="nowhere.txt").load()


@pytest.fixture
def save_and_load(tmp_path):
    """``save_and_load(tokenizer)`` loads a tokenizer through its file."""

    def read(tokenizer):
        tokenizer.save(str(tmp_path / "tokens.json"))
        return load_tokenizer(TextFile(tokenizer=str(tmp_path / "tokens.json")))

    return read


def test_refuses_symbols_that_a_tokenizer_would_drop(save_and_load):
    pairs = tokenizers.models.BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")])
    tokenizer = save_and_load(tokenizers.Tokenizer(pairs))
    assert tokenizer.encode("abba").tolist() == [2, 1, 0]
    with pytest.raises(UserError, match=r"tokens\.json has no token for some of 'abxbay'"):
        tokenizer.encode("abxbay")


@pytest.mark.parametrize(
    ("unknown", "reason"),
    [(2, "has no token for some of 'axb'"), (None, "cannot encode 'axb': .*`unk_id` is missing")],
)
def test_refuses_symbols_that_a_unigram_model_does_not_know(unknown, reason, save_and_load):
    scores = [("a", -1.0), ("b", -1.0), ("<unk>", -2.0)]
    made = tokenizers.Tokenizer(tokenizers.models.Unigram(scores, unknown, False))
    tokenizer = save_and_load(made)
    assert tokenizer.encode("abba").tolist() == [0, 1, 1, 0]
    with pytest.raises(UserError, match=rf"tokens\.json {reason}"):
        tokenizer.encode("axb")


def test_the_vocabulary_size_follows_from_the_largest_token(save_and_load):
    words = tokenizers.models.WordLevel({"a": 0, "b": 300}, unk_token="a")
    tokenizer = save_and_load(tokenizers.Tokenizer(words))
    assert tokenizer.vocab_size == 301
    assert tokenizer.encode("b").tolist() == [300]


def test_ignores_truncation_and_padding_of_the_tokenizer(save_and_load):
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1, "[PAD]": 2}))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.enable_truncation(3)
    made.enable_padding(length=6, pad_id=2)
    encode = save_and_load(made).encode
    assert encode("a b a b a").tolist() == [0, 1, 0, 1, 0]
    assert encode("b").tolist() == [1]


def test_a_prompt_has_the_start_but_not_the_end_tokens(save_and_load):
    parts = tokenizers.processors
    numbers = {"<s>": 0, "</s>": 1, "a": 2, "\u0120": 3}  # the last one is a space
    made = tokenizers.Tokenizer(tokenizers.models.BPE(numbers, []))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    ends = parts.TemplateProcessing("<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)])
    # With trimmed offsets, a space covers as little of the text as the template's tokens.
    made.post_processor = parts.Sequence([parts.ByteLevel(trim_offsets=True), ends])
    tokenizer = save_and_load(made)
    assert tokenizer.encode("a ").tolist() == [0, 2, 3, 1]
    assert tokenizer.encode_prompt("a ").tolist() == [0, 2, 3]
    assert tokenizer.encode_prompt(" ").tolist() == [0, 3]
    assert tokenizer.encode_prompt("").tolist() == []


def test_bucketed_batches_are_shuffled_by_epoch_and_seed(tmp_path):
    data = documents(tmp_path, LENGTHS).load()
    n = num_examples(data.train)

    def rows(seed):
        batches = bucketed_batches(data, 1, seed, 64)
        return [int(next(batches)["row"][0]) for _ in range(2 * n)]

    first, second, other = rows(0)[:n], rows(0)[n:], rows(1)[:n]
    assert sorted(first) == sorted(second) == sorted(other) == list(range(n))
    assert first != second
    assert first != other


def test_a_seed_chooses_the_test_documents(tmp_path):
    config = documents(tmp_path, LENGTHS)
    test_sets = [
        {*dataclasses.replace(config, split_seed=s).load().test["tokens"].ravel().tolist()}
        for s in (None, 0, 0, 1)
    ]
    assert test_sets[1] == test_sets[2] != test_sets[3]
    assert test_sets[0] - {0} == {*b"mnop"}  # the last four of sixteen


def test_a_pipe_is_no_text(tmp_path):
    os.mkfifo(tmp_path / "text.txt")
    with pytest.raises(UserError, match=r"data.path: .*text.txt.*is a pipe, a socket or a device"):
        TextFile(path=str(tmp_path / "text.txt"), context=4).load()
