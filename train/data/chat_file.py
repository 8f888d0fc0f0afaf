"""Rows of tokens from prompts with answers, chats or texts, for fine-tuning language models."""

import contextlib
import dataclasses
import itertools
import json
import statistics
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import numpy as np
from annotated_types import Ge, Gt, Lt, MinLen
from typing_extensions import override

from train.config import Config
from train.config.section import Count, Needs, Seed
from train.data import Arrays, Dataset, columns, records
from train.data.chat import DATA_DATE, ROLES, ChatTemplate, load_template
from train.data.chat_end import AnswerEnd, find_end
from train.data.packing import gather, pack
from train.data.placeholder import Placeholder, zero_tokens
from train.data.records import Record
from train.data.splits import describe_common, hold_out_contents, hold_out_users
from train.data.text import Text
from train.data.tokenizer import Pieces, Tokenizer, load_tokenizer
from train.errors import UserError, list_available, shorten

_FIELDS = {
    "messages": ("messages", "conversations"),
    "prompt": ("prompt", "question", "instruction"),
    "answer": ("completion", "answer", "response", "output"),
    "text": ("text",),
}
"""Names that a field may have if the config names none."""
_KINDS = {"chat": ("messages",), "answer": ("prompt", "answer"), "text": ("text",)}
"""Fields that the examples of a kind have."""
_NO_PACKING = ", with --data.no-packing"
_CHUNK = 1024
"""Number of examples that are encoded at once."""
_CHUNK_SYMBOLS = 2**22
"""Symbols after which no example is added to these."""
_ASSISTANT = "assistant"
_SHAREGPT = {"human": "user", "gpt": _ASSISTANT}
_WEIGHTS = ("weight", "loss", "train")
"""Keys of a message, 0 or 1, that say whether it is learned: of OpenAI, ms-swift and axolotl."""


class _Text(NamedTuple):
    """Text of an example and the spans that are learned; the others are as in `Document`."""

    text: str
    learned: list[range]
    where: str
    user: str | None
    label: str | None


class Document(NamedTuple):
    """Tokens of an example.

    Attributes:
      ids: Tokens [T].
      target: Whether each token is learned, bool [T].
      bytes: UTF-8 bytes of text that each token stands for, int32 [T].
      where: File and line of its example, which begin an error message.
      user: Id of its user, or None.
      label: Class of the text, or None.
    """

    ids: np.ndarray
    target: np.ndarray
    bytes: np.ndarray
    where: str
    user: str | None = None
    label: str | None = None

    @property
    def place(self) -> str:
        """File and line of its example."""
        return self.where.partition(": ")[2]

    def part(self, start: int, stop: int) -> "Document":
        """Return some of its tokens. The first one has nothing before it, so it is no target."""
        target = self.target[start:stop].copy()
        target[:1] = False
        return self._replace(ids=self.ids[start:stop], target=target, bytes=self.bytes[start:stop])


@dataclass(frozen=True)
class AnswerFile(Text):
    """Examples with answers in a JSON lines or Parquet file."""

    evaluation_options: ClassVar[dict[str, str]] = {"path": "test_path"}
    needs: ClassVar[Needs] = dict.fromkeys(
        ("test_fraction", "split_seed"), ("test_path", (None,).__contains__)
    )

    path: str = "data.jsonl"
    """File of JSON lines, .parquet file (fnet-jax[parquet]), a folder of them, or a URL."""
    test_path: str | None = None
    """File or folder of test examples; None holds out test_fraction of path."""
    chat_template: str | None = None
    """Jinja file; None is the template of the tokenizer's folder."""
    batch_size: Count = 8
    """Batch size, in rows, or in pairs of answers."""
    as_chat: bool = False
    """Write prompts and answers with the chat template, as a user's and an assistant's message."""
    test_fraction: Annotated[float, Gt(0), Lt(1)] = 0.1
    """Fraction of the examples that is held out for testing if there is no test_path."""
    split_seed: Seed | None = None
    """Random seed of the held-out examples; None holds out the last ones."""


@dataclass(frozen=True)
class ChatFile(AnswerFile):
    """Prompts with answers, chats or texts in a JSON lines or Parquet file, for fine-tuning."""

    source: Literal["chat_file"] = "chat_file"
    """Data source; --data.source NAME --help lists the fields of another one."""
    context: Annotated[int, Ge(2), Lt(2**31)] = 512
    """Context length: tokens per row."""
    packing: bool = False
    """Pack several examples into a row; they do not see each other. Not with privacy."""
    long: Literal["cut", "truncate", "drop"] | None = None
    """Longer examples: cut into rows, truncate, or drop. None cuts texts and truncates others."""
    loss_on: Literal["answers", "last_answer", "all"] = "answers"
    """Tokens that are learned: answers, the last answer of each chat, or all tokens."""
    prompt: Annotated[str, MinLen(1)] | None = None
    """Field of the prompt; None is prompt, question or instruction."""
    answer: Annotated[str, MinLen(1)] | None = None
    """Field of the answer; None is completion, answer, response or output."""
    text: Annotated[str, MinLen(1)] | None = None
    """Field of a plain text; None is text."""
    messages: Annotated[str, MinLen(1)] | None = None
    """Field of a chat's messages; None is messages or conversations."""
    label: Annotated[str, MinLen(1)] | None = None
    """Field of a class, a text or an integer; a published model then learns to classify."""
    user: Annotated[str, MinLen(1)] | None = None
    """Field of a user's id; privacy is then per user."""
    examples_per_user: Count | None = None
    """Largest number of rows of a user per step; needed with user."""

    def load(self, *, private: bool = False) -> Dataset:
        """Encode the examples of a file as rows of ``tokens`` [N, context + 1].

        All tokens of a row but the last are inputs, and all but the first can be targets. Batches
        have ``loss_mask`` [N, context], which is True for the targets that are learned.

        Without packing, a row holds one example, or a part of it, and batches have ``length`` [N],
        the number of inputs. With packing, batches have ``segment`` [N, context + 1], which counts
        the row's examples from 1 and is 0 for padding, and ``weight`` [N]. The weight is the number
        of targets / context, so that each target of a batch counts the same. Test batches always
        have it.

        With classes, batches have ``label`` [N] in place of ``loss_mask``, and weight 1. A row is
        the tokens of an example without an end token, of which the last is classified.

        Raises:
          UserError: if a file is unreadable, an example has no answer or does not fit the chat
            template, or there are too few examples.
        """
        if self.label or (private and self.user is None):  # cut texts would have several rows
            return load(dataclasses.replace(self, long=self.long or "truncate"), private=private)
        return load(self)

    def check(self, config: Config) -> None:
        """Check that a private run has one example in a row, and the options of users.

        Raises:
          UserError: if it has not.
        """
        super().check(config)
        if self.label is not None:
            given = {"packing": self.packing, "long": self.long == "cut"}
            given |= {"loss_on": self.loss_on != "answers", "user": self.user is not None}
            for name in (name for name, is_given in given.items() if is_given):
                raise UserError(
                    f"data.{name}: {getattr(self, name)}, but with data.label a row is an example "
                    f"that is classified as a whole; leave it out{_NO_PACKING * self.packing}"
                )
            if not config.model.is_published:
                raise UserError(
                    f"data.label: {self.label}, but texts are classified by published models; give "
                    "model.name pretrained"
                )
        if config.is_private and self.packing:
            raise UserError(
                "data.packing: puts several examples into a row, but privacy is per row; give "
                "data.packing False"
            )
        if config.is_private and self.user is None and self.long == "cut":
            raise UserError(
                "data.long: cut makes several rows of an example, but privacy is per row; give "
                "truncate or drop, or privacy per user with data.user"
            )

    @override
    def placeholder(self) -> Placeholder | None:
        if self.label is not None:  # the data have the classes
            return None
        batch: Arrays = {"loss_mask": np.ones((1, self.context), bool)}
        if self.packing:
            batch["segment"] = np.ones((1, self.context + 1), np.int32)
            batch["weight"] = np.ones(1, np.float32)
        else:
            batch["length"] = np.full(1, self.context, np.int32)
        return zero_tokens(self, batch, batch)

    @property
    @override
    def longest_row(self) -> int | None:
        return None if self.packing else self.context


def load(config: ChatFile, *, private: bool = False) -> Dataset:
    """Load the data of a config."""
    tokenizer = load_tokenizer(config)
    read = Reader(config, tokenizer)
    left_out: list[str] = []
    examples = read.documents(records.read(config.path, "data.path", left_out))
    num_rows, num_chats = len(examples), len({e.where for e in examples})
    if private and config.user is None and num_chats < num_rows:
        raise UserError(
            f"data.path: {read.template and read.template.where} makes {num_rows:,} rows of "
            f"{num_chats:,} chats, one for each answer, but privacy is per row; give data.loss_on "
            "last_answer, or privacy per user with data.user"
        )
    if config.test_path is None:
        examples, test_examples = _split(config, examples)
    else:
        test_records = records.read(config.test_path, "data.test_path", left_out)
        test_examples = read.documents(test_records)
    train, notes = _fit(config, read.kind, examples, "training")
    test, test_notes = _fit(config, read.kind, test_examples, "test")
    packed = config.context + 1 if config.packing else None
    train_rows, test_rows = Rows.make(train, packed), Rows.make(test, packed)

    found = {d.label for d in train if d.label is not None}
    classes = tuple(sorted(found, key=int if all(map(str.isdecimal, found)) else None))
    for rows, documents in ((train_rows, train), (test_rows, test)):
        if config.label is not None:
            rows.arrays["label"] = _labels(documents, classes)
    notes += columns.describe_classes(classes)

    def batch_of(own: Rows, rows: Arrays, *, is_weighed: bool) -> Arrays:
        batch = own.gather(rows, config.context)
        if classes:
            given = {name: batch[name] for name in ("tokens", "length")}
            ones = np.ones(len(rows["label"]), np.float32)
            return given | {"label": rows["label"], "weight": ones}
        if is_weighed:
            batch["weight"] = batch["loss_mask"].mean(1, dtype=np.float32)
        return batch

    users = None
    if config.user is not None:  # never packed, because users are protected by noise
        users = columns.number_users(np.array([d.user for d in train], np.str_))
    tokens_per_byte = None
    # The text of a chat has special tokens, which nobody writes in bytes.
    num_bytes = 0 if read.template or classes else sum(int(d.bytes[d.target].sum()) for d in test)
    if num_bytes:
        tokens_per_byte = sum(int(d.target.sum()) for d in test) / num_bytes
    if config.packing:
        count = len(train_rows.places)
        used = sum(len(d.ids) for d in train) / (count * (config.context + 1))
        notes.append(f"{len(train):,} examples packed into {count:,} rows, {used:.1%} full")
    if num_chats < num_rows and read.template:
        notes.insert(
            0,
            f"{read.template.where} writes answers differently if other messages follow: "
            f"{num_rows:,} rows of {num_chats:,} chats, one for each answer",
        )
    notes = [_describe_lengths(train), *notes]
    keys = [[(d.place, hash(d.ids.tobytes())) for d in split] for split in (train, test)]
    notes += describe_common(keys[0], keys[1], "examples")
    places = train_rows.places + test_rows.places
    return Dataset(
        train=train_rows.arrays,
        test=test_rows.arrays,
        classes=classes,
        augment=lambda rows, _: batch_of(train_rows, rows, is_weighed=config.packing),
        prepare=lambda rows: batch_of(test_rows, rows, is_weighed=True),
        name=lambda row: "; ".join(train_rows.places[row]),
        test_name=None if config.packing else lambda row: "; ".join(test_rows.places[row]),
        place=lambda row: {} if config.packing else {"index": line_of(places[row][0])},
        contents=tuple(a for r in (train_rows, test_rows) for a in (r.tokens, r.target, r.first)),
        users=users,
        tokens_per_byte=lambda: tokens_per_byte,
        notes=(*notes, *test_notes, *read.notes, *left_out),
        is_chat=read.template is not None,
        rows="rows" if config.packing else "examples",
    )


def load_unlabeled(config: ChatFile, path: str) -> tuple[list[str], Arrays, list[str]]:
    """Load the texts of a file or folder, to be classified; their records need no label.

    Returns:
      The place of each text, a file and its line, and ``tokens`` [N, context + 1] and ``length``
      [N] as batches of ``load`` have them, and what was cut off, for the user.

    Raises:
      UserError: as ``load``.
    """
    # Each text has a prediction, so none is dropped.
    config = dataclasses.replace(config, long="truncate", test_path=path)
    read = Reader(config, load_tokenizer(config), labeled=False)
    left_out: list[str] = []
    documents = read.documents(records.read(path, "predict", left_out))
    documents, notes = _fit(config, read.kind, documents, "test")
    rows = Rows.make(documents)
    batch = rows.gather(rows.arrays, config.context)
    places = ["; ".join(place) for place in rows.places]
    return places, {name: batch[name] for name in ("tokens", "length")}, notes + left_out


def _name(record: Record, column: str) -> str:
    value = record.get(column)
    if columns.is_missing(value) or (isinstance(value, str) and not value.strip()):
        raise UserError(f"{record.where}: {column} is {value!r}, which stands for none")
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise UserError(f"{record.where}: {column} must be a text or an integer, got {value!r}")
    return columns.clean_name(str(value))


def _labels(documents: list[Document], classes: tuple[str, ...]) -> np.ndarray:
    if len(classes) < 2:
        raise UserError(f"data.label: all training examples have the class {classes[0]}")
    for document in documents:
        if document.label not in classes:
            raise UserError(
                f"{document.where}: no training example has the class {document.label}"
                f"{list_available(list(classes), 'classes')}"
            )
    return np.array([classes.index(d.label or "") for d in documents], np.int32)


def line_of(place: str) -> int:
    """Return the line, or the row, of a `train.data.records.Record.place`."""
    return int(place.rpartition(" ")[2])


class Rows(NamedTuple):
    """Rows of documents whose tokens lie one after the other.

    Attributes:
      places: Files and lines of each row's documents.
      arrays: ``start`` and ``length`` of each row: its first token, and its number of inputs.
      tokens, target, first: Token, whether it is learned, and whether it begins a document.
      packed: Whether a row can have several documents.
    """

    places: list[list[str]]
    arrays: Arrays
    tokens: np.ndarray
    target: np.ndarray
    first: np.ndarray
    packed: bool

    @classmethod
    def make(cls, documents: list[Document], packed: int | None = None) -> "Rows":
        """Make a row of each document, or rows of a packed size that can have several."""
        lengths = np.array([len(d.ids) for d in documents])
        rows = [[d] for d in documents]
        if packed:
            rows = [[documents[i] for i in row] for row in pack(lengths, packed)]
        in_order = [d for row in rows for d in row]
        sizes = np.array([sum(len(d.ids) for d in row) for row in rows])
        first = np.zeros(lengths.sum(), bool)
        first[np.cumsum([0, *(len(d.ids) for d in in_order[:-1])])] = True
        return cls(
            [[d.place for d in row] for row in rows],
            {"start": np.cumsum(sizes) - sizes, "length": (sizes - 1).astype(np.int32)},
            np.concatenate([d.ids for d in in_order]),
            np.concatenate([d.target for d in in_order]),
            first,
            packed is not None,
        )

    def gather(self, rows: Arrays, context: int) -> Arrays:
        """Return ``tokens``, ``loss_mask``, and ``segment`` or ``length`` of some of `arrays`."""
        tokens, index, inside = gather(self.tokens, rows["start"], rows["length"], context)
        batch = {"tokens": tokens, "loss_mask": (self.target[index] & inside)[:, 1:]}
        if self.packed:
            segment = np.cumsum(self.first[index], 1, dtype=np.int32)
            return batch | {"segment": np.where(inside, segment, 0)}
        return batch | {"length": rows["length"]}


def _describe_lengths(documents: list[Document]) -> str:
    lengths = [len(d.ids) for d in documents]
    learned = sum(int(d.target.sum()) for d in documents) / sum(lengths)
    return (
        f"{sum(lengths):,} tokens in {len(lengths):,} training examples, "
        f"{statistics.median(lengths):,g} each (median), {max(lengths):,} at most; "
        f"{learned:.1%} are learned"
    )


def _split(config: ChatFile, examples: list[Document]) -> tuple[list[Document], list[Document]]:
    count = len(examples)
    if not count:
        raise UserError(f"data.path: {config.path} holds no examples")
    if config.user is not None:
        is_test = hold_out_users(config, np.array([e.user for e in examples], np.str_))
    else:  # The answers of a chat stay together.
        places = [e.where for e in examples]
        contents = {where: e.ids.tobytes().hex() for where, e in zip(places, examples, strict=True)}
        held_out = hold_out_contents(config, [*contents.values()], f"examples in {config.path}")
        by_place = dict(zip(contents, held_out, strict=True))
        is_test = np.array([by_place[where] for where in places])
    train, test = np.flatnonzero(~is_test), np.flatnonzero(is_test)
    return [examples[i] for i in train], [examples[i] for i in test]


def _fit(
    config: ChatFile, kind: str, examples: list[Document], split: str
) -> tuple[list[Document], list[str]]:
    """Cut, truncate or drop examples that are longer than a row; say what was changed."""
    size = config.context + 1
    way = config.long or ("cut" if kind == "text" else "truncate")
    documents: list[Document] = []
    num_long = 0
    for example in examples:
        whole = example.part(0, len(example.ids))
        if config.label is None and not whole.target.any():
            raise UserError(f"{whole.where}: has no token to learn; remove the record")
        if len(whole.ids) <= size:
            documents.append(whole)
            continue
        num_long += 1
        if way == "cut":
            # Each row begins with the last token of the row before, which it predicts from.
            parts = [whole.part(i, i + size) for i in range(0, len(whole.ids) - 1, config.context)]
            documents += [part for part in parts if part.target.any()]
        elif way == "truncate":
            part = whole.part(0, size)
            if config.label is None and not part.target.any():
                raise UserError(
                    f"{whole.where}: the answer begins after the first {size} tokens, so "
                    f"that nothing is left of it; give a larger data.context than "
                    f"{config.context}, or skip such examples with data.long drop"
                )
            documents.append(part)
    if not documents:
        is_own_file = split == "test" and config.test_path is not None
        file = config.test_path if is_own_file else config.path
        where = f"data.{'test_path' if is_own_file else 'path'}"
        if not examples:
            raise UserError(f"{where}: {file} holds no examples")
        raise UserError(
            f"{where}: no {split} example of {file} has at most data.context + 1 = {size} tokens; "
            "give a larger data.context"
        )
    done = {
        "cut": f"were cut into rows of {size} tokens",
        "truncate": f"were truncated to {size} tokens",
        "drop": f"were dropped, because they have more than {size} tokens",
    }[way]
    notes = [f"{num_long:,} of {len(examples):,} {split} examples {done}"] if num_long else []
    return documents, notes


class Reader:
    """Makes documents of records, which all have the fields of the first one.

    Attributes:
      kind: ``"text"``, ``"answer"`` or ``"chat"``; "" before the first record.
      template: Chat template; None without chats.
      end: How it ends an answer; None if it does not.
      has_end: Whether the answers that are learned include it.
    """

    def __init__(self, config: ChatFile, tokenizer: Tokenizer, *, labeled: bool = True):
        self._config, self._tokenizer, self._labeled = config, tokenizer, labeled
        self._fields: dict[str, str] = {}
        self.kind = ""
        self.template: ChatTemplate | None = None
        self._used: list[str] = []
        self._seen: dict[str, None] = {}
        self._written: dict[str, bool] = {}  # whether the template writes a role or a key
        self._with_end: dict[str, None] = {}  # places of chats
        self.end: AnswerEnd | None = None
        self.has_end = True

    def documents(self, read: Iterable[Record]) -> list[Document]:
        """Encode records in order.

        Raises:
          UserError: if one is wrong.
        """
        documents: list[Document] = []
        records = iter(read)
        while texts := self._chunk(records):
            try:
                pieces = self._tokenizer.encode_pieces([t.text for t in texts])
            except UserError:  # of one of them, which is found by encoding each alone
                pieces = [self._encode(t) for t in texts]
            documents += [self._document(t, p) for t, p in zip(texts, pieces, strict=True)]
        return documents

    def _chunk(self, records: Iterator[Record]) -> list[_Text]:
        """Read the texts to encode at once: as many as tokenizers encode fast, or a long one."""
        texts: list[_Text] = []
        size = 0
        for record in itertools.islice(records, _CHUNK):
            if not self.kind:
                self._find_fields(record)
            own = self._texts(record)
            texts += own
            size += sum(len(t.text) for t in own)
            if size > _CHUNK_SYMBOLS:
                break
        return texts

    def _find_fields(self, record: Record) -> None:
        """Find out what kind of examples a file has, and load the chat template if needed."""
        config = self._config
        given = {name: field for name in _FIELDS if (field := getattr(config, name))}
        found = {name: record.find(*fields) for name, fields in _FIELDS.items()} | given
        fields = list_available(list(record.fields), "fields")
        kinds = [kind for kind, needed in _KINDS.items() if given.keys() & set(needed)] or [
            kind for kind, needed in _KINDS.items() if all(found[name] for name in needed)
        ]
        if not kinds:
            raise UserError(
                f"{record.where}: expected the fields prompt and answer, messages, or text; name "
                f"others with data.prompt and data.answer, data.messages, or data.text{fields}"
            )
        self.kind = kinds[0]
        for name in _KINDS[self.kind]:
            several = [field for field in _FIELDS[name] if record.find(field)]
            if len(several) > 1 and name not in given:
                raise UserError(
                    f"{record.where}: {' and '.join(several)} may both be the {name}; give "
                    f"--data.{name} {several[0]} or --data.{name} {several[1]}"
                )
            if not found[name]:
                raise UserError(
                    f"{record.where}: no field {' or '.join(_FIELDS[name])}; name another one "
                    f"with data.{name}{fields}"
                )
            self._fields[name] = found[name] or ""
        self._used = [*self._fields.values(), *filter(None, (config.label, config.user))]
        if self._fields.get("prompt") == "instruction":
            self._used.append("input")
        is_chat = isinstance(record.fields.get(self._fields.get("prompt", "")), list)
        if self.kind == "answer" and (config.as_chat or is_chat):
            self.kind = "chat"
        if self.kind != "chat":
            return
        path = Path(config.chat_template) if config.chat_template else None
        folder = self._tokenizer.folder
        if folder is None and path is None:
            raise UserError(
                "data.tokenizer: chats need a tokenizer and its chat template; give the folder of "
                "a model, or a template alone with data.chat_template"
            )
        option = "data.chat_template" if path else "data.tokenizer"
        try:
            # The date is fixed, so that a run has the same data when it is resumed later.
            self.template = load_template(folder, path, lambda: DATA_DATE)
        except UserError as error:
            raise UserError(f"{option}: {error}") from error
        self.end = find_end(self.template, self._tokenizer)

    @property
    def notes(self) -> list[str]:
        """Ends of answers, and what of records and messages does not count."""
        tools = ("tools", "functions") * (self.kind == "chat")
        notes = columns.describe_unread(
            "fields", self._used, (n for n in self._seen if n not in tools)
        )
        if self.template and self._config.label is None and self._tokenizer.folder:
            notes.insert(0, self._ends(self.template))
        if self.end and self._with_end:
            count, first = len(self._with_end), next(iter(self._with_end))
            notes.append(f"{self.end.text} in a message of {count:,} chats ends it there: {first}")
        if unwritten := [what for what, is_written in self._written.items() if not is_written]:
            assert self.template
            notes.append(f"{self.template.where} does not write {shorten(unwritten)} of chats")
        return notes

    def _ends(self, template: ChatTemplate) -> str:
        if self.end and self.has_end:
            return f"ends of answers: {self.end.text}"
        what = f"{{% generation %}} leaves out {self.end.text}" if self.end else "it writes none"
        return (
            f"the end of an answer is not learned, because {what} ({template.where}); the model "
            "does not learn to stop"
        )

    def _texts(self, record: Record) -> list[_Text]:
        self._seen |= dict.fromkeys(record.fields)
        try:
            texts = self._chat(record) if self.kind == "chat" else [self._plain(record)]
        except UserError as error:
            if str(error).startswith(record.where):
                raise
            raise UserError(f"{record.where}: {error}") from error
        label = None if self._config.label is None else ""
        if self._config.label is not None and self._labeled:
            label = _name(record, self._config.label)
        if self._config.loss_on == "all":
            texts = [(text, [range(len(text))]) for text, _ in texts]
        user = None if self._config.user is None else _name(record, self._config.user)
        return [_Text(text, learned, record.where, user, label) for text, learned in texts]

    def _plain(self, record: Record) -> tuple[str, list[range]]:
        learned = _filled(record, self._fields["answer" if self.kind == "answer" else "text"])
        prompt = self._prompt(record) if self.kind == "answer" else ""
        return prompt + learned, [range(len(prompt), len(prompt) + len(learned))]

    def _prompt(self, record: Record) -> str:
        prompt = record.text(self._fields["prompt"])
        if self._fields["prompt"] == "instruction" and record.fields.get("input"):
            prompt += "\n" + record.text("input")
        return prompt

    def _chat(self, record: Record) -> list[tuple[str, list[range]]]:
        assert self.template
        if "messages" in self._fields:
            messages = _messages(record, self._fields["messages"])
        elif isinstance(record.get(self._fields["prompt"]), list):
            messages = _messages(record, self._fields["prompt"])
            if self._config.loss_on != "all":
                messages = [{**m, "weight": int(m["role"] != _ASSISTANT)} for m in messages]
            messages += _messages(record, self._fields["answer"])
        else:
            answer = _filled(record, self._fields["answer"])
            messages = [
                {"role": "user", "content": self._prompt(record), "weight": 1},
                {"role": _ASSISTANT, "content": answer, "weight": 1},
            ]
        learned = [message.pop("weight") for message in messages]
        tools = _tools(record)
        self._find_unwritten(messages, tools)
        if self.end and any(self.end.text in message["content"] for message in messages):
            self._with_end[record.place] = None
        if self._config.label is not None:
            return [(self.template.render(messages, tools=tools), [])]
        if self._config.loss_on == "all":
            if not all(learned):
                raise UserError("weight 0 of a message needs data.loss_on answers or last_answer")
            return [(self.template.render(messages, tools=tools), [])]
        last = self._config.loss_on == "last_answer"
        texts = self.template.render_answers(messages, last=last, tools=tools)
        if self.end and self.template.has_marks:
            learned_texts = [text[a.start : a.stop] for text, own in texts for a in own]
            self.has_end &= all(self.end.text in text for text in learned_texts)
        elif self.end:
            texts = [self.end.add(*text) for text in texts]
        answers = [answer for _, answers in texts for answer in answers]
        if not all(learned):
            weights = [w for w, m in zip(learned, messages, strict=True) if m["role"] == _ASSISTANT]
            weights = weights[-len(answers) :] if last else weights
            if len(weights) != len(answers):
                raise UserError(
                    f"{self.template.where} has {len(answers)} {{% generation %}} for "
                    f"{len(weights)} answers, so that weight cannot be applied"
                )
            left = iter(weights)
            texts = [(text, [a for a in answers if next(left)]) for text, answers in texts]
        texts = [(text, answers) for text, answers in texts if any(answers)]
        if not texts:
            missing = "no assistant's message" if all(learned) else "every answer has weight 0"
            raise UserError("the last message is not an assistant's" if last else missing)
        return texts

    def _find_unwritten(self, messages: list[dict[str, Any]], tools: list[Any] | None) -> None:
        assert self.template
        keys = {key for m in messages for key in m} - {"role", "content"}
        without = {k: [{**m, k: None} for m in messages] for k in sorted(keys)}
        for role in sorted({m["role"] for m in messages} - {_ASSISTANT}):
            without[f"{role} messages"] = [m for m in messages if m["role"] != role]
        for what, others in [*without.items(), *[("tools", messages)] * bool(tools)]:
            if not self._written.get(what):
                self._written[what] = True
                with contextlib.suppress(UserError):  # a template that needs it writes it
                    whole = self.template.render(messages, tools=tools)
                    kept = None if what == "tools" else tools
                    self._written[what] = whole != self.template.render(others, tools=kept)

    def _encode(self, text: _Text) -> Pieces:
        try:
            return self._tokenizer.encode_pieces([text.text])[0]
        except UserError as error:
            raise UserError(f"{text.where}: {error}") from error

    def _document(self, text: _Text, pieces: Pieces) -> Document:
        """Make a document, from a start to an end token. The template of chats writes its own."""
        ids, target, sizes = pieces.ids, _overlaps(pieces, text.learned), _bytes(text.text, pieces)
        if self.kind != "chat":
            before, end = self._tokenizer.start_tokens(), self._tokenizer.end_token()
            if len(before) and ids[0] == before[0]:  # the text begins with it
                before = before[:0]
            has_end = end is None or ids[-1] == end or text.label is not None
            after = np.array([] if has_end else [end], ids.dtype)
            ids = np.concatenate([before, ids, after])
            around = len(before), len(after)
            target = np.pad(target, around, constant_values=(False, True))
            sizes = np.pad(sizes, around)
        return Document(ids, target, sizes, text.where, text.user, text.label)


def _filled(record: Record, name: str) -> str:
    text = record.text(name)
    if not text.strip():
        raise UserError(f"{record.where}: {name} is empty; remove the record")
    return text


def _messages(record: Record, name: str) -> list[dict[str, Any]]:
    """Read the messages of a chat, whose keys are role and content, or from and value."""
    given = record.get(name)
    if not isinstance(given, list) or not given:
        raise UserError(f"{record.where}: {name} must be a list of messages, got {given!r:.40}")
    if record.fields.get("weight") not in (None, 1):
        raise UserError(f"{record.where}: weight is a key of an answer, not of a record")
    messages = []
    for number, message in enumerate(given, 1):
        where = f"{record.where}, message {number}"
        if not isinstance(message, Mapping):
            raise UserError(f"{where}: expected role and content, got {message!r:.40}")
        read = {key: value for key, value in message.items() if value is not None}
        if "from" in read and "role" not in read:
            role = read.pop("from")
            read = {"role": _SHAREGPT.get(role, role), "content": read.pop("value", None), **read}
        role, content = read.get("role"), read.get("content")
        if role is None:
            raise UserError(f"{where}: no role{list_available([*map(str, message)], 'keys')}")
        if role not in ROLES:
            raise UserError(f"{where}: expected a role of {', '.join(ROLES)}, got {role!r}")
        if isinstance(content, list) and all(_is_text_part(part) for part in content):
            read["content"] = content = "".join(part["text"] for part in content)
        if "tool_calls" in read:
            read["tool_calls"] = _tool_calls(where, read["tool_calls"])
        weights = {name: read.pop(name) for name in _WEIGHTS if name in read}
        for name, weight in weights.items():
            if weight not in (0, 1):
                raise UserError(f"{where}: {name} must be 0 or 1, got {weight!r:.40}")
        read["weight"] = int(all(weights.values()))
        if content is None and "tool_calls" in read:
            read["content"] = content = ""
        elif content is None and "content" in message:
            raise UserError(f"{where}: content is null; give a text, or remove the message")
        elif content is None:
            raise UserError(f"{where}: no content{list_available([*map(str, message)], 'keys')}")
        elif not isinstance(content, str):
            parts = content if isinstance(content, list) else []
            others = [part for part in parts if not _is_text_part(part)]
            given = f"a part {others[0]!r:.60}" if others else type(content).__name__
            raise UserError(f"{where}: content must be a text or a list of texts, got {given}")
        elif role == _ASSISTANT and not content.strip() and "tool_calls" not in read:
            raise UserError(f"{where}: the answer is empty; remove the record")
        messages.append(read)
    return messages


def _is_text_part(part: Any) -> bool:
    match part:
        case {"type": "text", "text": str()}:
            return True
    return False


def _tool_calls(where: str, calls: Any) -> list[dict[str, Any]]:
    if not isinstance(calls, list) or not all(isinstance(call, Mapping) for call in calls):
        raise UserError(f"{where}: tool_calls must be a list of objects, got {calls!r:.40}")
    read = [dict(call) for call in calls]
    for call in read:
        inner = call.get("function", call)
        if isinstance(inner, Mapping) and isinstance(inner.get("arguments"), str):
            try:
                parsed = {**inner, "arguments": json.loads(inner["arguments"] or "{}")}
            except ValueError:
                continue  # a text that the model wrote
            call |= {"function": parsed} if "function" in call else parsed
    return read


def _tools(record: Record) -> list[Any] | None:
    name = record.find("tools", "functions")
    if name is None:
        return None
    given = record.fields[name]
    try:
        tools = json.loads(given) if isinstance(given, str) else given
        tools = [json.loads(t) if isinstance(t, str) else t for t in tools]
    except (TypeError, ValueError):
        tools = [None]
    if isinstance(given, Mapping) or not all(isinstance(tool, Mapping) for tool in tools):
        raise UserError(f"{name} must be a list of JSON schemas, or its JSON, got {given!r:.40}")
    # The older functions of OpenAI are tools without their type.
    if name == "functions":
        tools = [{"type": "function", "function": tool} for tool in tools]
    return tools or None


def _overlaps(pieces: Pieces, spans: Iterable[range]) -> np.ndarray:
    """Return which tokens stand for a character of the spans, bool [T]."""
    inside = np.zeros(len(pieces.ids), bool)
    for span in spans:
        inside |= (pieces.end > span.start) & (pieces.start < span.stop)
    return inside


def _bytes(text: str, pieces: Pieces) -> np.ndarray:
    """Count the UTF-8 bytes that each token adds to the text, int32 [T].

    A character of several tokens counts for the first one. What is between two tokens, such as
    a space that the tokenizer drops, counts for the second one.
    """
    sizes = np.ones(len(text), np.int64)
    if not text.isascii():
        sizes = np.array([len(c.encode("utf-8", "surrogateescape")) for c in text])
    until = np.concatenate([[0], np.cumsum(sizes)])
    added = np.diff(until[np.maximum.accumulate(pieces.end)], prepend=0)
    return added.astype(np.int32)
