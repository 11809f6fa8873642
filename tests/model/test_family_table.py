"""The tables of docs/models.md list every family of transformers, with what the program does with it."""

import re
from pathlib import Path

import pytest
import transformers

from tests.family_table import PAGE, row_of, try_family
from tests.support.programs import ROOT
from tests.support.small_families import FAMILIES

_FOUND = re.search(r"families of transformers ([\d.]+), several", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
VERSION = _FOUND[1] if _FOUND else ""
"""The release of transformers that the page is about."""
with_that_version = pytest.mark.skipif(transformers.__version__ != VERSION, reason=f"the page is of {VERSION}")
QUICK = ("llama", "gpt2", "lfm2", "electra", "llama4")
"""One family that packs, one without adapters, one that leaks, one that is refused, and one with several parts."""
HEADINGS = {
    "packed": "## Documents share rows",
    "apart": "## One document in a row",
    "refused": "## Refused",
    "untried": "## Not tried",
}


@with_that_version
def test_the_page_lists_every_family_once() -> None:
    _, _, tables = PAGE.read_text(encoding="utf-8").partition("## Documents share rows")
    listed = re.findall(r"^\| `([\w.-]+)` ", tables, re.MULTILINE)
    _, _, lists = tables.partition("## Refused")
    listed += re.findall(r"`([\w.-]+)`", lists)
    assert sorted(listed) == sorted(FAMILIES), "run python -m tests.family_table --write"


def test_the_page_is_that_of_the_pinned_transformers() -> None:
    pins = re.findall(r"^transformers==([\d.]+)", (ROOT / "requirements.txt").read_text(), re.MULTILINE)
    assert VERSION in pins


@with_that_version
@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.matrix) for name in sorted(FAMILIES)]
)
def test_the_page_says_what_the_program_does_with_a_family(name: str, tmp_path: Path) -> None:
    family = try_family(name, tmp_path)
    _, _, section = PAGE.read_text(encoding="utf-8").partition(f"{HEADINGS[family.outcome]}\n")
    section, _, _ = section.partition("\n## ")
    if family.outcome in ("refused", "untried"):
        assert f"`{name}`" in section
        return
    reason = f" {family.reason} |" if family.reason else ""
    assert f"{row_of(family)}{reason}\n" in section
