"""The layout of tables that a run prints."""

from collections.abc import Sequence

from rich.table import Table


def facts_table(title: str) -> Table:
    """Return an empty table of names and what they stand for."""
    table = Table(title=title, title_justify="left", title_style="bold", show_header=False, box=None, pad_edge=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    return table


def figures_table(title: str, figures: Sequence[str], texts: Sequence[str] = ("source",)) -> Table:
    """Return an empty table with columns of ``texts``, and after them columns of numbers, aligned to the right."""
    table = Table(*texts, title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    for column in figures:
        table.add_column(column, justify="right")
    return table
