"""tokenize_dataset.py on preference pairs: forms of rows, tokens, labels, rows, counts, and refusals."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest

from fabric_train.cli.errors import InputError
from fabric_train.data.row_documents import documents_in
from fabric_train.data.token_dataset import open_dataset
from fabric_train.inspection import __main__ as inspect
from fabric_train.inspection.report import make_report
from fabric_train.programs import tokenize_dataset
from fabric_train.token_dataset.document_search import TokensInRow, files_named, find_documents, find_rows
from fabric_train.tokenization import merge as merging
from fabric_train.tokenization.shards import ShardSizes
from fabric_train.tokenization.tokenizers.vocabulary import load_vocabulary
from tests.support.programs import option_words
from tests.support.token_datasets import manifest_of

NUM_PAIRS = 30
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def pair_of(number: int) -> dict[str, Any]:
    """Return a pair whose prompts have one, two or three turns."""
    turns = [turn for n in range(number % 3) for turn in (("user", f"Question {n}?"), ("assistant", f"Answer {n}."))]
    prompt = [{"role": role, "content": content} for role, content in (*turns, ("user", f"And {number}?"))]
    chosen = f"It is {number}." + " Really." * (number % 5)
    rejected = f"I do not know {number}." * (1 + number % 2)
    answers = {"chosen": chosen, "rejected": rejected}
    return {name: [*prompt, {"role": "assistant", "content": text}] for name, text in answers.items()}


@pytest.fixture(scope="module")
def tokenizer_dir(tmp_path_factory: pytest.TempPathFactory, chatml_dir: Path) -> Path:
    """The small tokenizer with a template that adds no system message."""
    folder = Path(shutil.copytree(chatml_dir, tmp_path_factory.mktemp("pairs") / "tokenizer"))
    (folder / "chat_template.jinja").write_text(CHATML)
    return folder


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def run(folder: Path, tokenizer: Path, *sources: object, **options: object) -> datasets.DatasetDict:
    arguments = {
        "dataset": list(sources),
        "tokenizer_name": tokenizer,
        "output_dir": folder,
        "max_length": 256,
        "num_proc": 1,
        **options,
    }
    tokenize_dataset.main(option_words(arguments))
    return datasets.load_from_disk(folder)


def sequences_of(split: datasets.Dataset) -> list[tuple[list[int], list[bool]]]:
    """Return the tokens of each sequence in order, without padding, and which are supervised."""
    found = []
    for ids, labels, starts in zip(split["input_ids"][:], split["labels"][:], split["document_starts"][:], strict=True):
        ends = [*starts[1:], max(np.flatnonzero(np.array(labels) != -100)) + 2]  # a line break ends a turn
        found += [(ids[a:b], [label != -100 for label in labels[a:b]]) for a, b in zip(starts, ends, strict=True)]
    return found


def problems_of(folder: Path) -> list[str]:
    return [str(one) for one in make_report(folder, "train", range(0), lambda done, total: None).problems]


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    """Pairs with ratings, and with a column that nothing reads."""
    return [pair_of(n) | {"score_chosen": 1.5 * n, "score_rejected": 2, "prompt_id": n} for n in range(NUM_PAIRS)]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, tokenizer_dir: Path, rows: list[dict[str, Any]]) -> Path:
    """A dataset of pairs with validation, out of a parquet file and a save_to_disk folder."""
    folder = tmp_path_factory.mktemp("made")
    half = len(rows) // 2
    datasets.Dataset.from_list(rows[:half]).to_parquet(folder / "a.parquet")
    datasets.Dataset.from_list(rows[half:]).save_to_disk(folder / "b")
    run(folder / "out", tokenizer_dir, f"a={folder}/a.parquet", f"b={folder}/b", validation_split=0.2)
    return folder / "out"


def test_a_pair_has_the_tokens_and_labels_of_two_chats(
    tmp_path: Path, tokenizer_dir: Path, made: Path, rows: list[dict[str, Any]]
) -> None:
    chats = [{"messages": row[name]} for row in rows for name in ("chosen", "rejected")]
    source = write(tmp_path / "chats.jsonl", chats)
    options = {"validation_split": 0, "packing": "none", "train_on": "last"}
    alone = run(tmp_path / "chats", tokenizer_dir, source, **options)["train"]
    splits = datasets.load_from_disk(made)
    sequences = [one for split in splits.values() for one in sequences_of(split)]
    assert sorted(sequences) == sorted(sequences_of(alone))
    of_pairs = {json.dumps([one[0] for one in sequences[at : at + 2]]) for at in range(0, len(sequences), 2)}
    in_order = sequences_of(alone)
    assert of_pairs == {json.dumps([one[0] for one in in_order[at : at + 2]]) for at in range(0, len(in_order), 2)}


def test_ledger_counts_pairs_and_their_answers(made: Path, rows: list[dict[str, Any]]) -> None:
    content = json.loads((made / "manifest.json").read_text())
    assert (content["format"], content["has_pairs"]) == (3, True)
    manifest = manifest_of(made)
    splits = datasets.load_from_disk(made)
    assert [source.documents for source in manifest.sources] == [NUM_PAIRS // 2] * 2
    assert manifest.settings.packing == "best_fit"
    ledgers = [ledger.pairs for ledger in manifest.ledger.splits.values()]
    found = {name: [sum(mask) for _, mask in sequences_of(split)] for name, split in splits.items()}
    for (name, lengths), pairs in zip(found.items(), ledgers, strict=True):
        assert pairs is not None
        assert (pairs.chosen_tokens, pairs.rejected_tokens) == (sum(lengths[::2]), sum(lengths[1::2]))
        both = list(zip(lengths[::2], lengths[1::2], strict=True))
        assert pairs.chosen_longer == sum(chosen > rejected for chosen, rejected in both)
        assert pairs.equal_lengths == sum(chosen == rejected for chosen, rejected in both)
        assert pairs.rated == manifest.ledger.splits[name].documents == len(both)
    total = sum(pairs.rating_margin for pairs in ledgers if pairs)
    assert total == pytest.approx(sum(row["score_chosen"] - row["score_rejected"] for row in rows))


def test_inspector_shows_both_answers_and_the_first_token_that_differs(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    inspect.main([str(made), "--rows", "2", "--html", str(tmp_path / "page.html")])
    shown = capsys.readouterr().out
    assert "no problems found" in shown
    assert re.search(r"chosen, differs from position \d+ on +│ +rejected, differs from position \d+", shown)
    assert re.search(r"▸It is \d+\..*│ ▸I do not know", shown)
    page = (tmp_path / "page.html").read_text()
    assert len(re.findall(r'class="s[a-z ]* first"', page)) == 2 * page.count("rejected, differs from position")
    assert "two for each of 24 preference pairs" in page


def test_documents_of_a_row_are_named_by_pair_and_found(made: Path, rows: list[dict[str, Any]]) -> None:
    dataset = open_dataset(str(made))
    assert dataset.train.index is not None
    named = list(documents_in(dataset, 0, load_vocabulary(made / "tokenizer")))
    assert len(datasets.load_from_disk(made)["train"][0]["document_starts"]) == 2 * len(named)
    for one in named:
        assert one.origin is not None
        row = rows[one.origin.row - 1 + (one.origin.source == "b") * NUM_PAIRS // 2]
        assert row["chosen"][0]["content"] in one.text
        assert one.num_tokens == one.origin.num_tokens
        files = files_named(dataset.train.index.sources, one.origin.file)[one.origin.file]
        documents = find_documents(dataset.train.index, files, one.origin.row, lambda _: None)
        rows_of_document = find_rows(dataset.train.index, documents, lambda _: None)
        assert rows_of_document == {0: TokensInRow(one.num_tokens, num_repeated=0)}


def test_bad_pairs_are_refused_or_left_out_and_long_ones_dropped_or_cut(
    tmp_path: Path, tokenizer_dir: Path, rows: list[dict[str, Any]]
) -> None:
    equal = rows[0] | {"rejected": rows[0]["chosen"]}
    empty = rows[0] | {"rejected": [*rows[0]["rejected"][:-1], {"role": "assistant", "content": ""}]}
    prefix = rows[0] | {"rejected": [*rows[0]["chosen"][:-1], {"role": "assistant", "content": "It is 0. Or 1."}]}
    turns = [{"role": role, "content": "So long. " * 8} for role in ("user", "assistant")] * 3
    long = {name: [*turns, *answers] for name, answers in pair_of(3).items()}
    endless = rows[0] | {"rejected": [*rows[0]["rejected"][:-1], {"role": "assistant", "content": "No. " * 200}]}
    source = write(tmp_path / "a.jsonl", [prefix, equal, empty, {"chosen": 3, "rejected": "x"}, long, endless, rows[1]])
    for bad, reason in ((equal, "are the same"), (empty, "the rejected answer is empty")):
        one = write(tmp_path / "b.jsonl", [rows[0], bad])
        with pytest.raises(InputError, match=f"b.jsonl, line 2: .*{reason}.*--on_bad_rows skip skips such rows"):
            run(tmp_path / "out", tokenizer_dir, one)
    options = {"on_bad_rows": "skip", "validation_split": 0}
    counts = {}
    for too_long in ("cut_end", "drop", "cut_start"):
        folder = tmp_path / too_long
        run(folder, tokenizer_dir, source, too_long=too_long, **options)
        counts[too_long] = manifest_of(folder).ledger
        assert problems_of(folder) == [] or "cut off because preference pairs" in problems_of(folder)[0]
    for ledger in counts.values():
        skipped = dict(ledger.documents_skipped)
        num_too_long = skipped.pop("too_long")
        assert skipped == {"equal_answers": 1, "empty_answer": 1, "bad_row": 1}
        assert num_too_long == (1 if ledger is counts["cut_start"] else 2)
        pairs = ledger.splits["train"].pairs
        assert pairs is not None
        assert pairs.prefixes == 1
    cut = counts["cut_start"]
    dropped = counts["drop"]
    assert counts["cut_end"].tokens_cut == dropped.tokens_cut
    of_long = cut.splits["train"].tokens_in - dropped.splits["train"].tokens_in
    assert cut.tokens_cut["too_long"] == dropped.tokens_cut["too_long"] - of_long
    shortened = [ids for ids, _ in sequences_of(datasets.load_from_disk(tmp_path / "cut_start")["train"])]
    assert len(shortened) == 3 * 2


def test_what_pairs_cannot_be_is_refused_in_one_line_each(
    tmp_path: Path, tokenizer_dir: Path, made: Path, rows: list[dict[str, Any]]
) -> None:
    pairs = write(tmp_path / "pairs.jsonl", rows[:4])
    chats = write(tmp_path / "chats.jsonl", [{"messages": row["chosen"]} for row in rows[:4]])
    wrong = {"packing": "concat", "overlap": 3, "train_on": "all", "boilerplate": 2}
    with pytest.raises(InputError) as raised:
        run(tmp_path / "out", tokenizer_dir, pairs, chats, **wrong)
    expected = ["write a token dataset for each", "--packing concat", "--overlap", "--train_on all"]
    assert len(raised.value.faults) == len(expected)
    assert all(part in fault for part, fault in zip(expected, raised.value.faults, strict=True))
    with pytest.raises(InputError, match=r"--boilerplate .* but a source has preference"):
        run(tmp_path / "out", tokenizer_dir, pairs, boilerplate=2)
    run(tmp_path / "chats", tokenizer_dir, chats, validation_split=0)
    with pytest.raises(
        InputError, match=f"{tmp_path / 'chats'} has texts or chats, but {made} has preference pairs; do not merge them"
    ):
        merging.merge([tmp_path / "chats", made], tmp_path / "merged")
    again = write(tmp_path / "again.jsonl", [*rows[:4], *rows[2:6]])
    held_out = write(tmp_path / "held_out.jsonl", rows[4:9])
    mixed = {"weights": 1, "max_tokens": 600, "deduplicate": "true", "validation_dataset": held_out}
    run(tmp_path / "again", tokenizer_dir, again, **mixed)
    ledger = manifest_of(tmp_path / "again").ledger
    assert ledger.documents_skipped == {"duplicate": 4}
    merging.merge([tmp_path / "again", made], tmp_path / "merged")
    merged = manifest_of(tmp_path / "merged")
    assert merged.has_pairs
    parts = [manifest_of(folder).ledger.splits["train"].pairs for folder in (tmp_path / "again", made)]
    of_train = merged.ledger.splits["train"].pairs
    assert of_train is not None
    assert vars(of_train) == {name: sum(vars(part)[name] for part in parts) for name in vars(of_train)}
    assert problems_of(tmp_path / "merged") == []


def test_slices_of_pairs_merge_to_one_run_byte_for_byte(
    tmp_path: Path, tokenizer_dir: Path, rows: list[dict[str, Any]]
) -> None:
    pairs = write(tmp_path / "pairs.jsonl", rows)
    sizes = ShardSizes(smallest=pairs.stat().st_size // 4)
    flags = ["--dataset", str(pairs), "--tokenizer_name", str(tokenizer_dir), "--max_length", "256", "--num_proc", "1"]
    tokenize_dataset.main([*flags, "--output_dir", f"{tmp_path}/one"], sizes)
    for task in "12":
        tokenize_dataset.main([*flags, "--shard", f"{task}/2", "--output_dir", f"{tmp_path}/{task}"], sizes)
    merging.main([f"{tmp_path}/2", f"{tmp_path}/1", "--output_dir", f"{tmp_path}/merged"], sizes)
    assert manifest_of(tmp_path / "merged").has_pairs
    for file in (path for path in (tmp_path / "one").rglob("*") if path.is_file()):
        assert (tmp_path / "merged" / file.relative_to(tmp_path / "one")).read_bytes() == file.read_bytes(), file
