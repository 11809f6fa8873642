"""Read and write files that other users may have made: never wait for a pipe, follow a link, or trust JSON."""

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

_MAX_JSON_BYTES = 1 << 30  # a manifest lists each file that was read, so it may be large
_MAX_JSON_LEVELS = 100  # libraries read some of the files again, by recursion
_FILE_TYPES = {
    stat.S_IFIFO: "a pipe (FIFO)",
    stat.S_IFSOCK: "a socket",
    stat.S_IFDIR: "a folder",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def open_regular(path: Path, advice: str) -> BinaryIO:
    """Open a file to read bytes.

    Raises:
        InputError: it is a pipe, which would wait, or anything other than a file; ``advice`` ends the message.
        OSError: it cannot be opened.
    """
    _check_regular(path, os.stat(path).st_mode, advice)
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        _check_regular(path, os.fstat(descriptor).st_mode, advice)  # it may have become a pipe meanwhile
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
    temporary.unlink(missing_ok=True)  # left by a killed process with the same number, or a link that somebody planted
    with open_to_write(temporary, "x", newline="") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def check_regular_or_absent(path: Path) -> None:
    """Raise an InputError if ``path`` exists and is not a file, but a link, a pipe, a socket or a folder."""
    check_no_link(path)
    if path.is_fifo() or path.is_socket() or path.is_dir():
        raise InputError(f"{path} is {_FILE_TYPES[stat.S_IFMT(path.lstat().st_mode)]}, not a file; remove it")


def check_no_link(path: Path) -> None:
    """Raise an InputError if a path to write to is a link, which may lead to another of the user's files."""
    if path.is_symlink():
        raise _link_error(path)


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
        raise InputError(f"{path} is {_FILE_TYPES.get(stat.S_IFMT(mode), 'no file')}, not a file; {advice}")


def _open_without_links(path: str, flags: int) -> int:
    try:
        return os.open(path, flags | os.O_NOFOLLOW, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP:  # it became a link after check_no_link
            raise _link_error(Path(path)) from None
        raise


def _link_error(path: Path) -> InputError:
    return InputError(f"{path} is a link to {os.readlink(path)}, and no file is written through a link; remove it")


def check_file_name(name: object, listing: Path) -> str:
    """Return ``name`` if it is the name of a file, and not a path such as ``../x``.

    Args:
        name: A value of the file ``listing``.
        listing: The file that names it, for the message.

    Raises:
        InputError: it is not the name of a file.
    """
    # a text with half of a surrogate pair cannot be a file name
    is_text = isinstance(name, str) and name.encode(errors="ignore").decode() == name
    text = str(name)
    leaves_folder = text in ("", ".", "..") or any(separator in text for separator in "/\\\0")
    if not is_text or leaves_folder:
        raise InputError(f"{listing}: it names {name!r}, outside its folder: damaged or forged; fetch it again")
    return text


def check_links(folder: Path) -> None:
    """Raise an InputError if ``folder`` has a link that leads out of it, or an entry that is no file and no folder."""
    real_folder = os.path.realpath(folder)
    for path in sorted(folder.rglob("*")):
        if path.is_symlink() and not Path(os.path.realpath(path)).is_relative_to(real_folder):
            raise InputError(f"{path}: a link to {os.readlink(path)}, outside its folder; put the file itself there")
        if path.is_file() or path.is_dir():
            continue
        problem = f"a link to {os.readlink(path)}, which is not there" if path.is_symlink() else "not a file"
        raise InputError(f"{path}: {problem}; remove it, or put the file itself there")


def copy_folder(source: Path, target: Path) -> None:
    """Copy the content of ``source`` into ``target``; new files get permissions from the umask.

    Raises:
        InputError: a link in ``source`` leads out of it.
    """
    check_links(source)
    target.mkdir(exist_ok=True)
    for path in sorted(source.rglob("*")):  # a folder comes before its content
        copy = target / path.relative_to(source)
        if path.is_dir():
            copy.mkdir(exist_ok=True)
        else:
            shutil.copyfile(path, copy)


def check_not_pointer(file: Path) -> None:
    """Raise an InputError if ``file`` is a Git LFS pointer or not a regular file, an OSError if it cannot be read."""
    with open_regular(file, "put the file itself there") as opened:
        if opened.read(64).startswith(b"version https://git-lfs"):
            raise InputError(
                f"{file} is a Git LFS pointer and not the file itself; run `git lfs pull` in its repository"
            )


def read_json(file: Path, kind: type[T], advice: str) -> T:
    """Return the content of a JSON file as a value of a type.

    No value is converted, except int to float. An integer may have 64 bits, or 128 in a ``dict``: tokenizers on the hub
    have a ``model_max_length`` of 1e30.

    Args:
        file: The file.
        kind: ``dict``, a dataclass or a pydantic model.
        advice: The end of the error message, which says how to fix a wrong file.

    Raises:
        InputError: in one line: the file is missing, not a regular file, too large, not UTF-8 or not JSON, is nested
            too deeply, has an integer of too many bits, or a value is missing or has another type.
    """
    try:
        with open_regular(file, advice) as opened:
            if os.fstat(opened.fileno()).st_size > _MAX_JSON_BYTES:
                raise InputError(f"{file}: larger than 1 GiB, so it is not what its name says; {advice}")
            content = opened.read()
    except OSError as error:
        raise_reached_limit(error)
        raise InputError(f"{file}: {error.strerror}; {advice}") from None
    try:
        return parse_json(content, kind)
    except ValueError as error:
        raise InputError(f"{file}: damaged ({error}); {advice}") from None


def read_json_lines(file: Path, kind: type[T], advice: str) -> Iterator[T]:
    """Yield each line of a file as ``kind``, or nothing if there is no file.

    A last line without a line break was cut off, so it is left out. Errors are as in :func:`read_json`, with the number
    of the line.
    """
    if not file.exists():
        return
    with open_regular(file, advice) as lines:
        for line_number, line in enumerate(lines, 1):
            is_complete = line.endswith(b"\n")
            try:
                value = parse_json(line, kind)
            except ValueError as error:
                if not is_complete:
                    return
                raise InputError(f"{file}, line {line_number}: damaged ({error}); {advice}") from None
            if is_complete:
                yield value


def parse_json(text: bytes | str, kind: type[T]) -> T:
    """Return JSON as ``kind``, see :func:`read_json`; a ValueError in one line names the path of a wrong value."""
    content = _parse(text, max_bits=128 if kind is dict else 64)
    if kind is dict:
        if not isinstance(content, dict):
            raise ValueError("no JSON object")
        return cast("T", content)
    from pydantic import ValidationError  # a slow import, not needed by tokenization

    try:
        value: T = type_adapter(cast("Hashable", kind)).validate_json(text, strict=True)
    except ValidationError as error:
        first_error = error.errors()[0]
        path = ".".join(str(key) for key in first_error["loc"])
        reason = f"{path}: {first_error['msg']}" if path else first_error["msg"]
        reason = " ".join(reason.split())  # in one line
        raise ValueError(reason if reason.isprintable() else ascii(reason)) from None
    return value


@cache
def type_adapter(kind: "Hashable") -> "TypeAdapter[Any]":
    """Return the validator of a type of :func:`parse_json`; building one takes milliseconds, so it is kept."""
    from pydantic import TypeAdapter

    return TypeAdapter(cast("Any", kind))


def _parse(text: bytes | str, *, max_bits: int) -> Any:
    """Parse JSON; raise a ValueError that says in one line why it is refused."""
    limit = 1 << (max_bits - 1)

    def parse_int(digits: str) -> int:
        # A number of ``max_bits`` bits has fewer decimal digits. Python takes long to convert millions of them.
        if len(digits) <= max_bits:
            number = int(digits)
            if -limit <= number < limit:
                return number
        raise ValueError(f"an integer of more than {max_bits} bits")

    try:
        decoded = text if isinstance(text, str) else text.decode("utf-8")
        content = json.loads(decoded, parse_int=parse_int)
    except UnicodeDecodeError as error:
        raise ValueError(f"byte {error.start} is not UTF-8") from None
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except ValueError as error:
        raise ValueError(first_line(error)) from None
    if _is_deeper(content, _MAX_JSON_LEVELS):
        raise ValueError("nested too deeply")

    # json accepts an escape such as \ud800 alone, which no file can store
    if "\\ud" in decoded.lower():
        try:
            json.dumps(content, ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError:
            raise ValueError("a text with half of a surrogate pair") from None
    return content


def _is_deeper(content: Any, max_levels: int) -> bool:
    """Return whether JSON is nested more deeply than ``max_levels``, level by level and without recursion."""
    values = [content]
    for _ in range(max_levels + 1):
        inner_values: list[Any] = []
        for value in values:
            if isinstance(value, dict):
                inner_values += value.values()
            elif isinstance(value, list):
                inner_values += value
        values = inner_values
    return bool(values)
