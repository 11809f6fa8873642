"""Read the last rows of metrics.csv, in a time that does not grow with the file."""

import csv
import io
import math
import os
from pathlib import Path

from fabric_train.files.regular_file import open_regular

METRICS = "metrics.csv"
_TAIL_BYTES = 1 << 18


def read_last_rows(run_dir: Path) -> list[dict[str, float]]:
    """Return the last rows of metrics.csv as values by column, without empty cells; an empty list without the file.

    An incomplete row at the end is left out.

    Raises:
        ValueError, csv.Error: The file is damaged.
    """
    file = run_dir / METRICS
    if not file.exists():
        return []
    with open_regular(file, "") as opened:
        lines = io.TextIOWrapper(opened, encoding="utf-8", newline="")
        names = next(csv.reader(iter(lines.readline, "")), [])  # names of sources may have line breaks
        begin = lines.tell()
        end = opened.seek(0, os.SEEK_END)
        opened.seek(max(begin, end - _TAIL_BYTES))
        text = opened.read(_TAIL_BYTES).decode()
    complete_lines = text[: text.rfind("\n") + 1].splitlines()
    if end - begin > _TAIL_BYTES:
        complete_lines = complete_lines[1:]  # the first one is cut
    rows = []
    for cells in csv.reader(complete_lines):
        row = {}
        for name, cell in zip(names, cells, strict=True):
            if cell and name != "rows_hash":
                row[name] = float(cell)
        if not math.isfinite(row.get("step", math.nan)):
            raise ValueError(f"{file}: a row without a step")
        rows.append(row)
    return rows
