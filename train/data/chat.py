"""Chat templates and generation settings that come with published models."""

import datetime
import functools
import json
import re
import reprlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from train import limits
from train.data.storage import check_regular
from train.errors import UserError, list_available

Message = Mapping[str, Any]
"""Message of a chat: ``{"role": "user", "content": "Hi."}``."""

ROLES = ("system", "developer", "user", "assistant", "tool")
"""Roles that a message may have. Templates of most models know only some of them."""
DATA_DATE = datetime.datetime(2024, 7, 26)
"""Date in training data, so that a resumed run trains on the same tokens.

It is the date that the template of Llama 3.1 writes where there is no clock."""
# Unicode reserves these two for internal use, so that no text contains them.
_OPEN, _CLOSE = "\ufdd0", "\ufdd1"


class ChatTemplate(NamedTuple):
    """Jinja template that writes the messages of a chat as one text.

    Templates come with weights from the internet. They run in Jinja's sandbox, which gives them
    no access to Python objects and no way to change their arguments, in a process of its own with
    limits of memory and time (`train.limits`).

    Attributes:
      source: Template, as in ``tokenizer_config.json``.
      tokens: Special tokens by name, such as ``{"bos_token": "<s>"}``.
      where: File of the template, for error messages.
      now: Clock of ``strftime_now``.
    """

    source: str
    tokens: Mapping[str, str] = {}
    where: str = "the chat template"
    now: Callable[[], datetime.datetime] = datetime.datetime.now

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = False,
        tools: Sequence[Any] | None = None,
    ) -> str:
        """Write messages as a text, which includes all special tokens.

        Args:
          messages: Messages with ``role`` and ``content``.
          add_generation_prompt: End with the start of an assistant's answer.
          tools: JSON schemas of tools that the template may list.

        Raises:
          UserError: if the template is invalid, or refuses the messages.
        """
        text = self._render(messages, add_generation_prompt, tools)
        return text.replace(_OPEN, "").replace(_CLOSE, "")

    @property
    def has_marks(self) -> bool:
        """Whether the template encloses answers in ``{% generation %}``."""
        return re.search(r"\{%-?\s*generation\s*-?%\}", self.source) is not None

    def render_answers(
        self, messages: Sequence[Message], *, last: bool = False, tools: Sequence[Any] | None = None
    ) -> list[tuple[str, list[range]]]:
        """Write messages as texts, and find what an assistant wrote in them.

        With ``{% generation %}`` in the template, answers are what it encloses. Otherwise, the
        answer in message i is what ``render(messages[:i + 1])`` adds to
        ``render(messages[:i], add_generation_prompt=True)``. It includes the end of the turn.

        Some templates write an answer differently once others follow, for example without its
        thoughts. Then each answer has a text of its own, which ends with it. The messages before
        it are written as while the answer is generated.

        Args:
          messages: Messages with ``role`` and ``content``.
          last: Find only the answer in the last message.
          tools: JSON schemas of tools that the template may list.

        Returns:
          The texts, and in each the spans of its answers in characters: one text with all answers,
          or one for each answer. Without answers, a text without spans.

        Raises:
          UserError: as `render`; or if an answer does not continue its prompt, so that it cannot
            be found.
        """
        if self.has_marks:
            text, spans = _find_marks(self._render(messages, False, tools))
            if last:
                spans = spans[-1:] if messages[-1]["role"] == "assistant" else []
            return [(text, spans)]
        text = self.render(messages, tools=tools)
        own: list[tuple[str, list[range]]] = []
        for i, message in enumerate(messages):
            is_last = i == len(messages) - 1
            if message["role"] != "assistant" or (last and not is_last):
                continue
            try:
                before = self.render(messages[:i], add_generation_prompt=True, tools=tools)
            except UserError as error:
                if i:
                    raise
                raise UserError(
                    f"the chat begins with the assistant, which {self.where} does not allow; "
                    "begin with a user's message, or train on everything"
                ) from error
            after = text if is_last else self.render(messages[: i + 1], tools=tools)
            if not after.startswith(before):
                raise UserError(
                    f"{self.where} writes message {i + 1} differently than the start of an answer, "
                    "so that the answer cannot be found; enclose answers in the template in "
                    "{% generation %}, or train on everything"
                )
            own.append((after, [range(len(before), len(after))]))
        if all(text.startswith(after) for after, _ in own):
            return [(text, [span for _, spans in own for span in spans])]
        return own

    def _render(self, messages: Sequence[Message], add_generation_prompt: bool, tools: Any) -> str:
        # Some templates fail on None, where a missing key is fine.
        given = [{k: v for k, v in m.items() if v is not None} for m in messages]
        values = {
            "messages": given,
            "tools": tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
            **self.tokens,
        }
        try:
            text, mistake = limits.run("train.data.chat:render", self.source, self.now(), values)
        except limits.CodeError as error:
            raise UserError(f"{self.where} refuses the chat: {error}") from error
        if mistake:
            raise UserError(f"{self.where}, {mistake}")
        limits.LINE.check(len(text), f"{self.where} refuses the chat: its text")
        return text


def render(source: str, now: datetime.datetime, values: Mapping[str, Any]) -> tuple[str, str]:
    """Render a template, in the process for what others wrote; return the text or a mistake."""
    try:
        clock = {"strftime_now": now.strftime}
        return _compile(source).render(**(clock | dict(values))), ""
    except jinja2.TemplateSyntaxError as error:
        return "", f"line {error.lineno}: {_one_line(error)}"


class _Generation(Extension):
    """``{% generation %}...{% endgeneration %}``, which encloses what an assistant wrote."""

    tags: set[str] = {"generation"}  # noqa: RUF012 - as its base class declares it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller: Callable[[], str]) -> str:
        return f"{_OPEN}{caller()}{_CLOSE}"


class _PlainNamespace(Namespace):
    """``namespace(...)`` of Jinja, without names such as ``__html__`` that Python itself calls."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        for name in dict(*args[1:], **kwargs):
            _check_name(name)
        Namespace.__init__(*args, **kwargs)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if str(name).startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace cannot hold {name!r}")


@functools.lru_cache(maxsize=8)
def _compile(source: str) -> jinja2.Template:
    """Compile a template in the environment that transformers gives to chat templates."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )

    def raise_exception(message: str) -> str:
        raise jinja2.TemplateError(message)

    # Jinja's own filter escapes HTML.
    environment.filters["tojson"] = functools.partial(json.dumps, ensure_ascii=False)
    environment.globals["raise_exception"] = raise_exception
    environment.globals["namespace"] = _PlainNamespace
    return environment.from_string(source)


def _find_marks(text: str) -> tuple[str, list[range]]:
    plain, spans = "", []
    for piece in re.split(f"({_OPEN}[^{_OPEN}{_CLOSE}]*{_CLOSE})", text):
        inner = piece.replace(_OPEN, "").replace(_CLOSE, "")
        if inner != piece:
            spans.append(range(len(plain), len(plain) + len(inner)))
        plain += inner
    return plain, spans


def load_template(
    folder: Path | None,
    path: Path | None = None,
    now: Callable[[], datetime.datetime] = datetime.datetime.now,
) -> ChatTemplate:
    """Load a chat template, and the special tokens that it uses.

    A folder has ``tokenizer_config.json``, and perhaps ``chat_template.jinja``, which a Jinja file
    at ``path`` replaces. Without a folder, special tokens are empty.

    Raises:
      UserError: if there is no template, or a file is unreadable.
    """
    tokens = special_tokens(folder) if folder else {}
    file = path or (folder / "chat_template.jinja" if folder else None)
    if file and (path or file.is_file()):
        try:
            check_regular(str(file))
            limits.TEMPLATE.check(file.stat().st_size, file)
            return ChatTemplate(file.read_text("utf-8"), tokens, str(file), now)
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or _one_line(error)
            raise UserError(f"cannot read {file}: {reason}; expected a Jinja template") from error
    if folder is None:
        raise UserError("there is no tokenizer, which comes with a chat template")
    where = folder / "tokenizer_config.json"
    template = load_json(where).get("chat_template")
    if isinstance(template, list):  # several, by name
        by_name = {str(t.get("name")): t.get("template") for t in template if isinstance(t, dict)}
        template = by_name.get("default")
        if template is None:
            names = list_available(list(by_name), "templates")
            raise UserError(f"{where} has no chat template named default{names}")
    if not isinstance(template, str):
        raise UserError(
            f"{folder} has no chat template, neither chat_template.jinja nor chat_template in "
            "tokenizer_config.json; give one as a Jinja file"
        )
    limits.TEMPLATE.check(len(template), where)
    return ChatTemplate(template, tokens, f"chat_template in {where}", now)


def has_template(folder: Path) -> bool:
    """Whether the folder of a model has a chat template."""
    try:
        load_template(folder)
    except UserError:
        return False
    return True


def special_tokens(folder: Path) -> dict[str, str]:
    """Read the special tokens of a model by name, such as ``{"eos_token": "</s>"}``.

    Raises:
      UserError: if a file is unreadable.
    """
    tokens: dict[str, str] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        for key, value in load_json(folder / name).items():
            text = value.get("content") if isinstance(value, dict) else value
            if key.endswith("_token") and isinstance(text, str):
                tokens[key] = text
    return tokens


class GenerationSettings(NamedTuple):
    """Settings of ``generation_config.json``.

    Attributes:
      temperature: Sampling temperature; 0 is greedy. None without a file.
      top_k: Number of most probable tokens to sample from; None for all.
      top_p: Nucleus (top-p) threshold; None for 1.
      min_p: Least probability of a token, as a share of the largest; None for 0.
      repetition_penalty: Penalty of tokens that a text has already; None for 1.
      end_tokens: Tokens that end a text.
      not_applied: Other settings that would change the text, as ``name value``.
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    end_tokens: tuple[int, ...] = ()
    not_applied: tuple[str, ...] = ()


_WITHOUT_EFFECT: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("num_beams", "num_beam_groups", "encoder_repetition_penalty"), (1,)),
    **dict.fromkeys(("no_repeat_ngram_size", "min_length", "min_new_tokens"), (0,)),
    **dict.fromkeys(("epsilon_cutoff", "eta_cutoff", "penalty_alpha", "diversity_penalty"), (0,)),
    **dict.fromkeys(("typical_p", "guidance_scale"), (1,)),
    **dict.fromkeys(("suppress_tokens", "begin_suppress_tokens", "bad_words_ids"), ([],)),
    **dict.fromkeys(("forced_bos_token_id", "forced_eos_token_id", "sequence_bias"), ()),
    **dict.fromkeys(("exponential_decay_length_penalty", "top_h", "dola_layers"), ()),
}
"""Settings that are not applied, with values other than None that change nothing."""


def load_generation_settings(folder: Path) -> GenerationSettings:
    """Read ``generation_config.json``; without the file, the end tokens of ``config.json``.

    Without ``do_sample``, transformers generates greedily, so that the temperature is 0.

    Raises:
      UserError: if the file is unreadable, or a setting has a wrong type.
    """
    path = folder / "generation_config.json"
    has_file = path.is_file()
    path = path if has_file else folder / "config.json"
    settings = load_json(path)

    def read(name: str, expected: str, is_valid: Callable[[Any], bool]) -> Any:
        value = settings.get(name)
        if value is not None and (isinstance(value, bool) or not is_valid(value)):
            raise UserError(f"{path}: {name} must be {expected}, got {reprlib.repr(value)}")
        return value

    ends = settings.get("eos_token_id")
    ends = [] if ends is None else ends if isinstance(ends, list) else [ends]
    if not all(type(token) is int and token >= 0 for token in ends):
        raise UserError(
            f"{path}: eos_token_id must be a token or a list of tokens, got {reprlib.repr(ends)}"
        )
    if not has_file:
        return GenerationSettings(end_tokens=tuple(ends))
    temperature = read("temperature", "a number >= 0", lambda v: _is_number(v) and v >= 0)
    top_k = read("top_k", "an integer >= 0", lambda v: isinstance(v, int) and v >= 0)
    top_p = read("top_p", "a number in (0, 1]", lambda v: _is_number(v) and 0 < v <= 1)
    min_p = read("min_p", "a number in [0, 1]", lambda v: _is_number(v) and 0 <= v <= 1)
    penalty = read("repetition_penalty", "a number > 0", lambda v: _is_number(v) and v > 0)
    not_applied = tuple(
        f"{name} {reprlib.repr(settings[name])}"
        for name, values in _WITHOUT_EFFECT.items()
        if settings.get(name) is not None and settings[name] not in values
    )
    found = GenerationSettings(
        0.0, None, None, None, None if penalty in (None, 1) else penalty, tuple(ends), not_applied
    )
    if not settings.get("do_sample"):
        return found
    # transformers uses 0 for all tokens, and its own defaults for what is missing.
    return found._replace(
        temperature=1.0 if temperature is None else float(temperature),
        top_k=50 if top_k is None else top_k or None,
        top_p=None if top_p in (None, 1) else float(top_p),
        min_p=min_p or None,
    )


def load_json(path: Path) -> dict[str, Any]:
    """Read a JSON file that holds an object; ``{}`` if there is no such file.

    Raises:
      UserError: if it is unreadable, or is not JSON.
    """
    if not path.is_file():
        return {}
    try:
        limits.JSON_FILE.check(path.stat().st_size, path)
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"cannot read {path}: {_one_line(error)}") from error
    if not isinstance(content, dict):
        raise UserError(f"{path}: expected a JSON object, got {type(content).__name__}")
    return content


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
