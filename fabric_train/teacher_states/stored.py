"""Open a folder of stored values of a teacher, which may have several shards, for training."""

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import load_file, save

from fabric_train.cli.errors import InputError
from fabric_train.model.divergence_loss import TeacherHead
from fabric_train.teacher_states.blocks import BlockReader
from fabric_train.teacher_states.record import (
    FILE_NAME,
    HEAD,
    TEACH_AGAIN,
    StatesRecord,
    StatesShard,
    find_difference,
    list_blocks,
    read_record,
)

_MOST_NAMED = 5


@dataclass(frozen=True)
class StoredStates:
    """All values of a teacher for a token dataset."""

    folder: Path
    record: StatesRecord
    """What all shards have in common."""
    shard_dirs: dict[str, Path]
    """The folder of each file, by the file's path in it."""

    def reader(self, split: str) -> BlockReader:
        """Return the reader of a split's rows."""
        rows_per_block = self.record.content.rows_per_block
        files = []
        for block in list_blocks(self.record.splits, rows_per_block):
            if block.split == split:
                files.append(self.shard_dirs[block.file_name] / block.file_name)
        return BlockReader(tuple(files), rows_per_block)

    def read_head(self, device: torch.device) -> TeacherHead:
        """Read the teacher's head, which only folders of hidden states have."""
        tensors = load_file(self.shard_dirs[HEAD] / HEAD, str(device))
        return TeacherHead(tensors["weight"], tensors.get("bias"))

    def head_bytes(self) -> int:
        """Return the size of the teacher's head; 0 if the values are those of the likeliest tokens."""
        if self.record.content.top_k is not None:
            return 0
        return (self.shard_dirs[HEAD] / HEAD).stat().st_size


def write_head(folder: Path, head: TeacherHead) -> None:
    """Write the teacher's head."""
    tensors = {"weight": head.weight.contiguous().cpu()}
    if head.bias is not None:
        tensors["bias"] = head.bias.cpu()
    (folder / HEAD).write_bytes(save(tensors))  # not save_file, which hides a full disk in an error of its own


def open_states(folder: Path) -> StoredStates:
    """Open stored values, and check that all shards and all their files exist and belong together.

    Raises:
        InputError: Something is missing or damaged, or shards have other contents.
    """
    shard_dirs = _list_shards(folder)
    records = [read_record(shard_dir) for shard_dir in shard_dirs]
    first = records[0]
    _check_same_content(shard_dirs, records)
    folders_of_files: dict[str, Path] = {}
    for shard_dir, record in zip(shard_dirs, records, strict=True):
        for name, num_bytes in record.files.items():
            _check_size(shard_dir / name, num_bytes)
            folders_of_files[name] = shard_dir

    # every block, and the head of hidden states
    expected = [block.file_name for block in list_blocks(first.splits, first.content.rows_per_block)]
    if first.content.top_k is None:
        expected.append(HEAD)
    for name in expected:
        if name not in folders_of_files:
            raise InputError(f"{folder}: it lacks {name}, so it is damaged; {TEACH_AGAIN}")
    return StoredStates(folder, replace(first, shard=StatesShard(), files={}), folders_of_files)


def _list_shards(folder: Path) -> list[Path]:
    """Return the folders of all shards; the folder itself if it was written without ``--shard``."""
    if (folder / FILE_NAME).is_file():
        return [folder]
    shard_dirs = sorted(folder.glob("shard-*-of-*"))
    if not shard_dirs:
        raise InputError(f"{folder}: it has no stored values of a teacher; write them with fabric-train teach")
    count = read_record(shard_dirs[0]).shard.count
    missing = []
    for number in range(1, count + 1):
        if not (folder / StatesShard(number, count).folder_name / FILE_NAME).is_file():
            missing.append(f"{number}/{count}")
    if missing:
        shards = ", ".join(missing[:_MOST_NAMED])
        raise InputError(
            f"{folder}: {len(missing)} of {count} shards are missing; run fabric-train teach with --shard {shards}"
        )
    return [folder / StatesShard(number, count).folder_name for number in range(1, count + 1)]


def _check_same_content(shard_dirs: list[Path], records: list[StatesRecord]) -> None:
    """Raise an InputError if a shard's values were computed otherwise than those of the first shard."""
    first = records[0]
    for shard_dir, record in zip(shard_dirs, records, strict=True):
        difference = find_difference(first.content, record.content)
        if difference is not None:
            raise InputError(
                f"{shard_dir}: its {difference.name} is {difference.second_value}, but {difference.first_value} in "
                f"{shard_dirs[0]}; {TEACH_AGAIN}"
            )


def _check_size(file: Path, num_bytes: int) -> None:
    """Raise an InputError if a file is missing, or has another size than when it was written."""
    try:
        current_bytes = file.stat().st_size
    except OSError as error:
        raise InputError(f"{file}: {error.strerror}; {TEACH_AGAIN}") from None
    if current_bytes != num_bytes:
        raise InputError(
            f"{file}: damaged (it has {current_bytes:,} bytes, but was written with {num_bytes:,}); {TEACH_AGAIN}"
        )
