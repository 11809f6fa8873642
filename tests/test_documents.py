"""README, CONTRIBUTING and docs/ name only files, tests, options and sections that exist."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from fabric_train.all_arguments import ALL_ARGUMENTS
from fabric_train.cli.argument_types import shown_name, types_of
from tests import foreign_tables

ROOT = Path(__file__).resolve().parents[1]
ROOT_DOCUMENTS = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "CODE_OF_CONDUCT.md")


def _existing_documents() -> list[Path]:
    paths = [ROOT / name for name in (*ROOT_DOCUMENTS, "benchmarks/README.md")]
    paths += sorted((ROOT / "docs").rglob("*.md"))
    return [path for path in paths if path.is_file()]


DOCUMENTS = _existing_documents()
USER_DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FOLDERS = (
    "fabric_train",
    "tests",
    "configs",
    "docs",
    "benchmarks",
    "launch",
    "docker",
    "demo",
    "examples",
    "docs_build",
)
FOREIGN_OPTIONS = {
    "help", "dest", "first_hour", "time", "init", "rm", "gpus", "ipc", "ulimit", "volume", "shm-size", "nv", "bind",
    "sandbox", "strict", "follow", "selector", "max-restarts", "nproc-per-node", "nnodes", "node-rank", "master-addr",
    "master-port", "rdzv-backend", "rdzv-endpoint", "rdzv-conf", "local-addr", "num-nodes", "main-address",
    "main-port", "ntasks-per-node", "pty", "signal", "exclude", "allow-run-as-root", "oversubscribe", "hostfile",
    "served-model-name", "max-model-len", "enable-lora", "lora-modules", "max-lora-rank", "outtype", "host", "port",
    "gpu-memory-utilization", "build", "target",
    "env", "quarter_hour", "teacher_preset", "teacher_form",
    "index-url", "no-index", "find-links", "no-build-isolation", "no-deps", "build-arg",
    "nodes", "nodelist", "no-kill", "kill-on-bad-exit", "gres", "ntasks",
    "dependency", "print", "write", "base", "outfile", "lora", "logdir", "backend-store-uri", "learning_rate",
}  # fmt: skip
"""Options of other programs."""

_NAMED_TEST = re.compile(
    r"(?P<file>(?:[\w-]+/)*test_\w+\.py)?::(?P<function>test_\w+)|(?P<only_file>(?:[\w-]+/)*test_\w+\.py)"
)
"""``test_x.py::test_y``, ``::test_y`` or ``test_x.py``."""
_CODE = re.compile(r"```.*?```|`[^`\n]+`", re.DOTALL)
_LINK = re.compile(r"\]\((?!\w+:|#)([^)#\s]+)")
_LINK_TO_SECTION = re.compile(r"\]\(((?!\w+:)[^)#\s]*)#([^)\s]+)\)")
_OPTION = re.compile(r"(?<![\w-])--([a-z][\w-]*)")
_COMMAND = re.compile(r"fabric-train ([a-z_-]+)( [^\n`;|\"]*)")


def name_of(path: Path) -> str:
    """Return a path as a message shows it."""
    return str(path.relative_to(ROOT))


def read_lines(*documents: Path) -> Iterator[tuple[str, str]]:
    """Yield every line of some documents as FILE:LINE and its text."""
    for path in documents:
        for line_number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            yield f"{name_of(path)}:{line_number}", line


@cache
def names_of_tests(file: str) -> set[str] | None:
    """Return the test functions of a file, named relative to tests/ or to the root; None if there is no such file."""
    for path in (ROOT / "tests" / file, ROOT / file):
        if path.is_file():
            functions = re.findall(r"^ *(?:async )?def (\w+)", path.read_text(encoding="utf-8"), re.MULTILINE)
            return set(functions)
    return None


def test_every_test_that_a_document_names_exists() -> None:
    missing = []
    for location, line in read_lines(*DOCUMENTS):
        file = "(no file named before it)"
        for named_test in _NAMED_TEST.finditer(line):
            file = named_test["file"] or named_test["only_file"] or file  # a bare ::test_x is in the file named last
            function = named_test["function"]
            test = f"{file}::{function}" if function else file
            functions = names_of_tests(file)
            if functions is None or (function and function not in functions):
                missing.append(f"{location}: {test}")
    assert not missing, "tests that do not exist:\n" + "\n".join(missing)


def test_every_file_that_a_document_names_exists() -> None:
    subpackages = [path.name for path in (ROOT / "fabric_train").iterdir() if path.is_dir()]
    path_in_project = re.compile(rf"(?<![\w./-])(?:{'|'.join(FOLDERS)})/[\w./*-]*")
    module_in_package = re.compile(rf"(?<![\w./-])(?:{'|'.join(subpackages)})/[\w/]*\.py")
    missing = []
    for document in DOCUMENTS:
        for code in _CODE.findall(document.read_text(encoding="utf-8")):
            for path in path_in_project.findall(code):
                pattern = path.rstrip("./")
                is_placeholder = "NAME" in path
                if not is_placeholder and not any(ROOT.glob(pattern)):
                    missing.append(f"{name_of(document)}: {path}")
            for module in module_in_package.findall(code):
                is_test = "/test_" in module  # tests/ has folders with the names of the subpackages
                if not is_test and not (ROOT / "fabric_train" / module).is_file():
                    missing.append(f"{name_of(document)}: fabric_train/{module}")
    assert not missing, "files that do not exist:\n" + "\n".join(missing)


def test_every_relative_link_leads_to_a_file() -> None:
    missing = []
    for document in DOCUMENTS:
        for target in _LINK.findall(document.read_text(encoding="utf-8")):
            if not (document.parent / target).exists():
                missing.append(f"{name_of(document)}: {target}")
    assert not missing, "links that lead nowhere:\n" + "\n".join(missing)


def anchors_of(document: Path) -> set[str]:
    """Return the anchors that GitHub gives the headings of a document."""
    prose = re.sub(r"^```.*?^```", "", document.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)", prose, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_link_to_a_section_leads_to_its_heading() -> None:
    missing = []
    for document in DOCUMENTS:
        for file, section in _LINK_TO_SECTION.findall(document.read_text(encoding="utf-8")):
            target = document.parent / file if file else document  # without a file, a section of the same document
            if target.suffix == ".md" and section not in anchors_of(target):
                missing.append(f"{name_of(document)}: {file}#{section}")
    assert not missing, "sections that do not exist:\n" + "\n".join(missing)


def options_in_code() -> set[str]:
    """Return the options of all programs: the fields of every class that is named …Arguments."""
    options = set()
    for path in (*ROOT.glob("*.py"), *(ROOT / "fabric_train").rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        if not re.search(r"^class \w+Arguments\b", source, re.MULTILINE):  # parsing every module would take seconds
            continue
        for statement in ast.parse(source).body:
            if isinstance(statement, ast.ClassDef) and statement.name.endswith("Arguments"):
                options |= {shown_name(field) for field in fields_of(statement)}
    return options


def fields_of(definition: ast.ClassDef) -> Iterator[str]:
    """Yield the names of a dataclass's fields."""
    for statement in definition.body:
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            yield statement.target.id


def test_every_option_that_the_documents_name_exists() -> None:
    known_options = options_in_code() | FOREIGN_OPTIONS | {"config", "debug", "version"}
    missing = []
    for location, line in read_lines(*USER_DOCUMENTS):
        for option in _OPTION.findall(line):
            if option not in known_options:
                missing.append(f"{location}: --{option}")
    assert not missing, "options that no program has:\n" + "\n".join(missing)


def test_every_command_in_documents_and_messages_has_the_options_of_its_program() -> None:
    options_by_program: dict[str, set[str]] = {}
    for command_name, arguments in ALL_ARGUMENTS.items():  # a command such as "vocabulary report"
        program = command_name.split()[0]
        options = options_by_program.setdefault(program, {"config", "debug", "version", "help"})
        options.update(shown_name(option) for option in types_of(arguments))

    missing = []
    for path in (*USER_DOCUMENTS, *sorted((ROOT / "fabric_train").rglob("*.py"))):
        text = path.read_text(encoding="utf-8").replace("\\\n", " ")
        text = re.sub(r'"\s*\n\s*f?"', "", text)  # join a message that is written on several lines
        for program, words in _COMMAND.findall(text):
            options = options_by_program.get(program.replace("-", "_"), set())
            if not options:
                continue  # a word after fabric-train that is no program
            command = re.split(r" and |, |\. |\)", words)[0]  # without the rest of the sentence
            for option in _OPTION.findall(command):
                if option not in options:
                    missing.append(f"{name_of(path)}: {program} --{option}")
    assert not missing, "options that these programs do not have:\n" + "\n".join(missing)


@pytest.mark.parametrize("page", foreign_tables.PAGES)
def test_the_tables_of_other_programs_are_those_of_foreign_names(page: str) -> None:
    _, marker, tables = foreign_tables.path_of(page).read_text(encoding="utf-8").partition(foreign_tables.BEGIN)
    assert marker, "the page has no place for the tables"
    assert tables.strip() == foreign_tables.tables_of(page).strip(), "run python -m tests.foreign_tables --write"
