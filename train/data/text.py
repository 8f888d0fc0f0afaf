"""Fields that sources of text have in common."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from annotated_types import Ge, Lt
from typing_extensions import override

from train.config.data import Content, Data


@dataclass(frozen=True)
class Text(Data):
    """Rows of tokens for a language model."""

    content: ClassVar[Content] = "text"

    source: str = ""
    """Data source; --data.source NAME --help lists the fields of another one."""
    tokenizer: str | None = None
    """A tokenizer.json, or the folder of a model that holds one; None uses bytes as tokens."""
    vocabulary: Annotated[int, Ge(2), Lt(2**31)] | None = None
    """Vocabulary size of the network; None is the tokenizer's. fnet memory then needs no text."""
    context: Annotated[int, Ge(2), Lt(2**31)] = 64
    """Context length: tokens per row."""

    @property
    def chat_template(self) -> str | None:
        """Jinja file; None is the template of the tokenizer's folder."""
        return None

    @property
    def label(self) -> str | None:
        """Field of the class of a text; None: texts are not classified."""
        return None

    @property
    @override
    def identity(self) -> tuple[object, ...]:
        return *super().identity, self.tokenizer
