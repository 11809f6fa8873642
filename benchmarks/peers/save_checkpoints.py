"""Train under FSDP and save several times with ``CheckpointManager`` or with torch; print what each save costs.

``benchmarks/checkpoint.py`` runs this under torchrun. Each rank prints one line of JSON.
"""

import json
import re
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict

from fabric_train.arguments import TrainArguments, parse
from fabric_train.checkpoint import Description, TrainerState
from fabric_train.checkpoint.manager import CheckpointManager
from fabric_train.data.batch import Batch
from fabric_train.data.data_order import DataOrder
from fabric_train.data.step_sampler import Window
from fabric_train.distributed.gradients import clip_grad_norm
from fabric_train.distributed.ranks import StepSync, sync_step
from fabric_train.distributed.sharded_parameters import named_parameters
from fabric_train.distributed.strategy import build_fabric
from fabric_train.model.hf_model import read_shape
from fabric_train.model.load_weights import load_model
from fabric_train.model.parallelize import setup_model
from fabric_train.optim.optimizer import build_optimizer, decayed_names
from fabric_train.training.step import accumulate

NUM_SAVES = 4  # the first one allocates and is not counted
WARM_UP_STEPS = 1
STEPS_BETWEEN = 2  # enough for a background save to finish
NUM_TOKENS = 32  # per rank and step


class OurSaves:
    """Saves by ``CheckpointManager``, called as the training loop calls it."""

    def __init__(self, fabric: Any, model: Any, optimizer: Any, folder: Path, kind: str, asynchronous: bool) -> None:
        description = Description(kind, "float32", DataOrder("", 1, 1, 0), {"model_name": ""}, {}, None, ())
        self._fabric = fabric
        self._checkpoints = CheckpointManager(
            folder,
            fabric=fabric,
            model=model,
            optimizer=optimizer,
            description=description,
            keep=1,
            asynchronous=asynchronous,
            on_saved=lambda _: None,
        )

    def save(self, step: int) -> None:
        self._checkpoints.save(TrainerState(step))

    def before_step(self) -> float:
        return timed(self._checkpoints.wait_until_copied)

    def after_step(self) -> float:
        saves = self._checkpoints
        sync = sync_step(self._fabric, StepSync(is_saving=saves.is_writing, save_failed=saves.has_failed))
        return timed(lambda: saves.advance(sync))

    def finish(self) -> None:
        self._checkpoints.finish()


class TorchSaves:
    """Saves by ``torch.distributed.checkpoint``, or by ``torch.save`` of the full state dict on rank 0."""

    def __init__(self, model: Any, optimizer: Any, folder: Path, method: str) -> None:
        self._model = model._forward_module
        self._optimizer = optimizer.optimizer
        self._folder = folder
        self._method = method
        self._future: Any = None
        self._group = dist.new_group(backend="gloo")  # async_save's thread must not use training's group

    def save(self, step: int) -> None:
        self.finish()
        target = self._folder / f"step-{step}"
        if self._method == "torch_full":
            options = StateDictOptions(full_state_dict=True)  # with cpu_offload=True it crashes on CPU
            state = self._state(options)
            if dist.get_rank() == 0:
                target.mkdir(parents=True)
                torch.save(state, target / "checkpoint.pt")
            dist.barrier()
        elif self._method == "dcp_async":
            self._future = dcp.async_save(self._state(), checkpoint_id=target, process_group=self._group)
        else:
            dcp.save(self._state(), checkpoint_id=target)

    def before_step(self) -> float:
        return 0.0

    def after_step(self) -> float:
        return 0.0

    def finish(self) -> None:
        if self._future is not None:
            self._future.result()
            self._future = None

    def _state(self, options: StateDictOptions | None = None) -> dict[str, Any]:
        return {
            "model": get_model_state_dict(self._model, options=options),
            "optimizer": get_optimizer_state_dict(self._model, self._optimizer, options=options),
        }


class MemorySampler(threading.Thread):
    """A thread that samples this process's anonymous memory every 2 ms; ``peak`` is the most since it was set."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peak = 0
        self.start()

    def run(self) -> None:
        while True:
            self.peak = max(self.peak, anonymous_memory())
            time.sleep(0.002)


def anonymous_memory() -> int:
    """Return the bytes of anonymous memory that this process has resident; pages of files do not count."""
    found = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def main() -> None:
    """Measure the method ``sys.argv[1]`` with files in ``sys.argv[2]``; the other arguments are training's."""
    method = sys.argv[1]
    folder = Path(sys.argv[2])
    arguments = parse(TrainArguments, sys.argv[3:])
    shape = read_shape(arguments.model.model_name)
    fabric = build_fabric(arguments, shape.layer_classes)
    model: Any = load_model(shape, torch.float32)
    decayed = decayed_names(model)
    model = setup_model(fabric, model, shape.layer_classes, arguments)
    optimizer = fabric.setup_optimizers(build_optimizer(named_parameters(model), decayed, arguments.training))
    if method.startswith("ours"):
        _, kind, timing = method.split("_")
        system: Any = OurSaves(fabric, model, optimizer, folder, kind, timing == "async")
    else:
        system = TorchSaves(model, optimizer, folder, method)
    step = partial(train_step, fabric, model, optimizer, system, random_window(shape.vocab_size, fabric.global_rank))
    step()  # creates the optimizer's state
    sampler = MemorySampler()
    for _ in range(WARM_UP_STEPS):
        step()
    peak_in_training = sampler.peak
    saves = []
    extra_in_save = 0
    peak_after_save = 0
    for number in range(NUM_SAVES):
        fabric.barrier()
        before = anonymous_memory()
        sampler.peak = 0
        stall = timed(partial(system.save, number))
        extra_in_save = max(extra_in_save, sampler.peak - before)
        sampler.peak = 0
        steps = [step() for _ in range(STEPS_BETWEEN)]
        stall += sum(step_stall for step_stall, _ in steps) + timed(system.finish)
        peak_after_save = max(peak_after_save, sampler.peak)
        saves.append({"stall_seconds": stall, "step_seconds": [seconds for _, seconds in steps]})
    extra = max(extra_in_save, peak_after_save - peak_in_training)
    result = json.dumps({"rank": fabric.global_rank, "extra_bytes": extra, "saves": saves})
    print(f"{result}\n", end="", flush=True)  # in one write: the ranks share the file


def random_window(vocab_size: int, rank: int) -> Window:
    """Return a window of one micro-batch of one row."""
    ids = torch.randint(0, vocab_size, (1, NUM_TOKENS), generator=torch.Generator().manual_seed(rank))
    return Window(1, 0, False, np.arange(2), 1, [Batch(ids, ids)])


def train_step(fabric: Any, model: Any, optimizer: Any, system: Any, window: Window) -> tuple[float, float]:
    """Train a step; return the seconds it waited for a save, and the seconds of the whole step."""
    started = time.perf_counter()
    accumulate(fabric, model, window)
    clip_grad_norm(fabric, model, optimizer, 1.0)
    stall = system.before_step()
    optimizer.step()
    optimizer.zero_grad()
    return stall + system.after_step(), time.perf_counter() - started


def timed(function: Callable[[], Any]) -> float:
    """Call ``function`` and return the seconds it took."""
    started = time.perf_counter()
    function()
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
