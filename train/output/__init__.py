"""Everything a user looks at: progress lines, tables, plots and the HTML report."""
