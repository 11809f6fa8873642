"""Runs with --sampler vllm that are killed, or whose server fails twice: what stays, and how they continue.

No vLLM is needed. The server of these tests gives the same tokens for the same seed, whatever else it computes; vLLM
may round differently.
"""

import json
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from fabric_train.cli.errors import FAILURE
from fabric_train.rollouts.store import list_steps
from tests.support.forked_runs import ForkedRuns
from tests.support.rl_runs import KILL, MAX_STEP, VOWELS, Reinforcing
from tests.support.run_comparison import differences
from tests.support.short_runs import at_point
from tests.support.vllm_stand_in import write_stand_in

pytestmark = pytest.mark.slow

OPTIONS: dict[str, Any] = {"sampler": "vllm", "vllm_python": "python", "sampler_batch_size": None}
IN_TRANSFER = """
import os, signal
from fabric_train.rollouts.weight_folder import WeightFolder

def write_part(self, folder, weights, original=WeightFolder._write_part):
    original(self, folder, weights)
    if folder.name == ".step-{step:08d}":
        os.kill(os.getpid(), signal.SIGKILL)

WeightFolder._write_part = write_part
"""
KILLS = {
    "first_transfer": IN_TRANSFER.format(step=0),
    "transfer": IN_TRANSFER.format(step=2),
    "sampling": at_point(KILL, 3, "ROLLOUT", 1),
}
OUT_OF_MEMORY = """
import os

def generate(self, prompt_ids, parameters, original=vllm_stand_in.Engine.generate):
    if self.version == "step-2" and "prompt_logprobs" not in parameters:
        os.write(2, b"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\\n")
        os._exit(1)
    return original(self, prompt_ids, parameters)

vllm_stand_in.Engine.generate = generate
"""


@pytest.fixture(scope="module")
def reinforcing(tmp_path_factory: pytest.TempPathFactory, forked_runs: ForkedRuns, tiny_model_dir: Path) -> Reinforcing:
    folder = tmp_path_factory.mktemp("killed-vllm")
    (folder / "model").symlink_to(tiny_model_dir)
    rows = [{"prompt": f"{number} and"} for number in range(12)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "judge.py").write_text(VOWELS)
    write_stand_in(folder / "python")
    reinforcing = Reinforcing(folder, forked_runs)
    reinforcing.train("whole", **OPTIONS)
    return reinforcing


def left_by(reinforcing: Reinforcing, pid: int) -> list[str]:
    """Return the processes of servers, and the folders that the process of a run has left in memory."""
    left = [str(path) for path in Path("/dev/shm").glob(f"fabric-train-weights-*-{pid}")]
    for process in psutil.process_iter(["cmdline"]):
        command = " ".join(process.info["cmdline"] or [])
        if str(reinforcing.folder / "python") in command:
            left.append(command)
    return left


@pytest.mark.parametrize("name", KILLS)
def test_a_killed_run_leaves_nothing_and_continues_bit_for_bit(reinforcing: Reinforcing, name: str) -> None:
    killed = reinforcing.start(name, before=KILLS[name], **OPTIONS)
    (pid,) = killed.pids
    assert killed.wait() == [-9]
    deadline = time.monotonic() + 20
    while left_by(reinforcing, pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left_by(reinforcing, pid)
    reinforcing.train(name, resume="true", **OPTIONS)
    assert differences(reinforcing.folder / name, reinforcing.folder / "whole") == []
    for step in range(1, MAX_STEP + 1):
        assert reinforcing.tokens(name, step) == reinforcing.tokens("whole", step)


def test_a_server_without_memory_ends_the_run_which_keeps_its_completions(reinforcing: Reinforcing) -> None:
    """In step 3 the server is started again once."""
    python = reinforcing.folder / "python-without-memory"
    write_stand_in(python, OUT_OF_MEMORY)
    options = {**OPTIONS, "vllm_python": python.name}
    failed = reinforcing.start("without-memory", **options)
    assert failed.wait() == [FAILURE]
    assert sum("; vLLM is started again" in line for line in failed.lines()) == 1
    (error,) = [line for line in failed.stderr().splitlines() if line.startswith("error: ")]
    assert "CUDA out of memory" in error
    assert "VLLM_CPU_KVCACHE_SPACE" in error
    assert list_steps(reinforcing.folder / "without-memory") == [1, 2]
    write_stand_in(python)  # now it has memory
    reinforcing.train("without-memory", resume="true", **options)
    assert differences(reinforcing.folder / "without-memory", reinforcing.folder / "whole") == []
