"""--sample_prompts writes what the model of each evaluation says, and changes nothing of the training."""

import json
from pathlib import Path
from textwrap import indent
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from fabric_train.cli.errors import InputError
from fabric_train.inference.arguments import GenerateArguments
from fabric_train.inference.generate import generate
from fabric_train.inference.load_model import load_for_inference
from fabric_train.inference.prompts import encode_text
from fabric_train.training.logger import Sample
from fabric_train.training.sample_file import SampleFile, read_samples
from tests.support.forked_runs import ForkedRuns
from tests.support.short_runs import TERMINATE, argv, at_point, metrics

PROMPTS = ["To be", "If music be the food of love, play on; give me excess of it"]
NUM_TOKENS = 6
OPTIONS = {
    "micro_batch_size": 4,
    "max_step": 4,
    "eval_step_interval": 2,
    "eval_iters": 2,
    "save_step_interval": 4,
    "log_step_interval": 1,
}
TWO_STEPS = {**OPTIONS, "max_step": 2, "eval_step_interval": 1, "save_step_interval": 2}
KILL = "os.kill(os.getpid(), signal.SIGKILL)"


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("prompts") / "prompts.txt"
    file.write_text("\n".join(PROMPTS))
    return file


def _samples(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]


def _greedy(checkpoint: Path) -> list[str]:
    model, tokenizer = load_for_inference(str(checkpoint))
    encoded = [encode_text(tokenizer, prompt) for prompt in PROMPTS]
    return [text.text for text in generate(model, tokenizer, encoded, GenerateArguments("", num_tokens=NUM_TOKENS))]


@pytest.mark.parametrize(
    "parallelism, num_ranks", [("single", 1), pytest.param("fsdp", 2, marks=pytest.mark.launchers), ("fsdp2", 2)]
)
def test_samples_are_the_models_texts_and_training_stays_the_same(
    tmp_path: Path,
    prompts: Path,
    parallelism: str,
    num_ranks: int,
    tiny_model_dir: Path,
    tiny_tokens_dir: Path,
    forked_runs: ForkedRuns,
) -> None:
    options = {**TWO_STEPS, "parallelism": parallelism}
    sampling = {"sample_prompts": prompts, "sample_tokens": NUM_TOKENS}
    without = forked_runs.start(argv(tiny_model_dir, tiny_tokens_dir, tmp_path / "without", **options), num_ranks)
    without.finish()
    run = tmp_path / "run"
    sampled = forked_runs.start(argv(tiny_model_dir, tiny_tokens_dir, run, **options, **sampling), num_ranks)
    sampled.finish()
    rows = _samples(run)
    assert [(row["step"], row["prompt"]) for row in rows] == [(step, text) for step in (1, 2) for text in PROMPTS]
    assert [row["text"] for row in rows[2:]] == _greedy(run / "checkpoints" / "step-00000002")
    assert metrics(run) == metrics(tmp_path / "without")
    weights = [folder / "checkpoints/step-00000002/model.safetensors" for folder in (run, tmp_path / "without")]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    assert not (tmp_path / "without" / "samples.jsonl").exists()


@pytest.mark.parametrize(
    "action, step, phase, index, code",
    [(KILL, 4, "SAVING", 0, -9), (TERMINATE, 4, "SAMPLING", 3, 75)],
)
def test_a_run_that_is_resumed_has_each_step_once(
    tmp_path: Path,
    prompts: Path,
    action: str,
    step: int,
    phase: str,
    index: int,
    code: int,
    tiny_model_dir: Path,
    tiny_tokens_dir: Path,
    forked_runs: ForkedRuns,
) -> None:
    options = {**OPTIONS, "loggers": "tensorboard", "sample_prompts": prompts, "sample_tokens": NUM_TOKENS}
    line = argv(tiny_model_dir, tiny_tokens_dir, tmp_path / "run", **options)
    assert forked_runs.start(line, 1, before=at_point(action, step, phase, index)).wait() == [code]
    forked_runs.start([*line, "--resume", "true"], 1).finish()
    rows = _samples(tmp_path / "run")
    assert [row["step"] for row in rows] == [2, 2, 4, 4]
    assert [row["text"] for row in rows[2:]] == _greedy(tmp_path / "run" / "checkpoints" / "step-00000004")
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    logged = events.Tensors("samples/2/text_summary")
    assert [event.step for event in logged] == [2, 4]
    text = f"{PROMPTS[1]}▸{rows[3]['text']}"
    assert logged[1].tensor_proto.string_val[0].decode() == indent(text, "    ", lambda _: True)


def test_lines_after_the_last_step_and_a_cut_line_are_removed(tmp_path: Path) -> None:
    file = tmp_path / "samples.jsonl"
    samples = [Sample(step, "p", f"ä{step}") for step in (0, 2, 4)]
    SampleFile(file, -1).log_samples(samples)
    with file.open("a") as opened:
        opened.write('{"step": 6, "pro')
    SampleFile(file, 2)
    assert read_samples(file) == samples[:2]
    SampleFile(file, 2).log_samples([Sample(4, "p", "again")])
    SampleFile(file, 4)
    assert read_samples(file) == [*samples[:2], Sample(4, "p", "again")]
    file.write_text("no json\n")
    with pytest.raises(InputError, match=r"samples.jsonl, line 1: damaged .*; move the file away"):
        SampleFile(file, 2)


def test_wrong_prompts_are_refused_before_the_run(
    tmp_path: Path, prompts: Path, tiny_model_dir: Path, tiny_tokens_dir: Path, forked_runs: ForkedRuns
) -> None:
    chats = tmp_path / "chats.jsonl"
    chats.write_text('{"messages": [{"role": "user", "content": "Hi"}]}\n')
    for options, fault in (
        ({"sample_prompts": tmp_path / "none.txt"}, "none.txt: No such file or directory; give a .txt file"),
        ({"sample_prompts": prompts, "sample_tokens": 250}, "prompts.txt, line 2 has "),
        ({"sample_prompts": chats}, "has no chat template, because it is a base model"),
    ):
        run = forked_runs.start(argv(tiny_model_dir, tiny_tokens_dir, tmp_path / "run", **options), 1)
        assert run.wait() == [2]
        assert fault in run.stderr()
        assert not (tmp_path / "run").exists()


ORDER = """
from fabric_train.checkpoint.manager import (CheckpointManager)
from fabric_train.training.logger import Outputs

def flush(self, original=Outputs.flush):
    print("flush", flush=True)
    original(self)

def save(self, *given, original=CheckpointManager.save, **more):
    print("save", flush=True)
    return original(self, *given, **more)

Outputs.flush, CheckpointManager.save = flush, save
"""


def test_what_is_logged_is_on_the_disk_before_a_checkpoint_is_saved(
    tmp_path: Path, tiny_model_dir: Path, tiny_tokens_dir: Path, forked_runs: ForkedRuns
) -> None:
    for phase in ("COMPUTING", "OPTIMIZER"):
        line = argv(tiny_model_dir, tiny_tokens_dir, tmp_path / phase, **OPTIONS)
        stopped = forked_runs.start(line, 1, before=ORDER + at_point(TERMINATE, 3, phase))
        assert stopped.wait() == [75]
        whole = forked_runs.start([*line, "--resume", "true"], 1, before=ORDER)
        whole.finish()
        for run in (stopped, whole):
            order = [line for line in run.stdout().splitlines() if line in ("flush", "save")]
            assert order == ["flush", "save"] * (len(order) // 2)
            assert order
