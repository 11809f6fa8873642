"""The site of the documentation: its pages, the files written from the code, and the pages that messages name."""

import inspect
import re
import subprocess
from pathlib import Path

import pytest
import yaml

from docs_build import figures, reference, site
from fabric_train.cli.errors import InputError
from fabric_train.report import health
from tests.support.programs import ROOT

_PAGE = re.compile(r"docs/(?P<page>[\w/-]+\.md)(?:#(?P<anchor>[\w-]+))?")


def anchors_of(path: Path) -> set[str]:
    """Return the anchors of a document's headings."""
    text = re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    return {site.slug(heading) for heading in re.findall(r"^#+ (.*)", text, re.MULTILINE)}


def test_every_document_is_a_page_of_the_navigation() -> None:
    assert site.faults_of_navigation() == []


def test_what_is_written_from_the_code_is_up_to_date() -> None:
    assert list(reference.stale_files()) == [], "run python -m docs_build"


@pytest.mark.parametrize("name", figures.FIGURES)
def test_a_figure_shows_what_the_code_computes(name: str) -> None:
    drawn = (figures.FOLDER / f"{name}.svg").read_text(encoding="utf-8")
    assert figures.digest(figures.specification(name)) in drawn, "run python -m docs_build figures"


def test_every_page_that_a_message_names_exists_and_has_the_section() -> None:
    sources = [*ROOT.glob("*.py"), *(ROOT / "fabric_train").rglob("*.py"), *(ROOT / "fabric_train").rglob("*.yaml")]
    named = [(path, found) for path in sources for found in _PAGE.finditer(path.read_text(encoding="utf-8"))]
    wrong = [
        f"{path.relative_to(ROOT)}: {found[0]}"
        for path, found in named
        if not (page := ROOT / "docs" / found["page"]).is_file()
        or (found["anchor"] and found["anchor"] not in anchors_of(page))
    ]
    assert not wrong, "pages or sections that do not exist:\n" + "\n".join(wrong)


def test_each_section_of_the_errors_is_named_by_a_message() -> None:
    page = ROOT / "docs/reference/errors.md"
    sources = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "fabric_train").rglob("*.py"))
    named = set(re.findall(r"docs/reference/errors\.md#([\w-]+)", sources))
    assert named == anchors_of(page) - {"errors"}


def test_healthy_ranges_have_the_sentences_of_the_report() -> None:
    source = inspect.getsource(health)
    rows = re.findall(r"\| ([^|]+) … \| \[([^|]+)\]\(", (ROOT / "docs/reference/healthy_ranges.md").read_text())
    assert len(rows) == source.count("yield Finding(") - 2  # two repeat lines of run.log
    assert [sentence for sentence, page in rows if sentence not in source or f"docs/{page}" not in source] == []


def test_links_of_the_copied_pages_lead_to_pages(tmp_path: Path) -> None:
    site.copy_documents(tmp_path)
    link = re.compile(r"\]\((?!\w+:|#)([^)#\s]+)")
    wrong = [
        f"{path.relative_to(tmp_path)}: {target}"
        for path in tmp_path.rglob("*.md")
        if "source" not in path.relative_to(tmp_path).parts or path.name == "index.md"
        for target in link.findall(path.read_text(encoding="utf-8"))
        if not (path.parent / target).is_file()
    ]
    assert not wrong, "\n".join(wrong)
    assert "# `tests/training/test_resume.py`" in (tmp_path / "source/tests/training/test_resume.py.md").read_text()


@pytest.mark.parametrize(
    "text, fault",
    [("[a](b.md#there)", None), ("[a](c.md)", "page does not exist"), ("[a](b.md#x)", "anchor does not exist")],
)
def test_a_link_that_leads_nowhere_ends_the_build(tmp_path: Path, text: str, fault: str | None) -> None:
    try:
        zensical = site.zensical()
    except InputError as error:
        pytest.skip(str(error))
    (tmp_path / "pages").mkdir()
    (tmp_path / "pages/index.md").write_text(f"# A\n\n{text}\n")
    (tmp_path / "pages/b.md").write_text("# B\n\n## There\n")
    settings = site.read_settings() | {"nav": [{"A": "index.md"}, {"B": "b.md"}]}
    settings["theme"].pop("custom_dir")
    (tmp_path / "site.yaml").write_text(yaml.safe_dump(settings))
    command = [*zensical, "build", "--strict", "--config-file", str(tmp_path / "site.yaml")]
    done = subprocess.run(command, cwd=tmp_path, text=True, capture_output=True, check=False)
    assert bool(done.returncode) == bool(fault)
    assert (fault or "") in done.stdout + done.stderr
