"""The files that only GitHub and package indexes read agree with the package, and workflows pin what they run."""

import re
from pathlib import Path

import pytest
import yaml

from fabric_train import __version__
from tests.support.programs import ROOT

WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))


def text_of(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_pin_actions_by_commit_and_name_the_version(path: Path) -> None:
    used_actions = re.findall(r"uses: (.*)", path.read_text(encoding="utf-8"))
    assert used_actions
    pinned = re.compile(r"[\w.-]+/[\w.-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+")
    assert [action for action in used_actions if not pinned.fullmatch(action)] == []


def test_one_action_has_one_commit_in_all_workflows() -> None:
    commits: dict[str, set[str]] = {}
    for path in WORKFLOWS:
        for name, commit in re.findall(r"uses: (\S+)@(\S+)", path.read_text(encoding="utf-8")):
            commits.setdefault(name, set()).add(commit)
    assert [name for name, pins in commits.items() if len(pins) > 1] == []


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_jobs_end_and_begin_with_reading_rights_alone(path: Path) -> None:
    workflow = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert workflow["permissions"] == {"contents": "read"}
    assert [name for name, job in workflow["jobs"].items() if "timeout-minutes" not in job] == []


def test_the_release_is_the_one_in_the_changelog_and_the_citation() -> None:
    released = re.findall(r"^## (\d\S*) - (\d{4}-\d\d-\d\d)$", text_of("CHANGELOG.md"), re.MULTILINE)
    citation = yaml.safe_load(text_of("CITATION.cff"))
    assert released[0] == (__version__, citation["date-released"])
    assert citation["version"] == __version__


def test_every_file_has_the_address_that_the_package_has() -> None:
    match = re.search(r'^Repository = "(\S+)"$', text_of("pyproject.toml"), re.MULTILINE)
    assert match is not None
    address = match[1]
    project = address.rpartition("/")[2]
    files = [
        *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CITATION.cff", "pyproject.toml")),
        *(path for path in (ROOT / ".github").rglob("*") if path.is_file()),
        *(ROOT / "docs").rglob("*.md"),
    ]
    for path in files:
        text = path.read_text(encoding="utf-8")
        others = set(re.findall(rf"https://github\.com/[\w.-]+/{project}\b", text)) - {address}
        assert not others, path
    assert yaml.safe_load(text_of("CITATION.cff"))["repository-code"] == address
