"""--decontaminate: documents that share words with evaluation tasks are dropped or marked, listed and counted."""

import gzip
import json
import random
import textwrap
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fabric_train.cleaning.decontamination import (
    ngram_hashes,
    open_decontamination,
    read_task_files,
    split_words,
)
from fabric_train.cleaning.results import Dropped
from fabric_train.cli.errors import InputError
from fabric_train.export.publish import dataset_card, public_copy
from fabric_train.tokenization import merge
from fabric_train.tokenization.shards import ShardSizes
from tests.support.token_datasets import manifest_of, tokenize, write_jsonl

QUESTION = (
    "Un estudiante deja caer desde la misma altura una bola de plomo y una pluma dentro de un tubo sin aire. "
    "¿Cuál de los dos objetos llega antes al suelo, y por qué?"
)
SHORT = "¿Qué planeta del sistema solar tiene más lunas conocidas?"  # nine words


def write_task(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rows = [
        {"id": "q1", "question": QUESTION, "choices": ["la bola", "la pluma"], "answerKey": "C"},
        {"question": SHORT},
    ]
    return write_task(tmp_path_factory.mktemp("tasks") / "arc_es.jsonl", *rows)


@pytest.mark.parametrize(
    "planted",
    [
        QUESTION,
        textwrap.fill(QUESTION, 21),
        QUESTION.upper(),
        "> " + textwrap.fill(QUESTION, 33).replace("\n", "\n> "),
        QUESTION.replace(" ", "\u00a0\t").replace("¿", "").replace(",", ";"),
        "\n".join(QUESTION.replace(",", " -- ").split()),
        QUESTION.replace("estudiante", "estu\u00addiante").replace("á", "a\u0301"),
        QUESTION.replace("fi", "ﬁ").replace("de plomo", "**de** _plomo_"),
        " ".join(QUESTION.split()[3:16]),  # thirteen of its words
        SHORT,
        textwrap.fill(SHORT.upper(), 12).replace("?", ""),
    ],
)
def test_a_planted_item_is_found_however_it_is_wrapped(task: Path, planted: str) -> None:
    step = open_decontamination([str(task)], "drop")
    result = step.clean(f"Un texto sobre física.\n\n{planted}\n\nY algo más.", Counter())
    assert isinstance(result, Dropped)
    assert result.reason == "contaminated"
    assert [hit.task for hit in result.hits] == ["arc_es"]
    assert result.hits[0].item == ("2" if "planeta" in planted.lower().replace("\n", "") else "q1")


@pytest.mark.parametrize(
    "text",
    [
        " ".join(QUESTION.split()[3:15]),  # twelve of its words
        QUESTION.replace("plomo", "hierro").replace("pluma", "hoja").replace("aire", "vacío").replace("llega", "cae"),
        SHORT.replace("lunas", "satélites"),
        "la bola, la pluma",
        "",
    ],
)
def test_a_text_that_shares_fewer_words_stays(task: Path, text: str) -> None:
    assert open_decontamination([str(task)], "drop").clean(text, Counter()) == text


def test_hashes_find_exactly_the_ngrams_that_a_plain_search_finds() -> None:
    draw = random.Random(0)
    words = [draw.choice("abcde") * draw.randint(1, 2) for _ in range(2_000)]
    for separator in (" ", "\n", " - "):
        hashes = ngram_hashes(split_words(separator.join(words)), [8, 13])
        for length in (8, 13):
            ngrams = [tuple(words[start : start + length]) for start in range(len(words) - length + 1)]
            # equal n-grams have equal hashes, and different ones different hashes
            hash_of_ngram = dict(zip(ngrams, hashes[length].tolist(), strict=True))
            assert [hash_of_ngram[ngram] for ngram in ngrams] == hashes[length].tolist()
            assert len(set(hash_of_ngram.values())) == len(hash_of_ngram)
    assert ngram_hashes(split_words("seven words are not enough for this"), [8, 13]) == {}
    apart = ngram_hashes(split_words("ab c " * 8 + "a bc " * 8), [8])[8]
    assert len(np.unique(apart)) == 2 + 7 + 2  # in the first half, across the border, in the second half


def test_lm_evals_samples_give_the_item_and_not_the_models_answers(tmp_path: Path) -> None:
    sample = {
        "doc_id": 7,
        "doc": {"question": QUESTION, "choices": {"text": ["la bola de plomo", "la pluma"], "label": ["A", "B"]}},
        "target": "los dos llegan a la vez",
        "arguments": {"gen_args_0": {"arg_0": f"Pregunta: {QUESTION}\nRespuesta:", "arg_1": " la pluma"}},
        "resps": [["an answer of the model that must never count as a part of this task"]],
        "filter": "none",
        "acc": 0.0,
    }
    file = write_task(tmp_path / "samples_arc_es_2026-11-20T10-15-30.123456.jsonl", sample, sample | {"filter": "b"})
    (read,) = read_task_files([str(file)])
    assert [(item.task, item.name) for item in read.items] == [("arc_es", "7")]
    assert read.items[0].texts == (QUESTION, "la bola de plomo", "la pluma", "los dos llegan a la vez")


def test_texts_tasks_and_compression_are_read_as_documented(tmp_path: Path) -> None:
    rows = [{"task": "a", "text": "the text", "note": "not this one"}, {"passage": ["one two", {"x": "three four"}]}]
    file = tmp_path / "mine.jsonl.gz"
    file.write_bytes(gzip.compress("\n".join(map(json.dumps, rows)).encode()))
    (read,) = read_task_files([str(file)])
    assert [(item.task, item.name, item.texts) for item in read.items] == [
        ("a", "1", ("the text",)),
        ("mine", "2", ("one two", "three four")),
    ]


def test_the_instructions_of_prompts_are_ignored_and_counted(tmp_path: Path) -> None:
    instruction = "Read the following question with care and then choose the one answer that is right of the four below"
    rows = [
        {"question": f"{instruction}: what is {n} plus {n + 1} when it is multiplied by {n + 2}?"} for n in range(40)
    ]
    step = open_decontamination([str(write_task(tmp_path / "sums.jsonl", *rows))], "drop")
    assert step.clean(f"Hints. {instruction}.", Counter()) == f"Hints. {instruction}."
    assert isinstance(step.clean(rows[5]["question"], Counter()), Dropped)
    counts = step.settings()["tasks"]["sums"]
    assert (counts["items"], counts["too_short"], counts["common_ngrams"]) == (40, 0, 9)
    few = open_decontamination([str(write_task(tmp_path / "few.jsonl", *rows[:10]))], "drop")
    assert isinstance(few.clean(f"Hints. {instruction}.", Counter()), Dropped)


@pytest.mark.parametrize(
    "name, content, fault",
    [
        ("missing.jsonl", None, "missing.jsonl: no such file"),
        ("a.parquet", "PAR1", "a.parquet: expected .jsonl or .json"),
        ("bad.jsonl", '{"text": \n', "bad.jsonl, line 1: .*; fix or remove the line"),
        ("empty.jsonl", "", "empty.jsonl: it has no text"),
        ("names.jsonl", '{"id": "one two", "x": "word", "n": 3}\n', "names.jsonl: it has no text"),
        ("short.jsonl", '{"text": "seven words are not enough for this"}\n', "no item has a text of 8 words"),
    ],
)
def test_a_file_of_tasks_that_cannot_be_used_is_one_line(
    tmp_path: Path, name: str, content: str | None, fault: str
) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(InputError, match=f"--decontaminate: .*{fault}"):
        open_decontamination([str(tmp_path / name)], "drop")


TEXTS = ["A clean text", f"Mine: ana@uni.es {textwrap.fill(QUESTION, 40)}", "Another", f"{QUESTION} {SHORT}", "Last"]


@pytest.fixture(scope="module")
def datasets_dir(tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path, task: Path) -> Path:
    """Token datasets ``drop`` and ``mark`` of the same texts, and ``plain``, which was not compared."""
    folder = tmp_path_factory.mktemp("datasets")
    source = f"es={write_jsonl(folder / 'a.jsonl', TEXTS)}"
    for action in ("drop", "mark"):
        options = {"decontaminate": task, "contaminated": action, "redact": "email", "validation_split": 0}
        tokenize(folder / action, tiny_model_dir, source, max_length=4, **options)
    tokenize(folder / "plain", tiny_model_dir, source, max_length=4, validation_split=0)
    return folder


@pytest.mark.parametrize("action", ["drop", "mark"])
def test_contaminated_documents_are_listed_counted_and_dropped_or_kept(datasets_dir: Path, action: str) -> None:
    folder = datasets_dir / action
    manifest = manifest_of(folder)
    is_dropped = action == "drop"
    assert manifest.ledger.documents_skipped == ({"contaminated": 2} if is_dropped else {})
    assert (manifest.ledger.documents_kept, manifest.ledger.contaminated) == (3 if is_dropped else 5, {"arc_es": 2})
    hits = [json.loads(line) for line in (folder / "contamination.jsonl").read_text(encoding="utf-8").splitlines()]
    place = f"es: {datasets_dir / 'a.jsonl'}"
    listed = [(hit["task"], hit["item"], hit["place"]) for hit in hits]
    assert listed == [("arc_es", "q1", f"{place}:2"), ("arc_es", "2", f"{place}:4"), ("arc_es", "q1", f"{place}:4")]
    assert hits[1]["words"] == "qué planeta del sistema solar tiene más lunas conocidas"
    assert hits[0]["num_shared"] == len(split_words(QUESTION).starts) - 12
    settings = manifest.cleaning["decontaminate"]
    assert [file["name"] for file in settings["files"]] == ["arc_es.jsonl"]
    assert settings["tasks"] == {"arc_es": {"items": 2, "too_short": 0, "ngrams": 22, "common_ngrams": 0}}
    if is_dropped:  # the shown part has no personal data
        sample = json.loads((folder / "dropped.jsonl").read_text(encoding="utf-8").splitlines()[0])
        assert (sample["reason"], sample["text"].startswith("Mine: <EMAIL> Un")) == ("contaminated", True)


def test_the_card_says_which_tasks_were_checked_also_after_a_merge(
    datasets_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    drop = manifest_of(datasets_dir / "drop")
    card = str(dataset_card(drop, "alice/tokens", None, None))
    assert "item of these evaluation tasks (arXiv:2005.14165, appendix C) were left out. Items of 8 to 12" in card
    assert "| `arc_es` | 2 | 0 | all | 2 |" in card
    assert "## Cleaning" not in str(dataset_card(manifest_of(datasets_dir / "plain"), "alice/tokens", None, None))
    merge.main([*(str(datasets_dir / name) for name in ("mark", "plain")), "--output_dir", str(tmp_path / "merged")])
    merged = manifest_of(tmp_path / "merged")
    assert [list(part.cleaning) for part in merged.parts] == [["redact", "decontaminate"], []]
    card = str(dataset_card(merged, "alice/tokens", None, None))
    assert "appendix C) were kept. " in card
    assert "| `arc_es` | 2 | 0 | 1 of 2 parts | 2 |" in card
    assert "| redacted email | 1 |" in card
    assert "cleaned differently" in capsys.readouterr().out
    lists = [(folder / "contamination.jsonl").read_bytes() for folder in (datasets_dir / "mark", tmp_path / "merged")]
    assert lists[0] == lists[1]


def test_lists_with_places_and_dropped_texts_are_not_published(datasets_dir: Path) -> None:
    folder = datasets_dir / "drop"
    names = {file.name for file in folder.iterdir()}
    with public_copy(folder, manifest_of(folder), "alice/tokens", None, None) as copy:
        published_names = {file.name for file in copy.iterdir()}
    assert names - published_names == {"contamination.jsonl", "dropped.jsonl"}


def test_a_chat_is_compared_as_a_whole_and_its_sample_is_redacted(tmp_path: Path, chatml_dir: Path, task: Path) -> None:
    words = QUESTION.split()
    asked = " ".join(words[:20])
    clean = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    planted = [{"role": "user", "content": f"ana@uni.es: {asked}"}, {"role": "assistant", "content": "No sé"}]
    source = tmp_path / "chats.jsonl"
    source.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in (clean, planted, clean)))
    options = {"decontaminate": task, "redact": "email", "validation_split": 0, "max_length": 64}
    tokenize(tmp_path / "out", chatml_dir, source, **options)
    ledger = manifest_of(tmp_path / "out").ledger
    assert (ledger.documents_kept, ledger.documents_skipped) == (2, {"contaminated": 1})
    assert ledger.contaminated == {"arc_es": 1}
    (hit,) = map(json.loads, (tmp_path / "out" / "contamination.jsonl").read_text(encoding="utf-8").splitlines())
    (sample,) = map(json.loads, (tmp_path / "out" / "dropped.jsonl").read_text(encoding="utf-8").splitlines())
    assert hit["place"] == sample["place"] == f"{source}: {source}:2"
    assert sample["text"] == f"<EMAIL>: {asked}\nNo sé"


def test_hits_are_the_same_for_any_number_of_processes_and_shards(
    tmp_path: Path, tiny_model_dir: Path, task: Path
) -> None:
    texts = [f"Text {number}. " + (QUESTION if number % 7 == 3 else "Nothing here. ") for number in range(60)]
    source = write_jsonl(tmp_path / "a.jsonl", texts)
    tokenize(tmp_path / "1", tiny_model_dir, source, decontaminate=task)
    tokenize(tmp_path / "2", tiny_model_dir, source, decontaminate=task, num_proc=2, sizes=ShardSizes(smallest=500))
    files = [(tmp_path / name / "contamination.jsonl").read_bytes() for name in "12"]
    assert files[0] == files[1]
    counts = [manifest_of(tmp_path / name).ledger.contaminated for name in "12"]
    assert counts == [{"arc_es": 9}] * 2
