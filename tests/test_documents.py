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
DOCUMENTS = [
    path
    for path in (
        *(ROOT / name for name in (*ROOT_DOCUMENTS, "benchmarks/README.md")),
        *sorted((ROOT / "docs").rglob("*.md")),
    )
    if path.is_file()
]
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
    "index-url", "no-index", "find-links", "no-build-isolation", "no-deps", "build-arg",
    "nodes", "nodelist", "no-kill", "kill-on-bad-exit", "gres", "ntasks",
    "dependency", "print", "write", "base", "outfile", "lora", "logdir", "backend-store-uri", "learning_rate",
}  # fmt: skip
"""Of other programs."""

_TEST = re.compile(r"(?P<file>(?:[\w-]+/)*test_\w+\.py)?::(?P<name>test_\w+)|(?P<alone>(?:[\w-]+/)*test_\w+\.py)")
_CODE = re.compile(r"```.*?```|`[^`\n]+`", re.DOTALL)
_LINK = re.compile(r"\]\((?!\w+:|#)([^)#\s]+)")


def lines(*documents: Path) -> Iterator[tuple[str, str]]:
    """Yield the place and the text of every line of some documents."""
    for path in documents:
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            yield f"{path.relative_to(ROOT)}:{number}", line


@cache
def names_of_tests(file: str) -> set[str] | None:
    """Return the test functions of a file, named relative to tests/ or to the root; None if there is no such file."""
    path = next((path for path in (ROOT / "tests" / file, ROOT / file) if path.is_file()), None)
    if path is None:
        return None
    return set(re.findall(r"^ *(?:async )?def (\w+)", path.read_text(encoding="utf-8"), re.MULTILINE))


def test_every_test_that_a_document_names_exists() -> None:
    missing = []
    for place, line in lines(*DOCUMENTS):
        file = "(no file named before it)"
        for found in _TEST.finditer(line):
            file = found["file"] or found["alone"] or file  # a bare ::test_x is in the file named last
            names = names_of_tests(file)
            if names is None:
                missing.append(f"{place}: {file}" + (f"::{found['name']}" if found["name"] else ""))
            elif found["name"] and found["name"] not in names:
                missing.append(f"{place}: {file}::{found['name']}")
    assert not missing, "tests that do not exist:\n" + "\n".join(missing)


def test_every_file_that_a_document_names_exists() -> None:
    subpackages = [path.name for path in (ROOT / "fabric_train").iterdir() if path.is_dir()]
    ours = re.compile(rf"(?<![\w./-])(?:{'|'.join(FOLDERS)})/[\w./*-]*")
    modules = re.compile(rf"(?<![\w./-])(?:{'|'.join(subpackages)})/[\w/]*\.py")
    missing = []
    for path in DOCUMENTS:
        text = path.read_text(encoding="utf-8")
        name = path.relative_to(ROOT)
        for code in _CODE.findall(text):
            for named in ours.findall(code):
                if "NAME" not in named and not any(ROOT.glob(named.rstrip("./"))):  # NAME is a placeholder
                    missing.append(f"{name}: {named}")
            for named in modules.findall(code):
                if "/test_" not in named and not (ROOT / "fabric_train" / named).is_file():
                    missing.append(f"{name}: fabric_train/{named}")
    assert not missing, "files that do not exist:\n" + "\n".join(missing)


def test_every_relative_link_leads_to_a_file() -> None:
    missing = [
        f"{path.relative_to(ROOT)}: {target}"
        for path in DOCUMENTS
        for target in _LINK.findall(path.read_text(encoding="utf-8"))
        if not (path.parent / target).exists()
    ]
    assert not missing, "links that lead nowhere:\n" + "\n".join(missing)


def slugs(path: Path) -> set[str]:
    """Return the anchors that GitHub gives the headings of a document."""
    prose = re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)", prose, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_link_to_a_section_leads_to_its_heading() -> None:
    missing = []
    for path in DOCUMENTS:
        for file, section in re.findall(r"\]\(((?!\w+:)[^)#\s]*)#([^)\s]+)\)", path.read_text(encoding="utf-8")):
            if (file.endswith(".md") or not file) and section not in slugs(path.parent / file if file else path):
                missing.append(f"{path.relative_to(ROOT)}: {file}#{section}")
    assert not missing, "sections that do not exist:\n" + "\n".join(missing)


def test_every_option_that_the_documents_name_exists() -> None:
    sources = [
        path.read_text(encoding="utf-8") for path in (*ROOT.glob("*.py"), *(ROOT / "fabric_train").rglob("*.py"))
    ]
    with_arguments = [source for source in sources if re.search(r"^class \w+Arguments\b", source, re.MULTILINE)]
    every = [node for source in with_arguments for node in ast.parse(source).body]
    classes = [node for node in every if isinstance(node, ast.ClassDef) and node.name.endswith("Arguments")]
    fields = [node for kind in classes for node in kind.body]
    known = {node.target.id for node in fields if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)}
    known = {shown_name(name) for name in known}
    known |= FOREIGN_OPTIONS | {"config", "debug", "version"}
    documents = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    missing = [
        f"{place}: --{option}"
        for place, line in lines(*documents)
        for option in re.findall(r"(?<![\w-])--([a-z][\w-]*)", line)
        if option not in known
    ]
    assert not missing, "options that no program has:\n" + "\n".join(missing)


def test_every_command_in_documents_and_messages_has_the_options_of_its_program() -> None:
    known: dict[str, set[str]] = {}
    for name, arguments in ALL_ARGUMENTS.items():
        options = known.setdefault(name.split()[0], {"config", "debug", "version", "help"})
        options.update(shown_name(option) for option in types_of(arguments))
    missing = []
    documents = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    for path in (*documents, *sorted((ROOT / "fabric_train").rglob("*.py"))):
        text = path.read_text(encoding="utf-8").replace("\\\n", " ")
        text = re.sub(r'"\s*\n\s*f?"', "", text)  # a message on several lines
        for program, words in re.findall(r"fabric-train ([a-z_-]+)( [^\n`;|\"]*)", text):
            command = re.split(r" and |, |\. |\)", words)[0]
            options = known.get(program.replace("-", "_"), set())
            used = re.findall(r"(?<![\w-])--([a-z][\w-]*)", command) if options else []
            missing += [f"{path.relative_to(ROOT)}: {program} --{option}" for option in used if option not in options]
    assert not missing, "options that these programs do not have:\n" + "\n".join(missing)


@pytest.mark.parametrize("page", foreign_tables.PAGES)
def test_the_tables_of_other_programs_are_those_of_foreign_names(page: str) -> None:
    _, begins, written = foreign_tables.path_of(page).read_text(encoding="utf-8").partition(foreign_tables.BEGIN)
    assert begins
    assert written.strip() == foreign_tables.tables_of(page).strip(), "run python -m tests.foreign_tables --write"
