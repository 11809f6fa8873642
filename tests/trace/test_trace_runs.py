"""A trace of a real run names the rows that its ranks read: compared with the tokens of the batches of every step."""

import hashlib
import json
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from fabric_train.cli.errors import InputError
from fabric_train.trace.__main__ import main
from fabric_train.trace.documents import DocumentInStep, find_steps, list_documents
from fabric_train.trace.run_history import Ranks, RunHistory
from tests.support.checkpoint_examples import write_checksums
from tests.support.forked_runs import ForkedRuns
from tests.support.short_runs import argv, metrics, saved_steps
from tests.support.token_datasets import TEXTS, tokenize, write_jsonl

pytestmark = pytest.mark.slow
NAMES = ("va", "es")
STREAM = {
    "sources": ["a"],
    "text_column": "text",
    "max_length": 24,
    "tokenizer": "",
    "special_text_is_plain": False,
    "rows_per_window": 8,
}
LAST_STEPS = {"trunk": 6, "branch": 10, "on": 7}
RECORD = """
import json
from fabric_train.data.step_sampler import TrainBatches

def windows(self, after_step, last_step, original=TrainBatches.windows):
    for window in original(self, after_step, last_step):
        rows = [ids for batch in window.batches for ids in batch.input_ids.tolist()]
        with open("read.jsonl", "a") as file:
            file.write(json.dumps([{run!r}, window.step, rank, rows]) + "\\n")
        yield window

TrainBatches.windows = windows
"""


class Tracing:
    """Runs over two token datasets: a trunk of two ranks with other shares from step 4 on, and two branches.

    Both branch off at step 4. ``branch`` has other shares, one of them of a source in a token dataset, and is resumed
    on one rank. ``on`` goes on in the order of the trunk, on one rank, and has another phase from step 6 on.
    """

    def __init__(self, folder: Path, model: Path, runs: ForkedRuns) -> None:
        self.folder = folder
        self._model = model
        self._runs = runs
        self.texts: dict[tuple[str, int], str] = {}
        for name, texts in {"va": TEXTS[:20], "es": TEXTS, "more": TEXTS[:12]}.items():
            write_jsonl(folder / f"{name}.jsonl", [f"{name} {text}" for text in texts] + [" "])
            self.texts |= {(f"{name}.jsonl", line): f"{name} {text}" for line, text in enumerate(texts, 1)}
        for name, sources, packing in (("va", ["va"], "concat"), ("es", ["es", "more"], "best_fit")):
            files = [f"{source}={folder}/{source}.jsonl" for source in sources]
            tokenize(folder / name, model, *files, validation_split=0.1, packing=packing, max_length=24)

    def train(self, run: str, num_ranks: int, shares: tuple[object, ...], **options: object) -> None:
        given = {"train_data_dir": "TOKENS", "total_batch_size": 8, "save_step_interval": 2, "eval_iters": 1, **options}
        given["parallelism"] = "ddp" if num_ranks > 1 else "single"  # which starts in less time than shards
        words = argv(self._model, Path("TOKENS"), Path(run), **given)
        place = words.index("TOKENS")
        words = [*words[:place], *NAMES, "--shares", *map(str, shares), *words[place + 1 :]]
        self._runs.start(words, num_ranks, cwd=self.folder, before=RECORD.format(run=run)).finish()

    def read(self) -> dict[tuple[str, int, int], list[list[int]]]:
        """Return the rows of tokens that each (run, step, rank) read."""
        lines = (self.folder / "read.jsonl").read_text().splitlines()
        return {(run, step, rank): rows for run, step, rank, rows in map(json.loads, lines)}


@pytest.fixture(scope="module")
def tracing(
    tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path, forked_runs: ForkedRuns
) -> Iterator[Tracing]:
    made = Tracing(tmp_path_factory.mktemp("tracing"), tiny_model_dir, forked_runs)
    (made.folder / "phases.yaml").write_text("- {from: 4, shares: [0.25, 2]}")
    (made.folder / "more.yaml").write_text("- {from: 4, shares: [0.25, 2]}\n- {from: 6, shares: [0, 1]}")
    made.train("trunk", 2, (1.0, 0.5), max_step=6, phases="phases.yaml")
    named = ("va=2.0", "es:more=1", "es=0.25")
    made.train("branch", 2, named, branch="trunk@4", max_step=8)
    made.train("branch", 1, named, resume="true", max_step=10)
    made.train("on", 1, (1.0, 0.5), branch="trunk@4", max_step=7, phases="more.yaml")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(made.folder)  # the run's arguments have relative folders
        yield made


@pytest.fixture(scope="module")
def forged(tracing: Tracing) -> None:
    """Copies of the runs that are as if they had read a stream or older token datasets, or had lost their trunk."""
    forge("trunk", "stream", lambda content: content.update(data=STREAM))
    forge("trunk", "early", lambda content: None, step=2)
    digests = []
    for name in NAMES:
        folder = Path("older") / name
        shutil.copytree(name, folder, ignore=shutil.ignore_patterns("index"))
        manifest = json.loads((folder / "manifest.json").read_text()) | {"has_index": False}
        (folder / "manifest.json").write_text(json.dumps(manifest))
        digests.append(hashlib.sha256((folder / "manifest.json").read_bytes()).hexdigest())

    def read_older(content: dict[str, Any]) -> None:
        content["data"]["fingerprint"] = hashlib.sha256("\n".join(digests).encode()).hexdigest()
        content["arguments"]["train_data_dir"] = content["mixture_sources"] = [f"older/{name}" for name in NAMES]

    forge("trunk", "older", read_older)
    forge("branch", "moved", lambda content: content["lineage"][0].update(run="/gone/trunk"))


def forge(run: str, to: str, change: Callable[[dict[str, Any]], None], step: int = 6) -> None:
    """Copy a checkpoint of a run into the run ``to``, with another content of trainer.json."""
    name = f"checkpoints/step-{step:08d}"
    copy = Path(shutil.copytree(Path(run, name), Path(to, name)))
    content = json.loads((copy / "trainer.json").read_text())
    change(content)
    (copy / "trainer.json").write_text(json.dumps(content))
    write_checksums(copy)


def trace(capsys: pytest.CaptureFixture[str], *words: object) -> dict[str, Any]:
    main([*map(str, words), "--json"])
    return dict(json.loads(capsys.readouterr().out))


def run_with(run: str, step: int) -> str:
    """Return the run that trained a step of ``run``: all branched off the trunk after step 4."""
    return "trunk" if step <= 4 else run


def num_ranks(run: str, step: int) -> int:
    return 1 if (run == "on" and step > 4) or step > 8 else 2


def every_step() -> Iterator[tuple[str, int]]:
    """Yield each run with each of its steps, those before it branched off the trunk included."""
    for run, last_step in LAST_STEPS.items():
        for step in range(1, last_step + 1):
            yield run, step


def encoded_rows(documents: Iterable[DocumentInStep], tracing: Tracing, tokenizer: Any) -> list[list[int]]:
    """Return the token ids of the listed documents of each row, encoded again from their texts."""
    ids_by_row: dict[tuple[str, int], list[int]] = {}
    for document in documents:
        assert document.file is not None
        assert document.line is not None
        assert f"{document.source}.jsonl" == Path(document.file).name
        text = tracing.texts[Path(document.file).name, document.line]
        if document.first_token == 0:
            shown_beginning = document.text.rstrip("…")  # cut, on one line
            assert " ".join(text.split()).startswith(shown_beginning)
        text_ids = tokenizer.encode(text, add_special_tokens=False)
        ids = [tokenizer.bos_token_id, *text_ids, tokenizer.eos_token_id]
        piece = ids[document.first_token : document.first_token + document.tokens]
        ids_by_row.setdefault((document.dataset, document.row), []).extend(piece)
    return list(ids_by_row.values())


def test_documents_of_a_step_are_those_that_its_ranks_read(tracing: Tracing) -> None:
    rows_read = tracing.read()
    tokenizer = AutoTokenizer.from_pretrained(tracing.folder / "va" / "tokenizer")
    num_checked_documents = 0
    for run, step in every_step():
        history = RunHistory(Path(run))
        listing = list_documents(history, step, None)
        trained_in = run_with(run, step)
        epoch_of_step = {int(row[0]): int(row[1]) for row in metrics(tracing.folder / trained_in)}
        assert listing.epoch == epoch_of_step[step]
        assert Path(listing.run).name == trained_in
        assert listing.num_ranks == num_ranks(run, step)
        for rank in range(listing.num_ranks):
            documents = [document for document in listing.documents if document.ranks == [rank]]
            assert list_documents(history, step, rank).documents == documents
            num_checked_documents += len(documents)

            # The rows that the rank read begin with the listed documents, which come in the order of the rows, and have
            # no other document.
            rows = rows_read[trained_in, step, rank]
            for row, row_ids in zip(rows, encoded_rows(documents, tracing, tokenizer), strict=True):
                padding = row[len(row_ids) :]
                assert row[: len(row_ids)] == row_ids
                assert tokenizer.bos_token_id not in padding
    assert num_checked_documents > 150


def test_steps_of_a_document_are_those_that_list_it(tracing: Tracing, capsys: pytest.CaptureFixture[str]) -> None:
    listed: dict[tuple[str, str, int], set[int]] = {}
    for run, last in LAST_STEPS.items():
        history = RunHistory(Path(run))
        for step in range(1, last + 1):
            for one in list_documents(history, step, None).documents:
                listed.setdefault((run, Path(one.file or "").name, one.line or 0), set()).add(step)
    for run in LAST_STEPS:
        history = RunHistory(Path(run))
        kept = dict.fromkeys([step for step in saved_steps(tracing.folder / "trunk") if step <= 4], "trunk")
        kept |= dict.fromkeys(saved_steps(tracing.folder / run)[0 if run != "trunk" else len(kept) :], run)
        for file, line in list(tracing.texts)[::2]:
            found = find_steps(history, f"{file}:{line}")
            steps = listed.get((run, file, line), set())
            assert {one.step for one in found.read} == steps
            assert not found.to_come
            seen = {step for step in kept if steps and step >= min(steps)}
            assert [checkpoint_in(path) for path in found.checkpoints] == [(kept[step], step) for step in sorted(seen)]
            without = max(set(kept) - seen, default=None)
            assert (found.last_without and checkpoint_in(found.last_without)) == (
                (kept[without], without) if without else None
            )
    only_there = {(file, line) for file, line in tracing.texts if ("branch", file, line) not in listed}
    assert only_there  # of a share, and in validation


def checkpoint_in(path: str) -> tuple[str, int]:
    return Path(path).parents[1].name, int(Path(path).name.removeprefix("step-"))


@pytest.mark.usefixtures("forged")
def test_steps_after_the_newest_checkpoint_are_those_to_come(tracing: Tracing) -> None:
    whole = RunHistory(Path("trunk"))
    early = RunHistory(Path("early"))
    assert [list_documents(early, step, None).is_taken for step in (2, 3)] == [True, False]
    for file, line in list(tracing.texts)[::2]:
        steps = {one.step for one in find_steps(whole, f"{file}:{line}").read}
        found = find_steps(early, f"{file}:{line}")
        assert {one.step for one in found.read} == {step for step in steps if step <= 2}
        assert {one.step for one in found.to_come} == {step for step in steps if step > 2}


@pytest.mark.usefixtures("forged")
def test_what_is_printed_names_documents_steps_and_checkpoints(
    tracing: Tracing, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["branch", "--step", "6", "--rank", "1"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("step 6 of ")
    assert lines[1] == "2 ranks, according to branch/checkpoints/step-00000010"
    documents = trace(capsys, "branch", "--step", 6, "--rank", 1)["documents"]
    table = lines[lines.index(next(line for line in lines if "───" in line)) + 1 :]
    for line, one in zip(table, documents, strict=False):
        cells = ["1", f"{one['dataset']}:{one['row']}", one["source"], f"{one['file']}:{one['line']}"]
        assert [word.rstrip(",") for word in line.split()[:4]] == cells
        assert one["text"] in line
    assert len(documents) == len([line for line in table if line.strip()]) > 3
    validation = next(
        file_line
        for file_line in tracing.texts
        if trace(capsys, "early", "--document", "{}:{}".format(*file_line))["found"][0]["split"] == "validation"
    )
    main(["early", "--document", "{}:{}".format(*validation)])
    printed = capsys.readouterr().out
    assert "validation split, which is not used for training: " in printed
    assert "\nread by no step up to 2, the newest checkpoint\n" in printed
    assert "\nnewest without it " in printed


def test_ranks_that_split_a_model_read_the_same_rows() -> None:
    ranks = Ranks(num_data_ranks=2, group_size=2, micro_batch_size=3)
    assert [list(ranks.at(position)) for position in range(8)] == [[0, 1]] * 3 + [[2, 3]] * 3 + [[0, 1]] * 2
    assert ranks.num_ranks == 4


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        ("trunk --step 7", "--step 7: the run of .*trunk/checkpoints/step-00000006 ends at step 6"),
        ("trunk --step 2 --rank 2", "--rank 2: step 2 has ranks 0 to 1, according to "),
        ("nothing --step 2", "nothing: neither a complete checkpoint nor a run folder that has one|no such folder"),
        (
            "trunk --document b.jsonl:1",
            "no token dataset of the run has a file b.jsonl; they have .*/es.jsonl, .*/va.jsonl",
        ),
        ("trunk --document va.jsonl:21", r"no such document in va, so no step read it: it was left out \(empty\), is "),
        (
            "trunk --step 1 --train_data_dir gone es",
            "gone: no such folder, but the run of .*trunk/.* read a token dataset",
        ),
        (
            "trunk --step 1 --train_data_dir es va",
            "es, va: manifest.json differs from the token dataset that the run of .*trunk/",
        ),
        ("stream --step 1", "its run read --streaming_dataset, whose rows depend on the texts"),
        (
            "older --document va.jsonl:1",
            "older/va has no document index because an older version wrote it, so its rows cannot be traced to "
            "documents",
        ),
        ("moved --document va.jsonl:1", "trunk: the run that trained steps 1 to 4 no longer has a checkpoint"),
    ],
)
@pytest.mark.usefixtures("forged")
def test_what_cannot_be_traced_is_refused_in_one_line(words: str, fault: str) -> None:
    with pytest.raises(InputError) as refused:
        main(words.split())
    (line,) = refused.value.faults
    assert re.search(fault, line)
    assert line.isprintable()
