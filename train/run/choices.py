"""Multiple choice by likelihood: which answer a language model finds the most probable."""

import functools
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
from train.data.tokenizer import Tokenizer
from train.errors import UserError
from train.networks.pretrained import PretrainedNetwork


class Question(NamedTuple):
    """Question with its choices, as tokens.

    Attributes:
      rows: Tokens of the question and of each choice, at most context + 1.
      counts: Number of each row's last tokens that are the choice.
      choices: Texts of the choices.
      answer: Index of the right choice.
      truncated: Whether the beginning of the question was cut off.
    """

    rows: list[np.ndarray]
    counts: list[int]
    choices: list[str]
    answer: int
    truncated: bool


class ChoiceScores(NamedTuple):
    """Fractions of questions that a model answers right.

    Attributes:
      accuracy: By the likelihood of the choices (``acc``).
      accuracy_per_character: By log-likelihood per character of the choice (``acc_norm``).
      accuracy_per_byte: By log-likelihood per UTF-8 byte of the choice (``acc_bytes``).
      log_likelihoods: Of the choices of each question, in nats.
    """

    accuracy: float
    accuracy_per_character: float
    accuracy_per_byte: float
    log_likelihoods: list[np.ndarray]


def load_questions(
    path: str,
    option: str,
    tokenizer: Tokenizer,
    context: int,
    template: ChatTemplate | None = None,
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
    is_list = isinstance(choices, list) and len(choices) >= 2
    if not is_list or not all(isinstance(c, str) and c.strip() for c in choices):
        raise UserError(
            f"{record.where}: choices must be a list of two or more texts, got {choices!r:.60}"
        )
    answer = _answer(record, len(choices))
    rows, counts, truncated = [], [], False
    try:
        if template:
            start = tokenizer.start_tokens()[:0]  # the template writes all special tokens
            messages = [{"role": "user", "content": text}]
            question = template.render(messages, add_generation_prompt=True)
            texts = [question, *(question + choice for choice in choices)]
        else:
            start = tokenizer.start_tokens()
            texts = [text.rstrip(), *(f"{text} {choice}" for choice in choices)]
        prompt, *wholes = (pieces.ids for pieces in tokenizer.encode_pieces(texts))
        for choice, whole in zip(choices, wholes, strict=True):
            count = len(whole) - len(prompt)
            if not 0 < count <= context:
                raise UserError(
                    f"choice {choice!r:.40} has {count} tokens; expected 1 to data.context "
                    f"{context}"
                )
            row = np.concatenate([start, whole])
            truncated |= len(row) > context + 1
            rows.append(row[-(context + 1) :].astype(np.int32))
            counts.append(count)
    except UserError as error:
        raise UserError(f"{record.where}: {error}") from error
    return Question(rows, counts, choices, answer, truncated)


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
) -> ChoiceScores:
    """Compute the likelihood of each choice after its question, ``batch_size`` choices at a time.

    ``context`` is the largest number of tokens that the model reads.
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

    def accuracy(size: Any) -> float:
        right = [
            np.argmax(scores / [size(choice) for choice in question.choices]) == question.answer
            for question, scores in zip(questions, by_question, strict=True)
        ]
        return float(np.mean(right))

    return ChoiceScores(
        accuracy(lambda choice: 1),
        accuracy(len),
        accuracy(lambda choice: len(choice.encode("utf-8", "surrogateescape"))),
        by_question,
    )


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
    at = jnp.arange(tokens.shape[1] - 1)[None]
    losses, _ = model.losses(
        params,
        state,
        tokens[:, :-1],
        tokens[:, 1:],
        train=False,
        lengths=length,
        loss_mask=at >= (length - count)[:, None],
    )
    return -losses.sum(1)
