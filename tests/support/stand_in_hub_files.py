"""The files of a commit as the hub lists them: hashes, entries of files and folders, trees."""

import hashlib
from collections.abc import Mapping

Files = Mapping[str, bytes]
"""The content of each file of a commit, by its path."""
Entry = dict[str, object]


def git_hash(content: bytes) -> str:
    """Return the hash that git gives a file: of its length and its content."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def sha256(content: bytes) -> str:
    """Return the hash that names a large file."""
    return hashlib.sha256(content).hexdigest()


def list_paths(files: Files, paths: list[str]) -> list[Entry]:
    """Return the entries of those paths that are files or folders of the commit."""
    entries = []
    for path in paths:
        if path in files:
            content = files[path]
            entries.append({"type": "file", "path": path, "size": len(content), "oid": git_hash(content)})
        elif any(file.startswith(f"{path}/") for file in files):
            entries.append({"type": "directory", "path": path, "oid": git_hash(path.encode())})
    return entries


def list_tree(files: Files, folder: str, *, recursive: bool) -> list[Entry]:
    """Return the entries in a folder, "" for the root; ``recursive`` adds those in the folders there."""
    prefix = f"{folder}/" if folder else ""
    names: set[str] = set()
    for file in files:
        if not file.startswith(prefix):
            continue
        # the file and each folder on the way to it: a, a/b and a/b/c for a/b/c
        components = file.removeprefix(prefix).split("/")
        depth = len(components) if recursive else 1
        names.update("/".join(components[:length]) for length in range(1, depth + 1))
    return list_paths(files, [prefix + name for name in sorted(names)])
