"""A folder written with complete_folder is complete or absent."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from fabric_train.cli.errors import InputError
from fabric_train.files.atomic_folder import check_not_held, complete_folder, hold_lock


def test_the_folder_has_its_name_only_after_the_block(tmp_path: Path) -> None:
    target = tmp_path / "new" / "run"
    with complete_folder(target) as temporary:
        (temporary / "inner").mkdir()
        (temporary / "inner" / "file").write_text("whole")
        assert not target.exists()
        assert temporary.parent == target.parent
        assert temporary.name.startswith(".")
    assert (target / "inner" / "file").read_text() == "whole"
    assert os.listdir(target.parent) == ["run"]


def test_links_and_pipes_are_kept_as_they_are(tmp_path: Path) -> None:
    """As in the file system of a container's image."""
    with complete_folder(tmp_path / "image") as temporary:
        (temporary / "nowhere").symlink_to("/run/systemd/resolve/not-there.conf")
        (temporary / "folder").symlink_to(tmp_path)
        os.mkfifo(temporary / "pipe")
        writer = os.open(temporary / "pipe", os.O_RDWR)  # without it, opening the pipe would wait
    os.close(writer)
    assert os.readlink(tmp_path / "image" / "nowhere") == "/run/systemd/resolve/not-there.conf"
    assert sorted(os.listdir(tmp_path / "image")) == ["folder", "nowhere", "pipe"]


def test_an_empty_folder_may_be_replaced(tmp_path: Path) -> None:
    target = tmp_path / "run"
    target.mkdir()
    with complete_folder(target) as temporary:
        (temporary / "file").touch()
    assert os.listdir(target) == ["file"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_a_failure_of_any_kind_leaves_nothing_behind(tmp_path: Path, error: type[BaseException]) -> None:
    def fail() -> None:
        with complete_folder(tmp_path / "new" / "run") as temporary:
            (temporary / "file").touch()
            raise error

    with pytest.raises(error):
        fail()
    assert os.listdir(tmp_path) == []


def test_a_folder_with_content_or_a_file_is_refused_and_kept(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "precious").write_text("kept")
    (tmp_path / "file").write_text("kept")
    for name in ("folder", "file"):
        with pytest.raises(InputError, match="already exists"), complete_folder(tmp_path / name):
            raise AssertionError("the block must not be entered")
    assert (tmp_path / "folder" / "precious").read_text() == (tmp_path / "file").read_text() == "kept"


def test_a_second_writer_is_refused_before_its_work(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path\n"
        "from fabric_train.files.atomic_folder import complete_folder\n"
        "with complete_folder(Path(sys.argv[1])) as folder:\n"
        "    print('entered', flush=True); sys.stdin.read(); (folder / 'file').touch()"
    )
    target = tmp_path / "run"
    command = [sys.executable, "-c", program, str(target)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == b"entered\n"
        with pytest.raises(
            InputError, match=rf"another process is writing to it \(process {first.pid} on .*choose another"
        ):
            complete_folder(target).__enter__()
        first.communicate(b"")
    assert os.listdir(tmp_path) == ["run"]
    assert os.listdir(target) == ["file"]


def test_a_parent_that_cannot_be_written_to_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match=r"cannot write to .*file"), complete_folder(tmp_path / "file" / "run"):
        raise AssertionError("the block must not be entered")


def test_only_folders_of_killed_processes_are_removed(tmp_path: Path) -> None:
    program = (
        "import os, signal, sys; from pathlib import Path\n"
        "from fabric_train.files.atomic_folder import complete_folder\n"
        "with complete_folder(Path(sys.argv[1])) as folder:\n"
        "    (folder / 'half').touch(); os.kill(os.getpid(), signal.SIGKILL)"
    )
    target = tmp_path / "run"
    killed = subprocess.run([sys.executable, "-c", program, str(target)], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert len(os.listdir(tmp_path)) == 2  # the folder and its lock
    assert not target.exists()
    of_a_living_process = tmp_path / f".run.incomplete-{socket.gethostname()}-{os.getppid()}"
    of_a_living_process.mkdir()
    with complete_folder(target) as temporary:
        (temporary / "file").touch()
    assert sorted(os.listdir(tmp_path)) == sorted([of_a_living_process.name, "run"])


def test_a_lock_ends_with_its_holder_even_if_a_process_that_it_forked_goes_on(tmp_path: Path) -> None:
    """As data workers do for a moment after their rank was killed."""
    lock, (told, tells) = tmp_path / "lock", os.pipe()
    holder = os.fork()
    if not holder:
        with hold_lock(lock, "taken", "wait"):
            worker = os.fork()
            if not worker:
                os.write(tells, os.getpid().to_bytes(8, "little"))
            signal.pause()
            os._exit(0)
    worker = int.from_bytes(os.read(told, 8), "little")
    with pytest.raises(InputError, match=rf"^taken \(process {holder} on \S+\); wait$"):
        check_not_held(lock, "taken", "wait")
    try:
        os.kill(holder, signal.SIGKILL)
        os.waitpid(holder, 0)
        os.kill(worker, 0)
        check_not_held(lock, "taken", "wait")
    finally:
        os.kill(worker, signal.SIGKILL)
