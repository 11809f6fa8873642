"""Distilled runs are resumed, branched, replayed, evaluated and exported like any other, and keep their teacher."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Lfm2Config,
    Lfm2ForCausalLM,
    LlamaConfig,
)

from fabric_train.arguments import TrainArguments, parse
from fabric_train.cli.errors import InputError
from fabric_train.preflight.prepare import prepare
from fabric_train.vocabulary.__main__ import main as vocabulary
from tests.support import pair_datasets
from tests.support.exports import convert_run
from tests.support.forked_runs import ForkedRun, ForkedRuns
from tests.support.kill_moments import source_of_death
from tests.support.run_comparison import differences, metrics
from tests.support.short_runs import argv, saved_steps
from tests.support.tiny_model import random_llama
from tests.support.token_datasets import TEXTS, tokenize, write_jsonl

pytestmark = pytest.mark.slow

MAX_STEP = 4
TOLERANCE = 1e-5  # relative, in fp32
COMPARED_COLUMNS = ("train_loss", "grad_norm", "train_divergence", "train_cross_entropy")


def copy_tokenizer(folder: Path, model: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(model / name, folder / name)


def write_teacher(folder: Path, model: Path) -> Path:
    """Write a random Llama with the tokenizer of a model, a larger head that is not tied, and dropout."""
    num_tokens = AutoConfig.from_pretrained(model).vocab_size
    config = LlamaConfig(
        vocab_size=num_tokens + 24,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.2,
        attention_dropout=0.1,
        dtype="float32",
    )
    random_llama(config).save_pretrained(folder)
    copy_tokenizer(folder, model)
    return folder


@dataclass
class Distilling:
    """Starts runs in a folder that has the student ``model``, the ``teacher`` and the token dataset ``tokens``."""

    folder: Path
    runs: ForkedRuns

    def start(self, run: str, num_ranks: int = 1, before: str = "", **options: Any) -> ForkedRun:
        settings: dict[str, Any] = {
            "objective": "distill",
            "teacher": "teacher",
            "max_step": MAX_STEP,
            "save_step_interval": 1,
            "keep_checkpoints": 9,
            "eval_step_interval": 2,
            "eval_iters": 2,
            "log_step_interval": 1,
            **options,
        }
        words = argv(Path("model"), settings.pop("tokens", Path("tokens")), Path(run), **settings)
        return self.runs.start(words, num_ranks, cwd=self.folder, before=before)

    def train(self, run: str, num_ranks: int = 1, **options: Any) -> ForkedRun:
        started = self.start(run, num_ranks, **options)
        started.finish()
        return started

    def kill(self, run: str, moment: str, nth: int, num_ranks: int = 1, **options: Any) -> None:
        """Train until rank 0 dies at a moment, when it gets there the nth time."""
        started = self.start(run, num_ranks, before=source_of_death(moment, 0, nth), **options)
        assert started.wait_until(started.has_ended)
        started.kill()
        started.wait()
        assert MAX_STEP not in saved_steps(self.folder / run)

    def trainer_json(self, run: str, step: int = MAX_STEP) -> dict[str, Any]:
        content: dict[str, Any] = json.loads((self.checkpoint(run, step) / "trainer.json").read_text())
        return content

    def checkpoint(self, run: str, step: int = MAX_STEP) -> Path:
        return self.folder / run / "checkpoints" / f"step-{step:08d}"


@pytest.fixture(scope="module")
def distilling(
    tmp_path_factory: pytest.TempPathFactory, forked_runs: ForkedRuns, tiny_model_dir: Path, tiny_tokens_dir: Path
) -> Distilling:
    folder = tmp_path_factory.mktemp("distilling")
    (folder / "model").symlink_to(tiny_model_dir)
    (folder / "tokens").symlink_to(tiny_tokens_dir)
    write_teacher(folder / "teacher", tiny_model_dir)
    shutil.copytree(folder / "teacher", folder / "moved-teacher")
    changed = shutil.copytree(folder / "teacher", folder / "changed-teacher")
    model = AutoModelForCausalLM.from_pretrained(changed)
    with torch.no_grad():
        model.model.norm.weight[0] += 0.5
    model.save_pretrained(changed)
    return Distilling(folder, forked_runs)


@pytest.fixture(scope="module")
def whole(distilling: Distilling) -> Path:
    """A run on one device that nobody interrupted."""
    distilling.train("whole")
    return distilling.folder / "whole"


@pytest.fixture(scope="module")
def killed(distilling: Distilling) -> Path:
    """A run that was killed in its third step; tests copy it."""
    distilling.kill("killed", "optimizer step, half the parameters changed", nth=3)
    return distilling.folder / "killed"


def copy_run(run: Path, name: str) -> Path:
    return Path(shutil.copytree(run, run.parent / name))


def fault_of(run: ForkedRun) -> str:
    """Return the only line that a refused run has printed, from rank 0."""
    assert set(run.wait()) == {2}, run.report()
    (line,) = [line for line in run.stderr().splitlines() if line.startswith("error: ")]
    return line.removeprefix("error: ")


def assert_same_to_rounding(run: Path, expected_run: Path) -> None:
    rows = metrics(run)
    expected_rows = metrics(expected_run)
    assert len(rows) == len(expected_rows)
    for row, expected_row in zip(rows, expected_rows, strict=True):
        values = [float(row[column]) for column in COMPARED_COLUMNS]
        assert values == pytest.approx([float(expected_row[column]) for column in COMPARED_COLUMNS], rel=TOLERANCE)


# --------------------------------------------------------------------------------------------------------------- resume


ADAPTER: dict[str, Any] = {"adapter": "lora", "lora_dropout": 0.3}


@dataclass(frozen=True)
class Kill:
    """A kill in the third step, or in the evaluation before it."""

    parallelism: str
    num_ranks: int
    moment: str
    nth: int
    options: dict[str, Any]

    def __str__(self) -> str:
        return self.parallelism


# before the third step, the layers of student and teacher have run 20 times in the check of isolation, 10 times in each
# step and at most 10 times in the evaluation
KILLS = [
    Kill("single", 1, "optimizer step, half the parameters changed", 3, {}),
    Kill("fsdp2", 2, "forward pass", 53, ADAPTER),
    Kill("fsdp", 2, "validation", 1, {"state_dict_type": "sharded"}),
    Kill("ddp", 2, "backward pass", 6, ADAPTER),
]


@pytest.mark.parametrize("kill", KILLS, ids=str)
def test_a_killed_run_resumes_bit_for_bit(distilling: Distilling, kill: Kill) -> None:
    options = {"parallelism": kill.parallelism, **kill.options}
    killed = f"{kill.parallelism}-killed"
    distilling.train(f"{kill.parallelism}-whole", kill.num_ranks, **options)
    distilling.kill(killed, kill.moment, kill.nth, kill.num_ranks, **options)
    distilling.train(killed, kill.num_ranks, resume="true", **options)
    assert differences(distilling.folder / killed, distilling.folder / f"{kill.parallelism}-whole") == []


@pytest.mark.numerical
def test_other_ranks_continue_a_run_up_to_rounding(distilling: Distilling, whole: Path, killed: Path) -> None:
    run = copy_run(killed, "on-other-ranks")
    distilling.train(run.name, 2, resume="true", parallelism="fsdp")
    assert_same_to_rounding(run, whole)


def test_a_moved_teacher_continues_a_run_bit_for_bit(distilling: Distilling, whole: Path, killed: Path) -> None:
    run = copy_run(killed, "with-moved-teacher")
    distilling.train(run.name, resume="true", teacher="moved-teacher")
    assert differences(run, whole) == []


def test_a_changed_teacher_is_refused_unless_changes_are_allowed(distilling: Distilling, killed: Path) -> None:
    run = copy_run(killed, "with-changed-teacher")
    before = metrics(run)
    fault = fault_of(distilling.start(run.name, resume="true", teacher="changed-teacher"))
    assert fault.startswith(f"--teacher {distilling.folder / 'changed-teacher'}: its weights differ from those of ")
    assert metrics(run) == before

    allowed = distilling.train(run.name, resume="true", teacher="changed-teacher", allow_changes="true")
    assert "its weights differ from those of" in allowed.stdout()
    saved = distilling.trainer_json(run.name)
    assert saved["teacher"]["location"] == str(distilling.folder / "changed-teacher")


def test_a_branch_may_have_another_teacher(distilling: Distilling, whole: Path) -> None:
    branch = distilling.train("branch", branch="whole@2", teacher="changed-teacher")
    assert "its weights differ from those of" in branch.stdout()
    distilling.train("same-branch", branch="whole@2")
    own_teacher = distilling.trainer_json("branch")["teacher"]
    assert own_teacher["fingerprint"] != distilling.trainer_json("whole")["teacher"]["fingerprint"]
    rows = {name: metrics(distilling.folder / name) for name in ("whole", "branch", "same-branch")}
    assert rows["same-branch"][-1]["train_divergence"] == rows["whole"][-1]["train_divergence"]
    assert rows["branch"][-1]["train_divergence"] != rows["whole"][-1]["train_divergence"]


def test_a_phase_with_other_data_keeps_the_teacher(distilling: Distilling) -> None:
    documents = write_jsonl(distilling.folder / "later.jsonl")
    tokenize(distilling.folder / "later", distilling.folder / "model", documents, validation_split=0.1, max_length=32)
    (distilling.folder / "phases.yaml").write_text("- {from: 3, train_data_dir: later}\n")
    distilling.train("phases", phases="phases.yaml")
    first = distilling.trainer_json("phases", 2)["teacher"]
    assert first is not None
    assert distilling.trainer_json("phases", 4)["teacher"] == first
    shutil.rmtree(distilling.checkpoint("phases", 4))
    fault = fault_of(distilling.start("phases", phases="phases.yaml", resume="true", teacher="changed-teacher"))
    assert "its weights differ from those of" in fault


# ------------------------------------------------------------------------------------------- other programs and options


def test_a_distilled_run_is_replayed_bit_for_bit(distilling: Distilling, whole: Path) -> None:
    for steps in ("1:2", "4:4"):
        words = ["whole", "--steps", steps, "--devices", 1]
        replay = distilling.runs.start(words, 1, cwd=distilling.folder, program="fabric_train.replay")
        replay.finish()
        assert "bit-identical" in replay.stdout()
        assert replay.lines()[-1] == "passed: every compared value is reproduced"


def test_an_evaluation_alone_has_the_figures_of_the_run(distilling: Distilling, whole: Path) -> None:
    copy_run(whole, "evaluated")
    distilling.train("evaluated", checkpoint="evaluated", eval_only="true")
    content = json.loads((distilling.folder / "evaluated" / "evaluation.json").read_text())
    logged = metrics(whole)[-1]
    assert content["loss"] == float(logged["val_loss"])
    assert content["divergence"] == float(logged["val_divergence"])
    assert content["cross_entropy"] == float(logged["val_cross_entropy"])


def test_a_self_check_agrees_for_all_splits(distilling: Distilling) -> None:
    options = {"sft_weight": 0.5, "distill_temperature": 2.0, "divergence": "jsd", "parallelism": "fsdp"}
    distilling.train("self-check", 2, self_check="true", **options)
    content = json.loads((distilling.folder / "self-check" / "self_check.json").read_text())
    assert content["faults"] == []
    assert {figure["loss"] > 0 for figure in content["figures"]} == {True}


@pytest.fixture(scope="module")
def mixture(distilling: Distilling) -> list[str]:
    """Two token datasets with validation splits, ``even`` and ``odd``."""
    names = ["even", "odd"]
    for offset, name in enumerate(names):
        documents = write_jsonl(distilling.folder / f"{name}.jsonl", TEXTS[offset::2])
        source = f"{name}={documents}"
        tokenize(distilling.folder / name, distilling.folder / "model", source, validation_split=0.2, max_length=32)
    return names


def test_a_mixture_is_logged_by_source_and_stops_by_the_divergence_of_one(
    distilling: Distilling, mixture: list[str]
) -> None:
    options: dict[str, Any] = {"tokens": mixture[0], "train_data_dir": mixture, "shares": [1, 3], "eval_iters": None}
    # a learning rate of 1e-20 changes nothing: the second evaluation is not better than the first
    options |= {"eval_step_interval": 1, "early_stopping": "divergence/odd:1", "best_by": "agreement/even", "lr": 1e-20}
    stopped = distilling.train("mixture", **options)
    assert "early stopping after step 2: the validation's divergence/odd has not fallen below" in stopped.stdout()
    row = metrics(distilling.folder / "mixture")[0]
    for figure in ("loss", "divergence", "cross_entropy", "agreement"):
        by_source = [float(row[f"val_{figure}/{name}"]) for name in mixture]
        assert min(by_source) <= float(row[f"val_{figure}"]) <= max(by_source)


def test_a_stream_is_distilled_like_its_token_dataset(distilling: Distilling, mixture: list[str]) -> None:
    options: dict[str, Any] = {"max_length": 32, "train_data_dir": None, "eval_iters": None}
    distilling.train("stream", streaming_dataset="even.jsonl", **options)
    assert distilling.trainer_json("stream")["teacher"]["location"] == str(distilling.folder / "teacher")
    assert all(float(row["train_divergence"]) > 0 for row in metrics(distilling.folder / "stream"))


def test_a_checkpoint_and_an_export_have_the_student_alone(
    distilling: Distilling, whole: Path, forked_runs: ForkedRuns, tmp_path: Path
) -> None:
    distilling.train("sft", objective="sft", teacher=None)
    for file in sorted(distilling.checkpoint("sft").rglob("*.safetensors")):
        name = file.relative_to(distilling.checkpoint("sft"))
        expected_shapes = {key: tensor.shape for key, tensor in load_file(file).items()}
        shapes = {key: tensor.shape for key, tensor in load_file(distilling.checkpoint("whole") / name).items()}
        assert shapes == expected_shapes, name
    export = convert_run(forked_runs, tmp_path / "export", "--checkpoint", whole, "--dtype", "float32")
    model = AutoModelForCausalLM.from_pretrained(export)
    assert model.config.hidden_size == AutoConfig.from_pretrained(distilling.folder / "model").hidden_size
    trained = load_file(next(distilling.checkpoint("whole").rglob("model*.safetensors")))
    for key, tensor in model.state_dict().items():
        if key in trained:
            torch.testing.assert_close(tensor, trained[key], rtol=0, atol=0)


@pytest.mark.parametrize("teacher", ["whole", "whole/best", "adapter-run"])
def test_a_run_of_this_program_can_be_the_teacher(distilling: Distilling, whole: Path, teacher: str) -> None:
    if teacher == "adapter-run":
        distilling.train("adapter-run", adapter="lora", max_step=1)
    name = f"from-{teacher.replace('/', '-')}"
    distilling.train(name, teacher=teacher, max_step=1)
    (row,) = metrics(distilling.folder / name)
    assert float(row["train_divergence"]) > 0


# ------------------------------------------------------------------------------------------------------------ bad input


def check(distilling: Distilling, monkeypatch: pytest.MonkeyPatch, **options: Any) -> list[str]:
    """Return the faults that the checks before a run find."""
    monkeypatch.chdir(distilling.folder)
    settings: dict[str, Any] = {"objective": "distill", "teacher": "teacher", **options}
    model = settings.pop("model", "model")
    words = argv(Path(model), Path(settings.pop("tokens", "tokens")), Path("refused"), **settings)
    with pytest.raises(InputError) as caught:
        prepare(parse(TrainArguments, words, {}))
    assert not (distilling.folder / "refused").exists()
    return list(caught.value.faults)


def test_an_extended_student_needs_an_extended_teacher(distilling: Distilling, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(distilling.folder)
    Path("new.txt").write_text("zzqq\nxxyy\nkkww\n")
    vocabulary(["extend", "--model", "model", "--tokens", "new.txt", "--output_dir", "extended"])
    tokenize(distilling.folder / "extended-tokens", Path("extended"), write_jsonl(Path("x.jsonl")), max_length=32)
    (fault,) = check(distilling, monkeypatch, model="extended", tokens="extended-tokens", eval_iters=None)
    assert "it lacks 3 tokens of the student, such as id" in fault
    (fault,) = check(distilling, monkeypatch, teacher="extended")
    assert "it has 3 tokens that the student lacks, such as id" in fault


def test_preference_pairs_are_refused(distilling: Distilling, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model = pair_datasets.write_model(tmp_path / "model")
    source = pair_datasets.write_source(tmp_path / "pairs.jsonl", range(12))
    tokens = pair_datasets.tokenize(tmp_path / "pairs", model, [source])
    (fault,) = check(distilling, monkeypatch, model=model, tokens=tokens, teacher=model)
    assert "preference pairs, which --objective distill cannot train on; give --objective dpo" in fault


def test_a_teacher_with_a_capped_head_is_refused(distilling: Distilling, monkeypatch: pytest.MonkeyPatch) -> None:
    num_tokens = AutoConfig.from_pretrained(distilling.folder / "model").vocab_size
    config = Gemma2Config(
        vocab_size=num_tokens,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        head_dim=8,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    Gemma2ForCausalLM(config).save_pretrained(distilling.folder / "capped")
    copy_tokenizer(distilling.folder / "capped", distilling.folder / "model")
    (fault,) = check(distilling, monkeypatch, teacher="capped", attention="eager")
    assert fault.startswith("--teacher capped: --objective distill computes the loss in the head, but a gemma2 changes")


def test_a_teacher_that_leaks_between_documents_is_refused(distilling: Distilling) -> None:
    num_tokens = AutoConfig.from_pretrained(distilling.folder / "model").vocab_size
    config = Lfm2Config(
        vocab_size=num_tokens,
        layer_types=["conv", "full_attention"],  # a convolution reaches across the borders of documents
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        max_position_embeddings=256,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        Lfm2ForCausalLM(config).save_pretrained(distilling.folder / "leaks")
    copy_tokenizer(distilling.folder / "leaks", distilling.folder / "model")
    fault = fault_of(distilling.start("leaking", teacher="leaks"))
    beginning = f"--isolate_documents true: --teacher {distilling.folder / 'leaks'} (lfm2) cannot isolate the documents"
    assert fault.startswith(beginning)
    assert not (distilling.folder / "leaking").exists()
    distilling.train("joined", teacher="leaks", isolate_documents="false", max_step=1)
