"""README, CONTRIBUTING and docs/ name only what exists; README and the ways through the code are short."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests import foreign_tables, reading_list
from tests.support.forked_runs import ForkedRuns

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = [
    path
    for path in (
        *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "benchmarks/README.md")),
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
    "sample_data",
    "docs_build",
)
WRITTEN = ("benchmarks", "demo", "docs", "fabric_train", "install", "sample_data", "tests")
"""The folders whose documents and Python files have prose."""
FOREIGN_OPTIONS = {
    "help", "dest", "first_hour", "time", "init", "rm", "gpus", "ipc", "ulimit", "volume", "shm-size", "nv", "bind",
    "sandbox", "strict", "follow", "selector", "max-restarts", "nproc-per-node", "nnodes", "node-rank", "master-addr",
    "master-port", "rdzv-backend", "rdzv-endpoint", "rdzv-conf", "local-addr", "num-nodes", "main-address",
    "main-port", "ntasks-per-node", "pty", "signal", "exclude", "allow-run-as-root", "oversubscribe", "hostfile",
    "nodes", "nodelist", "no-kill", "kill-on-bad-exit", "gres", "ntasks",
    "dependency", "print", "write", "base", "outfile", "lora", "logdir", "backend-store-uri", "learning_rate",
}  # fmt: skip
"""Of other programs."""

_TEST = re.compile(r"(?P<file>(?:[\w-]+/)*test_\w+\.py)?::(?P<name>test_\w+)|(?P<alone>(?:[\w-]+/)*test_\w+\.py)")
_CODE = re.compile(r"```.*?```|`[^`\n]+`", re.DOTALL)
_CHAIN = re.compile(r"\b(?:(?:those|that)\s+of|of\s+which|what\s+(?:is|was))\b[^.?!\n]{0,70}\??", re.IGNORECASE)
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
        text, name = path.read_text(encoding="utf-8"), path.relative_to(ROOT)
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


def test_sentences_name_things_again() -> None:
    """No sentence has a chain with "that of" or "of which", or a "what is" that is no question."""
    texts = [path for folder in WRITTEN for path in sorted((ROOT / folder).rglob("*")) if path.suffix in (".md", ".py")]
    texts += [*ROOT.glob("*.md"), *ROOT.glob("*.py")]
    found = [
        f"{path.relative_to(ROOT)}: {' '.join(hit[0].split())}"
        for path in texts
        if path != Path(__file__)
        for hit in _CHAIN.finditer(path.read_text(encoding="utf-8"))
        if not hit[0].endswith("?")
    ]
    assert not found, "write these sentences without the chain:\n" + "\n".join(found)


def test_the_first_page_and_each_tutorial_have_at_most_900_words() -> None:
    pages = [ROOT / "README.md", ROOT / "docs/es/primer_entrenamiento.md", *(ROOT / "docs/tutorials").glob("*.md")]
    words = {page.name: len(page.read_text(encoding="utf-8").split()) for page in pages}
    assert {name: number for name, number in words.items() if number > 900} == {}


def test_every_option_that_the_documents_name_exists() -> None:
    sources = [
        path.read_text(encoding="utf-8") for path in (*ROOT.glob("*.py"), *(ROOT / "fabric_train").rglob("*.py"))
    ]
    with_arguments = [source for source in sources if re.search(r"^class \w+Arguments\b", source, re.MULTILINE)]
    every = [node for source in with_arguments for node in ast.parse(source).body]
    classes = [node for node in every if isinstance(node, ast.ClassDef) and node.name.endswith("Arguments")]
    fields = [node for kind in classes for node in kind.body]
    known = {node.target.id for node in fields if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)}
    known |= FOREIGN_OPTIONS | {"config", "debug", "version"}
    documents = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    missing = [
        f"{place}: --{option}"
        for place, line in lines(*documents)
        for option in re.findall(r"(?<![\w-])--([a-z][\w-]*)", line)
        if option not in known
    ]
    assert not missing, "options that no program has:\n" + "\n".join(missing)


@pytest.mark.parametrize("page", foreign_tables.PAGES)
def test_the_tables_of_other_programs_are_those_of_foreign_names(page: str) -> None:
    _, begins, written = foreign_tables.path_of(page).read_text(encoding="utf-8").partition(foreign_tables.BEGIN)
    assert begins
    assert written.strip() == foreign_tables.tables_of(page).strip(), "run python -m tests.foreign_tables --write"


def test_the_page_of_the_rehearsal_counts_its_own_cases() -> None:
    page = (ROOT / "docs" / "cuda_rehearsal.md").read_text(encoding="utf-8")
    found = re.search(r": (\d+) of (\d+) cases in ", page)
    assert found is not None
    rows = [line for line in page.splitlines() if line.endswith((" passed |", " failed |"))]
    assert (int(found[1]), int(found[2])) == (len(rows), len(rows))


@pytest.mark.slow
def test_the_reading_list_is_that_of_the_code_and_each_way_is_short(forked_runs: ForkedRuns) -> None:
    run = forked_runs.start([], 1, program="tests.reading_list", draws=True)
    run.finish()
    written = reading_list.written_list(reading_list.DOCUMENT.read_text(encoding="utf-8"))
    listed, found = (
        sorted(re.sub(r"^\d+\.", "", text.strip(), flags=re.M).split("\n")) for text in (written, run.stdout())
    )
    assert listed == found, "run python -m tests.reading_list --write"
    number_of_files = [int(number) for number in re.findall(r"\*\*: (\d+) files", run.stdout())]
    limits = [way.limit for way in reading_list.WAYS.values()]
    assert all(number <= limit for number, limit in zip(number_of_files, limits, strict=True)), number_of_files
