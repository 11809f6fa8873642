"""No write follows a link, and no read waits for a pipe."""

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from fabric_train.cli.errors import InputError
from fabric_train.files.atomic_folder import check_not_held, check_not_taken, complete_folder, hold_lock
from fabric_train.files.regular_file import (
    check_links,
    check_no_links_in,
    check_not_pointer,
    open_regular,
    open_to_write,
    write_atomically,
)
from fabric_train.files.typed_json import read_json


def write(path: Path) -> None:
    with open_to_write(path, "w") as file:
        file.write("ours")


def append(path: Path) -> None:
    with open_to_write(path, "a") as file:
        file.write("ours")


def lock(path: Path) -> None:
    with hold_lock(path, "taken", "wait"):
        pass


WRITERS: list[Callable[[Path], None]] = [write, append, lock, lambda path: write_atomically(path, "ours")]


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("target", ["precious", "nowhere"])
def test_a_link_is_refused_by_name_and_what_it_leads_to_stays(
    tmp_path: Path, writer: Callable[[Path], None], target: str
) -> None:
    (tmp_path / "precious").write_text("theirs")
    link = tmp_path / "link"
    link.symlink_to(tmp_path / target)
    with pytest.raises(InputError) as refused:
        writer(link)
    assert str(refused.value).startswith(f"{link} is a link to {tmp_path / target}, ")
    assert (tmp_path / "precious").read_text() == "theirs"
    assert sorted(os.listdir(tmp_path)) == ["link", "precious"]


@pytest.mark.parametrize("writer", WRITERS)
def test_a_pipe_and_a_folder_are_refused_without_waiting(tmp_path: Path, writer: Callable[[Path], None]) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    for name, kind in (("pipe", "a pipe (FIFO)"), ("folder", "a folder")):
        with pytest.raises(InputError) as refused:
            writer(tmp_path / name)
        assert str(refused.value) == f"{tmp_path / name} is {kind}, not a file; remove it"


def test_a_link_in_place_of_the_temporary_file_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("theirs")
    (tmp_path / f".config.yaml.{os.getpid()}.new").symlink_to("precious")
    write_atomically(tmp_path / "config.yaml", "ours")
    assert (tmp_path / "config.yaml").read_text() == "ours"
    assert (tmp_path / "precious").read_text() == "theirs"
    assert sorted(os.listdir(tmp_path)) == ["config.yaml", "precious"]


def test_links_anywhere_in_a_folder_are_found(tmp_path: Path) -> None:
    check_no_links_in(tmp_path / "nothing-yet")
    (tmp_path / "inner").mkdir()
    check_no_links_in(tmp_path)
    (tmp_path / "inner" / "circle").symlink_to("circle")
    with pytest.raises(InputError, match="circle is a link to circle"):
        check_no_links_in(tmp_path)
    with pytest.raises(InputError, match="is a link"):
        check_not_held(tmp_path / "inner" / "circle", "taken", "wait")


@pytest.mark.parametrize("kind", ["pipe", "socket", "folder", "device"])
def test_only_regular_files_are_read_and_nothing_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.chdir(tmp_path)  # the path of a socket is short
    path = Path("there")
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "device":
        path = Path("/dev/zero")
    else:
        socket.socket(socket.AF_UNIX).bind("there")
    for read in (lambda: open_regular(path, "fetch it"), lambda: read_json(path, dict, "fetch it")):
        with pytest.raises(InputError, match=rf"^{path} is a {kind}.*, not a file; fetch it$"):
            read()
    with pytest.raises(InputError, match="not a file"):
        check_not_pointer(path)


def test_a_pipe_or_a_dead_link_in_a_folder_to_copy_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InputError, match="pipe: not a file"):
        check_links(tmp_path)
    (tmp_path / "pipe").unlink()
    (tmp_path / "circle").symlink_to("circle")
    with pytest.raises(InputError, match="circle: a link to circle, which does not exist"):
        check_links(tmp_path)


@pytest.mark.parametrize("leftover", ["link", "file", "folder"])
def test_leftovers_of_any_kind_are_removed_and_links_not_followed(tmp_path: Path, leftover: str) -> None:
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "precious").touch()
    name = f".out.incomplete-{socket.gethostname()}-999999999"
    if leftover == "link":
        (tmp_path / name).symlink_to("theirs")
    elif leftover == "file":
        (tmp_path / name).touch()
    else:
        (tmp_path / name).mkdir()
    strange = [f".out.incomplete-{socket.gethostname()}-{number}" for number in ("²", "0", "9" * 40)]
    for other in strange:
        (tmp_path / other).touch()
    with complete_folder(tmp_path / "out") as folder:
        (folder / "file").touch()
    assert sorted(os.listdir(tmp_path)) == sorted(["out", "theirs", *strange])
    assert os.listdir(tmp_path / "theirs") == ["precious"]


def test_the_root_of_the_file_system_is_refused_in_one_line() -> None:
    with pytest.raises(InputError, match=r"^/ already exists and is not empty"):
        check_not_taken(Path("/"))
