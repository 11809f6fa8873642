"""Tokenizing processes: messages of any size in both directions, killed processes, and very many small files."""

import os
import resource
import signal
from pathlib import Path

import pytest

from fabric_train.workers import Worker, WorkerPool
from tests.support.token_datasets import manifest_of, tokenize

NUM_FILES = 3_000
LARGE = 4 << 20  # bytes, more than a pipe holds


def repeat(item: bytes) -> bytes:
    return item * 2


def end(item: bytes) -> bytes:
    if item == b"end":
        os.kill(os.getpid(), signal.SIGTERM)
    return item


def test_large_items_and_large_results_do_not_wait_for_each_other() -> None:
    items = [bytes([number]) * LARGE for number in range(8)]
    with WorkerPool(repeat, 2, lambda item: "") as pool:
        results = {item[0]: len(result) for item, result in filter(None, pool.run(iter(items), 0.1))}
    assert results == dict.fromkeys(range(8), 2 * LARGE)
    worker: Worker[bytes, bytes] = Worker(repeat)
    for item in items:
        worker.send(item)
    assert [len(worker.receive()) for _ in items] == [2 * LARGE] * 8
    worker.kill()


def test_a_killed_process_is_reported_with_its_signal_and_item() -> None:
    items = iter([b"a", b"end", b"b", b"c"])
    fault = "while reading end, a tokenizing process was killed by SIGTERM"
    with WorkerPool(end, 1, bytes.decode) as pool, pytest.raises(ChildProcessError, match=fault):
        list(pool.run(items, 0.1))


@pytest.fixture(scope="module")
def small_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """15 folders of 200 files each, with one line in a file."""
    data = tmp_path_factory.mktemp("small-files")
    for index in range(NUM_FILES):
        folder = data / f"{index // 200:03d}"
        folder.mkdir(exist_ok=True)
        (folder / f"{index:06d}.txt").write_text(f"This is the small document number {index:09d}.\n")
    return data


@pytest.mark.slow
def test_very_many_small_files_are_tokenized(tmp_path: Path, tiny_model_dir: Path, small_files: Path) -> None:
    tokenize(tmp_path / "out", tiny_model_dir, small_files, num_proc=2, max_length=64)
    manifest = manifest_of(tmp_path / "out")
    assert manifest.ledger.documents_kept == NUM_FILES
    assert [file.path for file in manifest.sources[0].files][::1_499] == [
        "000/000000.txt",
        "007/001499.txt",
        "014/002998.txt",
    ]
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 3 << 20  # KiB
