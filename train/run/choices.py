"""Multiple choice by likelihood: which answer a language model finds the most probable."""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import fnet
from train.data import records
from train.data.buckets import bucket_lengths
from train.data.chat import ChatTemplate
from train.data.records import Record
from train.data.tokenizer import Tokenizer, load_tokenizer
from train.errors import UserError, writing
from train.networks.published.network import PretrainedNetwork
from train.run.open_run import OpenRun
from train.tasks import language


class Question(NamedTuple):
    """Question with its choices, as tokens.

    Attributes:
      rows: Tokens of the question and of each choice, at most context + 1.
      counts: Number of each row's last tokens that are the choice.
      answer: Index of the right choice.
      truncated: Whether the beginning of the question was cut off.
    """

    rows: list[np.ndarray]
    counts: list[int]
    choices: list[str]
    answer: int
    truncated: bool


_LENGTHS: dict[str, Callable[[str], int]] = {
    "accuracy": lambda choice: 1,  # acc
    "accuracy_per_character": len,  # acc_norm
    "accuracy_per_byte": lambda choice: len(choice.encode("utf-8", "surrogateescape")),  # acc_bytes
}
"""Lengths that log-likelihoods are divided by, and the names of lm-evaluation-harness."""


def answer_choices(
    opened: OpenRun, file: str, log: Callable[[str], None], *, best: bool, chat: bool
) -> None:
    """Print how many multiple-choice questions the model answers, and write choices.json.

    Neither the training nor the test data of the run are read.
    """
    folder, data = opened.folder, language.text_source(opened.config)
    tokenizer, template = load_tokenizer(data), None
    if chat:
        try:
            template = language.chat_template(data, tokenizer)
        except UserError as error:
            raise UserError(f"--chat: {error}") from error
    questions = load_questions(file, "--choices", tokenizer, data.context, template)
    model, (params, state, step) = opened.network(best=best)
    accuracies, log_likelihoods = score_choices(
        model, params, state, questions, data.batch_size, data.context
    )
    metrics = {f"choices/{name}": value for name, value in accuracies.items()}
    num_truncated = sum(question.truncated for question in questions)
    answers = [
        {"answer": q.answer, "log_likelihoods": s.tolist()}
        for q, s in zip(questions, log_likelihoods, strict=True)
    ]
    content = {"step": step, "file": file, "metrics": metrics}
    content |= {"questions": len(questions), "truncated_questions": num_truncated}
    with writing(folder.path, "make it writable"):
        folder.write(folder.choices, content | {"answers": answers})
    log(f"{folder.path} after step {step}, {len(questions):,} questions")
    if num_truncated:
        log(f"{num_truncated:,} questions lost their beginning to fit in {data.context} tokens")
    for name, value in metrics.items():
        log(f"{name} {value:.6g}")
    log(f"choices: {folder.choices}")


def load_questions(
    path: str, option: str, tokenizer: Tokenizer, context: int, template: ChatTemplate | None = None
) -> list[Question]:
    """Read questions from a file of JSON lines, or a .parquet file.

    A question has ``question`` or ``prompt``, a list ``choices``, and ``answer``, the index of the
    right one from 0, or its letter from A. Question and choice are joined by a space. As in
    lm-evaluation-harness, spaces at the end of the question count as part of the choice, and long
    questions lose their beginning. With a chat template, the question is a user's message and the
    choice the start of the assistant's answer.
    """
    questions = [
        _question(record, tokenizer, context, template) for record in records.read(path, option)
    ]
    if not questions:
        raise UserError(f"{option}: {path} holds no questions")
    return questions


def _question(
    record: Record, tokenizer: Tokenizer, context: int, template: ChatTemplate | None
) -> Question:
    text = record.text(record.find("question", "prompt") or "question")
    choices = record.get("choices")
    if not text.strip():
        raise UserError(f"{record.where}: the question is empty; remove the record")
    given = choices if isinstance(choices, list) else []
    texts = {choice for choice in given if isinstance(choice, str) and choice.strip()}
    if not len(given) == len(texts) > 1:
        raise UserError(
            f"{record.where}: choices must be a list of two or more texts that differ, got "
            f"{choices!r:.60}"
        )
    answer = _answer(record, len(choices))
    prompt, space = text, ""
    if not template:
        prompt, space = text.rstrip(), f"{text[len(text.rstrip()) :]} "
    completions = [(f"{space}{choice}", f"choice {choice!r:.40}") for choice in choices]
    try:
        pieces = [*encode_completions(tokenizer, prompt, completions, context, template)]
    except UserError as error:
        raise UserError(f"{record.where}: {error}") from error
    rows, counts = ([*column] for column in zip(*pieces, strict=True))
    truncated = any(len(row) > context + 1 for row in rows)
    return Question([row[-(context + 1) :] for row in rows], counts, choices, answer, truncated)


def encode_completions(
    tokenizer: Tokenizer,
    prompt: str,
    completions: Sequence[tuple[str, str]],
    context: int,
    template: ChatTemplate | None,
) -> Iterator[tuple[np.ndarray, int]]:
    """Yield the tokens of a prompt with each completion, and how many are the completion's.

    With a chat template, the prompt is a user's message and a completion the assistant's answer.

    Raises:
      UserError: for a completion of no tokens or more than the context, with its name.
    """
    start = tokenizer.start_tokens()
    if template:
        start = start[:0]  # the template writes all special tokens
        messages = [{"role": "user", "content": prompt}]
        prompt = template.render(messages, add_generation_prompt=True)
    texts = [prompt, *(prompt + completion for completion, _ in completions)]
    before, *wholes = (pieces.ids for pieces in tokenizer.encode_pieces(texts))
    for whole, (_, name) in zip(wholes, completions, strict=True):
        count = len(whole) - len(before)
        if not 0 < count <= context:
            raise UserError(f"{name} has {count} tokens; expected 1 to data.context {context}")
        yield np.concatenate([start, whole]).astype(np.int32), count


def _answer(record: Record, count: int) -> int:
    given = record.get("answer")
    index = given
    if isinstance(given, str) and len(given) == 1:
        index = ord(given.upper()) - ord("A")
    if isinstance(index, int) and not isinstance(index, bool) and 0 <= index < count:
        return index
    raise UserError(
        f"{record.where}: answer must be an index from 0 to {count - 1} or a letter from A to "
        f"{chr(ord('A') + count - 1)}, got {given!r}"
    )


def score_choices(
    model: fnet.models.LanguageModel | PretrainedNetwork,
    params: Any,
    state: Any,
    questions: list[Question],
    batch_size: int,
    context: int,
) -> tuple[dict[str, float], list[np.ndarray]]:
    """Return how often the right choice is the likeliest, and the log-likelihoods of choices.

    Args:
      batch_size: number of choices at a time.
      context: largest number of tokens that the model reads.
    """
    rows = [row for question in questions for row in question.rows]
    counts = np.array([count for question in questions for count in question.counts])
    lengths = np.array([len(row) - 1 for row in rows])
    buckets = bucket_lengths(lengths, context)
    log_likelihoods = np.zeros(len(rows))
    for bucket in np.unique(buckets).tolist():
        members = np.flatnonzero(buckets == bucket)
        for start in range(0, len(members), batch_size):
            chosen = members[start : start + batch_size]
            tokens = np.zeros((batch_size, bucket + 1), np.int32)
            for i, row in enumerate(chosen):
                tokens[i, : len(rows[row])] = rows[row]
            padding = (0, batch_size - len(chosen))
            length, count = (np.pad(a[chosen], padding) for a in (lengths, counts))
            found = _log_likelihoods(model, params, state, tokens, length, count)
            log_likelihoods[chosen] = np.asarray(found)[: len(chosen)]
    ends = np.cumsum([len(question.rows) for question in questions])
    by_question = np.split(log_likelihoods, ends[:-1])

    accuracies = {}
    for name, size in _LENGTHS.items():
        right = [
            np.argmax(scores / [size(choice) for choice in question.choices]) == question.answer
            for question, scores in zip(questions, by_question, strict=True)
        ]
        accuracies[name] = float(np.mean(right))
    return accuracies, by_question


@functools.partial(jax.jit, static_argnums=0)
def _log_likelihoods(
    model: fnet.models.LanguageModel | PretrainedNetwork,
    params: Any,
    state: Any,
    tokens: Array,
    length: Array,
    count: Array,
) -> Array:
    """Sum the log-likelihoods of the last ``count`` of ``length`` targets of each row [B]."""
    learned = jnp.arange(tokens.shape[1] - 1)[None] >= (length - count)[:, None]
    losses, _ = language.token_losses(model, params, state, tokens, length, learned, None)
    return -losses.sum(1)
