"""Tables as data, so that the terminal, a log and the report's page show the same rows."""

from collections.abc import Sequence
from typing import Literal, NamedTuple

from rich import box
from rich import table as rich_table
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.text import Text

from train.errors import printable

MISSING = "-"
"""Text of a cell whose value is not known."""
_BAR = 20
"""Characters of a full bar in the terminal."""


class Cell(NamedTuple):
    """A cell with more than its text.

    Attributes:
      note: Smaller text below it.
      strong: Whether the text is bold.
      run: Index of the run that the cell names. The page puts its line in front.
      rank: Number that is smallest for the best run. None if no run is better than another.
    """

    text: str
    note: str = ""
    strong: bool = False
    run: int | None = None
    rank: float | None = None


class Table(NamedTuple):
    """A table.

    Attributes:
      title: Caption above the table.
      columns: Heads of the columns. All are empty for a table without a head.
      rows: Cells of each row. None is shown as `MISSING`.
      texts: Number of leading columns that hold text. The others hold numbers.
      bars: Length of each row's bar between 0 and 1. Empty for a table without bars. The
        terminal shows them next to a single column of text.
      caption: Text below the table.
      styles: Style of each row in the terminal, such as ``"dim"``. Empty for none.
      is_wide: Whether its columns need all of 80 characters: they fold, without a frame.
    """

    title: str
    columns: Sequence[str | Cell]
    rows: Sequence[Sequence[str | Cell | None]]
    texts: int = 1
    bars: Sequence[float] = ()
    caption: str = ""
    styles: Sequence[str] = ()
    is_wide: bool = False


def to_rich(table: Table) -> rich_table.Table:
    """Render a table for the terminal."""
    show_header = any(_text(column).plain for column in table.columns)
    rich = rich_table.Table(
        title=table.title or None,
        caption=table.caption or None,
        title_justify="left",
        caption_justify="left",
        show_header=show_header,
        box=box.SIMPLE if table.is_wide else box.HEAVY_HEAD,
        padding=0 if table.is_wide else (0, 1),
    )
    for i, column in enumerate(table.columns):
        folds = i == 0 or not show_header or table.is_wide
        justify: Literal["left", "right"] = "left" if i < table.texts else "right"
        rich.add_column(_text(column), justify=justify, no_wrap=not folds, overflow="fold")
    bars = table.bars if table.texts == 1 else ()
    if bars:
        rich.add_column("", no_wrap=True)
    for i, row in enumerate(table.rows):
        bar = ["█" * round(_BAR * bars[i])] if bars else []
        first, *others = map(_text, row)
        name = _Path(first.plain) if "/" in first.plain else first
        rich.add_row(name, *others, *bar, style=table.styles[i] if table.styles else "")
    return rich


class _Path(str):
    """A path that loses its first parts, not its last one, in a narrow column."""

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        last = len(self.rpartition("/")[2]) + 2
        return Measurement(min(last, len(self)), len(self)).with_maximum(options.max_width)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        text, parts = str(self), self.split("/")[1:]
        while len(text) > options.max_width and parts:
            text = "…/" + "/".join(parts)
            parts = parts[1:]
        yield Text(text, overflow="fold")


def _text(cell: str | Cell | None) -> Text:
    """Return a cell's text, in which rich looks for no markup."""
    text = MISSING if cell is None else cell.text if isinstance(cell, Cell) else cell
    return Text("\n".join(map(printable, text.split("\n"))))
