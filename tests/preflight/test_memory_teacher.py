"""The plan of a distillation counts its teacher as it is when the run has set it up, and as a step needs it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning import Fabric
from transformers import LlamaConfig

from benchmarks.measure import ROOT
from benchmarks.op_counts import TEACHER
from benchmarks.rehearsal import TOLERANCE, Case, plan_error, read_fake_run
from fabric_train.arguments import TrainArguments, parse
from fabric_train.checkpoint.model_files import resolve_name
from fabric_train.data.token_dataset import TokenDataset
from fabric_train.preflight.memory_forecast import make_request
from fabric_train.preflight.prepare import prepare
from fabric_train.training.prepared_run import PreparedRun
from fabric_train.training.teacher import set_up_teacher, teacher_run
from tests.support import short_runs
from tests.support.pretended_cuda.run import run_pretended, why_not

LLAMA_70B: dict[str, Any] = {
    "vocab_size": 128_256,
    "hidden_size": 8192,
    "intermediate_size": 28_672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
}


def prepare_run(model: Path, tokens: Path, run: Path, **options: object) -> PreparedRun:
    words = short_runs.argv(model, tokens, run, objective="distill", **options)
    return prepare(parse(TrainArguments, words, {}))


@pytest.mark.parametrize(
    ("precision", "weights"),
    [("32-true", "16bit"), ("bf16-mixed", "16bit"), ("bf16-mixed", "nf4"), ("32-true", "nf4_double")],
)
def test_the_forecast_is_the_size_of_the_teacher_that_is_set_up(
    tiny_model_dir: Path, tiny_tokens_dir: Path, tmp_path: Path, precision: str, weights: str
) -> None:
    options = {"teacher": tiny_model_dir, "precision": precision, "teacher_weights": weights}
    run = prepare_run(tiny_model_dir, tiny_tokens_dir, tmp_path / "run", **options)
    forecast = make_request(run).forecast_teacher()
    assert isinstance(run.data, TokenDataset)
    fabric = Fabric(accelerator="cpu", devices=1)
    teacher = set_up_teacher(fabric, teacher_run(run, resolve_name(str(tiny_model_dir))))

    tensors: list[torch.Tensor] = [*teacher.model.parameters(), teacher.head.weight]
    assert forecast is not None
    assert forecast.device_bytes == sum(tensor.nbytes for tensor in tensors)


def test_a_70b_teacher_is_sharded_and_its_head_is_not(
    tiny_model_dir: Path, tiny_tokens_dir: Path, tmp_path: Path
) -> None:
    teacher = tmp_path / "teacher"
    LlamaConfig(**LLAMA_70B).save_pretrained(teacher)  # a plan needs no weights
    options = {"devices": 8, "parallelism": "fsdp2", "precision": "bf16-mixed", "device_memory": "80GB", "plan": "true"}
    run = prepare_run(
        tiny_model_dir, tiny_tokens_dir, tmp_path / "run", teacher=teacher, total_batch_size=16, **options
    )
    forecast = make_request(run).forecast_teacher()

    head = 128_256 * 8192
    assert forecast is not None
    outside_head = 70_553_706_496 - head
    assert forecast.device_bytes == 2 * head + 2 * outside_head // 8
    num_tokens = 2 * run.plan.tokens_per_row  # two rows on each device
    matrices = outside_head  # the embedding is only looked up
    assert forecast.flops_of_step == pytest.approx(2 * matrices * num_tokens, rel=0.01)
    (gathered,) = forecast.collectives
    assert gathered.sent == run.plan.accumulation * (2 * outside_head * 7 // 8)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["live", "hidden"])
def test_plan_is_within_5_percent_of_the_tensors_of_a_distillation(form: str) -> None:
    """Count a step on fake tensors; a teacher of two layers takes more memory in its pass than the student."""
    reason = why_not()
    if reason:
        pytest.skip(reason)
    case = Case("llama-3.2-1b", 1, "fsdp2", "full", teacher="llama-3-8b", form=form)
    argv = ["benchmarks.fake_rank", *case.argv, "--num_layers", "2", "--teacher_layers", "2", "--row_tokens", "1024"]
    run = run_pretended(argv, devices=8, ranks=1, cwd=ROOT, timeout=300)
    assert run.returncode == 0, run.stderr
    found = read_fake_run(run.stdout.splitlines()[-1])
    assert plan_error(found) == pytest.approx(0, abs=TOLERANCE)
    has_pass = TEACHER in found.step.parts
    assert has_pass == (form == "live")
