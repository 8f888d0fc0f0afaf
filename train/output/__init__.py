"""Everything a user looks at: progress lines, tables, plots and the HTML report."""

from typing import TYPE_CHECKING

from fnet import lazy

if TYPE_CHECKING:  # it imports matplotlib, which no step waits for
    from train.output import plots as plots
else:
    lazy.import_names_late(__name__)
