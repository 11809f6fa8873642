"""Run the cells of docs/first_run.ipynb in the current folder; ``python -m tests.notebook --write`` keeps the outputs.

Cells with the tag "varies" print times, or figures that depend on the machine: their outputs are not compared.
"""

import ast
import contextlib
import io
import json
import sys
from pathlib import Path
from typing import Any

NOTEBOOK = Path(__file__).resolve().parents[1] / "docs" / "first_run.ipynb"


def run_cell(number: int, source: str, names: dict[str, Any]) -> list[dict[str, Any]]:
    """Run a cell as a notebook would, and return its outputs: standard output, and the value of a last expression."""
    tree = ast.parse(source)
    printed = io.StringIO()
    value = None
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, "cell", "exec"), names)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), "cell", "eval"), names)
    outputs: list[dict[str, Any]] = []
    if text := printed.getvalue():
        outputs.append({"name": "stdout", "output_type": "stream", "text": text.splitlines(keepends=True)})
    if value is not None:
        shown = {"text/plain": repr(value).splitlines(keepends=True)}
        outputs.append({"data": shown, "execution_count": number, "metadata": {}, "output_type": "execute_result"})
    return outputs


def main() -> None:
    """Run all cells; print those whose outputs differ from what the notebook has, or write the outputs."""
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    names: dict[str, Any] = {}
    writes = "--write" in sys.argv
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for number, cell in enumerate(cells, 1):
        outputs = run_cell(number, "".join(cell["source"]), names)
        if not writes and outputs != cell["outputs"] and "varies" not in cell["metadata"].get("tags", ()):
            print(f"cell {number} has other outputs: {json.dumps(outputs)}")
        cell["outputs"] = outputs
        cell["execution_count"] = number
    if writes:
        NOTEBOOK.write_text(json.dumps(notebook, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
