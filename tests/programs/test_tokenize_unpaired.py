"""tokenize_dataset.py on unpaired answers: sequences, labels through packing, slices and merges, and refusals."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fabric_train.cli.errors import InputError
from fabric_train.data.token_dataset import TokenDataset, open_dataset
from fabric_train.inspection import __main__ as inspect
from fabric_train.inspection.report import make_report
from fabric_train.programs import tokenize_dataset
from fabric_train.tokenization import merge as merging
from fabric_train.tokenization.shards import ShardSizes
from fabric_train.tokenization.tokenizers.vocabulary import load_vocabulary
from tests.support.pair_datasets import tokenize, write_model, write_source, write_unpaired_source
from tests.support.token_datasets import manifest_of

NUMBERS = range(20)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "model")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_unpaired_source(tmp_path_factory.mktemp("source") / "a.jsonl", NUMBERS)


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory, model: Path, source: Path) -> Path:
    return tokenize(tmp_path_factory.mktemp("tokens") / "tokens", model, [source])


def read_rows(path: Path) -> list[tuple[str, str, bool]]:
    """Return the prompt, the answer and the label of each row of a file of unpaired answers."""
    rows = []
    for line in path.read_text().splitlines():
        row = json.loads(line)
        prompt, answer = row.get("prompt"), row.get("completion")
        if "messages" in row:
            prompt, answer = (message["content"] for message in row["messages"])
        rows.append((prompt, answer, row["label"]))
    return rows


def read_documents(dataset: TokenDataset) -> dict[int, tuple[str, str, bool]]:
    """Return the text of both sequences and the label of the documents of all splits, by their rows in the source."""
    vocabulary = load_vocabulary(dataset.folder / "tokenizer")
    assert vocabulary is not None
    documents: dict[int, tuple[str, str, bool]] = {}
    for split in (dataset.train, dataset.validation):
        assert split is not None
        assert split.index is not None
        for row in range(len(split)):
            batch = split.__getitems__([row])
            assert batch.documents is not None
            assert batch.is_desirable is not None
            borders = batch.documents.borders.tolist()
            ids = batch.input_ids.flatten().tolist()
            texts = []
            for begin, end in pairwise(borders):
                texts.append(vocabulary.tokenizer.decode(ids[begin:end], skip_special_tokens=True).strip())
            origins = [split.index.origin(document) for document in split.index.pieces(np.array([row])).documents]
            labels = batch.is_desirable.tolist()
            for origin, own, mismatched, label in zip(origins, texts[::2], texts[1::2], labels, strict=True):
                documents[origin.row] = (own, mismatched, label)
    return documents


def problems_of(folder: Path) -> list[str]:
    return [str(problem) for problem in make_report(folder, "train", range(0), lambda *_: None).problems]


def desirable_of(folder: Path) -> list[bool]:
    """Return the labels of the train split in the order of its rows, as batches have them."""
    rows = open_dataset(str(folder)).train
    batch = rows.__getitems__(range(len(rows)))
    assert batch.is_desirable is not None
    return batch.is_desirable.tolist()


@pytest.mark.parametrize("packing", ["best_fit", "none"])
def test_a_document_has_its_answer_that_of_the_row_before_it_and_its_label(
    tmp_path: Path, model: Path, source: Path, tokens: Path, packing: str
) -> None:
    folder = tokens
    if packing == "none":
        folder = tokenize(tmp_path / "tokens", model, [source], packing="none")
    rows = read_rows(source)
    documents = read_documents(open_dataset(str(folder)))
    assert sorted(documents) == list(range(1, len(rows) + 1))
    for number, (prompt, answer, label) in enumerate(rows):
        own, mismatched, stored_label = documents[number + 1]
        other_answer = rows[number - 1][1]
        beginning = f"user: {prompt}assistant: "
        assert (own, mismatched, stored_label) == (beginning + answer, beginning + other_answer, label)


def test_the_other_answer_is_of_another_prompt_if_there_is_one(tmp_path: Path, model: Path) -> None:
    rows = [{"prompt": "Count from one, 1.", "completion": answer, "label": True} for answer in ("one", "two", "six")]
    rows.insert(0, {"prompt": "Count from five.", "completion": "five", "label": False})
    source = tmp_path / "a.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    folder = tokenize(tmp_path / "tokens", model, [source, source], validation_split=0.5)
    mismatched = {row: document[1].split()[-1] for row, document in read_documents(open_dataset(str(folder))).items()}
    assert mismatched == {1: "six", 2: "five", 3: "five", 4: "five"}


def test_ledger_inspector_and_command_show_the_labels(
    tokens: Path, source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = manifest_of(tokens)
    content = json.loads((tokens / "manifest.json").read_text())
    assert (content["format"], content["has_unpaired"], manifest.objective) == (4, True, "kto")
    ledgers = [split.unpaired for split in manifest.ledger.splits.values()]
    num_desirable = sum(ledger.desirable for ledger in ledgers if ledger)
    num_undesirable = sum(ledger.undesirable for ledger in ledgers if ledger)
    labels = [label for _, _, label in read_rows(source)]
    assert (num_desirable, num_undesirable) == (labels.count(True), labels.count(False))
    inspect.main([str(tokens)])
    shown = capsys.readouterr().out
    assert "another row's answer" in shown
    assert ", undesirable" in shown
    assert problems_of(tokens) == []


def test_another_label_is_found_by_the_inspector(tmp_path: Path, model: Path, source: Path) -> None:
    folder = tokenize(tmp_path / "tokens", model, [source])
    file = folder / "train" / "index" / "desirable.npy"
    labels = np.load(file)
    labels[0] = not labels[0]
    np.save(file, labels)
    assert any("desirable answers, but the document index" in problem for problem in problems_of(folder))
    file.unlink()
    with pytest.raises(InputError, match=r"desirable.npy: the file is missing; tokenize again"):
        desirable_of(folder)


@pytest.mark.parametrize("as_parts", [False, True])
def test_a_merge_keeps_the_labels_of_its_parts(
    tmp_path: Path, model: Path, tokens: Path, source: Path, as_parts: bool
) -> None:
    other_source = write_unpaired_source(tmp_path / "b.jsonl", range(33, 40))
    other = tokenize(tmp_path / "other", model, [other_source])
    merging.merge([tokens, other], tmp_path / "merged", as_parts=as_parts)
    assert desirable_of(tmp_path / "merged") == desirable_of(tokens) + desirable_of(other)
    assert manifest_of(tmp_path / "merged").has_unpaired
    assert problems_of(tmp_path / "merged") == []
    pairs = tokenize(tmp_path / "pairs", model, [write_source(tmp_path / "pairs.jsonl", range(9))])
    with pytest.raises(InputError, match=r"has unpaired answers, but .* has preference pairs; do not merge them"):
        merging.merge([tokens, pairs], tmp_path / "mixed")


def test_slices_merge_to_one_run_byte_for_byte(tmp_path: Path, model: Path, source: Path) -> None:
    sizes = ShardSizes(smallest=source.stat().st_size // 4)
    flags = ["--dataset", str(source), "--tokenizer_name", str(model), "--max_length", "192", "--num_proc", "1"]
    tokenize_dataset.main([*flags, "--output_dir", f"{tmp_path}/one"], sizes)
    for task in "12":
        tokenize_dataset.main([*flags, "--shard", f"{task}/2", "--output_dir", f"{tmp_path}/{task}"], sizes)
    merging.main([f"{tmp_path}/2", f"{tmp_path}/1", "--output_dir", f"{tmp_path}/merged"], sizes)
    for file in (path for path in (tmp_path / "one").rglob("*") if path.is_file()):
        assert (tmp_path / "merged" / file.relative_to(tmp_path / "one")).read_bytes() == file.read_bytes(), file


def test_an_answer_that_comes_twice_with_one_label_is_a_duplicate(tmp_path: Path, model: Path, source: Path) -> None:
    lines = source.read_text().splitlines()
    other_label = json.dumps(json.loads(lines[0]) | {"label": True})
    repeated = tmp_path / "a.jsonl"
    repeated.write_text("\n".join([*lines, lines[0], lines[4], other_label]))
    folder = tokenize(tmp_path / "tokens", model, [repeated], deduplicate="true")
    assert manifest_of(folder).ledger.documents_skipped == {"duplicate": 2}


ANSWER = {"prompt": "Count from one.", "completion": "one two"}


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (ANSWER, "label is missing; it is true for a desirable answer and false for one to avoid"),
        ({**ANSWER, "label": 1}, "label is 1, but must be true or false"),
        ({**ANSWER, "label": None, "kto_tag": "good"}, 'kto_tag is "good", but must be true or false'),
        ({"messages": [{"role": "user", "content": "Hm?"}], "label": True}, "must end with the assistant's answer"),
        ({"messages": [{"role": "assistant", "content": "Hm."}], "label": True}, "the answer has no prompt"),
        ({"prompt": "Hm?", "label": True}, "it has neither prompt and completion nor messages"),
    ],
)
def test_a_row_without_a_label_or_an_answer_is_named(
    tmp_path: Path, model: Path, row: dict[str, Any], reason: str
) -> None:
    source = write_unpaired_source(tmp_path / "a.jsonl", range(2))
    with source.open("a") as file:
        file.write(json.dumps(row) + "\n")
    with pytest.raises(InputError) as raised:
        tokenize(tmp_path / "tokens", model, [source])
    (fault,) = raised.value.faults
    assert "a.jsonl, line 3: " in fault
    assert reason in fault


def test_kto_tag_of_llama_factory_and_labels_of_csv_files_are_understood(tmp_path: Path, model: Path) -> None:
    tagged = tmp_path / "a.jsonl"
    rows = [{"instruction": f"Count from {n}.", "output": "one", "kto_tag": n > 0} for n in range(3)]
    tagged.write_text("".join(json.dumps(row) + "\n" for row in rows))
    table = tmp_path / "b.csv"
    table.write_text("prompt,completion,label\nCount.,one,True\nCount on.,two,false\nCount more.,three,TRUE\n")
    for source, num_desirable in ((tagged, 2), (table, 2)):
        folder = tokenize(tmp_path / f"{source.stem}.tokens", model, [source], validation_split=0)
        ledger = manifest_of(folder).ledger.splits["train"].unpaired
        assert ledger is not None
        assert (ledger.desirable, ledger.undesirable) == (num_desirable, 1)


def test_what_unpaired_answers_cannot_be_is_refused_in_one_line_each(tmp_path: Path, model: Path, source: Path) -> None:
    chats = tmp_path / "chats.jsonl"
    chats.write_text(json.dumps({"messages": [{"role": "user", "content": "Hm?"}]}) + "\n")
    with pytest.raises(InputError) as raised:
        tokenize(tmp_path / "tokens", model, [source, chats], packing="concat", overlap=3, train_on="all")
    expected = [
        "write a token dataset for each",
        "--packing concat",
        "--overlap has no effect, since an unpaired",
        "--train_on all does not apply to an",
    ]
    assert all(part in fault for part, fault in zip(expected, raised.value.faults, strict=True))
    single = tmp_path / "single.jsonl"
    single.write_text(source.read_text().splitlines()[0])
    with pytest.raises(InputError, match=r"every document is left out \(1 no other answer\)"):
        tokenize(tmp_path / "tokens", model, [single])


def test_chats_with_a_label_are_still_read_as_chats_on_request(tmp_path: Path, model: Path, source: Path) -> None:
    completions = tmp_path / "a.jsonl"
    lines = [line for line in source.read_text().splitlines() if "completion" in line]
    completions.write_text("\n".join(lines))
    folder = tokenize(tmp_path / "chats", model, [completions], data_format="prompt_completion", validation_split=0)
    manifest = manifest_of(folder)
    num_undesirable = sum(not json.loads(line)["label"] for line in lines)
    assert manifest.ledger.documents_skipped == {"undesirable_answer": num_undesirable}
    assert not manifest.has_unpaired
