"""A run on several machines has a vLLM server on each of them. No vLLM is needed."""

import json
from pathlib import Path
from typing import Any

import pytest

from fabric_train.rollouts.store import ROLLOUTS
from tests.support.forked_runs import ForkedRuns
from tests.support.rl_runs import TOLERANCE, VOWELS, Reinforcing
from tests.support.two_nodes import on_nodes
from tests.support.vllm_stand_in import write_stand_in

pytestmark = pytest.mark.slow

KILL_SERVER_OF_THE_SECOND_MACHINE = """
import psutil
from fabric_train.rollouts import vllm_sampler
from fabric_train.rollouts.vllm_sampler import VllmSampler

vllm_sampler._END_SECONDS = 1.0  # the time to find out that the other server runs

def request_and_kill(self, *arguments, original=VllmSampler._request):
    if rank == 1 and self._step == 1 and not self._has_restarted:
        servers = [process for process in psutil.Process().children(recursive=True) if "--uds" in process.cmdline()]
        servers[-1].kill()  # the first one is its supervisor
        servers[-1].wait()
    return original(self, *arguments)

VllmSampler._request = request_and_kill
"""


@pytest.fixture
def reinforcing(tmp_path: Path, forked_runs: ForkedRuns, tiny_model_dir: Path) -> Reinforcing:
    (tmp_path / "model").symlink_to(tiny_model_dir)
    rows = [{"prompt": f"{number} and"} for number in range(12)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "judge.py").write_text(VOWELS)
    return Reinforcing(tmp_path, forked_runs)


@pytest.mark.parametrize("parallelism", ["ddp", "fsdp2"])
def test_each_machine_has_a_server_and_all_start_again_together(
    reinforcing: Reinforcing, tmp_path: Path, parallelism: str
) -> None:
    options: dict[str, Any] = {"sampler": "vllm", "vllm_python": write_stand_in(tmp_path / "python"), "max_step": 2}
    options |= {"sampler_batch_size": None, "devices": 1, "num_nodes": 2, "parallelism": parallelism}
    run = reinforcing.train("run", 2, before=on_nodes(1) + "\n" + KILL_SERVER_OF_THE_SECOND_MACHINE, **options)

    restarts = [line for line in run.lines() if "vLLM is started again" in line]
    assert len(restarts) == 1
    assert "vllm-1.log" in restarts[0]
    rollouts = tmp_path / "run" / ROLLOUTS
    assert {path.name for path in rollouts.iterdir()} == {"step-000001", "step-000002", "vllm-0.log", "vllm-1.log"}
    # both servers sample with the weights of the step
    assert reinforcing.column("run", "train_sampler_weight") == pytest.approx([1.0] * 2, abs=TOLERANCE)
    assert any(reinforcing.column("run", "train_loss"))
