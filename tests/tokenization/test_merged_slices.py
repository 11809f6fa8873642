"""Tasks with --shard I/N and one merge give the token dataset of one run, or one error line and nothing."""

import gzip
import json
import os
import shutil
import tracemalloc
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fabric_train.cli.errors import InputError
from fabric_train.data.token_dataset import open_dataset
from fabric_train.programs import tokenize_dataset
from fabric_train.reading.listing import NO_SHA256, ListedFile, ListedFiles, list_file
from fabric_train.reading.sources import FileSource
from fabric_train.token_dataset.arrow_folder import write_index
from fabric_train.token_dataset.document_index import CHECKSUM, open_index
from fabric_train.token_dataset.parts import open_parts
from fabric_train.token_dataset.rows import Packing, plan_rows
from fabric_train.tokenization import encoding, merge, slice_folder
from fabric_train.tokenization.corpus import unfinished_folder
from fabric_train.tokenization.selection import collect
from fabric_train.tokenization.shards import (
    ENCODED,
    HASH_BYTES,
    PART,
    InputSlice,
    Shard,
    ShardRecord,
    ShardSizes,
    files_to_hash,
    read_record,
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
    turns = [("user", "How many?"), ("assistant", "Some."), ("user", "And now?"), ("assistant", "More than some.")]
    chats = [[{"role": role, "content": f"{content} {n}"} for role, content in turns[: 2 + n % 3]] for n in range(30)]
    lines = "".join(json.dumps({"messages": chat}) + "\n" for chat in chats)
    (folder / "chats.jsonl").write_text(lines, encoding="utf-8")
    rejected = {"role": "assistant", "content": "More than some. " * 3}
    pairs = [
        {"chosen": chat, "rejected": [*chat[:-1], rejected], "score_chosen": n, "score_rejected": 0.1}
        for n, chat in enumerate(chats)
        if chat[-1]["role"] == "assistant" or n % 2
    ]
    lines = "".join(json.dumps(pair) + "\n" for pair in pairs)
    (folder / "pairs.jsonl").write_text(lines, encoding="utf-8")
    return folder


@pytest.fixture(autouse=True)
def _in_the_folder_of_the_corpus(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(corpus)


def run(tokenizer: Path, output: Path, words: str = "") -> Path:
    line = f"--dataset es=texts/es en=texts/en --tokenizer_name {tokenizer} --max_length 64 --num_proc 1 {words}"
    tokenize_dataset.main([*line.split(), "--output_dir", str(output)], SMALL)
    return output


def run_tasks(tokenizer: Path, folder: Path, words: str = "", count: int = NUM_TASKS) -> list[Path]:
    tasks = range(1, count + 1)
    return [run(tokenizer, folder / str(number), f"{words} --shard {number}/{count}") for number in tasks]


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
    one = run(tokenizer, tmp_path / "one", words)
    slices = run_tasks(tokenizer, tmp_path, words, num_tasks)
    assert content(run_merge(slices[::-1], tmp_path / "merged")) == content(one)
    assert sum(len(list(folder.glob("*.npz"))) for folder in slices) > num_tasks


@pytest.mark.parametrize("count", [1, 3, 7, 40])
def test_slices_are_consecutive_and_balanced_by_bytes(count: int) -> None:
    sizes = [10 + 7 * (number % 9) for number in range(200)]
    numbers = slice_numbers(sizes, count)
    assert numbers == sorted(numbers)
    of_each = [
        sum(size for size, number in zip(sizes, numbers, strict=True) if number == n) for n in range(1, count + 1)
    ]
    assert max(abs(num_bytes - sum(sizes) / count) for num_bytes in of_each) <= max(sizes)
    assert slice_numbers([0, 0], count) == [1, 1]
    assert slice_numbers([], count) == []


def test_a_terabyte_has_few_shards_and_slices_of_one_size() -> None:
    source = FileSource("a", Path(), ListedFiles(ListedFile(f"{name}.jsonl", 1 << 38, 0, 0) for name in range(4)))
    sizes = [shard.num_bytes for shard in split_into_shards([source], "")]
    assert sum(sizes) == 1 << 40
    assert 8000 < len(sizes) <= 8196
    of_each = Counter[int]()
    for size, number in zip(sizes, slice_numbers(sizes, 64), strict=True):
        of_each[number] += size
    assert max(of_each.values()) / min(of_each.values()) < 1.02


def test_groups_of_files_cover_each_file_once(tmp_path: Path) -> None:
    paths = [tmp_path / f"{number}.txt" for number in range(20)]
    for number, path in enumerate(paths):
        path.write_text("x" * (7 * number % 90))
    files = [list_file(path) for path in paths]
    sources = [FileSource("a", tmp_path, ListedFiles(files[:8])), FileSource("b", tmp_path, ListedFiles(files[8:]))]
    are_read = [np.zeros(len(source.files), dtype=bool) for source in sources]
    slices = [InputSlice(number, 3) for number in (1, 2, 3)]
    groups = [group for one in slices for group in files_to_hash(sources, one, are_read, group_bytes=100)]
    assert len(groups) > 6
    assert all(sum(file.size for file in list(sources[g.source].files)[g.start : g.stop - 1]) < 100 for g in groups)
    covered = Counter((group.source, index) for group in groups for index in range(group.start, group.stop))
    assert covered == Counter([(0, index) for index in range(8)] + [(1, index) for index in range(12)])


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, corpus: Path, tiny_model_dir: Path) -> Path:
    """A folder with three slices, 1 to 3."""
    folder = tmp_path_factory.mktemp("made")
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(corpus)
        run_tasks(tiny_model_dir, folder)
    return folder


def slices_of(made: Path, folder: Path) -> list[Path]:
    return [Path(shutil.copytree(made / str(n), folder / f"s{n}")) for n in range(1, NUM_TASKS + 1)]


def test_each_file_is_hashed_by_one_task(made: Path) -> None:
    slices = [made / str(number) for number in range(1, NUM_TASKS + 1)]
    hashed = [
        [file["hashed"]["path"] for file in json.loads((one / "slice.json").read_text())["files"]] for one in slices
    ]
    assert sorted(path for paths in hashed for path in paths) == ["a.jsonl", "c.jsonl.gz", "d.jsonl", "sub/b.txt"]
    assert max(map(len, hashed)) < 4
    shards = Counter(file.name for one in slices for file in one.glob("*.npz"))
    assert set(shards.values()) == {1}


def test_a_merge_needs_each_slice_of_one_run_once(tmp_path: Path, made: Path, tiny_model_dir: Path) -> None:
    first, second, third = slices_of(made, tmp_path)
    half = tmp_path / "half"
    other = Path(shutil.copytree(second, tmp_path / "other"))
    run(tiny_model_dir, half, "--shard 2/2")
    given = (other / "config.yaml").read_text(encoding="utf-8")
    assert "\nseed: 0\n" in given
    (other / "config.yaml").write_text(given.replace("\nseed: 0\n", "\nseed: 7\n"), encoding="utf-8")
    (tmp_path / "tokens").mkdir()
    faults = {
        (first, third): r"of 3 slices these are missing: 2; run their tasks, such as --shard 2/3, to their end, and …",
        (first, other, third): f"{first} was made with --seed 0, and {other} not; remove it, and run its task again",
        (first, second, half): f"{half} is slice 2/2, and {first} 1/3; remove it, and run its task again",
        (first, second, third, made / "3"): f"{made / '3'} and {third} are both slice 3/3; leave one of them out",
        (first, second, tmp_path / "tokens"): f"{tmp_path / 'tokens'} is no slice made with --shard, as {first} is; …",
    }
    for folders, fault in faults.items():
        with pytest.raises(InputError) as raised:
            run_merge(folders, tmp_path / "merged")
        begin, _, end = fault.partition("…")
        assert str(raised.value).startswith(begin)
        assert str(raised.value).endswith(end)


def test_a_damaged_slice_is_one_line_and_nothing_is_written(tmp_path: Path, made: Path) -> None:
    slices = slices_of(made, tmp_path)
    tokens = max(slices[1].glob("*.tokens"))
    os.truncate(tokens, tokens.stat().st_size - 4)
    (slices[2] / "config.yaml").unlink()
    with pytest.raises(InputError, match=r"config\.yaml"):
        run_merge(slices, tmp_path / "merged")
    shutil.copy(made / "3" / "config.yaml", slices[2])
    with pytest.raises(InputError, match=rf"s2: {tokens.name} has .* bytes instead of .*; remove it, and run its task"):
        run_merge(slices, tmp_path / "merged")
    tokens.unlink()
    with pytest.raises(InputError, match=rf"s2: {tokens.name} is missing; remove it, and run its task again"):
        run_merge(slices, tmp_path / "merged")
    assert sorted(os.listdir(tmp_path)) == ["s1", "s2", "s3"]


def test_a_changed_byte_of_a_slice_is_found(tmp_path: Path, made: Path) -> None:
    for suffix in ("tokens", "npz"):
        slices = slices_of(made, tmp_path / suffix)
        file = max(slices[1].glob(f"*.{suffix}"))
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
        with pytest.raises(InputError, match=rf"s2: {file.name} has changed since it was written; remove it, and run"):
            run_merge(slices, tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


def test_slices_with_relative_paths_are_merged_where_they_were_made(
    tmp_path: Path, made: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slices = slices_of(made, tmp_path)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=f"s1 was made in {corpus}, where texts/es is; merge there"):
        run_merge(slices, tmp_path / "merged")


def test_only_the_tasks_of_a_changed_file_run_again(
    tmp_path: Path, corpus: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(corpus / "texts", tmp_path / "texts")
    monkeypatch.chdir(tmp_path)
    slices = run_tasks(tiny_model_dir, tmp_path, count=2)
    write_jsonl(Path("texts/en/d.jsonl"), [f"{text} in English!" for text in TEXTS])
    with pytest.raises(InputError) as raised:
        run_merge(slices, tmp_path / "merged")
    fix = f"remove {slices[1]}, and run their tasks again"
    assert str(raised.value) == f"texts/en/d.jsonl has changed since the tasks ran; {fix}"
    shutil.rmtree(slices[1])
    run(tiny_model_dir, slices[1], "--shard 2/2")
    merged = run_merge(slices, tmp_path / "merged")
    assert content(merged) == content(run(tiny_model_dir, tmp_path / "one"))


def test_a_tokenizer_that_has_changed_is_named(tmp_path: Path, made: Path, chatml_dir: Path) -> None:
    slices = slices_of(made, tmp_path)
    for one in slices:
        config = one / "config.yaml"
        lines = config.read_text(encoding="utf-8").splitlines()
        changed = [f"tokenizer_name: {chatml_dir}" if line.startswith("tokenizer_name") else line for line in lines]
        config.write_text("\n".join(changed), encoding="utf-8")
    with pytest.raises(InputError, match="s1: the tokenizer, or a package or file that cleaning uses, has changed"):
        run_merge(slices, tmp_path / "merged")


def listed(items: Iterator[object], into: list[object]) -> Iterator[object]:
    for item in items:
        into.append(item)
        yield item


def test_a_task_that_was_stopped_continues_and_a_finished_one_does_nothing(
    tmp_path: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as stopped:
        stopped.setattr(slice_folder, "dump", interrupt)  # when the shards are in their place
        with pytest.raises(KeyboardInterrupt):
            run(tiny_model_dir, tmp_path / "s", "--shard 2/3")
    assert os.listdir(tmp_path) == [".s.unfinished"]
    encoded: list[object] = []
    whole = encoding.unfinished_shards
    monkeypatch.setattr(encoding, "unfinished_shards", lambda *given: listed(whole(*given), encoded))
    run(tiny_model_dir, tmp_path / "s", "--shard 2/3")
    assert not encoded
    assert os.listdir(tmp_path) == ["s"]
    before = content(tmp_path / "s")
    run(tiny_model_dir, tmp_path / "s", "--shard 2/3 --num_proc 2")
    assert "has slice 2/3 already: nothing to do" in capsys.readouterr().out
    assert content(tmp_path / "s") == before
    for words, made_with in {"--shard 1/3": "--shard 2/3", "--shard 2/3 --seed 1": "--seed 0"}.items():
        with pytest.raises(InputError, match=f"s was made with {made_with}; choose another folder, or remove it"):
            run(tiny_model_dir, tmp_path / "s", words)


def test_two_tasks_of_one_slice_at_a_time_are_refused(tmp_path: Path, tiny_model_dir: Path) -> None:
    with (
        unfinished_folder(tmp_path / "s"),
        pytest.raises(InputError, match="another process is tokenizing into it"),
    ):
        run(tiny_model_dir, tmp_path / "s", "--shard 2/3")


@pytest.mark.parametrize("packing", ["concat", "best_fit"])
def test_a_merge_takes_less_than_200_bytes_of_memory_a_document(made: Path, tmp_path: Path, packing: Packing) -> None:
    num_shards = 8
    of_each = 10_000
    (tmp_path / "file").touch()
    source = FileSource("a", tmp_path, ListedFiles([list_file(tmp_path / "file")]))
    (part,) = source.parts(1)
    key = min((made / "1").glob("*.npz")).stem
    shard = Shard(0, 0, (part,), 1, key, np.zeros(1, int), np.zeros(1, bool))
    small = read_record(made / "1", shard)
    random = np.random.default_rng(0)
    assert small is not None
    tracemalloc.start()
    records = [enlarged(small, of_each, random) for _ in range(num_shards)]
    no_hashes = np.empty((0, HASH_BYTES), np.uint8)
    collection = collect(
        records, [source], max_documents=None, max_tokens=None, earlier_hashes=no_hashes, is_near_duplicate=None
    )
    records.clear()
    plan = plan_rows(collection.documents.lengths, collection.kept_documents, packing, 2048, 0)
    write_index(tmp_path, plan, collection.places[plan.order], np.zeros(plan.num_rows, CHECKSUM))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak / (num_shards * of_each) < 200


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


def places_in(folder: Path) -> Counter[str]:
    """Return the place, the tokens and the bytes of each document of a token dataset, how often it is there."""
    manifest = manifest_of(folder)
    found: Counter[str] = Counter()
    for split in manifest.ledger.splits:
        index = open_index(folder, manifest, split)
        assert index is not None
        origins = (index.origin(number) for number in range(len(index.documents)))
        found.update(f"{origin}, {origin.num_tokens} tokens, {origin.num_bytes} bytes" for origin in origins)
    return found


@pytest.mark.parametrize("packing", ["concat", "best_fit"])
def test_tasks_pack_their_slices_and_a_merge_joins_them_as_parts(
    packing: str, tmp_path: Path, tiny_model_dir: Path
) -> None:
    words = f"--packing {packing} --validation_split 0.2"
    slices = run_tasks(tiny_model_dir, tmp_path / "slices", f"{words} --parts true")
    merge.main([*map(str, slices[::-1]), "--parts", "true", "--output_dir", str(tmp_path / "parts")])
    merge.main([*map(str, slices), "--output_dir", str(tmp_path / "full")])
    assert any(part.rows_before for part in open_parts(tmp_path / "parts").record.parts)  # a file is in two slices
    at_once = run(tiny_model_dir, tmp_path / "at-once", words)
    for joined in ("parts", "full"):
        assert places_in(tmp_path / joined) == places_in(at_once)
    ours = manifest_of(tmp_path / "parts")
    theirs = manifest_of(at_once)
    assert ours == manifest_of(tmp_path / "full")
    assert {(one.name, file) for one in ours.sources for file in one.files} == {
        (one.name, file) for one in theirs.sources for file in one.files
    }
    assert (ours.ledger.documents_read, ours.ledger.documents_kept, ours.ledger.documents_skipped) == (
        theirs.ledger.documents_read,
        theirs.ledger.documents_kept,
        theirs.ledger.documents_skipped,
    )
    for split, ledger in ours.ledger.splits.items():
        own = [manifest_of(folder).ledger.splits[split] for folder in slices]
        assert ledger.tokens_dropped == dict(sum((Counter(one.tokens_dropped) for one in own), Counter()))
        assert ledger.rows == sum(one.rows for one in own)
    rows = open_dataset(str(tmp_path / "parts")).train
    whole = open_dataset(str(tmp_path / "full")).train
    for one, other in zip(rows.read(range(len(rows))), whole.read(range(len(rows))), strict=True):
        assert one[0].tolist() == other[0].tolist()


def test_slices_without_rows_and_what_needs_the_whole_are_refused(tmp_path: Path, tiny_model_dir: Path) -> None:
    encoded = run_tasks(tiny_model_dir, tmp_path / "encoded")
    with pytest.raises(InputError, match="encoded/1 is encoded and has no rows; run the tasks with --parts true"):
        merge.main([*map(str, encoded), "--parts", "true", "--output_dir", str(tmp_path / "out")])
    with pytest.raises(InputError, match=r"--parts true: --weights, --max_tokens would need the whole corpus"):
        run(tiny_model_dir, tmp_path / "out", "--shard 1/2 --parts true --weights 1 2 --max_tokens 100")
    with pytest.raises(InputError, match=r"--parts true packs a slice: give --shard I/N too"):
        run(tiny_model_dir, tmp_path / "out", "--parts true")
    packed = run(tiny_model_dir, tmp_path / "packed" / "1", "--shard 1/2 --parts true")
    with pytest.raises(InputError, match="of 2 slices these are missing: 2"):
        merge.main([str(packed), "--parts", "true", "--output_dir", str(tmp_path / "out")])
