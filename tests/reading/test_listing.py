"""Files are listed once, through links too; whatever is no file is refused, and so is a file that changes meanwhile."""

import gzip
import json
import os
import shutil
import socket
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import datasets
import pytest

from fabric_train.cli.errors import InputError
from fabric_train.reading.documents import BadRowError
from fabric_train.reading.files import FileReader, is_readable, split_file
from fabric_train.reading.listing import (
    FilePart,
    ListedFiles,
    PackedParts,
    check_unchanged,
    hash_files,
    list_file,
    list_folder,
    sha256,
)
from fabric_train.reading.sources import open_sources
from tests.support.token_datasets import TEXTS, manifest_of, tokenize, write_jsonl
from tests.support.tokenizing import finish, start, wait_for_shards


def names_in(folder: Path, *names: object) -> list[str]:
    """Return the paths of the files of some sources, relative to ``folder``."""
    sources = open_sources([str(name) for name in names], "--dataset", False, folder / "downloads")
    return [str(file.path.relative_to(folder)) for source in sources for file in source.files]


def write(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"text of {name}")


# ------------------------------------------------------------------------------------------------------------ links


def test_linked_folders_are_read_once_and_circles_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "data"
    write(tmp_path, "data/b/1.txt", "data/z.txt", "elsewhere/2.txt", "elsewhere/deep/3.txt")
    (folder / "a").symlink_to("../elsewhere")
    (tmp_path / "elsewhere" / "back").symlink_to("../data")
    (folder / "same").symlink_to("b")
    (folder / "self").symlink_to(".")
    (folder / "linked.txt").symlink_to("../elsewhere/2.txt")
    files = ["data/a/2.txt", "data/a/deep/3.txt", "data/b/1.txt", "data/linked.txt", "data/z.txt"]
    assert names_in(tmp_path, folder) == files
    assert names_in(tmp_path, folder / "**" / "*.txt") == files
    assert names_in(tmp_path, folder / "?" / "**" / "[13].txt") == ["data/a/deep/3.txt", "data/b/1.txt"]
    (source,) = open_sources([str(folder)], "--dataset", False, tmp_path)
    links = ", ".join(f"{folder}/{name}" for name in ("a/back", "same", "self"))
    assert source.notes == (f"skipping links to folders that are already read under another path: {links}",)


def test_a_pattern_with_many_circles_ends(tmp_path: Path) -> None:
    write(tmp_path, "data/1.txt")
    for number in range(8):
        (tmp_path / "data" / f"self-{number}").symlink_to(".")
    assert names_in(tmp_path, tmp_path / "**" / "*.txt") == ["data/1.txt"]


def test_patterns_without_a_folder_are_relative(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "a/1.txt", "2.txt")
    monkeypatch.chdir(tmp_path)
    (source,) = open_sources(["**/*.txt"], "--dataset", False, tmp_path)
    assert [str(file.path) for file in source.files] == ["2.txt", "a/1.txt"]
    with pytest.raises(InputError, match=r"a\*\*: .*'\*\*' can only be an entire path component"):
        open_sources(["a**"], "--dataset", False, tmp_path)


def test_a_folder_is_in_the_order_of_its_paths(tmp_path: Path) -> None:
    write(tmp_path, "data/a.txt", "data/a/1.txt", "data/a-b/2.txt", "data/a/b/3.txt", "data/b.txt")
    found = list_folder(tmp_path / "data", is_readable).files
    assert [file.path for file in found] == sorted((tmp_path / "data").rglob("*.txt"))


def test_a_listed_file_takes_little_memory(tmp_path: Path) -> None:
    write(tmp_path, "data/99.txt")
    tracemalloc.start()
    files = ListedFiles(list_file(f"{tmp_path}/data/99.txt") for _ in range(2_000))
    packed = PackedParts(files, (FilePart(file, file.size, origin=number) for number, file in enumerate(files)))
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert taken / len(files) < 32 + 32 + len(f"{tmp_path}/data/99.txt") + 16
    assert packed[1_999].name == files[-1].name == f"{tmp_path}/data/99.txt"
    assert [packed[number].origin for number in (3, 4)] == [3, 4]


def test_names_that_are_not_utf_8_are_read_and_recorded(tmp_path: Path, tiny_model_dir: Path) -> None:
    (tmp_path / "data").mkdir()
    write_jsonl(tmp_path / "data" / "a.jsonl")
    shutil.copy(tmp_path / "data" / "a.jsonl", tmp_path / "data" / os.fsdecode(b"caf\xe9.jsonl"))
    tokenize(tmp_path / "out", tiny_model_dir, tmp_path / "data")
    assert [file.path for file in manifest_of(tmp_path / "out").sources[0].files] == ["a.jsonl", "caf\\xe9.jsonl"]


# ------------------------------------------------------------------------------------------------------- not a file


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))


def make_saved_dataset_with_a_pipe(path: Path) -> None:
    datasets.Dataset.from_dict({"text": TEXTS}).save_to_disk(path)
    (path / "dataset_info.json").unlink()
    os.mkfifo(path / "dataset_info.json")


NO_FILES: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "a pipe": ("a.jsonl", os.mkfifo, "a.jsonl: a pipe, not a file; "),
    "a pipe in a folder": ("data/b.txt", os.mkfifo, "data/b.txt: a pipe, not a file; "),
    "a socket": ("a.txt", make_socket, "a.txt: a socket, not a file; "),
    "a link to a device": ("a.txt", lambda path: path.symlink_to("/dev/zero"), "a.txt: a device, not a file; "),
    "a link to nowhere": ("a.csv", lambda path: path.symlink_to("x"), "a.csv: a link to x, which does not exist; "),
    "a link to no folder": ("data/b", lambda path: path.symlink_to("/x"), "data/b: a link to /x, which does not "),
    "a pipe in a saved dataset": ("data", make_saved_dataset_with_a_pipe, "dataset_info.json: a pipe, not a file; "),
}


@pytest.mark.parametrize("case", NO_FILES)
def test_what_is_no_file_is_refused_before_it_is_opened(tmp_path: Path, case: str) -> None:
    name, make, fault = NO_FILES[case]
    (tmp_path / name).parent.mkdir(exist_ok=True)
    make(tmp_path / name)
    sources = [tmp_path / Path(name).parts[0]]
    if case != "a pipe in a saved dataset":  # a pattern names the files of such a folder, and not the dataset
        sources.append(tmp_path / "**" / "*")
    for source in sources:
        with pytest.raises(InputError) as caught:
            names_in(tmp_path, source)
        assert fault in str(caught.value)
        assert len(caught.value.faults) == 1


def test_other_kinds_of_files_are_only_counted(tmp_path: Path) -> None:
    write(tmp_path, "data/1.txt", "data/2.pdf")
    make_socket(tmp_path / "data" / "s.sock")
    (source,) = open_sources([str(tmp_path / "data")], "--dataset", False, tmp_path)
    assert source.notes == ("skipping 2 files of other kinds (1 .pdf, 1 .sock)",)


def test_readme_and_licence_of_a_folder_are_no_documents(tmp_path: Path) -> None:
    about = ["data/README.md", "data/LICENSE-MIT.txt", "data/dataset_infos.json", "data/deep/readme.md.gz"]
    documents = ["data/1.md", "data/deep/readme.jsonl", "data/license_plates.txt"]
    write(tmp_path, *about, *documents)
    assert names_in(tmp_path, tmp_path / "data") == names_in(tmp_path, tmp_path / "**" / "*") == sorted(documents)
    assert names_in(tmp_path, tmp_path / "**" / "README*") == ["data/README.md"]
    assert names_in(tmp_path, tmp_path / "data" / "LICENSE-MIT.txt") == ["data/LICENSE-MIT.txt"]
    (source,) = open_sources([str(tmp_path / "data")], "--dataset", False, tmp_path)
    (note,) = source.notes
    assert (
        "(1 LICENSE-MIT.txt, 1 README.md, 1 dataset_infos.json, 1 readme.md.gz); to read a LICENSE-MIT.txt, name it in"
        in note
    )


def test_output_of_another_program_is_refused(tmp_path: Path) -> None:
    read, written = os.pipe()
    try:
        with pytest.raises(InputError, match="a pipe, not a file; write its content to a file, "):
            names_in(tmp_path, f"/dev/fd/{read}")
    finally:
        os.close(read)
        os.close(written)


# ------------------------------------------------------------------------------------------- files that change


def rewrite(file: Path, keep_time: bool) -> None:
    """Write as many other bytes into a file, and put its time of modification back if asked."""
    before = file.stat()
    file.write_bytes(file.read_bytes().replace(b"says", b"said"))
    if keep_time:
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize("keep_time", [False, True])
def test_a_rewritten_file_is_not_what_was_listed(tmp_path: Path, keep_time: bool) -> None:
    listed = list_file(write_jsonl(tmp_path / "a.jsonl"))
    (digest,) = hash_files([listed])
    assert digest.hex() == sha256(listed.path)
    check_unchanged(listed, digest)
    time.sleep(0.02)  # the clock of a file system has ticks
    rewrite(listed.path, keep_time)
    with pytest.raises(InputError, match=r"a\.jsonl: changed while it was being read"):
        check_unchanged(listed, digest)
    with pytest.raises(InputError, match=r"a\.jsonl: changed while it was being read"):
        list(hash_files([listed]))
    listed.path.unlink()
    with pytest.raises(InputError, match=r"a\.jsonl: removed while it was being read"):
        check_unchanged(listed, digest)


def test_other_permissions_and_links_are_no_change(tmp_path: Path) -> None:
    listed = list_file(write_jsonl(tmp_path / "a.jsonl"))
    (digest,) = hash_files([listed])
    time.sleep(0.02)
    listed.path.chmod(0o400)
    os.link(listed.path, tmp_path / "b.jsonl")
    assert list_file(listed.path) != listed
    check_unchanged(listed, digest)


SMALL_FILES = {
    "a.txt": b"some text\n",
    "a.jsonl": b'{"text": "some text"}\n',
    "a.json": b'[{"text": "some text"}]',
    "a.csv": b"text\nsome text\n",
    "a.jsonl.gz": gzip.compress(b'{"text": "some text"}\n'),
    "empty.txt": b"",
}


@pytest.mark.parametrize("name", SMALL_FILES)
def test_a_small_file_is_opened_once_to_be_read_and_hashed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (tmp_path / name).write_bytes(SMALL_FILES[name])
    (part,) = split_file(list_file(tmp_path / name), 1 << 20)
    names: list[str] = []
    open_file = os.open

    def note_name(path: str, flags: int) -> int:
        names.append(path)
        return open_file(path, flags)

    with monkeypatch.context() as patched:
        patched.setattr(os, "open", note_name)
        patched.setattr("builtins.open", None)
        reader = FileReader(part, ("text",))
        texts = [row["text"].strip() for _, row in reader if not isinstance(row, BadRowError)]
    assert (names, texts) == ([part.name], ["some text" if SMALL_FILES[name] else ""])
    assert reader.sha256().hex() == sha256(part.name)
    time.sleep(0.02)
    rewrite(tmp_path / name, keep_time=True)
    assert list(reader)
    with pytest.raises(InputError, match=f"{name}: changed while it was being read"):
        reader.sha256()


@pytest.mark.parametrize("change", ["size", "time", "content"])
def test_a_file_that_changes_while_it_is_tokenized_ends_the_run(
    tmp_path: Path, tiny_model_dir: Path, change: str
) -> None:
    first = write_jsonl(tmp_path / "a.jsonl")
    second = write_jsonl(tmp_path / "b.jsonl", TEXTS * 1_200)
    process = start(tmp_path, tiny_model_dir, [first, second], "--num_proc", 1)
    wait_for_shards(process, tmp_path / "new", 1)  # the shard of the first file
    if change == "size":
        with first.open("a") as file:
            file.write(json.dumps({"text": "one more"}) + "\n")
    else:
        rewrite(first, keep_time=change == "content")
    code, stderr = finish(process)
    fault = f"error: {first}: changed while it was being read; start again when nothing is writing to it"
    assert (code, stderr.splitlines()[-1]) == (2, fault)
    assert not (tmp_path / "new" / "out").exists()


def test_a_file_that_is_cut_while_it_is_read_is_not_called_damaged(tmp_path: Path, tiny_model_dir: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", TEXTS * 2_000)
    process = start(tmp_path, tiny_model_dir, [source], "--num_proc", 1)
    wait_for_shards(process, tmp_path / "new", 1)
    os.truncate(source, source.stat().st_size - 20)
    code, stderr = finish(process)
    assert (code, stderr.splitlines()[-1].split(";")[0]) == (2, f"error: {source}: changed while it was being read")
