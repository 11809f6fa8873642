"""Whole runs, of forked ranks or by ``fabric run``: every parallelism against plain PyTorch; kills; resume."""

import csv
import functools
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.nn.functional as F
import yaml
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from fabric_train.arguments import TrainingArguments
from fabric_train.data.step_sampler import WindowOrder
from fabric_train.data.token_dataset import open_dataset
from fabric_train.optim.learning_rate import learning_rate
from tests.support.forked_runs import ForkedRun, ForkedRuns
from tests.support.ports import free_port
from tests.support.programs import ROOT, option_words
from tests.support.token_datasets import tokenize, write_jsonl

pytestmark = pytest.mark.slow

# 12 rows a window: with 2 ranks, micro-batches of 3 and 2 accumulations
ROWS_PER_WINDOW = 12
MAX_STEP = 8
LR = 1e-3
WEIGHT_DECAY = 1.0
SETTINGS = {
    "total_batch_size": ROWS_PER_WINDOW,
    "micro_batch_size": 3,
    "max_step": MAX_STEP,
    "lr": LR,
    "weight_decay": WEIGHT_DECAY,  # so large that the losses show which weights decay
    "warmup_steps": 2,
    "precision": "32-true",
    "eval_step_interval": 5,
    "save_step_interval": 4,
    "num_workers": 0,
    "eval_at_start": "false",
    "loggers": "csv",
}


class Trainer:
    """Starts runs of the tiny model on the tiny token dataset: forked ranks, or those that ``fabric run`` starts."""

    def __init__(self, folder: Path, model: Path, tokens: Path, runs: ForkedRuns) -> None:
        self.folder = folder
        self.model = model
        self.tokens = tokens
        self._runs = runs

    def words(self, run: str, options: dict[str, object]) -> list[str]:
        arguments = {
            "train_data_dir": self.tokens,
            "model_name": self.model,
            **SETTINGS,
            **options,
            "accelerator": "cpu",
            "output_dir": self.folder / run,
        }
        return option_words({name: value for name, value in arguments.items() if value is not None})

    def __call__(self, run: str, num_ranks: int = 2, **options: object) -> Path:
        self.start(run, num_ranks, **options).finish(300)
        return self.folder / run

    def start(self, run: str, num_ranks: int = 2, **options: object) -> ForkedRun:
        return self._runs.start(self.words(run, options), num_ranks, cwd=self.folder)

    def launch(self, run: str) -> "subprocess.Popen[str]":
        """Start two ranks under FSDP with ``fabric run``."""
        fabric = [str(Path(sys.executable).with_name("fabric")), "run", "--main-port", str(free_port())]
        program = [*fabric, "--devices", "2", str(ROOT / "fabric_train")]
        return subprocess.Popen(
            [*program, *self.words(run, {"parallelism": "fsdp"})],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=self.folder,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )


@pytest.fixture(scope="module")
def trainer(
    tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path, tiny_tokens_dir: Path, forked_runs: ForkedRuns
) -> Trainer:
    return Trainer(tmp_path_factory.mktemp("runs"), tiny_model_dir, tiny_tokens_dir, forked_runs)


@pytest.fixture(scope="module")
def uninterrupted(trainer: Trainer) -> Path:
    """A run under FSDP on two ranks that nobody interrupts."""
    return trainer("uninterrupted", parallelism="fsdp", state_dict_type="full")


def kill_with_ranks(process: "subprocess.Popen[str]") -> None:
    """SIGKILL the launcher and, in sessions of their own, the ranks."""
    launcher = psutil.Process(process.pid)
    for victim in (launcher, *launcher.children(recursive=True)):
        victim.kill()
    process.communicate()


def metrics(run: Path) -> list[dict[str, str]]:
    with (run / "metrics.csv").open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def column(run: Path, name: str) -> list[float]:
    return [float(row[name]) for row in metrics(run) if row[name]]


def timeless(run: Path) -> list[tuple[str, ...]]:
    """Return the metrics that are the same in every repetition, to the last digit."""
    names = ("step", "epoch", "train_loss", "val_loss", "perplexity", "learning_rate", "grad_norm", "num_tokens")
    return [tuple(row[name] for name in names) for row in metrics(run)]


def mean_loss(model: Any, split: Any, rows: Sequence[int]) -> torch.Tensor:
    """Return the loss over rows of a token dataset, with one document at a time through the model."""
    losses = []
    for row in rows:
        ids = torch.tensor(split[row]["input_ids"])
        starts = split[row]["document_starts"]
        for document in ids.tensor_split([start for start in starts if start > 0]):
            losses.append(F.cross_entropy(model(document[None]).logits[0, :-1], document[1:], reduction="none"))
    return torch.cat(losses).mean()


@functools.cache
def plain_pytorch(model_dir: Path, tokens_dir: Path) -> tuple[list[float], list[float], float]:
    """Train on whole windows on one device; return losses, gradient norms and the last validation loss."""
    dataset = open_dataset(str(tokens_dir))
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() == 1]
    groups = [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95))
    order = WindowOrder(len(dataset.train), ROWS_PER_WINDOW, ROWS_PER_WINDOW, world_size=1, rank=0, seed=0)
    losses = []
    norms = []
    schedule = TrainingArguments(lr=LR, warmup_steps=2)
    for step, rows in enumerate(order.batches(0, MAX_STEP), 1):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, MAX_STEP, schedule)
        loss = mean_loss(model, dataset.train.split, rows)
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert dataset.validation is not None
    with torch.no_grad():
        held_out = mean_loss(model, dataset.validation.split, range(len(dataset.validation)))
    return losses, norms, float(held_out)


@pytest.mark.parametrize(("parallelism", "num_ranks"), [("fsdp", 2), ("fsdp2", 2), ("ddp", 2), ("single", 1)])
def test_every_parallelism_trains_as_plain_pytorch_does(
    trainer: Trainer, uninterrupted: Path, parallelism: str, num_ranks: int
) -> None:
    run = uninterrupted if parallelism == "fsdp" else trainer(parallelism, num_ranks, parallelism=parallelism)
    losses, norms, held_out = plain_pytorch(trainer.model, trainer.tokens)
    assert column(run, "step") == list(range(1, MAX_STEP + 1))
    assert column(run, "train_loss") == pytest.approx(losses, abs=1e-5)
    assert column(run, "grad_norm") == pytest.approx(norms, rel=1e-4)
    assert column(run, "val_loss")[-1] == pytest.approx(held_out, abs=1e-5)
    assert column(run, "perplexity")[-1] == pytest.approx(math.exp(held_out), rel=1e-4)
    assert losses[-1] < losses[0] - 0.15  # and it does learn


def test_evaluations_and_saves_come_at_intervals_and_the_end(trainer: Trainer, tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "texts.jsonl")
    num_rows = len(tokenize(tmp_path / "tokens", trainer.model, source, max_length=64, validation_split=0.1)["train"])
    intervals = {"eval_step_interval": 5, "save_step_interval": 6, "save_best": "false", "max_step": 11}
    windows: dict[str, object] = {"total_batch_size": num_rows // 4 + 1, "micro_batch_size": num_rows // 4 + 1}
    run = trainer("intervals", 1, train_data_dir=tmp_path / "tokens", number_epochs=9, **intervals, **windows)
    # epochs of 4 steps
    assert [int(row["step"]) for row in metrics(run) if row["val_loss"]] == [4, 5, 8, 10, 11]
    saved = sorted(int(folder.name.removeprefix("step-")) for folder in (run / "checkpoints").iterdir())
    assert saved == [4, 6, 8, 11]


def test_checkpoint_is_complete_and_a_plain_hugging_face_folder(trainer: Trainer, uninterrupted: Path) -> None:
    checkpoint = uninterrupted / "checkpoints" / f"step-{MAX_STEP:08d}"
    for name in ("config.json", "generation_config.json", "manifest.json", "tokenizer/tokenizer.json", "trainer.json"):
        assert (checkpoint / name).is_file()
    described = json.loads((checkpoint / "trainer.json").read_text(encoding="utf-8"))
    assert described["arguments"]["gradient_accumulation_steps"] == 2  # 12 rows in micro-batches of 3 on 2 ranks
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    dataset = open_dataset(str(trainer.tokens))
    assert dataset.validation is not None
    with torch.no_grad():
        held_out = mean_loss(model, dataset.validation.split, range(len(dataset.validation)))
    assert column(uninterrupted, "val_loss")[-1] == pytest.approx(float(held_out), abs=1e-5)


@pytest.mark.launchers
def test_launched_run_killed_by_sigkill_resumes_bit_for_bit(trainer: Trainer, uninterrupted: Path) -> None:
    process = trainer.launch("killed")
    wanted = trainer.folder / "killed" / "checkpoints" / "step-00000004"
    deadline = time.monotonic() + 200
    while not wanted.is_dir() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    kill_with_ranks(process)
    assert wanted.is_dir()
    assert not (trainer.folder / "killed" / "checkpoints" / f"step-{MAX_STEP:08d}").exists()
    resumed = trainer("killed", parallelism="fsdp", resume="true")
    assert timeless(resumed) == timeless(uninterrupted)
    last = f"checkpoints/step-{MAX_STEP:08d}"
    for file in ("model.safetensors", "optimizer/optimizer.safetensors"):
        ours = load_file(resumed / last / file)
        theirs = load_file(uninterrupted / last / file)
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize(
    ("parallelism", "num_ranks", "options"),
    [
        ("fsdp", 3, {"micro_batch_size": 2}),
        ("fsdp2", 2, {}),
        ("ddp", 2, {"micro_batch_size": 6}),
        ("single", 1, {}),
    ],
)
def test_sharded_checkpoint_resumes_on_other_ranks_and_parallelism(
    trainer: Trainer, uninterrupted: Path, parallelism: str, num_ranks: int, options: dict[str, object]
) -> None:
    half = trainer.folder / "sharded"
    if not half.exists():
        trainer("sharded", parallelism="fsdp", state_dict_type="sharded")
    checkpoint = half / "checkpoints" / "step-00000004"
    assert len(list((checkpoint / "model").glob("*.safetensors"))) == 2
    run = trainer(f"from-shards-{parallelism}", num_ranks, parallelism=parallelism, checkpoint=checkpoint, **options)
    assert column(run, "step")[0] == 5
    assert column(run, "train_loss") == pytest.approx(column(uninterrupted, "train_loss")[4:], abs=1e-5)
    assert column(run, "val_loss") == pytest.approx(column(uninterrupted, "val_loss"), abs=1e-5)
    assert metrics(run)[-1]["num_tokens"] == metrics(uninterrupted)[-1]["num_tokens"]


def test_finished_run_reports_it_and_ends_with_0(trainer: Trainer, uninterrupted: Path) -> None:
    before = timeless(uninterrupted)
    run = trainer.start("uninterrupted", 1, resume="true")
    run.finish()
    assert "nothing left to train" in run.stdout() + run.stderr()
    assert timeless(uninterrupted) == before


def test_weights_alone_start_a_new_run(trainer: Trainer, uninterrupted: Path) -> None:
    checkpoint = uninterrupted / "checkpoints" / f"step-{MAX_STEP:08d}"
    run = trainer("weights", 1, checkpoint=checkpoint, weights_only="true", max_step=2, seed=5)
    assert column(run, "step") == [1, 2]
    assert column(run, "train_loss")[0] < column(uninterrupted, "train_loss")[0] - 0.15


def test_other_data_than_the_checkpoints_are_named(trainer: Trainer, uninterrupted: Path) -> None:
    checkpoint = uninterrupted / "checkpoints" / "step-00000004"
    run = trainer.start("other", 1, checkpoint=checkpoint, seed=1, total_batch_size=9)
    assert run.wait() == [2]
    output = run.stdout() + run.stderr()
    assert "--seed differs: 0 there, 1 here" in output
    assert "the number of rows per optimizer step differs" in output
    assert "Traceback" not in output
    assert not (trainer.folder / "other").exists()


def test_eval_only_gives_the_loss_of_the_run_at_that_checkpoint(trainer: Trainer, uninterrupted: Path) -> None:
    options = {"checkpoint": uninterrupted, "eval_only": "true", "eval_batch_size": 3, "parallelism": "ddp"}
    started = trainer.start("evaluated", 2, **options)
    assert started.wait() == [0, 0]
    run = trainer.folder / "evaluated"
    result = json.loads((run / "evaluation.json").read_text(encoding="utf-8"))
    assert result["loss"] == pytest.approx(column(uninterrupted, "val_loss")[-1], abs=1e-5)
    assert result["step"] == MAX_STEP
    dataset = open_dataset(str(trainer.tokens))
    assert dataset.validation is not None
    starts = [start for row in dataset.validation.split["document_starts"] for start in row if start > 0]
    # every row once, its 63 predictions less the ones of a document's first token from another's last
    assert result["num_tokens"] == len(dataset.validation) * 63 - len(starts)
    supervised = len(dataset.validation) * 64
    said = f"{supervised:,} validation tokens are supervised; {supervised - result['num_tokens']:,} of these are"
    assert (started.stdout() + started.stderr()).count(said) == 1


def test_the_saved_configuration_repeats_the_run(trainer: Trainer, uninterrupted: Path) -> None:
    saved = uninterrupted / "config.yaml"
    assert yaml.safe_load(saved.read_text(encoding="utf-8"))["devices"] == 2
    nothing = dict.fromkeys([*SETTINGS, "train_data_dir", "model_name"])
    run = trainer("again", 2, **{**nothing, "config": saved})
    assert timeless(run) == timeless(uninterrupted)


def test_only_the_newest_and_the_best_checkpoint_are_kept(trainer: Trainer) -> None:
    run = trainer(
        "pruned", 1, keep_checkpoints=1, lr=0.5, save_step_interval=5, max_step=10
    )  # diverges: step 5 is the best
    losses = {int(row["step"]): float(row["val_loss"]) for row in metrics(run) if row["val_loss"]}
    best = min(losses, key=lambda step: losses[step])
    kept = {int(folder.name.removeprefix("step-")) for folder in (run / "checkpoints").iterdir()}
    assert kept == {best, 10}


def test_layers_of_another_family_are_sharded_and_recomputed(trainer: Trainer, tmp_path: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    size: dict[str, Any] = {"vocab_size": 1000, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 2}
    no_dropout: dict[str, Any] = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    GPT2LMHeadModel(GPT2Config(**size, **no_dropout)).save_pretrained(tmp_path / "gpt2")
    options = {"model_name": tmp_path / "gpt2", "max_step": 2}
    one = trainer("gpt2-one", 1, **options)
    two = trainer("gpt2-two", 2, parallelism="fsdp", activation_checkpointing="full", **options)
    assert column(two, "train_loss") == pytest.approx(column(one, "train_loss"), abs=1e-5)
    assert column(two, "grad_norm") == pytest.approx(column(one, "grad_norm"), rel=1e-4)
