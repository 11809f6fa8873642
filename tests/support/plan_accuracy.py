"""Compare the memory that ``--plan`` predicts for a rank with the resident memory of real CPU ranks that train.

A run keeps freed memory to use it again (``host_memory``), and so does glibc. The plan is therefore compared with ranks
in which glibc returns freed blocks at once.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from tests.support.forked_runs import ForkedRun, ForkedRuns
from tests.support.programs import option_words

STEPS = 2
TOLERANCE = 0.15
"""Of the plan, relative to the measured peak."""
RETURN_FREED = """
import ctypes, fabric_train.training.run as program
program.reuse_freed_memory = lambda: ctypes.CDLL(None).mallopt(-3, 1 << 16)
"""
"""Code for a rank: let glibc map each block above 64 KiB separately (M_MMAP_THRESHOLD) and unmap it when freed."""
_MEASURE_LAST_STEP = f"""
from pathlib import Path
from fabric_train.training import step
seed_step = step.seed_step
def begin_step(seed, step_number, *arguments):
    if step_number == {STEPS}:
        Path("/proc/self/clear_refs").write_text("5")  # proc(5): resets the peak
    seed_step(seed, step_number, *arguments)
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
        words = [f"{self.parallelism} × {self.num_ranks}"]
        words += [word.removeprefix("--") for word in self.options]
        if self.is_real:
            words.append("SmolLM2-135M")
        return " ".join(words)


def planned_bytes(runs: ForkedRuns, case: Case, model: Path, tokens: Path, output_dir: Path) -> int:
    """Return the peak resident bytes that the plan predicts for a rank."""
    run = runs.start([*case_argv(case, model, tokens, output_dir), "--plan", "true"], 1)
    run.finish()
    gigabytes = re.search(r"at most\s+([\d.,]+) GB", run.stdout())
    assert gigabytes, run.stdout()
    return round(float(gigabytes[1].replace(",", "")) * 1e9)


def resident_bytes(
    runs: ForkedRuns, case: Case, model: Path, tokens: Path, output_dir: Path, before: str = RETURN_FREED
) -> int:
    """Train and return the peak resident bytes of any rank in the last step."""
    argv = case_argv(case, model, tokens, output_dir)
    run = runs.start(argv, case.num_ranks, before=before + _MEASURE_LAST_STEP)
    return max(_peak_bytes(run, output_dir / "metrics.csv"))


def case_argv(case: Case, model: Path, tokens: Path, output_dir: Path) -> list[str]:
    """Return the arguments of a run in the way of ``case``."""
    arguments: dict[str, object] = {
        "accelerator": "cpu",
        "precision": "32-true",
        "gradient_accumulation_steps": 1,
        "num_workers": 0,
        "loggers": "csv",
        "parallelism": case.parallelism,
        "devices": case.num_ranks,
        "max_step": STEPS,
        "model_name": model,
        "train_data_dir": tokens,
        "output_dir": output_dir,
    }
    names = [word.removeprefix("--") for word in case.options[::2]]
    values = case.options[1::2]
    arguments.update(zip(names, values, strict=True))
    return option_words(arguments)


def _peak_bytes(run: ForkedRun, metrics_file: Path) -> list[int]:
    """Return each rank's peak resident bytes in its last step, as the kernel counts them."""
    peak_bytes = [0] * len(run.pids)

    def has_trained() -> bool:
        # a peak that was read before the last step is read again: the rank resets it when that step begins
        for rank, pid in enumerate(run.pids):
            peak_bytes[rank] = _high_water_bytes(pid) or peak_bytes[rank]
        return _num_logged_steps(metrics_file) >= STEPS

    if not run.wait_until(has_trained):
        raise ChildProcessError(run.report())
    run.kill()  # its last save would take longer than its steps
    run.wait()
    return peak_bytes


def _num_logged_steps(metrics_file: Path) -> int:
    if not metrics_file.exists():
        return 0
    return len(metrics_file.read_text().splitlines()) - 1  # without the header


def _high_water_bytes(pid: int) -> int:
    """Return the peak resident bytes of a process, 0 if it has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    kibibytes = re.search(r"VmHWM:\s+(\d+) kB", status)
    return int(kibibytes[1]) * 1024 if kibibytes else 0
