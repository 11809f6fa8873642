"""Write the tables of other programs' arguments in docs/how-to/: ``python -m tests.foreign_tables --write``.

The names are those that tests/cli/test_foreign_names.py looks up. The advice is what the program prints, from
``fabric_train/cli/foreign_names.yaml``.
"""

import ast
import importlib.util
import re
import sys
from pathlib import Path

from fabric_train.arguments import TrainArguments
from fabric_train.cli.argument_types import types_of
from fabric_train.cli.foreign_names import advice_for_name
from fabric_train.cli.yaml_core import load

ROOT = Path(__file__).resolve().parents[1]
BEGIN = "<!-- the rest: python -m tests.foreign_tables --write -->\n"
PAGES = {
    "from_axolotl": ("axolotl",),
    "from_torchtune": ("torchtune",),
    "from_llama_factory": ("llamafactory",),
    "from_trainer": ("trl", "transformers"),
}
"""Page → beginnings of the programs' names in tests/cli/other_programs_arguments.yaml."""
COLUMN_TITLES = {
    "from_axolotl": "axolotl",
    "from_torchtune": "torchtune",
    "from_llama_factory": "LLaMA-Factory",
    "from_trainer": "Trainer, TRL",
}
"""Page → title of the column with the other program's arguments."""


def path_of(page: str) -> Path:
    return ROOT / "docs" / "how-to" / f"{page}.md"


def tables_of(page: str) -> str:
    """Return the tables of a page as Markdown: arguments with another name here, with the same name, with none."""
    column_title = COLUMN_TITLES[page]
    known = list(types_of(TrainArguments))
    names = _argument_names(PAGES[page])
    rows: dict[str, list[str]] = {}
    for name in sorted({*names} - {*known, "config", "debug"}):
        advice = advice_for_name("TrainArguments", name, known)
        if advice is None:
            raise ValueError(f"{name} is not in foreign_names.yaml")
        rows.setdefault(advice, []).append(f"`{name}`")
    renamed = {advice.removeprefix("here it is "): row for advice, row in rows.items() if "here it is" in advice}
    absent = {advice: row for advice, row in rows.items() if "here it is" not in advice}
    same = ", ".join(f"`{name}`" for name in known if name in names)
    return "\n".join(
        [
            *("## Renamed", "", f"| {column_title} | Fabric Train |", "|---|---|"),
            *(f"| {', '.join(row)} | {_in_code(here)} |" for here, row in sorted(renamed.items())),
            *(
                "",
                "## Unchanged",
                "",
                f"{same}.",
                "",
                "## Not supported",
                "",
                f"| {column_title} | instead |",
                "|---|---|",
            ),
            *(f"| {', '.join(row)} | {_in_code(advice)} |" for advice, row in sorted(absent.items())),
            "",
        ]
    )


def _argument_names(title_beginnings: tuple[str, ...]) -> list[str]:
    """Return the names of the arguments that other programs have.

    Args:
        title_beginnings: The beginnings of titles in tests/cli/other_programs_arguments.yaml. With "transformers", the
            fields of the installed transformers' TrainingArguments are added.
    """
    names_by_title = load((ROOT / "tests" / "cli" / "other_programs_arguments.yaml").read_text(encoding="utf-8"))
    names: list[str] = []
    for title, space_separated_names in names_by_title.items():
        if title.startswith(title_beginnings):
            names += space_separated_names.split()
    if "transformers" not in title_beginnings:
        return names
    # the fields of transformers' TrainingArguments, from its source: an import would take seconds
    package = importlib.util.find_spec("transformers")
    assert package is not None
    assert package.origin is not None
    source = (Path(package.origin).parent / "training_args.py").read_text(encoding="utf-8")
    classes = [node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)]
    fields = next(node for node in classes if node.name == "TrainingArguments").body
    return names + [
        node.target.id for node in fields if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    ]


def _in_code(text: str) -> str:
    if re.fullmatch(r"--\w+ [\w-]+", text):
        return f"`{text}`"
    values = "true|FILE|NAME:SUBSET:SPLIT@REVISION|FIRST:LAST|FAMILY|PATH|RUN"
    return re.sub(rf"(fabric-train \w+ )?--\w+( ({values})\b)?|fabric-train \w+", r"`\g<0>`", text)


if __name__ == "__main__":
    for page in PAGES:
        written = path_of(page).read_text(encoding="utf-8").partition(BEGIN)[0] + BEGIN + "\n" + tables_of(page)
        if "--write" in sys.argv[1:]:
            path_of(page).write_text(written, encoding="utf-8")
        else:
            print(written)
