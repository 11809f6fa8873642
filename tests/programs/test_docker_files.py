"""What the Dockerfile copies is in the build context: .dockerignore lets it through."""

import fnmatch
import re

from tests.support.programs import ROOT


def copied() -> list[str]:
    """Return the sources of every COPY of the Dockerfile."""
    text = (ROOT / "docker" / "Dockerfile").read_text(encoding="utf-8")
    lines = re.findall(r"^COPY (.*)$", text, re.MULTILINE)
    return [word for line in lines for word in line.split()[:-1] if not word.startswith("--")]


def is_let_through(name: str) -> bool:
    """Whether .dockerignore keeps a file: its last pattern that matches decides."""
    kept = True
    for pattern in (ROOT / ".dockerignore").read_text(encoding="utf-8").split():
        if fnmatch.fnmatch(name, pattern.removeprefix("!")):
            kept = pattern.startswith("!")
    return kept


def test_every_file_that_is_copied_is_in_the_build_context() -> None:
    assert len(copied()) > 5
    assert [name for name in copied() if not is_let_through(name) or not (ROOT / name).exists()] == []


def test_nothing_else_is_in_the_build_context() -> None:
    """A model, a data set or a token in the project's folder does not get into an image."""
    others = {path.name for path in ROOT.iterdir()} - set(copied())
    assert [name for name in others if is_let_through(name)] == []
