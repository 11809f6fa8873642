"""Copy the documents into one folder, where all their links work, and let Zensical build the site from it.

The documents stay readable in the repository: they link to files outside ``docs/``. The copy has each such file as a
page below ``source/``. Headings have the anchors that GitHub gives them.
"""

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from fabric_train.cli.errors import InputError

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
SETTINGS = Path(__file__).with_name("site.yaml")
BUILD = ROOT / "build" / "docs"
OUTSIDE = {
    "README.md": "project/readme.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "CHANGELOG.md": "project/changelog.md",
    "SECURITY.md": "project/security.md",
    "CODE_OF_CONDUCT.md": "project/code_of_conduct.md",
    "benchmarks/README.md": "project/benchmarks.md",
}
"""The documents that are not in ``docs/``, and the pages that they are on the site."""
_LINK = re.compile(r"(?<=\]\()(?!\w+:|#)(?P<target>[^)#\s]+)")
_FENCE = re.compile(r"^( *)(```|~~~).*?^\1\2\s*$", re.MULTILINE | re.DOTALL)
_LANGUAGES = {".py": "python", ".yaml": "yaml", ".json": "json", ".toml": "toml", ".sh": "bash"}


def documents() -> dict[str, Path]:
    """Return the file of each page of the site by the page's path, without the pages below ``source/``."""
    own = {path.relative_to(DOCS).as_posix(): path for path in sorted(DOCS.rglob("*.md"))}
    return own | {page: ROOT / name for name, page in OUTSIDE.items()}


def title_of(path: Path) -> str:
    """Return the first heading of a document."""
    found = re.search(r"^# (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return found[1] if found else path.stem


def read_settings() -> dict[str, Any]:
    """Return what ``site.yaml`` has; a folder in its navigation becomes the pages of the folder, sorted by their names.

    Pages that the navigation has elsewhere are left out of a folder.
    """
    settings = yaml.safe_load(SETTINGS.read_text(encoding="utf-8"))
    named = set(re.findall(r": (\S+\.md)$", SETTINGS.read_text(encoding="utf-8"), re.MULTILINE))

    def expanded(entries: list[Any]) -> Iterator[dict[str, Any]]:
        for entry in entries:
            if isinstance(entry, str):
                pages = [page for page in documents() if Path(page).parent == Path(entry) and page not in named]
                yield from ({title_of(documents()[page]): page} for page in pages)
            else:
                ((title, inner),) = entry.items()
                yield {title: inner if isinstance(inner, str) else list(expanded(inner))}

    return settings | {"nav": [entry for entry in expanded(settings["nav"]) if all(entry.values())]}


def pages_of(navigation: list[Any]) -> Iterator[tuple[str, str, str]]:
    """Yield part, title and path of each page of a navigation, in its order; outside of parts the part is ''."""
    for entry in navigation:
        ((title, inner),) = entry.items()
        if isinstance(inner, str):
            yield "", title, inner
        else:
            yield from ((title, own, page) for _, own, page in pages_of(inner))


def faults_of_navigation() -> list[str]:
    """Return the pages that the navigation lacks or has twice, and its entries that are no pages."""
    listed = [page for _, _, page in pages_of(read_settings()["nav"])]
    there = set(documents())
    return [
        *(f"{page} is not in the navigation of {SETTINGS.name}" for page in sorted(there - set(listed))),
        *(f"{page} is in the navigation of {SETTINGS.name}, but is no page" for page in listed if page not in there),
        *(f"{page} is twice in the navigation of {SETTINGS.name}" for page in sorted(there) if listed.count(page) > 1),
    ]


def slug(heading: str) -> str:
    """Return the anchor that GitHub, and the site, give a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def copy_documents(folder: Path) -> None:
    """Write the pages and what they show into ``folder``; remove pages that are none any more."""
    pages: dict[str, str] = {}
    waiting = list(documents().values())
    while waiting:
        path = waiting.pop()
        page = _page_of(path)
        if page not in pages:
            pages[page], linked = _with_links(page, path) if page in documents() else _source_page(page, path)
            waiting += linked
    for path in DOCS.rglob("*"):
        if path.is_file() and path.suffix != ".md":
            _write(folder / path.relative_to(DOCS), path.read_bytes())
    for page, text in pages.items():
        _write(folder / page, text.encode())
    for path in folder.rglob("*.md"):
        if path.relative_to(folder).as_posix() not in pages:
            path.unlink()


def build() -> Path:
    """Build the site in ``build/docs/site`` and return that folder.

    Beside each page lies its Markdown, ``training.md`` beside ``training.html``. An InputError if a page is not in the
    navigation, a link or an anchor leads nowhere, or Zensical is not installed.
    """
    if faults := faults_of_navigation():
        raise InputError(*faults)
    shutil.rmtree(BUILD, ignore_errors=True)
    _prepare()
    done = subprocess.run([*zensical(), "build", "--strict", "--config-file", str(BUILD / SETTINGS.name)], check=False)
    if done.returncode:
        raise InputError("the site was not built; what is wrong is above")
    for path in (BUILD / "pages").rglob("*.md"):
        _write(BUILD / "site" / path.relative_to(BUILD / "pages"), path.read_bytes())
    return BUILD / "site"


def serve() -> None:
    """Serve the site on this machine until Ctrl-C; a page is built again when its document changes."""
    _prepare()
    server = subprocess.Popen([*zensical(), "serve", "--config-file", str(BUILD / SETTINGS.name)])
    try:
        while server.poll() is None:
            time.sleep(1)
            _prepare()
    finally:
        server.terminate()


def _prepare() -> None:
    copy_documents(BUILD / "pages")
    for path in (SETTINGS.parent / "theme").rglob("*"):
        if path.is_file():
            _write(BUILD / path.relative_to(SETTINGS.parent), path.read_bytes())
    _write(BUILD / SETTINGS.name, yaml.safe_dump(read_settings(), sort_keys=False).encode())


def zensical() -> list[str]:
    """Return the words that start Zensical; an InputError if it is not installed."""
    program = Path(sys.executable).with_name("zensical")
    if not program.exists():
        raise InputError("Zensical is not installed here: make docs installs it (the extra docs, from Python 3.11 on)")
    return [str(program)]


def _write(path: Path, content: bytes) -> None:
    """Write a file, unless it has this content: Zensical builds what has changed."""
    if not path.is_file() or path.read_bytes() != content:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def _page_of(path: Path) -> str:
    """Return the page that shows a file or folder of the project."""
    name = path.relative_to(ROOT).as_posix()
    if path.is_dir():
        return f"source/{name}/index.md"
    if path.is_relative_to(DOCS):
        return path.relative_to(DOCS).as_posix()
    return OUTSIDE.get(name) or f"source/{name}.md"


def _with_links(page: str, path: Path) -> tuple[str, list[Path]]:
    """Return the text of a document with links from its page, and the files outside ``docs/`` that it links to."""
    text = path.read_text(encoding="utf-8")
    fences = [found.span() for found in _FENCE.finditer(text)]
    linked: list[Path] = []

    def link(found: re.Match[str]) -> str:
        target = Path(os.path.normpath(path.parent / found["target"]))
        if any(start <= found.start() < end for start, end in fences) or not target.is_relative_to(ROOT):
            return found["target"]
        if target.is_dir() or (target.exists() and not target.is_relative_to(DOCS)):
            linked.append(target)
        return os.path.relpath(_page_of(target), Path(page).parent)

    return _LINK.sub(link, text), linked


def _source_page(page: str, path: Path) -> tuple[str, list[Path]]:
    """Return a page with the text of a file or the names in a folder, and the files and folders that it links to."""
    name = path.relative_to(ROOT).as_posix()
    head = f"---\nsearch:\n  exclude: true\n---\n\n# `{name}`\n\n"
    if path.is_file():
        text = path.read_text(encoding="utf-8").rstrip("\n")
        return f"{head}````{_LANGUAGES.get(path.suffix, 'text')}\n{text}\n````\n", []
    inside = [one for one in sorted(path.iterdir()) if not one.name.startswith((".", "__"))]
    links = [f"- [{one.name}]({os.path.relpath(_page_of(one), Path(page).parent)})" for one in inside]
    return head + "\n".join(links) + "\n", inside
