"""A shard counts as finished only when all of its files are whole."""

from pathlib import Path

import numpy as np
import pytest

from fabric_train.reading.listing import NO_SHA256
from fabric_train.tokenization.shard_files import ENCODED, ShardWriter, read_record
from fabric_train.tokenization.shards import Shard


def test_a_record_appears_after_the_other_files_are_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shard = Shard(0, 0, (), 10, "key", np.zeros(1, int), np.zeros(1, bool))
    rename = Path.rename
    sizes: list[list[int]] = []

    def note_sizes(file: Path, target: Path) -> Path:
        sizes.append([(tmp_path / f"key.{name}").stat().st_size for name in ("tokens", "masks", "signatures")])
        return rename(file, target)

    monkeypatch.setattr(Path, "rename", note_sizes)
    document = np.zeros(1, ENCODED)
    document["number"] = document["row"] = 1
    document["length"] = 100
    with ShardWriter(tmp_path, shard, lambda *_: None, hashed=True, signed=True, skips_bad_rows=False) as writer:
        writer.read()
        writer.sign(np.zeros(112, np.uint32))
        writer.write(document, np.arange(100, dtype=np.int32), np.ones(100, dtype=bool), 10)
        writer.end_part(1, 10, 1, NO_SHA256)
        assert read_record(tmp_path, shard) is None
        writer.finish()
    assert sizes == [[400, 100, 448]]
    record = read_record(tmp_path, shard)
    assert record is not None
    assert (record.num_tokens, record.num_read, len(record.hashes)) == (100, 1, 1)
