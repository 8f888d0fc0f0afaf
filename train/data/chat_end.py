"""The token with which a chat template ends an answer, where generation stops."""

from collections.abc import Iterable
from typing import NamedTuple

from train.data.chat import ChatTemplate
from train.data.tokenizer import Tokenizer
from train.errors import UserError

_ASKED, _ANSWER, _NEXT = "fnet asks", "fnet answers", "fnet asks again"


class AnswerEnd(NamedTuple):
    """End of an answer.

    Attributes:
      token: Its token.
      text: Its text.
      is_next: Whether it is the start of the next message, so that the last answer has none.
    """

    token: int
    text: str
    is_next: bool

    def add(self, text: str, spans: Iterable[range]) -> tuple[str, list[range]]:
        """Return a text and its answers with their ends, which the next message may write."""
        longer = []
        for span in spans:
            if self.is_next and span.stop == len(text):
                text += self.text
            is_there = self.is_next and text.startswith(self.text, span.stop)
            longer.append(range(span.start, span.stop + is_there * len(self.text)))
        return text, longer


def find_end(template: ChatTemplate, tokenizer: Tokenizer) -> AnswerEnd | None:
    """Return the first special token after an answer; None if the template writes none.

    After the last answer it is an end-of-text or end-of-turn token. Some templates write nothing
    there, and an answer ends with the marker of the next message.
    """
    if tokenizer.folder is None:  # bytes have no special tokens
        return None
    messages = [("user", _ASKED), ("assistant", _ANSWER), ("user", _NEXT)]
    chat = [{"role": role, "content": content} for role, content in messages]
    for is_next in (False, True):
        try:
            text = template.render(chat[: 2 + is_next])
        except UserError:  # it needs other messages
            return None
        after = text.rpartition(_ANSWER)[2].partition(_NEXT)[0]
        (pieces,) = tokenizer.encode_pieces([after])
        for token, start, stop in zip(pieces.ids.tolist(), pieces.start, pieces.end, strict=True):
            if after[start:stop].strip() and not tokenizer.decode([token]):
                return AnswerEnd(token, after[start:stop], is_next)
    return None
