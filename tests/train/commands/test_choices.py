"""Perplexity of held-out text, and multiple choice by likelihood."""

import json

import jax
import numpy as np
import pytest
import tokenizers
from data_cases import error_message
from program_cases import assert_one_line_error, exit_code, fnet_command, initial_run, output_of

from train.config import ChatFile, Config, LanguageModel, TextFile
from train.data.chat import ChatTemplate
from train.data.tokenizer import load_tokenizer
from train.run.checkpoints import load_network
from train.run.choices import Question, load_questions, score_choices
from train.tasks import language

BYTES = load_tokenizer(ChatFile())
CONTEXT = 48
QUESTIONS = [
    {"question": "Is é a letter? ", "choices": ["Yes", "No", "☃☃☃☃"], "answer": 0},
    {"prompt": "The sky is", "choices": ["blue", "a very long answer, but wrong"], "answer": "b"},
    {"question": "a" * 60, "choices": ["x", "abc", "q r"], "answer": "C"},
    {"question": "1 + 1 =", "choices": ["2", "9" * (CONTEXT - 1)], "answer": 0},
    {"question": "?", "choices": ["éé", "aaa", "abab"], "answer": 1},
]


@pytest.fixture
def write(tmp_path):
    """``write(records)`` returns the path of a file of JSON lines."""

    def write(questions):
        path = tmp_path / "questions.jsonl"
        lines = [q if isinstance(q, str) else json.dumps(q) for q in questions]
        path.write_text("\n".join(lines))
        return str(path)

    return write


@pytest.fixture(scope="module")
def network():
    model = LanguageModel(blocks=1, width=16, heads=2, hidden=16).for_text(256, "float32")
    params, state = jax.jit(model.init)(jax.random.key(0))
    return model, jax.tree.map(lambda p: 2 * p, params), state


def log_likelihood(network, question, choice):
    """Sum of the log-probabilities of a choice's bytes, from the logits of one row."""
    model, params, state = network
    text = question.rstrip().encode()
    answer = f"{question} {choice}".encode()[len(text) :]
    tokens = np.frombuffer((text + answer)[-CONTEXT - 1 :], np.uint8).astype(np.int32)
    padded = np.zeros((1, CONTEXT + 1), np.int32)
    padded[0, : len(tokens)] = tokens
    logits, _ = jax.jit(model.apply, static_argnames="train")(params, state, padded, train=False)
    logits = np.asarray(logits[0], np.float64)
    log_probs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    at = range(len(tokens) - len(answer), len(tokens))
    return sum(log_probs[i - 1, tokens[i]] for i in at)


def test_scores_are_those_of_single_choices(network, write):
    questions = load_questions(write(QUESTIONS), "--choices", BYTES, CONTEXT)
    accuracies, actual = score_choices(*network, questions, batch_size=4, context=CONTEXT)
    expected = [
        np.array(
            [log_likelihood(network, q.get("question", q.get("prompt")), c) for c in q["choices"]]
        )
        for q in QUESTIONS
    ]
    for row, values in zip(actual, expected, strict=True):
        np.testing.assert_allclose(row, values, rtol=1e-5)
    answers = [0, 1, 2, 0, 1]
    for name, size in (
        ("accuracy", lambda c: 1),
        ("accuracy_per_character", len),
        ("accuracy_per_byte", lambda c: len(c.encode())),
    ):
        right = [
            np.argmax([s / size(c) for s, c in zip(values, q["choices"], strict=True)]) == answer
            for values, q, answer in zip(expected, QUESTIONS, answers, strict=True)
        ]
        assert accuracies[name] == np.mean(right)


def test_normalization_is_by_characters_or_by_bytes():
    """``acc_norm`` of lm-evaluation-harness divides by characters, ``acc_bytes`` by bytes."""

    class Fixed:
        """Model whose loss of a token is its number / 10."""

        @staticmethod
        def losses(params, state, tokens, labels, *, key, train, lengths, loss_mask):
            real = np.arange(tokens.shape[1])[None] < lengths[:, None]
            return np.float32(0.1) * labels * (real & loss_mask), state

    def question(answer):
        # Sums of -30, -40 and -36: per character -15, -10 and -36; per byte -15, -10 and -9.
        rows = [np.array([1, n]) for n in (300, 400, 360)]
        return Question(rows, [1, 1, 1], ["ab", "abcd", "\U0001f600"], answer, False)

    for answer, expected in enumerate([(1, 0, 0), (0, 1, 0), (0, 0, 1)]):
        scores, _ = score_choices(Fixed, {}, {}, [question(answer)], batch_size=2, context=8)
        assert tuple(scores.values()) == expected


def test_questions_are_joined_to_choices_by_a_space(write):
    first, *_ = load_questions(write(QUESTIONS), "--choices", BYTES, CONTEXT)
    assert bytes(first.rows[0].astype(np.uint8)).decode() == "Is é a letter?  Yes"
    assert first.counts[0] == 5  # with both spaces
    assert not first.truncated


def test_long_questions_lose_their_beginning(write):
    question = load_questions(write(QUESTIONS), "--choices", BYTES, CONTEXT)[2]
    assert question.truncated
    assert [len(row) for row in question.rows] == [CONTEXT + 1] * 3
    assert bytes(question.rows[1].astype(np.uint8)).decode() == "a" * 45 + " abc"
    longest = [{"question": "a" * n, "choices": ["x", "abc"], "answer": 0} for n in (45, 46)]
    longest = load_questions(write(longest), "--choices", BYTES, CONTEXT)
    assert [q.truncated for q in longest] == [False, True]  # a row has CONTEXT + 1 tokens


def test_questions_begin_with_the_start_token_of_the_tokenizer(write, tmp_path):
    numbers = {"<s>": 0, "[U]": 1, "Is": 2, "it": 3, "yes": 4, "no": 5}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(numbers, unk_token="[U]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.post_processor = tokenizers.processors.TemplateProcessing(
        "<s> $A", special_tokens=[("<s>", 0)]
    )
    made.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(ChatFile(tokenizer=str(tmp_path)))
    path = write([{"question": "Is it", "choices": ["yes", "no no"], "answer": 1}])
    (question,) = load_questions(path, "--choices", tokenizer, CONTEXT)
    assert [row.tolist() for row in question.rows] == [[0, 2, 3, 4], [0, 2, 3, 5, 5]]
    assert question.counts == [1, 2]
    message = error_message(
        load_questions,
        write([{"question": "Is", "choices": ["yes", "perhaps"], "answer": 0}]),
        "--choices",
        tokenizer,
        CONTEXT,
    )
    assert "questions.jsonl, line 1: " in message
    assert "tokenizer.json has no token for some of 'Is perhaps'" in message


def test_questions_are_written_with_a_chat_template(write):
    template = ChatTemplate(
        "<u>{{ messages[0].content }}{% if add_generation_prompt %}<a>{% endif %}"
    )
    path = write([{"question": "Is it? ", "choices": ["yes", "no"], "answer": 1}])
    (question,) = load_questions(path, "--choices", BYTES, CONTEXT, template)
    rows = [bytes(row.astype(np.uint8)).decode() for row in question.rows]
    assert rows == ["<u>Is it? <a>yes", "<u>Is it? <a>no"]
    assert question.counts == [3, 2]


GOOD = QUESTIONS[0]


@pytest.mark.parametrize(
    ("questions", "message"),
    [
        ([], "holds no questions"),
        (["?"], "line 1: not JSON: "),
        ([GOOD, {"choices": ["a", "b"], "answer": 0}], "line 2: no field question"),
        ([GOOD | {"question": " "}], "line 1: the question is empty; remove the record"),
        ([GOOD | {"choices": ["a"]}], "line 1: choices must be a list of two or more texts that differ, got ['a']"),
        ([GOOD | {"choices": ["a", "a"]}], "choices must be a list of two or more texts that differ"),
        ([GOOD | {"choices": ["a", ""]}], "choices must be a list of two or more texts"),
        ([GOOD | {"answer": 3}], "answer must be an index from 0 to 2 or a letter from A to C, got 3"),
        ([GOOD | {"answer": "D"}], "or a letter from A to C, got 'D'"),
        ([GOOD | {"answer": "1"}], "or a letter from A to C, got '1'"),
        ([GOOD | {"answer": True}], "or a letter from A to C, got True"),
        ([GOOD | {"choices": ["a", "b" * 47]}], "has 49 tokens; expected 1 to data.context 48"),
    ],
)  # fmt: skip
def test_a_wrong_question_names_its_line(write, questions, message):
    path = write(questions)
    given = error_message(load_questions, path, "--choices", BYTES, CONTEXT)
    assert given.startswith(f"--choices: {path}")
    assert message in given


@pytest.mark.parametrize("separator", [None, "|"])
def test_tokens_per_byte_follow_from_the_text(tmp_path, separator):
    numbers = {c: i for i, c in enumerate(sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()))}
    numbers["ab"] = len(numbers)
    made = tokenizers.Tokenizer(tokenizers.models.BPE(numbers, [("a", "b")]))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "text.txt").write_text("x" * 40 + ("|" if separator else "") + "abé ababab")
    options = {"context": 4, "separator": separator, "test_fraction": 7 / 47}
    data = TextFile(path=str(tmp_path / "text.txt"), **options)
    if separator:
        data = TextFile(path=str(tmp_path / "text.txt"), **options | {"test_fraction": 0.5})
    assert data.load().tokens_per_byte() == 1
    # The tokens ab, é (two), a space, ab, ab, ab: the first one is no target.
    tokenized = TextFile(**data.__dict__ | {"tokenizer": str(tmp_path)}).load()
    assert tokenized.tokens_per_byte() == 6 / 9


def test_tokens_per_byte_are_unknown_if_the_tokenizer_changes_the_text(tmp_path):
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "text.txt").write_text("b\n" * 200)
    data = TextFile(path=str(tmp_path / "text.txt"), tokenizer=str(tmp_path), context=4)
    assert data.load().tokens_per_byte() is None


@pytest.mark.slow
def test_a_run_is_evaluated_on_text_and_on_questions(workplace, capsys):
    lines = [json.dumps({"prompt": f"{i}? ", "answer": "yes" * (i % 4 + 1)}) for i in range(40)]
    (workplace / "data.jsonl").write_text("\n".join(lines))
    (workplace / "questions.jsonl").write_text("\n".join(map(json.dumps, QUESTIONS)))
    data = ChatFile(path="data.jsonl", context=CONTEXT, batch_size=4, packing=True)
    model = LanguageModel(blocks=1, width=16, hidden=16, heads=2)
    run = initial_run(workplace / "run", Config(data=data, model=model))
    fnet_command("eval", "run")
    printed = dict(
        line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("test/")
    )
    metrics = json.loads((workplace / "run" / "evaluation.json").read_text())["metrics"]
    loss = metrics["test/loss"]
    np.testing.assert_allclose(metrics["test/bits_per_byte"], loss / np.log(2))
    assert printed["test/perplexity"] == f"{np.exp(loss):.6g}"

    lines = output_of(capsys, "eval", "run", "--choices", "questions.jsonl").splitlines()
    model = language.build_network(run.read_config())
    network = load_network(run, model)
    questions = load_questions("questions.jsonl", "--choices", BYTES, CONTEXT)
    accuracies, expected = score_choices(
        model, *network[:2], questions, batch_size=4, context=CONTEXT
    )
    written = json.loads(run.choices.read_text())
    for answer, values in zip(written["answers"], expected, strict=True):
        np.testing.assert_allclose(answer["log_likelihoods"], values, rtol=1e-4)
    assert written["metrics"]["choices/accuracy"] == accuracies["accuracy"]
    assert f"choices/accuracy {accuracies['accuracy']:.6g}" in lines
    assert "2 questions lost their beginning to fit in 48 tokens" in lines
    for options, message in (
        (["--flip"], "on chat_file; its options: --path, --choices, --chat"),
        (["--chat"], "--chat: True has no effect with --choices None; leave one of them out"),
        (["--choices", "questions.jsonl", "--chat"], "--chat: there is no tokenizer, which comes"),
    ):
        assert exit_code("eval", "run", *options) == 2
        assert_one_line_error(capsys, message)
