"""The loss of each source: what every token adds to it, in validation and training, for any number of ranks."""

import csv
import json
import math
import shutil
import traceback
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
from fabric_train.cli.argument_types import Shares
from fabric_train.cli.errors import InputError
from fabric_train.data.batch import IGNORED_LABEL
from fabric_train.data.mixture import Mixture
from fabric_train.data.step_sampler import Window, validation_batches
from fabric_train.data.token_dataset import TokenDataset, open_dataset
from fabric_train.data.token_mixture import TokenMixture, open_mixture
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
    texts = {name: [f"{name} {text[: 5 + 9 * number % 60]}" for number, text in enumerate(TEXTS)] for name in SOURCES}
    files = {name: f"{name}={write_jsonl(folder / f'{name}.jsonl', texts[name])}" for name in SOURCES}
    given: dict[str, Any] = {"max_length": LENGTH, "validation_split": 0.3}
    tokenize(folder / "cut", tiny_model_dir, files["es"], files["va"], overlap=3, packing="concat", **given)
    tokenize(folder / "whole", tiny_model_dir, files["va"], files["en"], packing="best_fit", **given)
    return [str(folder / "cut"), str(folder / "whole")]


@pytest.fixture(scope="module", params=[True, False], ids=["isolated", "joined"])
def mixture(folders: list[str], request: pytest.FixtureRequest) -> TokenMixture:
    return open_mixture(folders, Shares("--shares", None), request.param, Path(folders[0]))


def owners_by_hand(dataset: TokenDataset, split: str, row: int) -> list[tuple[str, int, float, int]]:
    """Return the source of each token of a row, the number of its piece, and the piece's bytes and tokens."""
    index = Path(dataset.folder, split, "index")
    documents, rows, continuations = (np.load(index / f"{name}.npy") for name in ("documents", "rows", "continuations"))
    first = rows[row]
    last = rows[row + 1]
    begun = iter(range(int(first["documents"]), int(last["documents"])))
    continued = {int(one["ordinal"]): one for one in continuations[first["continuations"] : last["continuations"]]}
    assert dataset.manifest is not None
    files = [record.name for record in dataset.manifest.sources for _ in range(record.num_files)]
    owners: list[tuple[str, int, float, int]] = []
    for ordinal in range(int(last["documents"] - first["documents"]) + len(continued)):
        one = continued.get(ordinal)
        document = documents[next(begun) if one is None else one["document"]]
        left = int(document["tokens"]) - (0 if one is None else int(one["start"]))
        length = min(left, LENGTH - len(owners))
        num_bytes = int(document["bytes"]) * length / int(document["tokens"])
        owners += [(files[document["file"]], ordinal, num_bytes, length)] * length
    return owners


class ByHand:
    """Sums of nats, supervised tokens and bytes by source, token by token from logits."""

    def __init__(self, model: Any, mixture: TokenMixture, split: str) -> None:
        self.model = model
        self.parts = mixture.parts
        self.split = split
        self.isolates = mixture.isolates
        self.rows = [
            (part, row)
            for part in mixture.parts
            for row in range(len(part.train if split == "train" else part.validation or []))
        ]

    @torch.no_grad()
    def sums(self, rows: list[int]) -> dict[str, list[float]]:
        sums: dict[str, list[float]] = {name: [0.0, 0, 0.0] for name in SOURCES}
        for part, row in (self.rows[row] for row in rows):
            columns = (part.train if self.split == "train" else part.validation).split[row]  # type: ignore[union-attr]
            ids = columns["input_ids"]
            labels = columns.get("labels", columns["input_ids"])
            starts = sorted({0, *(columns["document_starts"] if self.isolates else [])})
            owners = owners_by_hand(part, self.split, row)
            targets: dict[tuple[str, int, float, int], int] = {}
            for begin, end in zip(starts, [*starts[1:], LENGTH], strict=True):
                logits = self.model(torch.tensor([ids[begin:end]])).logits[0].float()
                for position in range(begin + 1, end):
                    if labels[position] == IGNORED_LABEL:
                        continue
                    owner = owners[position]
                    target = torch.tensor(labels[position])
                    sums[owner[0]][0] += F.cross_entropy(logits[position - 1 - begin], target).item()
                    sums[owner[0]][1] += 1
                    targets[owner] = targets.get(owner, 0) + 1
            for (source, _, num_bytes, length), number in targets.items():
                sums[source][2] += num_bytes * min(1, number / max(length - 1, 1))
        return sums


@pytest.mark.parametrize("in_head", [True, False])
def test_losses_of_sources_are_those_of_every_token_by_hand(
    tiny_model_dir: Path, mixture: TokenMixture, in_head: bool
) -> None:
    by_hand, model = (AutoModelForCausalLM.from_pretrained(tiny_model_dir) for _ in range(2))
    if in_head:
        assert compute_loss_in_head(model)
    fabric = Fabric(accelerator="cpu", devices=1)
    wrapped = fabric.setup_module(model)
    assert mixture.source_names == SOURCES
    rows = list(range(0, len(mixture.train), 9))
    wanted = ByHand(by_hand, mixture, "train").sums(rows)
    for size in (1, 4, len(rows)):
        cut = [rows[begin : begin + size] for begin in range(0, len(rows), size)]
        batches = [mixture.train.__getitems__(part) for part in [*cut, []]]
        window = Window(1, 0, False, np.array(rows), size, batches)
        loss = backpropagate(fabric, wrapped, window, CrossEntropy(), num_sources=3)
        for number, name in enumerate(SOURCES):
            nats, tokens, _ = wanted[name]
            assert loss.sources.counts[number] == tokens > 0
            assert loss.sources.losses[number].item() == pytest.approx(nats, rel=1e-5)
        assert loss.sources.losses.sum().item() == pytest.approx(loss.summed.sum().item(), rel=1e-12)


def test_evaluation_has_nats_tokens_and_bytes_of_each_source(tiny_model_dir: Path, mixture: TokenMixture) -> None:
    fabric = Fabric(accelerator="cpu", devices=1)
    model: Any = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    assert mixture.validation is not None
    rows = list(range(len(mixture.validation)))
    wanted = ByHand(model, mixture, "validation").sums(rows)
    batches = [mixture.validation.__getitems__(rows[begin : begin + 3]) for begin in range(0, len(rows), 3)]
    found = evaluate(fabric, fabric.setup_module(model), batches, mixture.validation.source_names)
    assert found is not None
    for name, (nats, tokens, num_bytes) in wanted.items():
        source = found.sources[name]
        assert source.num_tokens == tokens
        assert source.nats == pytest.approx(nats, rel=1e-5)
        assert source.num_bytes == pytest.approx(num_bytes, rel=1e-12)
        assert source.bits_per_byte == pytest.approx(nats / math.log(2) / num_bytes, rel=1e-5)
    assert found.whole.num_bytes == pytest.approx(sum(one[2] for one in wanted.values()), rel=1e-12)


def test_a_loss_that_is_not_finite_is_in_its_own_source_only(folders: list[str]) -> None:
    rows = open_dataset(folders[0]).train
    batch = rows.__getitems__(range(len(rows)))
    assert batch.pieces is not None
    losses = torch.ones(int(batch.pieces.num_targets.sum()))
    losses[0] = torch.nan
    of_sources = sum_by_source(sum_by_piece(losses, batch), batch.pieces.sources, 2)
    assert of_sources.isnan().tolist() == [source == batch.pieces.sources[0] for source in (0, 1)]


def test_limited_validation_reads_equally_many_rows_of_each_source(folders: list[str]) -> None:
    dataset = open_dataset(folders[0])
    assert dataset.validation is not None
    main = dataset.validation.main_sources()
    for row, source in enumerate(main.tolist()):
        owners = [owner[0] for owner in owners_by_hand(dataset, "validation", row)]
        counts = [owners.count(name) for name in SOURCES[:2]]
        assert counts[source] >= max(counts) - 3  # repeated tokens do not count


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
        given = {
            "micro_batch_size": 4,
            "max_step": 3,
            "eval_at_start": None,
            "eval_step_interval": 3,
            "eval_iters": None,
            **options,
        }
        words = argv(self.model, Path("TOKENS"), self.folder / name, **given)
        place = words.index("TOKENS")
        return self.forked.start([*words[:place], *self.tokens, *words[place + 1 :]], num_ranks, before=before)

    def evaluation(self, name: str, step: int = 3) -> Evaluation:
        state = read_trainer_json(self.folder / name / "checkpoints" / f"step-{step:08d}").state
        assert state.evaluation is not None
        return state.evaluation


@pytest.fixture(scope="module")
def runs(
    tmp_path_factory: pytest.TempPathFactory, forked_runs: ForkedRuns, tiny_model_dir: Path, folders: list[str]
) -> Runs:
    made = Runs(tmp_path_factory.mktemp("runs"), forked_runs, tiny_model_dir, folders)
    made.start("whole").finish()
    return made


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_ranks", "micro_batch_size", "options"),
    [(1, 8, {}), (2, 1, {}), (2, 2, {"parallelism": "fsdp2", "devices": 2, "context_parallel_size": 2})],
)
def test_sources_add_up_to_the_whole_in_every_cut(
    runs: Runs, folders: list[str], num_ranks: int, micro_batch_size: int, options: dict[str, Any]
) -> None:
    name = f"cut-{num_ranks}-{micro_batch_size}"
    given = {"micro_batch_size": micro_batch_size, "eval_batch_size": micro_batch_size, **options}
    runs.start(name, num_ranks, **given).finish()
    found = runs.evaluation(name)
    same = runs.evaluation("whole")
    assert math.fsum(one.nats for one in found.sources.values()) == pytest.approx(found.whole.nats, rel=1e-12)
    assert sum(one.num_tokens for one in found.sources.values()) == found.whole.num_tokens
    assert found.rows == same.rows is not None
    for source, loss in found.sources.items():
        assert loss.num_tokens == same.sources[source].num_tokens
        assert loss.num_bytes == pytest.approx(same.sources[source].num_bytes, rel=1e-12)
        assert loss.loss == pytest.approx(same.sources[source].loss, rel=1e-5)
    mixture = open_mixture(folders, Shares("--shares", None), True, Path(folders[0]))
    train = mixture.train
    rows = rows_of(runs.folder / name)
    others = rows_of(runs.folder / "whole")
    for step, row in enumerate(rows[1:]):
        order = window_rows(mixture, step)
        pieces = train.__getitems__(order).pieces
        assert pieces is not None
        counts = pieces.count_by_source(3)[0].tolist()
        nats = [float(row[f"train_loss/{source}"]) * count for source, count in zip(SOURCES, counts, strict=True)]
        assert math.fsum(nats) == pytest.approx(float(row["train_loss"]) * sum(counts), rel=1e-12)
        for source in SOURCES:
            column = f"train_loss/{source}"
            assert float(row[column]) == pytest.approx(float(others[step + 1][column]), rel=1e-5)


def window_rows(mixture: TokenMixture, window: int) -> list[int]:
    sizes = tuple(len(part.train) for part in mixture.parts)
    return Mixture(sizes, mixture.rows_per_epoch, 8, 0).rows_in(0, window).tolist()


@pytest.mark.slow
def test_a_new_run_is_evaluated_at_step_0(runs: Runs) -> None:
    rows = rows_of(runs.folder / "whole")
    assert [(row["step"], bool(row["val_loss"])) for row in rows] == [
        ("0", True),
        ("1", False),
        ("2", False),
        ("3", True),
    ]
    assert (rows[0]["train_loss"], rows[0]["num_tokens"]) == ("", "0")
    for source in (*SOURCES, None):
        loss, perplexity, bits = (
            float(rows[0][f"{name}/{source}" if source else other])
            for name, other in (
                ("val_loss", "val_loss"),
                ("val_perplexity", "perplexity"),
                ("val_bits_per_byte", "val_bits_per_byte"),
            )
        )
        assert perplexity == pytest.approx(math.exp(loss))
        assert 0 < bits < 100
    weights = runs.folder / "whole" / "checkpoints" / "step-00000003"
    runs.start("weights", checkpoint=weights, weights_only="true", max_step=1).finish()
    again = rows_of(runs.folder / "weights")
    assert again[0]["step"] == "0"
    assert float(again[0]["val_loss/es"]) == pytest.approx(float(rows[3]["val_loss/es"]), rel=1e-12)


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
    write_model_card(runs.folder / "branch" / "checkpoints" / "step-00000005", tmp_path, CardFacts("model"))
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
    assert "before step 4 other rows were evaluated, whose losses cannot be compared" in " ".join(table.split())
    write_model_card(saved, tmp_path, CardFacts("model"))
    card = (tmp_path / "README.md").read_text()
    assert "after step 4 → after step 5. Before step 4 other rows were evaluated" in card
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
def test_a_signal_in_the_first_evaluation_ends_the_run_and_step_0_is_logged_once(runs: Runs) -> None:
    name = "stopped"
    at_start = at_point(TERMINATE, 0, "VALIDATION", 1)
    stopped = runs.start(name, 2, before=at_start)
    assert set(stopped.wait()) == {75}, stopped.report()
    assert "stopped by SIGTERM before the first step was taken" in stopped.stdout()
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
