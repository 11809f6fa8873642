"""Two ranks with --refill whose vLLM server is killed have the completions of one rank. No vLLM is needed."""

import json
from pathlib import Path
from typing import Any

import pytest

from fabric_train.rollouts.store import RolloutManifest, read_manifest, step_folder
from tests.support.forked_runs import ForkedRuns
from tests.support.rl_runs import VOWELS, Reinforcing
from tests.support.vllm_stand_in import write_stand_in

pytestmark = pytest.mark.slow

KILL_SERVER = """
import itertools
import os
import signal
import psutil
from fabric_train.rollouts.vllm_client import VllmClient
from fabric_train.rollouts.vllm_sampler import VllmSampler

num_rounds = 0
num_answers = itertools.count(1)
server_ids = []

def request(self, *arguments, original=VllmSampler._request):
    global num_rounds
    num_rounds += 1
    if rank == {killing_rank} and num_rounds == {round}:
        socket = str(self._client.path)
        for process in psutil.process_iter(["cmdline"]):
            words = process.info["cmdline"] or []
            if socket in words and not any("vllm_supervisor" in word for word in words):
                server_ids.append(process.pid)
    return original(self, *arguments)

def generate(self, *arguments, original=VllmClient.generate, **options):
    generated = original(self, *arguments, **options)
    if server_ids and next(num_answers) == 1:  # the other requests wait for theirs
        os.kill(server_ids.pop(), signal.SIGKILL)
    return generated

VllmSampler._request = request
VllmClient.generate = generate
"""
RESTARTS = "vLLM is started again"


def train(reinforcing: Reinforcing, run: str, num_ranks: int, before: str = "") -> list[str]:
    """Take a step with prompts that are replaced, and return the lines of rank 0."""
    options: dict[str, Any] = {
        "sampler": "vllm",
        "vllm_python": reinforcing.folder / "python",
        "sampler_batch_size": None,
        "rewards": "judge.py:vowels_of_odd_prompts",
        "refill": "true",
        "max_step": 1,
        "devices": num_ranks,
        "parallelism": "ddp" if num_ranks > 1 else "single",
    }
    return reinforcing.train(run, num_ranks, before, **options).lines()


def manifest(reinforcing: Reinforcing, run: str) -> RolloutManifest:
    return read_manifest(step_folder(reinforcing.folder / run, 1))


@pytest.fixture(scope="module")
def refilled(tmp_path_factory: pytest.TempPathFactory, forked_runs: ForkedRuns, tiny_model_dir: Path) -> Reinforcing:
    """Return the folder of a run ``whole`` whose server is not killed."""
    folder = tmp_path_factory.mktemp("refilled")
    (folder / "model").symlink_to(tiny_model_dir)
    rows = [{"prompt": f"{number} and", "answer": str(number)} for number in range(12)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "judge.py").write_text(VOWELS)
    write_stand_in(folder / "python")
    reinforcing = Reinforcing(folder, forked_runs)
    lines = train(reinforcing, "whole", 1)
    assert not any(RESTARTS in line for line in lines)
    assert manifest(reinforcing, "whole").num_replaced > 0
    return reinforcing


@pytest.mark.parametrize("killed_round", [1, 2], ids=["prompts", "replacements"])
def test_a_server_that_is_killed_while_it_samples_changes_no_token(refilled: Reinforcing, killed_round: int) -> None:
    """It is killed after the first answer to the second rank, which has prompts in both rounds."""
    run = f"killed-{killed_round}"
    kill_server = KILL_SERVER.replace("{round}", str(killed_round)).replace("{killing_rank}", "1")
    lines = train(refilled, run, 2, kill_server)
    assert sum(RESTARTS in line for line in lines) == 1
    assert refilled.tokens(run, 1) == refilled.tokens("whole", 1)
    assert manifest(refilled, run).num_replaced == manifest(refilled, "whole").num_replaced
