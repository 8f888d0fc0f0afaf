"""The token with which a chat template ends an answer."""

import re
from types import SimpleNamespace

import numpy as np
import pytest

from train.data.chat_end import AnswerEnd, find_end
from train.errors import UserError

SPECIAL = {"<end>": 5, "<user>": 6, "<answer>": 7}


class Tokenizer:
    """Special tokens, and a token for each other character."""

    folder = "a folder"

    def encode_pieces(self, texts):
        for text in texts:
            found = [*re.finditer(r"<\w+>|[^<]", text)]
            ids = np.array([SPECIAL.get(piece[0]) or ord(piece[0]) for piece in found], int)
            start, end = ([getattr(piece, name)() for piece in found] for name in ("start", "end"))
            yield SimpleNamespace(ids=ids, start=start, end=end)

    def decode(self, tokens):
        return "".join(chr(token) for token in tokens if token not in SPECIAL.values())


def template(after):
    def render(messages):
        if len(messages) > 2 and after is None:
            raise UserError("one question")
        around = {"user": "<user>{}", "assistant": "<answer>{}" + (after or "")}
        return "".join(around[m["role"]].format(m["content"]) for m in messages)

    return SimpleNamespace(render=render)


@pytest.mark.parametrize(
    ("after", "end"),
    [
        ("<end>\n", AnswerEnd(5, "<end>", is_next=False)),
        (" \n<end>", AnswerEnd(5, "<end>", is_next=False)),
        ("", AnswerEnd(6, "<user>", is_next=True)),
        (".", AnswerEnd(6, "<user>", is_next=True)),
        (None, None),
    ],
)
def test_an_answer_ends_with_the_first_special_token_after_it(after, end):
    assert find_end(template(after), Tokenizer()) == end
    assert find_end(template(after), SimpleNamespace(folder=None)) is None


def test_answers_get_the_start_of_the_next_message_as_their_end():
    text = "<user>a<answer>bc<user>d<answer>e"
    spans = [range(15, 17), range(32, 33)]
    assert [text[s.start : s.stop] for s in spans] == ["bc", "e"]
    longer, ends = AnswerEnd(6, "<user>", is_next=True).add(text, spans)
    assert longer == text + "<user>"
    assert [longer[s.start : s.stop] for s in ends] == ["bc<user>", "e<user>"]
    assert AnswerEnd(6, "<user>", is_next=True).add(text, spans[:1])[0] == text
    assert AnswerEnd(5, "<end>", is_next=False).add(text, spans) == (text, spans)
