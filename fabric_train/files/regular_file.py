"""Files of others: reading never waits for a pipe, writing never follows a link, JSON may be damaged or forged."""

import errno
import json
import os
import shutil
import stat
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Literal, TextIO, TypeVar, cast

from fabric_train.cli.errors import InputError, first_line, raise_reached_limit

if TYPE_CHECKING:
    from collections.abc import Hashable

    from pydantic import TypeAdapter

T = TypeVar("T")

_MOST_BYTES = 1 << 30  # of JSON: a manifest lists each file that was read
_MOST_LEVELS = 100  # libraries read some of the files again, and walk through them by recursion
_KINDS = {
    stat.S_IFIFO: "a pipe (FIFO)",
    stat.S_IFSOCK: "a socket",
    stat.S_IFDIR: "a folder",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def open_regular(path: Path, advice: str) -> BinaryIO:
    """Open a file to read bytes; InputError, with ``advice``, for a pipe, whose opening would wait, and the like."""
    _check_regular(path, os.stat(path).st_mode, advice)
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # it may have become a pipe meanwhile
    try:
        _check_regular(path, os.fstat(descriptor).st_mode, advice)
    except InputError:
        os.close(descriptor)
        raise
    return os.fdopen(descriptor, "rb")


def open_to_write(
    path: Path, mode: Literal["w", "x", "a", "a+", "r+"], newline: str | None = None, errors: str | None = None
) -> TextIO:
    """Open a UTF-8 file for writing as ``open`` does; InputError if it is a link, a pipe, a socket or a folder."""
    check_regular_or_absent(path)
    return open(path, mode, encoding="utf-8", errors=errors, newline=newline, opener=_open_without_links)


def write_atomically(path: Path, text: str) -> None:
    """Write a file so that it is complete or unchanged after any failure; errors as in ``open_to_write``."""
    check_regular_or_absent(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.new")
    temporary.unlink(missing_ok=True)  # of a killed process that had the same number, or a planted link
    with open_to_write(temporary, "x", newline="") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def check_regular_or_absent(path: Path) -> None:
    """Raise an InputError if ``path`` exists and is no file: a link, a pipe, a socket or a folder."""
    check_no_link(path)
    if path.is_fifo() or path.is_socket() or path.is_dir():
        raise InputError(f"{path} is {_KINDS[stat.S_IFMT(path.lstat().st_mode)]}, not a file; remove it")


def check_no_link(path: Path) -> None:
    """Raise an InputError if a place to write to is a link, which may lead to something else of the user's."""
    if path.is_symlink():
        raise _is_link(path)


def check_no_links_in(folder: Path) -> None:
    """Raise an InputError if a folder, which need not exist, or anything below it is a link."""
    check_no_link(folder)
    for path in folder.rglob("*"):
        check_no_link(path)


def check_no_pipes(folder: Path) -> None:
    """Raise an InputError if a folder has a pipe or a socket, which a library would open and wait for."""
    for path in sorted(folder.iterdir()):
        if path.is_fifo() or path.is_socket():
            _check_regular(path, path.stat().st_mode, "remove it")


def _check_regular(path: Path, mode: int, advice: str) -> None:
    if not stat.S_ISREG(mode):
        raise InputError(f"{path} is {_KINDS.get(stat.S_IFMT(mode), 'no file')}, not a file; {advice}")


def _open_without_links(path: str, flags: int) -> int:
    try:
        return os.open(path, flags | os.O_NOFOLLOW, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP:  # it became a link after check_no_link
            raise _is_link(Path(path)) from None
        raise


def _is_link(path: Path) -> InputError:
    return InputError(f"{path} is a link to {os.readlink(path)}, and no file is written through a link; remove it")


def check_file_name(name: object, listing: Path) -> str:
    """Return ``name``, which is in the file ``listing``, or raise an InputError if it is a path such as ``../x``."""
    is_text = isinstance(name, str) and name.encode(errors="ignore").decode() == name  # no half of a surrogate pair
    if not is_text or name in ("", ".", "..") or not set(str(name)).isdisjoint("/\\\0"):
        raise InputError(f"{listing}: it names {name!r}, outside its folder: damaged or forged; fetch it again")
    return str(name)


def check_links(folder: Path) -> None:
    """Raise an InputError if a link in ``folder`` leads out of it, or if something in it is no file and no folder."""
    inside = os.path.realpath(folder)
    for path in sorted(folder.rglob("*")):
        if path.is_symlink() and not Path(os.path.realpath(path)).is_relative_to(inside):
            raise InputError(f"{path}: a link to {os.readlink(path)}, outside its folder; put the file itself there")
        if not (path.is_file() or path.is_dir()):
            kind = f"a link to {os.readlink(path)}, which is not there" if path.is_symlink() else "not a file"
            raise InputError(f"{path}: {kind}; remove it, or put the file itself there")


def copy_folder(source: Path, target: Path) -> None:
    """Copy ``source``, without links out of it, into ``target``; new files get permissions from the umask."""
    check_links(source)
    target.mkdir(exist_ok=True)
    for path in sorted(source.rglob("*")):  # a folder comes before its content
        place = target / path.relative_to(source)
        if path.is_dir():
            place.mkdir(exist_ok=True)
        else:
            shutil.copyfile(path, place)


def check_not_pointer(file: Path) -> None:
    """Raise an InputError if ``file`` is a Git LFS pointer, or no regular file; an OSError if it cannot be read."""
    with open_regular(file, "put the file itself there") as opened:
        if opened.read(64).startswith(b"version https://git-lfs"):
            raise InputError(
                f"{file} is a Git LFS pointer and not the file itself; run `git lfs pull` in its repository"
            )


def read_json(file: Path, kind: type[T], advice: str) -> T:
    """Return the content of a JSON file as ``kind``: ``dict``, a dataclass or a pydantic model.

    No value is converted, except int to float. ``advice`` ends the error message: how to fix a wrong file. InputError,
    in one line: the file is missing, no regular file, too large, not UTF-8 or not JSON, is nested too deeply, has an
    integer of more than 64 bits (128 in a ``dict``: tokenizers of the hub have a ``model_max_length`` of 1e30), or a
    value is missing or has another type.
    """
    try:
        with open_regular(file, advice) as opened:
            if os.fstat(opened.fileno()).st_size > _MOST_BYTES:
                raise InputError(f"{file}: larger than 1 GiB, so it is not what its name says; {advice}")
            raw = opened.read()
    except OSError as error:
        raise_reached_limit(error)
        raise InputError(f"{file}: {error.strerror}; {advice}") from None
    try:
        return parse_json(raw, kind)
    except ValueError as error:
        raise InputError(f"{file}: damaged ({error}); {advice}") from None


def read_json_lines(file: Path, kind: type[T], advice: str) -> Iterator[T]:
    """Yield each line of a file as ``kind``, without a last one that is cut off; nothing without a file.

    Errors as in :func:`read_json`, with the number of the line.
    """
    if not file.exists():
        return
    with open_regular(file, advice) as lines:
        for number, line in enumerate(lines, 1):
            try:
                parsed = parse_json(line, kind)
            except ValueError as error:
                if not line.endswith(b"\n"):
                    return
                raise InputError(f"{file}, line {number}: damaged ({error}); {advice}") from None
            if line.endswith(b"\n"):
                yield parsed


def parse_json(raw: bytes | str, kind: type[T]) -> T:
    """Return JSON as ``kind``, see :func:`read_json`; ValueError, in one line, with the path of a wrong value."""
    content = _parse(raw, 128 if kind is dict else 64)
    if kind is dict:
        if not isinstance(content, dict):
            raise ValueError("no JSON object")
        return cast("T", content)
    from pydantic import ValidationError  # a slow import, not needed by tokenization

    try:
        parsed: T = type_adapter(cast("Hashable", kind)).validate_json(raw, strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        path = ".".join(map(str, first["loc"]))
        reason = " ".join((f"{path}: {first['msg']}" if path else first["msg"]).split())
        raise ValueError(reason if reason.isprintable() else ascii(reason)) from None
    return parsed


@cache
def type_adapter(kind: "Hashable") -> "TypeAdapter[Any]":
    """Return what validates a type of :func:`parse_json`; to build it takes milliseconds, at each call the same."""
    from pydantic import TypeAdapter

    return TypeAdapter(cast("Any", kind))


def _parse(raw: bytes | str, most_bits: int) -> Any:
    """Parse JSON; all reasons to refuse it are in the line of a ValueError."""

    def parse_int(digits: str) -> int:
        half = 1 << (most_bits - 1)
        if len(digits) > most_bits or not -half <= (number := int(digits)) < half:
            raise ValueError(f"an integer of more than {most_bits} bits")
        return number

    try:
        text = raw if isinstance(raw, str) else raw.decode("utf-8")
        content = json.loads(text, parse_int=parse_int)
    except UnicodeDecodeError as error:
        raise ValueError(f"byte {error.start} is not UTF-8") from None
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except ValueError as error:
        raise ValueError(first_line(error)) from None
    if _is_deeper(content, _MOST_LEVELS):
        raise ValueError("nested too deeply")
    if "\\ud" in text.lower():
        try:
            json.dumps(content, ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError:
            raise ValueError("a text with half of a surrogate pair") from None
    return content


def _is_deeper(content: Any, most_levels: int) -> bool:
    level = [content]
    for _ in range(most_levels + 1):
        inner = (part for part in level if isinstance(part, dict | list))
        level = [part for one in inner for part in (one.values() if isinstance(one, dict) else one)]
    return bool(level)
