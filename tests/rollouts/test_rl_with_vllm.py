"""A run of --objective rl whose completions a real vLLM server samples (make test-vllm)."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig

from fabric_train.cli.errors import STOPPED
from fabric_train.rollouts.store import read_manifest, step_folder
from fabric_train.sample_data import real_data
from tests.support.forked_runs import ForkedRuns
from tests.support.rl_runs import MAX_STEP, TOLERANCE, VOWELS, Reinforcing
from tests.support.short_runs import TERMINATE, at_point, saved_steps
from tests.support.tiny_model import random_llama, write_tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.vllm]

PYTHON = Path(os.environ.get("VLLM_PYTHON", real_data.CACHE / "vllm" / "bin" / "python"))
SMALL_BATCHES = "from fabric_train.rollouts import vllm_sampler; vllm_sampler.REQUESTS_PER_REPLICA = 4"


def test_the_server_samples_what_the_trainer_computes(tmp_path: Path, forked_runs: ForkedRuns) -> None:
    rows = [{"prompt": f"{number} and"} for number in range(12)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "judge.py").write_text(VOWELS)
    num_tokens = write_tokenizer(tmp_path / "model", ["one and two and three and four"] * 20)
    config = LlamaConfig(
        vocab_size=num_tokens,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,  # vLLM has no attention on CPUs for smaller ones
        max_position_embeddings=128,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=1,
        dtype="float32",
    )
    random_llama(config).save_pretrained(tmp_path / "model")
    reinforcing = Reinforcing(tmp_path, forked_runs)
    options: dict[str, Any] = {
        "sampler": "vllm",
        "vllm_python": os.path.relpath(PYTHON, tmp_path),
        "sampler_batch_size": None,
        "devices": 2,
        "parallelism": "ddp",
    }

    # a signal in the first batch of a step
    stop = at_point(TERMINATE, 3, "ROLLOUT", 1)
    stopped = reinforcing.start("run", 2, f"{SMALL_BATCHES}\n{stop}", **options)
    assert stopped.wait(timeout=600) == [STOPPED] * 2
    assert saved_steps(tmp_path / "run") == [2]
    assert not step_folder(tmp_path / "run", 3).exists()

    run = reinforcing.start("run", 2, resume="true", **options)
    run.finish(timeout=600)
    assert read_manifest(step_folder(tmp_path / "run", MAX_STEP)).sampler == "vllm"
    assert reinforcing.column("run", "train_sampler_weight") == pytest.approx([1.0] * MAX_STEP, abs=10 * TOLERANCE)
    assert any(reinforcing.column("run", "train_loss"))
