"""The command lines in the documents, the programs' docstrings and the launch files are ones that the programs take."""

import re
import shlex
from pathlib import Path

import pytest

from fabric_train.all_arguments import ALL_ARGUMENTS
from fabric_train.arguments import TrainArguments, parse
from tests.support.program_arguments import PROGRAM_ARGUMENTS
from tests.support.programs import ROOT

PROGRAMS = {f"python {words}": kind for words, kind in PROGRAM_ARGUMENTS.items()}
PROGRAMS |= {f"fabric-train {name}": kind for name, kind in ALL_ARGUMENTS.items()}
PROGRAMS |= {"fabric run fabric_train": TrainArguments, "fabric-train sample-data": ALL_ARGUMENTS["sample_data"]}
PROGRAMS["fabric-train launch-files"] = ALL_ARGUMENTS["launch_files"]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "configs").rglob("*.yaml"))]


def commands_in(path: Path) -> list[str]:
    """Return the whole command lines of a document's shell blocks and of a YAML file's comments."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".yaml":
        text = "\n".join(re.findall(r"^# ?(.*)$", text, re.MULTILINE))
    else:
        text = "\n".join(re.findall(r"```bash\n(.*?)```", text, re.DOTALL))
    lines = text.replace("\\\n", " ").splitlines()
    commands = [line.strip() for line in lines if any(line.strip().startswith(f"{name} ") for name in PROGRAMS)]
    # names that a module of the user registers are known only with it; tests/training/test_extensions.py
    return [command for command in commands if "--extensions" not in command]


COMMANDS = [(path, command) for path in DOCUMENTS for command in commands_in(path)]


@pytest.mark.parametrize("path, command", COMMANDS, ids=[f"{path.name}: {line[:50]}" for path, line in COMMANDS])
def test_a_command_line_of_the_documents_is_accepted(
    path: Path, command: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    (tmp_path / "data").mkdir()
    monkeypatch.chdir(tmp_path)
    program = next(name for name in PROGRAMS if command.startswith(f"{name} "))
    words = shlex.split(command.removeprefix(program), comments=True)
    parse(PROGRAMS[program], [word for word in words if word != "…"])


def test_the_documents_have_command_lines_of_most_programs() -> None:
    assert len(COMMANDS) > 15
    assert len({command.split()[1] for _, command in COMMANDS}) >= 4
