"""Compare the memory that ``--plan`` predicts for a rank with the resident memory of real CPU ranks that train.

A run keeps freed memory to use it again (``host_memory``), and so does glibc. The plan is therefore compared with ranks
in which glibc returns freed blocks at once.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.forked_runs import ForkedRun, ForkedRuns

LAYERS = 8
WIDTH = 512
VOCABULARY = 8192
LENGTH = 256
STEPS = 2
TOLERANCE = 0.15
RETURN_FREED = """
import ctypes, fabric_train.training.run as program
program.reuse_freed_memory = lambda: ctypes.CDLL(None).mallopt(-3, 1 << 16)
"""
"""Code for a rank: let glibc map each block above 64 KiB separately (M_MMAP_THRESHOLD) and unmap it when freed."""
_MEASURE_LAST_STEP = f"""
from pathlib import Path
from fabric_train.training import step
seed_step = step.seed_step
def begin_step(seed, number, *more):
    if number == {STEPS}:
        Path("/proc/self/clear_refs").write_text("5")  # proc(5): resets the peak
    seed_step(seed, number, *more)
step.seed_step = begin_step
"""
"""Code for a rank: forget the peak of what came before the last step, such as the loading of the model."""


@dataclass(frozen=True)
class Case:
    """A way to train the small model or, with ``is_real``, SmolLM2-135M."""

    parallelism: str
    num_ranks: int
    options: tuple[str, ...] = ()
    is_real: bool = False

    def __str__(self) -> str:
        given = [word.removeprefix("--") for word in self.options]
        return " ".join([f"{self.parallelism} × {self.num_ranks}", *given, *(["SmolLM2-135M"] * self.is_real)])


def write_model(folder: Path, **sizes: int) -> Path:
    """Write a seeded random Llama with tied embeddings: of about 30 million parameters, or of the given ``sizes``."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    given: dict[str, Any] = {"num_hidden_layers": LAYERS, "hidden_size": WIDTH, "vocab_size": VOCABULARY}
    given |= {"num_attention_heads": 8, "num_key_value_heads": 4, **sizes}
    config = LlamaConfig(
        **given,
        intermediate_size=11 * given["hidden_size"] // 4,
        tie_word_embeddings=True,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def write_rows(folder: Path, num_rows: int = 64, length: int = LENGTH) -> Path:
    """Write a token dataset of random rows, each of one document."""
    import datasets

    rows = np.random.default_rng(0).integers(3, 100, (num_rows, length)).tolist()
    datasets.DatasetDict({"train": datasets.Dataset.from_dict({"input_ids": rows})}).save_to_disk(str(folder))
    return folder


def plan_of(runs: ForkedRuns, case: Case, model: Path, tokens: Path, work: Path) -> int:
    """Return the peak resident bytes that the plan predicts for a rank."""
    run = runs.start([*case_argv(case, model, tokens, work), "--plan", "true"], 1)
    run.finish()
    found = re.search(r"at most\s+([\d.,]+) GB", run.stdout())
    assert found, run.stdout()
    return round(float(found[1].replace(",", "")) * 1e9)


def resident(runs: ForkedRuns, case: Case, model: Path, tokens: Path, work: Path, before: str = RETURN_FREED) -> int:
    """Train and return the peak resident bytes of any rank in the last step."""
    run = runs.start(case_argv(case, model, tokens, work), case.num_ranks, before=before + _MEASURE_LAST_STEP)
    return max(_peaks(run, work / "metrics.csv"))


def case_argv(case: Case, model: Path, tokens: Path, work: Path) -> list[str]:
    """Return the arguments of a run in the way of ``case``."""
    words = "--accelerator cpu --precision 32-true --gradient_accumulation_steps 1 --num_workers 0 --loggers csv"
    words += f" --parallelism {case.parallelism} --devices {case.num_ranks} --max_step {STEPS}"
    words += f" --model_name {model} --train_data_dir {tokens} --output_dir {work}"
    given = [*words.split(), *case.options]
    last_of_each = dict(zip(given[::2], given[1::2], strict=True))
    return [word for pair in last_of_each.items() for word in pair]


def _peaks(run: ForkedRun, metrics: Path) -> list[int]:
    """Return each rank's peak resident bytes in its last step, as the kernel counts them."""
    peaks = [0] * len(run.pids)

    def is_done() -> bool:
        for index, pid in enumerate(run.pids):
            peaks[index] = _high_water(pid) or peaks[index]  # before its last step a rank's is another peak
        return _num_rows(metrics) >= STEPS

    if not run.wait_until(is_done):
        raise ChildProcessError(run.report())
    run.kill()  # its last save would take longer than its steps
    run.wait()
    return peaks


def _num_rows(metrics: Path) -> int:
    return len(metrics.read_text().splitlines()) - 1 if metrics.exists() else 0


def _high_water(pid: int) -> int:
    status = Path(f"/proc/{pid}/status")
    try:
        found = re.search(r"VmHWM:\s+(\d+) kB", status.read_text())
    except OSError:  # the rank has ended
        return 0
    return int(found[1]) * 1024 if found else 0
