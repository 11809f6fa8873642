"""Download the files that a URL names (https, s3, gs and the other protocols of fsspec), each once."""

import glob
import hashlib
from pathlib import Path
from typing import Any

from fabric_train.cli.errors import InputError, first_line
from fabric_train.cli.redaction import redact
from fabric_train.tokenization.progress import ThrottledLog
from fabric_train.tokenization.reading.files import is_readable, readable_suffixes
from fabric_train.tokenization.reading.listing import is_about_data

PART = ".part"
"""The suffix of a file whose download has not finished."""


def download(url: str, option: str, folder: Path) -> tuple[Path, ...]:
    """Download the file, or the readable files that a URL with a pattern names, into ``folder``.

    Files are downloaded before they are read, so that several processes can read parts of one file, the file can be
    hashed, and a restart does not download it again. A file that is in ``folder`` already is not downloaded.

    Args:
        url: of one file, or with a glob pattern.
        option: the command-line option that gives it, for error messages.
        folder: made if it does not exist.

    Returns:
        The local files.

    Raises:
        InputError: the protocol's package is not installed, there is no readable file, or the download fails.
    """
    from fsspec.core import url_to_fs  # type: ignore[import-untyped]

    try:
        system, path = url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise InputError(f"{option} {url}: {error}; pip install 'fabric-train[remote]' has the packages") from None
    try:
        is_web = url.startswith("http")  # in a web address, ? begins the query and is no pattern
        is_pattern = glob.has_magic(path.partition("?")[0] if is_web else path)
        paths = sorted(system.glob(path)) if is_pattern else [path]
        named = [path for path in paths if not is_pattern or is_about_data(url) or not is_about_data(path)]
        readable = [path for path in named if is_readable(_name(path))]
        if not readable:
            raise InputError(f"{option} {url}: no readable file there; readable are {readable_suffixes()}")
        return tuple(_fetch(system, path, folder) for path in readable)
    except OSError as error:
        raise InputError(f"{option} {url}: cannot be fetched: {_reason(error, url)}") from None


def _reason(error: BaseException, url: str) -> str:
    """Return why a file cannot be fetched: most of fsspec's errors only repeat the address, and their cause says it."""
    reason = first_line(error)
    if not url.endswith(reason):
        return reason
    return "there is no such file" if error.__cause__ is None else _reason(error.__cause__, url)


def _fetch(system: Any, path: str, folder: Path) -> Path:
    details = system.info(path)
    version = f"{path} {details.get('size')} {details.get('ETag') or details.get('mtime') or ''}"
    target = folder / f"{hashlib.sha256(version.encode()).hexdigest()[:16]}-{_name(path).name}"
    if target.exists():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f"{target.name}{PART}")
    log = ThrottledLog()
    with system.open(path, "rb") as remote, part.open("wb") as local:
        while piece := remote.read(1 << 22):
            local.write(piece)
            log(f"fetching {redact(path)}: {local.tell() / 1e6:,.0f} MB")
    part.rename(target)
    return target


def _name(path: str) -> Path:
    """Return a remote path's file name, without a query."""
    return Path(Path(path.split("?")[0]).name)
