"""Opening a token dataset takes the same time, memory and reads for any number of rows."""

import ctypes
import mmap
import os
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa

from fabric_train.data.token_dataset import open_dataset
from fabric_train.token_dataset.token_folder import open_splits

# batches of 1 MiB
LENGTH = 16
ROWS_PER_BATCH = 1 << 14
NUM_BATCHES = 64


class HoleyFile:
    """A file for pyarrow that leaves holes for the content of batches, which is zeros."""

    closed = False

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb")

    def write(self, content: object) -> int:
        view = memoryview(content)  # type: ignore[arg-type]
        if len(view) > 1 << 16:
            self._file.seek(len(view), 1)
        else:
            self._file.write(view)
        return len(view)

    def tell(self) -> int:
        return self._file.tell()

    def flush(self) -> None:
        pass

    def close(self) -> None:
        self._file.truncate(self._file.tell())
        self._file.close()
        self.closed = True


def make(folder: Path) -> Path:
    """Make a token dataset of 2**20 rows in a file that takes no room; return the file."""
    features = datasets.Features({"input_ids": datasets.List(datasets.Value("int32"), length=LENGTH)})
    row = datasets.Dataset.from_dict({"input_ids": [[0] * LENGTH]}, features=features)
    datasets.DatasetDict(train=row).save_to_disk(folder)
    (file,) = folder.glob("train/*.arrow")
    schema = pa.ipc.open_stream(file.read_bytes()).schema
    tokens = pa.array(np.zeros(ROWS_PER_BATCH * LENGTH, np.int32))
    batch = pa.RecordBatch.from_arrays([pa.FixedSizeListArray.from_arrays(tokens, LENGTH)], schema=schema)
    with pa.ipc.new_stream(pa.PythonFile(HoleyFile(file), "w"), schema) as writer:
        for _ in range(NUM_BATCHES):
            writer.write_batch(batch)
    return file


def bytes_read(file: Path) -> int:
    """Return how much of a file the kernel has read into its page cache."""
    libc = ctypes.CDLL(None)
    size = file.stat().st_size
    libc.mmap.restype = ctypes.c_void_p
    pages = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
    with file.open("rb") as opened:
        begin = libc.mmap(
            None, ctypes.c_size_t(size), mmap.PROT_READ, mmap.MAP_SHARED, opened.fileno(), ctypes.c_long(0)
        )
    assert libc.mincore(ctypes.c_void_p(begin), ctypes.c_size_t(size), pages) == 0
    libc.munmap(ctypes.c_void_p(begin), ctypes.c_size_t(size))
    return sum(page & 1 for page in bytes(pages)) * mmap.PAGESIZE


def test_opening_a_token_dataset_reads_none_of_its_rows(tmp_path: Path) -> None:
    file = make(tmp_path / "tokens")
    size = file.stat().st_size
    with file.open("rb") as opened:
        os.fsync(opened.fileno())
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    assert size > NUM_BATCHES << 20
    dataset = open_dataset(str(tmp_path / "tokens"))
    assert (len(dataset.train), dataset.train.lengths()) == (ROWS_PER_BATCH * NUM_BATCHES, {LENGTH})
    assert (dataset.train.longest(), dataset.train.shortest()) == (LENGTH, LENGTH)
    assert open_splits(tmp_path / "tokens")["train"].num_rows == len(dataset.train)
    assert bytes_read(file) < size / 20
    assert dataset.train.read([ROWS_PER_BATCH * NUM_BATCHES - 1])[0][0].tolist() == [0] * LENGTH
