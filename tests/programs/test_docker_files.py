"""The build context has what the Dockerfile copies, and the image what the programs need there."""

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


def test_the_image_can_compile_and_reach_other_machines() -> None:
    """Triton needs a compiler and Python.h; NCCL needs libibverbs for InfiniBand."""
    text = (ROOT / "docker" / "Dockerfile").read_text(encoding="utf-8")
    installed = re.search(r"apt-get install .*$", text, re.MULTILINE)
    assert installed is not None
    assert {"g++", "python3-dev", "libibverbs1", "ibverbs-providers"} <= set(installed.group().split())


def test_the_images_user_can_write_to_every_cache() -> None:
    text = (ROOT / "docker" / "Dockerfile").read_text(encoding="utf-8")
    caches = re.findall(r"(?:HF_HOME|[A-Z]+_CACHE_DIR)=(\S+)", text)
    owned = re.search(r"install -d -o 1000 -g 1000 (.*)$", text, re.MULTILINE)
    assert owned is not None
    assert len(caches) == 3
    assert [cache for cache in caches if not any(cache.startswith(folder) for folder in owned.group(1).split())] == []
