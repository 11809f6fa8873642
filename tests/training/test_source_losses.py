"""The loss of each source: what every token adds to it, in validation and training, for any number of ranks."""

import csv
import json
import math
import shutil
import traceback
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from lightning import Fabric
from transformers import AutoModelForCausalLM

from fabric_train.checkpoint import Evaluation, best_checkpoint, read_trainer_json
from fabric_train.checkpoint.discovery import lowest_loss
from fabric_train.cli.errors import InputError
from fabric_train.cli.shares import Shares
from fabric_train.data.batch import IGNORED_LABEL
from fabric_train.data.mixture import Mixture
from fabric_train.data.step_sampler import Window, validation_batches
from fabric_train.data.token_dataset import TokenDataset, open_dataset
from fabric_train.data.token_mixture import TokenMixture, open_mixture
from fabric_train.export.card_facts import read_record
from fabric_train.export.model_card import CardFacts, write_model_card
from fabric_train.model.lm_head_loss import compute_loss_in_head
from fabric_train.training.evaluation import evaluate
from fabric_train.training.objective import CrossEntropy
from fabric_train.training.source_losses import sum_by_piece, sum_by_source
from fabric_train.training.step import backpropagate
from tests.support.bad_input_folder import edit_json
from tests.support.checkpoint_examples import write_checksums
from tests.support.forked_runs import ForkedRuns
from tests.support.short_runs import TERMINATE, argv, at_point, saved_steps
from tests.support.token_datasets import TEXTS, tokenize, write_jsonl

SOURCES = ("es", "va", "en")
LENGTH = 16


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path) -> list[str]:
    """Two token datasets: es and va in rows that are cut and overlap, va and en in rows with padding."""
    folder = tmp_path_factory.mktemp("sources")
    files = {}
    for name in SOURCES:
        texts = [f"{name} {text[: 5 + 9 * number % 60]}" for number, text in enumerate(TEXTS)]  # of many lengths
        files[name] = f"{name}={write_jsonl(folder / f'{name}.jsonl', texts)}"
    options: dict[str, Any] = {"max_length": LENGTH, "validation_split": 0.3}
    tokenize(folder / "cut", tiny_model_dir, files["es"], files["va"], overlap=3, packing="concat", **options)
    tokenize(folder / "whole", tiny_model_dir, files["va"], files["en"], packing="best_fit", **options)
    return [str(folder / "cut"), str(folder / "whole")]


@pytest.fixture(scope="module", params=[True, False], ids=["isolated", "joined"])
def mixture(folders: list[str], request: pytest.FixtureRequest) -> TokenMixture:
    return open_mixture(folders, Shares("--shares", None), request.param, Path(folders[0]))


@dataclass(frozen=True)
class Piece:
    """A piece of a document in a row."""

    source: str
    ordinal: int
    """Its place among the pieces of the row."""
    num_tokens: int
    num_bytes: float
    """Of its tokens, as their share of the document's bytes."""


def pieces_of_tokens(dataset: TokenDataset, split: str, row: int) -> list[Piece]:
    """Return the piece that each token of a row belongs to, read from the arrays of the document index."""
    folder = Path(dataset.folder, split, "index")
    documents = np.load(folder / "documents.npy")
    rows = np.load(folder / "rows.npy")
    continuations = np.load(folder / "continuations.npy")
    assert dataset.manifest is not None
    sources_of_files: list[str] = []
    for record in dataset.manifest.sources:
        sources_of_files += [record.name] * record.num_files

    # the pieces of a row are documents that begin in it, and continued ones at their ordinals
    start = rows[row]
    end = rows[row + 1]
    begun_documents = iter(range(int(start["documents"]), int(end["documents"])))
    row_continuations = continuations[start["continuations"] : end["continuations"]]
    continuation_by_ordinal = {int(record["ordinal"]): record for record in row_continuations}
    num_pieces = int(end["documents"] - start["documents"]) + len(row_continuations)
    pieces: list[Piece] = []  # of each token
    for ordinal in range(num_pieces):
        if ordinal in continuation_by_ordinal:
            continuation = continuation_by_ordinal[ordinal]
            document = documents[continuation["document"]]
            first_token = int(continuation["start"])
        else:
            document = documents[next(begun_documents)]
            first_token = 0
        document_tokens = int(document["tokens"])
        num_tokens = min(document_tokens - first_token, LENGTH - len(pieces))  # the row may end before
        num_bytes = int(document["bytes"]) * num_tokens / document_tokens
        piece = Piece(sources_of_files[document["file"]], ordinal, num_tokens, num_bytes)
        pieces += [piece] * num_tokens
    return pieces


@dataclass
class SourceSums:
    """Sums over the supervised tokens of a source."""

    nats: float = 0.0
    num_tokens: int = 0
    num_bytes: float = 0.0


@torch.no_grad()
def sums_by_hand(model: Any, mixture: TokenMixture, split: str, rows: list[int]) -> dict[str, SourceSums]:
    """Return the sums of each source in some rows of a mixture, token by token from logits."""
    dataset_rows = []  # token dataset and row in it, of each row of the mixture
    for dataset in mixture.parts:
        dataset_split = dataset.train if split == "train" else dataset.validation
        assert dataset_split is not None
        dataset_rows += [(dataset, dataset_split, row) for row in range(len(dataset_split))]

    sums = {name: SourceSums() for name in SOURCES}
    for mixture_row in rows:
        dataset, dataset_split, row = dataset_rows[mixture_row]
        columns = dataset_split.split[row]
        ids = columns["input_ids"]
        labels = columns.get("labels", ids)
        pieces = pieces_of_tokens(dataset, split, row)

        # the loss of each supervised token, from what attention lets it see
        starts = sorted({0, *columns["document_starts"]}) if mixture.isolates else [0]
        num_targets: Counter[Piece] = Counter()
        for begin, end in pairwise([*starts, LENGTH]):
            logits = model(torch.tensor([ids[begin:end]])).logits[0].float()
            for position in range(begin + 1, end):
                if labels[position] == IGNORED_LABEL:
                    continue
                piece = pieces[position]
                target = torch.tensor(labels[position])
                sums[piece.source].nats += F.cross_entropy(logits[position - 1 - begin], target).item()
                sums[piece.source].num_tokens += 1
                num_targets[piece] += 1

        # the bytes of a piece count as far as its tokens are targets, of which the first cannot be one
        for piece, count in num_targets.items():
            share = min(1, count / max(piece.num_tokens - 1, 1))
            sums[piece.source].num_bytes += piece.num_bytes * share
    return sums


@pytest.mark.parametrize("in_head", [True, False])
def test_losses_of_sources_are_those_of_every_token_by_hand(
    tiny_model_dir: Path, mixture: TokenMixture, in_head: bool
) -> None:
    assert mixture.source_names == SOURCES
    rows = list(range(0, len(mixture.train), 9))
    plain_model = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    expected = sums_by_hand(plain_model, mixture, "train", rows)

    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    if in_head:
        assert compute_loss_in_head(model)
    fabric = Fabric(accelerator="cpu", devices=1)
    wrapped_model = fabric.setup_module(model)
    for batch_size in (1, 4, len(rows)):
        batches = [
            mixture.train.__getitems__(rows[begin : begin + batch_size]) for begin in range(0, len(rows), batch_size)
        ]
        batches.append(mixture.train.__getitems__([]))  # as a rank without rows has it
        window = Window(
            step=1, epoch=0, ends_epoch=False, rows=np.array(rows), micro_batch_size=batch_size, batches=batches
        )
        loss = backpropagate(fabric, wrapped_model, window, CrossEntropy(), num_sources=3)
        for source, name in enumerate(SOURCES):
            assert loss.sources.counts[source] == expected[name].num_tokens > 0
            assert loss.sources.losses[source].item() == pytest.approx(expected[name].nats, rel=1e-5)
        assert loss.sources.losses.sum().item() == pytest.approx(loss.summed.sum().item(), rel=1e-12)


def test_evaluation_has_nats_tokens_and_bytes_of_each_source(tiny_model_dir: Path, mixture: TokenMixture) -> None:
    fabric = Fabric(accelerator="cpu", devices=1)
    model: Any = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    assert mixture.validation is not None
    rows = list(range(len(mixture.validation)))
    sums = sums_by_hand(model, mixture, "validation", rows)
    batches = [mixture.validation.__getitems__(rows[begin : begin + 3]) for begin in range(0, len(rows), 3)]
    evaluation = evaluate(fabric, fabric.setup_module(model), batches, mixture.validation.source_names)
    assert evaluation is not None
    for name, expected in sums.items():
        source = evaluation.sources[name]
        assert source.num_tokens == expected.num_tokens
        assert source.nats == pytest.approx(expected.nats, rel=1e-5)
        assert source.num_bytes == pytest.approx(expected.num_bytes, rel=1e-12)
        assert source.bits_per_byte == pytest.approx(expected.nats / math.log(2) / expected.num_bytes, rel=1e-5)
    num_bytes = sum(expected.num_bytes for expected in sums.values())
    assert evaluation.whole.num_bytes == pytest.approx(num_bytes, rel=1e-12)


def test_a_loss_that_is_not_finite_is_in_its_own_source_only(folders: list[str]) -> None:
    rows = open_dataset(folders[0]).train
    batch = rows.__getitems__(range(len(rows)))
    assert batch.pieces is not None
    token_losses = torch.ones(int(batch.pieces.num_targets.sum()))
    token_losses[0] = torch.nan
    source_losses = sum_by_source(sum_by_piece(token_losses, batch), batch.pieces.sources, num_sources=2)
    first_source = int(batch.pieces.sources[0])
    assert source_losses.isnan().tolist() == [source == first_source for source in (0, 1)]


def test_limited_validation_reads_equally_many_rows_of_each_source(folders: list[str]) -> None:
    dataset = open_dataset(folders[0])
    assert dataset.validation is not None
    for row, main_source in enumerate(dataset.validation.main_sources().tolist()):
        sources_of_tokens = [piece.source for piece in pieces_of_tokens(dataset, "validation", row)]
        counts = [sources_of_tokens.count(name) for name in SOURCES[:2]]
        assert counts[main_source] >= max(counts) - 3  # repeated tokens do not count


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_damaged_index_is_one_line_whoever_reads_it(tmp_path: Path, folders: list[str], num_workers: int) -> None:
    damaged = tmp_path / "tokens"
    shutil.copytree(folders[0], damaged)
    documents = np.load(damaged / "train" / "index" / "documents.npy", mmap_mode="r+")
    documents["file"][20] = 77
    documents.flush()
    rows = open_dataset(str(damaged)).train
    with pytest.raises(InputError) as error:
        list(validation_batches(rows, 4, 1, 0, None, 0, num_workers))
    traceback.clear_frames(error.tb)  # ends the worker: torch waits 10 s for workers of a collected iterator
    assert str(error.value) == "the document index has a file that manifest.json does not list; tokenize again"


# -------------------------------------------------------------------------------------------------------------- runs


def rows_of(run: Path) -> list[dict[str, str]]:
    with (run / "metrics.csv").open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


class Runs:
    """Trains on both token datasets for three steps, with an evaluation at step 0 and at the end."""

    def __init__(self, folder: Path, forked: ForkedRuns, model: Path, tokens: list[str]) -> None:
        self.folder = folder
        self.forked = forked
        self.model = model
        self.tokens = tokens

    def start(self, name: str, num_ranks: int = 1, before: str = "", **options: Any) -> Any:
        all_options = {
            "micro_batch_size": 4,
            "max_step": 3,
            "eval_at_start": None,
            "eval_step_interval": 3,
            "eval_iters": None,
            **options,
        }
        words = argv(self.model, Path("TOKENS"), self.folder / name, **all_options)
        index = words.index("TOKENS")
        words[index : index + 1] = self.tokens  # argv takes one token dataset
        return self.forked.start(words, num_ranks, before=before)

    def evaluation(self, name: str, step: int = 3) -> Evaluation:
        state = read_trainer_json(self.folder / name / "checkpoints" / f"step-{step:08d}").state
        assert state.evaluation is not None
        return state.evaluation


@pytest.fixture(scope="module")
def runs(
    tmp_path_factory: pytest.TempPathFactory, forked_runs: ForkedRuns, tiny_model_dir: Path, folders: list[str]
) -> Runs:
    runs = Runs(tmp_path_factory.mktemp("runs"), forked_runs, tiny_model_dir, folders)
    runs.start("whole").finish()
    return runs


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_ranks", "micro_batch_size", "options"),
    [(1, 8, {}), (2, 1, {}), (2, 2, {"parallelism": "fsdp2", "devices": 2, "context_parallel_size": 2})],
)
def test_sources_add_up_to_the_whole_in_every_cut(
    runs: Runs, folders: list[str], num_ranks: int, micro_batch_size: int, options: dict[str, Any]
) -> None:
    name = f"cut-{num_ranks}-{micro_batch_size}"
    sizes: dict[str, Any] = {"micro_batch_size": micro_batch_size, "eval_batch_size": micro_batch_size}
    runs.start(name, num_ranks, **sizes, **options).finish()

    # in an evaluation, the sources add up, and are those of the first run
    evaluation = runs.evaluation(name)
    first_evaluation = runs.evaluation("whole")
    sources = evaluation.sources
    assert math.fsum(loss.nats for loss in sources.values()) == pytest.approx(evaluation.whole.nats, rel=1e-12)
    assert sum(loss.num_tokens for loss in sources.values()) == evaluation.whole.num_tokens
    assert evaluation.rows == first_evaluation.rows is not None
    for source, loss in sources.items():
        first_loss = first_evaluation.sources[source]
        assert loss.num_tokens == first_loss.num_tokens
        assert loss.num_bytes == pytest.approx(first_loss.num_bytes, rel=1e-12)
        assert loss.loss == pytest.approx(first_loss.loss, rel=1e-5)

    # so are they in each step of training; row 0 of metrics.csv is the evaluation before it
    mixture = open_mixture(folders, Shares("--shares", None), True, Path(folders[0]))
    metrics = rows_of(runs.folder / name)[1:]
    first_metrics = rows_of(runs.folder / "whole")[1:]
    for window, (row, first_row) in enumerate(zip(metrics, first_metrics, strict=True)):
        pieces = mixture.train.__getitems__(window_rows(mixture, window)).pieces
        assert pieces is not None
        counts = pieces.count_by_source(3)[0].tolist()
        nats = []
        for source, count in zip(SOURCES, counts, strict=True):
            column = f"train_loss/{source}"
            assert float(row[column]) == pytest.approx(float(first_row[column]), rel=1e-5)
            nats.append(float(row[column]) * count)
        assert math.fsum(nats) == pytest.approx(float(row["train_loss"]) * sum(counts), rel=1e-12)


def window_rows(mixture: TokenMixture, window: int) -> list[int]:
    sizes = tuple(len(part.train) for part in mixture.parts)
    return Mixture(sizes, mixture.rows_per_epoch, 8, 0).rows_in(0, window).tolist()


@pytest.mark.slow
def test_a_new_run_is_evaluated_at_step_0(runs: Runs) -> None:
    rows = rows_of(runs.folder / "whole")
    assert [row["step"] for row in rows] == ["0", "1", "2", "3"]
    assert [row["step"] for row in rows if row["val_loss"]] == ["0", "3"]

    # the figures before the first step, of each source and of all
    row = rows[0]
    assert (row["train_loss"], row["num_tokens"]) == ("", "0")
    columns = [(f"val_loss/{name}", f"val_perplexity/{name}", f"val_bits_per_byte/{name}") for name in SOURCES]
    columns.append(("val_loss", "perplexity", "val_bits_per_byte"))
    for loss_column, perplexity_column, bits_column in columns:
        assert float(row[perplexity_column]) == pytest.approx(math.exp(float(row[loss_column])))
        assert 0 < float(row[bits_column]) < 100

    # a run that begins with these weights has their losses at its step 0
    checkpoint = runs.folder / "whole" / "checkpoints" / "step-00000003"
    runs.start("weights", checkpoint=checkpoint, weights_only="true", max_step=1).finish()
    first_row = rows_of(runs.folder / "weights")[0]
    assert first_row["step"] == "0"
    assert float(first_row["val_loss/es"]) == pytest.approx(float(rows[3]["val_loss/es"]), rel=1e-12)


@pytest.mark.slow
def test_first_evaluation_goes_through_resume_and_branch_to_the_card(runs: Runs, tmp_path: Path) -> None:
    whole = runs.folder / "whole"
    runs.start("resumed", checkpoint=whole, max_step=4, allow_changes="true").finish()
    branch = runs.start("branch", branch=f"{whole}@3", max_step=5)
    branch.finish()
    assert [row["step"] for row in rows_of(runs.folder / "branch")] == ["4", "5"]
    state = read_trainer_json(runs.folder / "branch" / "checkpoints" / "step-00000005").state
    assert state.first_evaluation is not None
    assert state.evaluation is not None
    assert (state.first_evaluation.step, state.evaluation.step) == (0, 5)
    before = float(rows_of(whole)[0]["val_loss/va"])
    after = state.evaluation.sources["va"].loss
    assert state.first_evaluation.sources["va"].loss == before
    resumed = read_trainer_json(runs.folder / "resumed" / "checkpoints" / "step-00000004").state
    assert resumed.first_evaluation == state.first_evaluation
    write_model_card(
        read_record(read_trainer_json(runs.folder / "branch" / "checkpoints" / "step-00000005")),
        tmp_path,
        CardFacts("model"),
    )
    card = (tmp_path / "README.md").read_text()
    (line,) = [line for line in card.splitlines() if line.startswith("| va |")]
    assert f" | {before:.3f}\u00a0→\u00a0{after:.3f} | " in line
    assert "On held-out documents, before training → after step 5." in card
    assert "| source | tokens evaluated | loss | perplexity | bits per byte | change of loss |" in card
    table = branch.stdout().split("Done\n")[1]
    assert f"va {before:.4f} {after:.4f}" in " ".join(table.split())


@pytest.mark.slow
def test_losses_of_other_rows_are_not_compared(runs: Runs, tmp_path: Path) -> None:
    other: dict[str, Any] = {"eval_iters": 1, "eval_step_interval": 1, "early_stopping": "all:1", "max_step": 5}
    resumed = runs.start("other_rows", checkpoint=runs.folder / "whole", allow_changes="true", **other)
    resumed.finish()
    saved = runs.folder / "other_rows" / "checkpoints" / "step-00000005"
    state = read_trainer_json(saved).state
    assert state.first_evaluation is not None
    assert state.evaluation is not None
    assert (state.first_evaluation.step, state.evaluation.step) == (4, 5)
    assert state.first_evaluation.rows == state.evaluation.rows
    table = resumed.stdout().split("Done\n")[1]
    assert "before step 4, different rows were evaluated; their losses are not comparable" in " ".join(table.split())
    write_model_card(read_record(read_trainer_json(saved)), tmp_path, CardFacts("model"))
    card = (tmp_path / "README.md").read_text()
    assert "after step 4 → after step 5. Before step 4 different rows were evaluated" in card
    folder = tmp_path / "checkpoints"
    earlier = shutil.copytree(runs.folder / "whole" / "checkpoints" / "step-00000003", folder / "step-00000003")
    shutil.copytree(saved, folder / saved.name)
    low = {"whole": {"nats": 1.0, "num_tokens": 9}, "step": 3, "rows": "00"}
    edit_json(earlier / "trainer.json", lambda content: content.update(val_loss=1 / 9, evaluation=low))
    (earlier / "checksums.json").unlink()
    write_checksums(earlier)
    assert best_checkpoint(tmp_path) == folder / saved.name
    assert lowest_loss(tmp_path, "all", 5) == state.val_loss
    assert lowest_loss(tmp_path, "all", 4) == 1 / 9


@pytest.mark.slow
def test_signal_in_the_first_evaluation_ends_the_run_and_logs_step_0_once(runs: Runs) -> None:
    name = "stopped"
    at_start = at_point(TERMINATE, 0, "VALIDATION", 1)
    stopped = runs.start(name, 2, before=at_start)
    assert set(stopped.wait()) == {75}, stopped.report()
    assert "stopped by SIGTERM before the first step, with" in stopped.stdout()
    assert saved_steps(runs.folder / name) == []
    assert rows_of(runs.folder / name) == []
    killed = runs.start(name, 1, at_point("os.kill(os.getpid(), signal.SIGKILL)", 2, "DATA"), resume="true")
    assert killed.wait() == [-9]
    assert [row["step"] for row in rows_of(runs.folder / name)] == ["0", "1"]
    runs.start(name, 1, resume="true").finish()
    assert [row["step"] for row in rows_of(runs.folder / name)] == ["0", "1", "2", "3"]
    assert json.loads((runs.folder / name / "checkpoints" / "step-00000003" / "trainer.json").read_text())[
        "first_evaluation"
    ]
