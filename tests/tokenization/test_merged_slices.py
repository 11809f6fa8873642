"""Tasks with --shard I/N and one merge give the token dataset of one run, or one error line and nothing."""

import gzip
import json
import os
import re
import shutil
import tracemalloc
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fabric_train.cli.errors import InputError
from fabric_train.data.token_dataset import open_dataset
from fabric_train.programs import tokenize_dataset
from fabric_train.reading.listing import NO_SHA256, ListedFile, ListedFiles, list_file
from fabric_train.reading.sources import FileSource
from fabric_train.token_dataset.arrow_folder import write_index
from fabric_train.token_dataset.document_index import CHECKSUM, open_index
from fabric_train.token_dataset.manifest import Manifest, SourceFile
from fabric_train.token_dataset.parts import open_parts
from fabric_train.token_dataset.rows import Packing, plan_rows
from fabric_train.tokenization import encoding, merge, slice_folder
from fabric_train.tokenization.corpus import unfinished_folder
from fabric_train.tokenization.selection import collect
from fabric_train.tokenization.shard_files import ENCODED, HASH_BYTES, PART, ShardRecord, read_record
from fabric_train.tokenization.shards import (
    InputSlice,
    Shard,
    ShardSizes,
    files_to_hash,
    slice_numbers,
    split_into_shards,
)
from tests.support.token_datasets import TEXTS, manifest_of, write_jsonl

NUM_TASKS = 3
SMALL = ShardSizes(smallest=1500, worth_keeping=0)
CASES = {
    "concat with caps, duplicates and a split": (
        2,
        "--packing concat --deduplicate true --max_tokens 3000 --overlap 3",
    ),
    "best_fit with weights": (2, "--packing best_fit --weights 1 3 --deduplicate true --seed 5"),
    "documents capped before all are read": (1, "--packing none --max_documents 50"),
    "chats and a validation dataset": (
        2,
        "--dataset texts/en chats=chats.jsonl --validation_dataset texts/es --num_proc 2",
    ),
    "preference pairs, some of them bad or too long": (
        2,
        "--dataset chats=pairs.jsonl --too_long cut_start --on_bad_rows skip --deduplicate true --max_length 160",
    ),
}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files of several kinds and sizes, with duplicates within and across sources, and chats."""
    folder = tmp_path_factory.mktemp("corpus")
    (folder / "texts" / "es" / "sub").mkdir(parents=True)
    (folder / "texts" / "en").mkdir()
    write_jsonl(folder / "texts" / "es" / "a.jsonl", [*TEXTS, "Todo otra vez. " * 30, *TEXTS[:7], " "])
    (folder / "texts" / "es" / "sub" / "b.txt").write_text("Un texto más largo que los otros. " * 40, encoding="utf-8")
    with gzip.open(folder / "texts" / "es" / "c.jsonl.gz", "wt", encoding="utf-8") as file:
        file.writelines(json.dumps({"text": text[::-1]}) + "\n" for text in TEXTS)
    write_jsonl(folder / "texts" / "en" / "d.jsonl", [f"{text} In English." for text in TEXTS] + TEXTS[5:9])

    # chats of 2 to 4 turns, and pairs of most of them; some pairs are bad, since their chat ends with the user
    turns = [("user", "How many?"), ("assistant", "Some."), ("user", "And now?"), ("assistant", "More than some.")]
    rejected = {"role": "assistant", "content": "More than some. " * 3}
    chat_lines = []
    pair_lines = []
    for number in range(30):
        num_turns = 2 + number % 3
        chat = [{"role": role, "content": f"{content} {number}"} for role, content in turns[:num_turns]]
        chat_lines.append(json.dumps({"messages": chat}) + "\n")
        if chat[-1]["role"] == "assistant" or number % 2 == 1:
            pair = {"chosen": chat, "rejected": [*chat[:-1], rejected], "score_chosen": number, "score_rejected": 0.1}
            pair_lines.append(json.dumps(pair) + "\n")
    (folder / "chats.jsonl").write_text("".join(chat_lines), encoding="utf-8")
    (folder / "pairs.jsonl").write_text("".join(pair_lines), encoding="utf-8")
    return folder


@pytest.fixture(autouse=True)
def _in_the_folder_of_the_corpus(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(corpus)


def run(tokenizer: Path, output: Path, words: str = "") -> Path:
    line = f"--dataset es=texts/es en=texts/en --tokenizer_name {tokenizer} --max_length 64 --num_proc 1 {words}"
    tokenize_dataset.main([*line.split(), "--output_dir", str(output)], SMALL)
    return output


def run_tasks(tokenizer: Path, folder: Path, words: str = "", num_tasks: int = NUM_TASKS) -> list[Path]:
    """Run all tasks of a slice each, and return their folders, 1 to ``num_tasks``."""
    slices = []
    for task in range(1, num_tasks + 1):
        slices.append(run(tokenizer, folder / str(task), f"{words} --shard {task}/{num_tasks}"))
    return slices


def run_merge(slices: Sequence[Path], output: Path) -> Path:
    merge.main([*map(str, slices), "--output_dir", str(output)], SMALL)
    return output


def content(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


@pytest.mark.parametrize("case", CASES)
def test_merged_slices_are_one_run_byte_for_byte(
    tmp_path: Path, chatml_dir: Path, tiny_model_dir: Path, case: str
) -> None:
    num_tasks, words = CASES[case]
    tokenizer = chatml_dir if "chats" in words else tiny_model_dir
    expected = content(run(tokenizer, tmp_path / "one_run", words))
    slices = run_tasks(tokenizer, tmp_path, words, num_tasks)
    assert content(run_merge(slices[::-1], tmp_path / "merged")) == expected
    num_shards = sum(len(list(folder.glob("*.npz"))) for folder in slices)
    assert num_shards > num_tasks


@pytest.mark.parametrize("num_slices", [1, 3, 7, 40])
def test_slices_are_consecutive_and_balanced_by_bytes(num_slices: int) -> None:
    sizes = [10 + 7 * (shard % 9) for shard in range(200)]
    slices_of_shards = slice_numbers(sizes, num_slices)
    assert slices_of_shards == sorted(slices_of_shards)
    bytes_of_slices = bytes_by_slice(sizes, slices_of_shards)
    average = sum(sizes) / num_slices
    assert len(bytes_of_slices) == num_slices
    assert max(abs(num_bytes - average) for num_bytes in bytes_of_slices.values()) <= max(sizes)
    assert slice_numbers([0, 0], num_slices) == [1, 1]
    assert slice_numbers([], num_slices) == []


def bytes_by_slice(sizes: list[int], slices_of_shards: list[int]) -> Counter[int]:
    """Return the bytes of each slice, from the sizes of the shards and the slice of each."""
    bytes_of_slices = Counter[int]()
    for size, slice_number in zip(sizes, slices_of_shards, strict=True):
        bytes_of_slices[slice_number] += size
    return bytes_of_slices


def test_a_terabyte_has_few_shards_and_slices_of_one_size() -> None:
    source = FileSource("a", Path(), ListedFiles(ListedFile(f"{name}.jsonl", 1 << 38, 0, 0) for name in range(4)))
    sizes = [shard.num_bytes for shard in split_into_shards([source], "")]
    assert sum(sizes) == 1 << 40
    assert 8000 < len(sizes) <= 8196
    bytes_of_slices = bytes_by_slice(sizes, slice_numbers(sizes, 64))
    assert max(bytes_of_slices.values()) / min(bytes_of_slices.values()) < 1.02


def test_groups_of_files_cover_each_file_once(tmp_path: Path) -> None:
    # files of 0 to 89 bytes in two sources, of which none is read
    files = []
    for number in range(20):
        path = tmp_path / f"{number}.txt"
        path.write_text("x" * (7 * number % 90))
        files.append(list_file(path))
    sources = [FileSource("a", tmp_path, ListedFiles(files[:8])), FileSource("b", tmp_path, ListedFiles(files[8:]))]
    are_read = [np.zeros(len(source.files), dtype=bool) for source in sources]

    # the groups of three slices: a group is full once it has 100 bytes
    hashed_files: Counter[tuple[int, int]] = Counter()  # source and index of the file
    num_groups = 0
    for slice_number in (1, 2, 3):
        for group in files_to_hash(sources, InputSlice(slice_number, 3), are_read, group_bytes=100):
            num_groups += 1
            files_before_last = list(sources[group.source].files)[group.start : group.stop - 1]
            assert sum(file.size for file in files_before_last) < 100
            hashed_files.update((group.source, index) for index in range(group.start, group.stop))
    assert num_groups > 6
    assert hashed_files == Counter([(0, index) for index in range(8)] + [(1, index) for index in range(12)])


@pytest.fixture(scope="module")
def three_slices(tmp_path_factory: pytest.TempPathFactory, corpus: Path, tiny_model_dir: Path) -> Path:
    """A folder with three slices, 1 to 3."""
    folder = tmp_path_factory.mktemp("slices")
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(corpus)
        run_tasks(tiny_model_dir, folder)
    return folder


def copied_slices(three_slices: Path, folder: Path) -> list[Path]:
    """Copy the slices to s1, s2 and s3 in a folder."""
    return [
        Path(shutil.copytree(three_slices / str(number), folder / f"s{number}")) for number in range(1, NUM_TASKS + 1)
    ]


def test_each_file_is_hashed_by_one_task(three_slices: Path) -> None:
    hashed_paths: list[str] = []
    shard_names: list[str] = []
    for task in range(1, NUM_TASKS + 1):
        folder = three_slices / str(task)
        files = json.loads((folder / "slice.json").read_text())["files"]
        assert len(files) < 4  # no task hashes all
        hashed_paths += [file["hashed"]["path"] for file in files]
        shard_names += [file.name for file in folder.glob("*.npz")]
    assert sorted(hashed_paths) == ["a.jsonl", "c.jsonl.gz", "d.jsonl", "sub/b.txt"]
    assert len(set(shard_names)) == len(shard_names)  # no shard is in two slices


def test_a_merge_needs_each_slice_of_one_run_once(tmp_path: Path, three_slices: Path, tiny_model_dir: Path) -> None:
    # slices that are not of the same run
    first, second, third = copied_slices(three_slices, tmp_path)
    half = run(tiny_model_dir, tmp_path / "half", "--shard 2/2")
    with_seed_7 = Path(shutil.copytree(second, tmp_path / "with_seed_7"))
    config = (with_seed_7 / "config.yaml").read_text(encoding="utf-8")
    assert "\nseed: 0\n" in config
    (with_seed_7 / "config.yaml").write_text(config.replace("\nseed: 0\n", "\nseed: 7\n"), encoding="utf-8")
    empty_folder = tmp_path / "tokens"
    empty_folder.mkdir()

    again = "remove it and run its task again"
    faults = {
        (first, third): "missing slices (of 3): 2; run their tasks to completion (such as --shard 2/3), and …",
        (first, with_seed_7, third): f"{first} was written with --seed 0, but {with_seed_7} was not; {again}",
        (first, second, half): f"{half} is slice 2/2, but {first} is slice 1/3; {again}",
        (
            first,
            second,
            third,
            three_slices / "3",
        ): f"{three_slices / '3'} and {third} are both slice 3/3; leave one of them out",
        (first, second, empty_folder): f"{empty_folder} is not a slice made with --shard, but {first} is; …",
        (first, tmp_path / "absent", third): f"{tmp_path / 'absent'}: no such folder",
    }
    for folders, fault in faults.items():
        with pytest.raises(InputError) as raised:
            run_merge(folders, tmp_path / "merged")
        begin, _, end = fault.partition("…")
        assert str(raised.value).startswith(begin)
        assert str(raised.value).endswith(end)


def test_a_damaged_slice_is_one_line_and_nothing_is_written(tmp_path: Path, three_slices: Path) -> None:
    slices = copied_slices(three_slices, tmp_path)
    tokens = max(slices[1].glob("*.tokens"))
    os.truncate(tokens, tokens.stat().st_size - 4)
    (slices[2] / "config.yaml").unlink()
    with pytest.raises(InputError, match=r"config\.yaml"):
        run_merge(slices, tmp_path / "merged")
    shutil.copy(three_slices / "3" / "config.yaml", slices[2])
    with pytest.raises(InputError, match=rf"s2: {tokens.name} has .* bytes instead of .*; remove it and run its task"):
        run_merge(slices, tmp_path / "merged")
    tokens.unlink()
    with pytest.raises(InputError, match=rf"s2: {tokens.name} is missing; remove it and run its task again"):
        run_merge(slices, tmp_path / "merged")
    assert sorted(os.listdir(tmp_path)) == ["s1", "s2", "s3"]


def test_a_changed_byte_of_a_slice_is_found(tmp_path: Path, three_slices: Path) -> None:
    for suffix in ("tokens", "npz"):
        slices = copied_slices(three_slices, tmp_path / suffix)
        file = max(slices[1].glob(f"*.{suffix}"))
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
        with pytest.raises(InputError, match=rf"s2: {file.name} has changed since it was written; remove it and run"):
            run_merge(slices, tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


def test_slices_with_relative_paths_are_merged_where_they_were_made(
    tmp_path: Path, three_slices: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slices = copied_slices(three_slices, tmp_path)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=f"s1 was written in {corpus}, and the path texts/es is relative to that"):
        run_merge(slices, tmp_path / "merged")


def test_only_the_tasks_of_a_changed_file_run_again(
    tmp_path: Path, corpus: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(corpus / "texts", tmp_path / "texts")
    monkeypatch.chdir(tmp_path)
    slices = run_tasks(tiny_model_dir, tmp_path, num_tasks=2)
    write_jsonl(Path("texts/en/d.jsonl"), [f"{text} in English!" for text in TEXTS])
    with pytest.raises(InputError) as raised:
        run_merge(slices, tmp_path / "merged")
    fix = f"remove {slices[1]} and run their tasks again"
    assert str(raised.value) == f"texts/en/d.jsonl has changed since the tasks ran; {fix}"
    shutil.rmtree(slices[1])
    run(tiny_model_dir, slices[1], "--shard 2/2")
    merged = run_merge(slices, tmp_path / "merged")
    assert content(merged) == content(run(tiny_model_dir, tmp_path / "one"))


def test_a_tokenizer_that_has_changed_is_named(tmp_path: Path, three_slices: Path, chatml_dir: Path) -> None:
    slices = copied_slices(three_slices, tmp_path)
    for folder in slices:
        config = folder / "config.yaml"
        text = config.read_text(encoding="utf-8")
        changed_text = re.sub("^tokenizer_name: .*$", f"tokenizer_name: {chatml_dir}", text, flags=re.MULTILINE)
        assert changed_text != text
        config.write_text(changed_text, encoding="utf-8")
    with pytest.raises(InputError, match="s1: the tokenizer, or a package or file that cleaning uses, has changed"):
        run_merge(slices, tmp_path / "merged")


def test_a_task_that_was_stopped_continues_and_a_finished_one_does_nothing(
    tmp_path: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    # stopped when all shards are encoded
    with monkeypatch.context() as stopped:
        stopped.setattr(slice_folder, "dump", interrupt)
        with pytest.raises(KeyboardInterrupt):
            run(tiny_model_dir, tmp_path / "s", "--shard 2/3")
    assert os.listdir(tmp_path) == [".s.unfinished"]

    # none is encoded again
    encoded_shards: list[object] = []
    unfinished_shards = encoding.unfinished_shards

    def recorded_shards(*arguments: Any) -> Iterator[Any]:
        for shard in unfinished_shards(*arguments):
            encoded_shards.append(shard)
            yield shard

    monkeypatch.setattr(encoding, "unfinished_shards", recorded_shards)
    run(tiny_model_dir, tmp_path / "s", "--shard 2/3")
    assert not encoded_shards
    assert os.listdir(tmp_path) == ["s"]

    # a finished slice stays as it is
    finished_content = content(tmp_path / "s")
    run(tiny_model_dir, tmp_path / "s", "--shard 2/3 --num_proc 2")
    assert "already has slice 2/3; nothing to do" in capsys.readouterr().out
    assert content(tmp_path / "s") == finished_content
    for words, made_with in {"--shard 1/3": "--shard 2/3", "--shard 2/3 --seed 1": "--seed 0"}.items():
        with pytest.raises(InputError, match=f"s was written with {made_with}; choose another folder, or remove it"):
            run(tiny_model_dir, tmp_path / "s", words)


def test_two_tasks_of_one_slice_at_a_time_are_refused(tmp_path: Path, tiny_model_dir: Path) -> None:
    with (
        unfinished_folder(tmp_path / "s"),
        pytest.raises(InputError, match="another process is writing to it"),
    ):
        run(tiny_model_dir, tmp_path / "s", "--shard 2/3")


@pytest.mark.parametrize("packing", ["concat", "best_fit"])
def test_a_merge_takes_less_than_200_bytes_of_memory_a_document(
    three_slices: Path, tmp_path: Path, packing: Packing
) -> None:
    num_shards = 8
    documents_of_shard = 10_000

    # the record of a shard, which is enlarged below
    (tmp_path / "file").touch()
    source = FileSource("a", tmp_path, ListedFiles([list_file(tmp_path / "file")]))
    (part,) = source.parts(1)
    key = min((three_slices / "1").glob("*.npz")).stem
    shard = Shard(0, 0, (part,), 1, key, np.zeros(1, int), np.zeros(1, bool))
    small_record = read_record(three_slices / "1", shard)
    assert small_record is not None

    # what a merge does with all records
    random = np.random.default_rng(0)
    tracemalloc.start()
    records = [enlarged(small_record, documents_of_shard, random) for _ in range(num_shards)]
    no_hashes = np.empty((0, HASH_BYTES), np.uint8)
    collection = collect(
        records, [source], max_documents=None, max_tokens=None, earlier_hashes=no_hashes, is_near_duplicate=None
    )
    records.clear()
    plan = plan_rows(collection.documents.lengths, collection.kept_documents, packing, 2048, 0)
    write_index(tmp_path, plan, collection.places[plan.order], np.zeros(plan.num_rows, CHECKSUM))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak / (num_shards * documents_of_shard) < 200


def enlarged(record: ShardRecord, num_documents: int, random: np.random.Generator) -> ShardRecord:
    """Return the record with documents of 600 tokens on average, all different."""
    documents = np.zeros(num_documents, ENCODED)
    documents["number"] = documents["row"] = np.arange(1, num_documents + 1)
    documents["length"] = 1 + random.lognormal(6, 1, num_documents)
    hashes = np.frombuffer(random.bytes(num_documents * HASH_BYTES), np.uint8)
    return replace(
        record,
        documents=documents,
        parts=np.array([(num_documents, num_documents, NO_SHA256)], PART),
        hashes=hashes.reshape(num_documents, -1),
        num_read=num_documents,
    )


def described_documents(folder: Path) -> Counter[str]:
    """Return the origin, the tokens and the bytes of each document of a token dataset, and how often it is there."""
    manifest = manifest_of(folder)
    descriptions: Counter[str] = Counter()
    for split in manifest.ledger.splits:
        index = open_index(folder, manifest, split)
        assert index is not None
        for document in range(len(index.documents)):
            origin = index.origin(document)
            descriptions[f"{origin}, {origin.num_tokens} tokens, {origin.num_bytes} bytes"] += 1
    return descriptions


@pytest.mark.parametrize("packing", ["concat", "best_fit"])
def test_tasks_pack_their_slices_and_a_merge_joins_them_as_parts(
    packing: str, tmp_path: Path, tiny_model_dir: Path
) -> None:
    words = f"--packing {packing} --validation_split 0.2"
    slices = run_tasks(tiny_model_dir, tmp_path / "slices", f"{words} --parts true")
    merge.main([*map(str, slices[::-1]), "--parts", "true", "--output_dir", str(tmp_path / "parts")])
    merge.main([*map(str, slices), "--output_dir", str(tmp_path / "full")])
    assert any(part.rows_before for part in open_parts(tmp_path / "parts").record.parts)  # a file is in two slices

    # the documents and the ledger are those of one run
    one_run = run(tiny_model_dir, tmp_path / "one_run", words)
    assert described_documents(tmp_path / "parts") == described_documents(one_run)
    assert described_documents(tmp_path / "full") == described_documents(one_run)
    manifest = manifest_of(tmp_path / "parts")
    assert manifest == manifest_of(tmp_path / "full")
    expected = manifest_of(one_run)
    assert files_by_source(manifest) == files_by_source(expected)
    assert manifest.ledger.documents_read == expected.ledger.documents_read
    assert manifest.ledger.documents_kept == expected.ledger.documents_kept
    assert manifest.ledger.documents_skipped == expected.ledger.documents_skipped

    # the rows are those of the slices
    for split, ledger in manifest.ledger.splits.items():
        slice_ledgers = [manifest_of(folder).ledger.splits[split] for folder in slices]
        tokens_dropped: Counter[str] = Counter()
        for slice_ledger in slice_ledgers:
            tokens_dropped.update(slice_ledger.tokens_dropped)
        assert Counter(ledger.tokens_dropped) == tokens_dropped
        assert ledger.rows == sum(slice_ledger.rows for slice_ledger in slice_ledgers)
    parts_train = open_dataset(str(tmp_path / "parts")).train
    full_train = open_dataset(str(tmp_path / "full")).train
    all_rows = range(len(full_train))
    for row, full_row in zip(parts_train.read(all_rows), full_train.read(all_rows), strict=True):
        assert row[0].tolist() == full_row[0].tolist()  # the ids


def files_by_source(manifest: Manifest) -> dict[str, set[SourceFile]]:
    """Return the files of each source; a merge lists a file for each slice that has read some of it."""
    files: dict[str, set[SourceFile]] = {}
    for source in manifest.sources:
        files.setdefault(source.name, set()).update(source.files)
    return files


def test_slices_without_rows_and_what_needs_the_whole_are_refused(tmp_path: Path, tiny_model_dir: Path) -> None:
    encoded = run_tasks(tiny_model_dir, tmp_path / "encoded")
    with pytest.raises(
        InputError, match="encoded/1 is encoded but not packed into rows; run the tasks with --parts true"
    ):
        merge.main([*map(str, encoded), "--parts", "true", "--output_dir", str(tmp_path / "out")])
    with pytest.raises(InputError, match=r"--parts true: --weights, --max_tokens needs the entire corpus"):
        run(tiny_model_dir, tmp_path / "out", "--shard 1/2 --parts true --weights 1 2 --max_tokens 100")
    with pytest.raises(InputError, match=r"--parts true packs a slice; add --shard I/N"):
        run(tiny_model_dir, tmp_path / "out", "--parts true")
    packed = run(tiny_model_dir, tmp_path / "packed" / "1", "--shard 1/2 --parts true")
    with pytest.raises(InputError, match=r"missing slices \(of 2\): 2"):
        merge.main([str(packed), "--parts", "true", "--output_dir", str(tmp_path / "out")])
