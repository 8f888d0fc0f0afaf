"""Pairs of answers of which one is preferred, for DPO, ORPO and reward models."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from annotated_types import Ge, Lt
from typing_extensions import override

from train.config.data import Content
from train.config.section import Needs, Positive
from train.data import Arrays, Dataset, records
from train.data.chat_file import AnswerFile, ChatFile, Document, Reader, Rows
from train.data.columns import describe_unread
from train.data.placeholder import Placeholder, zero_tokens
from train.data.records import Record
from train.data.splits import describe_common, hold_out_contents
from train.data.tokenizer import load_tokenizer
from train.errors import UserError

_ANSWERS = ("chosen", "rejected")


@dataclass(frozen=True)
class PreferenceFile(AnswerFile):
    """Pairs of answers of which one is preferred, for DPO, ORPO or a reward model."""

    content: ClassVar[Content] = "preferences"
    needs: ClassVar[Needs] = AnswerFile.needs | {"beta": ("objective", "reward".__ne__)}

    source: Literal["preference_file"] = "preference_file"
    """Data source; --data.source NAME --help lists the fields of another one."""
    context: Annotated[int, Ge(2), Lt(2**31)] = 1024
    """Context length: tokens of a prompt with an answer."""
    long: Literal["truncate", "drop"] = "truncate"
    """Longer pairs: truncate, or drop."""
    objective: Literal["dpo", "orpo", "reward"] = "dpo"
    """DPO; ORPO, without a reference, also learns the preferred answer; or a reward model."""
    beta: Positive = 0.1
    """DPO: factor of rewards, larger values change the model less. ORPO: weight of preference."""

    @override
    def load(self, *, private: bool = False) -> Dataset:
        """Encode the pairs as ``tokens`` [N, 2, context + 1], the preferred answer first.

        Batches also have ``length`` [N, 2], ``loss_mask`` [N, 2, context], which is True for the
        tokens of answers, ``weight`` [N], 1, and ``reference`` [N, 2]. The task computes the last.

        Raises:
          UserError: if a file is unreadable, a pair is wrong, or there are too few of them.
        """
        reader = Reader(
            ChatFile(
                tokenizer=self.tokenizer,
                chat_template=self.chat_template,
                as_chat=self.as_chat,
                loss_on="last_answer",
            ),
            load_tokenizer(self),
        )
        left_out: list[str] = []
        fields: dict[str, None] = {}
        twice: list[str] = []

        def read(path: str, option: str) -> list[Document]:

            def answers() -> Iterator[Record]:
                for record in records.read(path, option, left_out):
                    fields.update(dict.fromkeys(record.fields))
                    begin = record.fields.get("prompt") or "\0"
                    if all(str(record.fields.get(a)).startswith(str(begin)) for a in _ANSWERS):
                        twice.append(record.place)
                    yield from _answers(record)

            return reader.documents(answers())

        train = read(self.path, "data.path")
        if self.test_path is None:
            both = zip(train[::2], train[1::2], strict=True)
            contents = [a.ids.tobytes().hex() + b.ids.tobytes().hex() for a, b in both]
            is_test = hold_out_contents(self, contents, f"pairs in {self.path}")
            of_test = np.repeat(is_test, 2)
            test = [d for d, held_out in zip(train, of_test, strict=True) if held_out]
            train = [d for d, held_out in zip(train, of_test, strict=True) if not held_out]
        else:
            test = read(self.test_path, "data.test_path")
        train, notes = self._fit(train, "training")
        test, test_notes = self._fit(test, "test")
        train_rows, test_rows = Rows.make(train), Rows.make(test)
        train_pairs = _pairs(train_rows)
        tools = ("tools", "functions") if reader.template else ()
        unread = describe_unread("fields", ["prompt", *_ANSWERS, *tools], fields)
        unread += reader.notes
        if twice:
            unread.append(f"both answers of {len(twice):,} pairs repeat their prompt: {twice[0]}")
        pairs = [zip(split[::2], split[1::2], strict=True) for split in (train, test)]
        keys = [[(a.place, hash(a.ids.tobytes() + b.ids.tobytes())) for a, b in p] for p in pairs]
        copies = describe_common(keys[0], keys[1], "pairs")
        lengths = train_pairs["length"]
        first = (
            f"{len(lengths):,} training pairs, {np.median(lengths):,g} tokens each answer with its "
            f"prompt (median), {lengths.max() + 1:,} at most"
        )
        return Dataset(
            train=train_pairs,
            test=_pairs(test_rows),
            classes=(),
            augment=lambda pairs, _: _gather(pairs, train_rows, self.context),
            prepare=lambda pairs: _gather(pairs, test_rows, self.context),
            name=lambda row: train_rows.places[2 * row][0],
            test_name=lambda row: test_rows.places[2 * row][0],
            contents=tuple(a for r in (train_rows, test_rows) for a in (r.tokens, r.target)),
            notes=(first, *notes, *test_notes, *copies, *unread, *left_out),
            is_chat=reader.template is not None,
            rows="pairs",
        )

    def _fit(self, documents: list[Document], split: str) -> tuple[list[Document], list[str]]:
        size = self.context + 1
        pairs = list(zip(documents[::2], documents[1::2], strict=True))
        is_long = [max(len(d.ids) for d in pair) > size for pair in pairs]
        if self.long == "drop":
            pairs = [pair for pair, long in zip(pairs, is_long, strict=True) if not long]
        cut = [(a.part(0, size), b.part(0, size)) for a, b in pairs]
        for document in (document for pair in cut for document in pair):
            if not document.target.any():
                raise UserError(
                    f"{document.where}: the answer begins after the first {size} tokens, so that "
                    "nothing is left of it; give a larger data.context, or skip such pairs with "
                    "data.long drop"
                )
        differing = [(a, b) for a, b in cut if not np.array_equal(a.ids, b.ids)]
        fitted = [document for pair in differing for document in pair]
        same = f"{len(cut) - len(differing):,} of {len(cut):,} {split} pairs do not differ"
        if cut and not fitted:
            raise UserError(
                f"data.path: {same} in the first {size} tokens, so that nothing can be learned; "
                "give other pairs, or a larger data.context"
            )
        if not fitted:
            raise UserError(
                f"data.path: no {split} pair has at most data.context + 1 = {size} tokens; give "
                "more pairs, or a larger data.context"
            )
        done = "dropped" if self.long == "drop" else "truncated"
        limit = f"{sum(is_long):,} of {len(is_long):,} {split} pairs were {done}, because they have"
        notes = [f"{limit} more than {size} tokens"] if any(is_long) else []
        if len(differing) < len(cut):
            notes.append(f"{same} in the first {size} tokens, and are left out")
        return fitted, notes

    @override
    def placeholder(self) -> Placeholder | None:
        dtype = np.min_scalar_type((self.vocabulary or 2) - 1)
        batch: Arrays = {
            "tokens": np.zeros((1, 2, self.context + 1), dtype),
            "length": np.full((1, 2), self.context, np.int32),
            "loss_mask": np.ones((1, 2, self.context), bool),
            "reference": np.zeros((1, 2), np.float32),
            "weight": np.ones(1, np.float32),
        }
        return zero_tokens(self, batch, batch)

    @property
    @override
    def longest_row(self) -> int | None:
        return self.context


def _answers(record: Record) -> Iterator[Record]:
    """Yield the records of the preferred answer and of the other one, as `Reader` reads them.

    Answers are texts or the messages of chats, with or without the messages of the prompt.
    """
    prompt = record.fields.get("prompt")
    answers = [record.get(name) for name in _ANSWERS]
    if all(isinstance(answer, str) for answer in answers) and isinstance(prompt, str):
        for answer in answers:
            yield record._replace(fields={"prompt": prompt, "answer": answer})
        return
    before: Any = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt or []
    if not all(isinstance(part, list) and (part or part is before) for part in (before, *answers)):
        raise UserError(
            f"{record.where}: chosen and rejected must be texts after a prompt, or both messages"
        )
    if answers[0][:-1] != answers[1][:-1]:
        raise UserError(
            f"{record.where}: chosen and rejected must differ in their last message only"
        )
    tools = {n: v for n, v in record.fields.items() if n in ("tools", "functions")}
    has_prompt = answers[0][: len(before)] == before  # as well as a field with it
    ends = [part.get("role") for part in (*before[-1:], answers[0][0]) if isinstance(part, dict)]
    if not has_prompt and ends == ["user", "user"]:
        raise UserError(f"{record.where}: prompt is not how chosen begins; leave one of both out")
    for answer in answers:
        messages = answer if has_prompt else [*before, *answer]
        yield record._replace(fields={"messages": messages} | tools)


def _pairs(rows: Rows) -> Arrays:
    pairs = {name: a.reshape(-1, 2) for name, a in rows.arrays.items()}
    return pairs | {"reference": np.zeros((len(rows.places) // 2, 2), np.float32)}


def _gather(pairs: Arrays, rows: Rows, context: int) -> Arrays:
    batch = rows.gather({name: pairs[name].ravel() for name in ("start", "length")}, context)
    batch = {name: a.reshape(-1, 2, *a.shape[1:]) for name, a in batch.items()}
    weight = np.ones(len(pairs["length"]), np.float32)
    return batch | {"reference": pairs["reference"], "weight": weight}
