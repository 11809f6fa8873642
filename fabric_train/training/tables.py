"""Create empty tables in the layout of those that a run prints."""

from collections.abc import Sequence

from rich.table import Table


def facts_table(title: str) -> Table:
    """Return an empty table of names and values."""
    table = Table(title=title, title_justify="left", title_style="bold", show_header=False, box=None, pad_edge=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    return table


def figures_table(title: str, figures: Sequence[str], texts: Sequence[str] = ("source",)) -> Table:
    """Return an empty table with columns for ``texts``, followed by right-aligned columns for numbers."""
    table = Table(*texts, title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    for column in figures:
        table.add_column(column, justify="right")
    return table
