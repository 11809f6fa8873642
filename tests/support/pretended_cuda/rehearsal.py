"""Train the tiny model on pretended CUDA devices, and compare with CPU ranks and with synchronous saves."""

import re
from collections.abc import Mapping
from pathlib import Path

from tests.support.forked_runs import ForkedRuns
from tests.support.pretended_cuda.run import PretendedRun, run_pretended
from tests.support.short_runs import argv, metrics

LATE = 5.0
"""Seconds that a copy is late if nothing else waits for it: the optimizer would change tensors not copied yet."""
SETTINGS = {"max_step": 4, "total_batch_size": 12, "eval_step_interval": 4, "save_step_interval": 2}
STEP_WAITS = {"copy to host in exchange_step"}
"""Where the host waits for the device in a step: there and nowhere else."""
# a note of a wait, such as "item at fabric_train/training/loop.py:166 take_step < train < main"
_WAIT = re.compile(r"(?P<operation>.*?) at \S+ (?P<functions>.* < .*)")
_CUDA_ONLY = ("cpu_offload", "activation_offload", "compile", "limit_all_gathers")
# without Inductor, which would write kernels for CUDA
_EAGER_COMPILER = """
import functools, torch
torch.compile = functools.partial(torch.compile, backend="aot_eager")
"""


class Rehearsal:
    """Starts runs of the tiny model on the tiny token dataset, each into a folder of its own."""

    def __init__(self, folder: Path, model: Path, tokens: Path, cpu_runs: ForkedRuns) -> None:
        self.folder = folder
        self.model = model
        self.tokens = tokens
        self._cpu_runs = cpu_runs

    def run(
        self,
        name: str,
        options: Mapping[str, object],
        devices: int = 2,
        *,
        copy_delay: float = 0.0,
        before: str = "",
        timeout: float = 120,
        returncode: int = 0,
    ) -> PretendedRun:
        """Run on devices into the folder ``name``.

        Raises:
            AssertionError: the exit code is not ``returncode``.
        """
        settings = {**SETTINGS, "accelerator": "cuda", **options}
        words = argv(self.model, self.tokens, self.folder / name, **settings)
        if options.get("compile"):
            before = _EAGER_COMPILER + before
        run = run_pretended(["fabric_train", *words], devices, copy_delay, before, timeout=timeout)
        assert run.returncode == returncode, run.stderr or run.stdout
        return run

    def cpu_losses(self, name: str, options: Mapping[str, object], ranks: int = 2) -> list[float]:
        """Return ``losses`` of a run on CPU ranks, without the options that only GPUs have."""
        settings = {**SETTINGS, **options}
        for option in _CUDA_ONLY:
            settings.pop(option, None)
        if settings.get("precision") == "16-mixed":  # GPUs only, too
            settings["precision"] = "32-true"
        words = argv(self.model, self.tokens, self.folder / name, **settings)
        self._cpu_runs.start(words, ranks).finish()
        return losses(self.folder / name)

    def checkpoint(self, name: str, step: int) -> Path:
        """Return the folder of a checkpoint of a run."""
        return self.folder / name / "checkpoints" / f"step-{step:08d}"


def losses(run: Path) -> list[float]:
    """Return training loss, validation loss and gradient norm of each step, as far as it has them, in one list."""
    values = []
    for _step, _epoch, train_loss, val_loss, _perplexity, _learning_rate, grad_norm, _num_tokens in metrics(run):
        values += [float(cell) for cell in (train_loss, val_loss, grad_norm) if cell]
    return values


def tensor_files(checkpoint: Path) -> dict[str, bytes]:
    """Return the content of the files with weights and optimizer states."""
    files = {str(file.relative_to(checkpoint)): file.read_bytes() for file in checkpoint.rglob("*.safetensors")}
    assert files, f"{checkpoint} has no tensors"
    return files


def waits_in_steps(run: PretendedRun) -> set[str]:
    """Return where the hosts waited for a device in a step, as "item in FUNCTION"."""
    waits = set()
    for notes in run.notes.values():
        for note in notes.waits:
            match = _WAIT.fullmatch(note)
            if match is None:  # without functions of the project
                continue
            functions = match["functions"].split(" < ")
            if "take_step" in functions:
                waits.add(f"{match['operation']} in {functions[0]}")
    return waits


def foreign_contexts(run: PretendedRun) -> dict[int, list[str]]:
    """Return where ranks made contexts on devices of other ranks, by rank."""
    places_by_rank = {}
    for rank, notes in run.notes.items():
        own_device = str(rank)
        if notes.contexts.keys() != {own_device}:
            places_by_rank[rank] = [place for device, place in notes.contexts.items() if device != own_device]
    return places_by_rank
