"""Run by ``benchmarks/checkpoint.py`` under torchrun: train a model sharded by FSDP and save it several times in one
way, ours or torch's. The last line of each rank's output is JSON: what every save has cost.
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

from arguments import TrainArguments, parse
from fabric_train.checkpoint import Checkpoints, DataOrder, Description, TrainerState
from fabric_train.data.batch import Batch
from fabric_train.data.step_sampler import Window
from fabric_train.distributed.collectives import StepSync, sync_step
from fabric_train.distributed.grad_norm import clip
from fabric_train.distributed.shards import named_parameters
from fabric_train.distributed.strategy import build_fabric
from fabric_train.model.hf_model import load_model, read_shape
from fabric_train.model.parallelize import setup_model
from fabric_train.optim.optimizer import build_optimizer, decayed_names
from fabric_train.training.loop import accumulate

NUM_SAVES = 4  # the first, which allocates, is told apart
WARM_UP_STEPS = 1
STEPS_BETWEEN = 2  # enough for a save in the background to come to its end
NUM_TOKENS = 32  # a rank and a step


class Ours:
    """``Checkpoints``, driven as the training loop does it."""

    def __init__(self, fabric: Any, model: Any, optimizer: Any, folder: Path, kind: str, asynchronous: bool) -> None:
        description = Description(kind, "float32", DataOrder("", 0, 1, 0), {}, {}, ())
        self._fabric = fabric
        self._checkpoints = Checkpoints(folder, fabric, model, optimizer, description, 1, asynchronous, lambda _: None)

    def save(self, step: int) -> None:
        self._checkpoints.save(TrainerState(step))

    def before_step(self) -> float:
        return timed(self._checkpoints.wait_until_copied)

    def after_step(self) -> float:
        saves = self._checkpoints
        border = sync_step(self._fabric, StepSync(saving=saves.is_writing, failed=saves.has_failed))
        return timed(lambda: saves.at_border(border))

    def finish(self) -> None:
        self._checkpoints.finish()


class Torchs:
    """``torch.distributed.checkpoint``, or the whole state dict on rank 0 by ``torch.save``."""

    def __init__(self, model: Any, optimizer: Any, folder: Path, way: str) -> None:
        self._model, self._optimizer, self._folder, self._way = model._forward_module, optimizer.optimizer, folder, way
        self._future: Any = None
        self._group = dist.new_group(backend="gloo")  # the thread of async_save must not share training's

    def save(self, step: int) -> None:
        self.finish()
        target = self._folder / f"step-{step}"
        if self._way == "torch_full":
            options = StateDictOptions(full_state_dict=True)  # with cpu_offload=True it crashes on CPU
            state = self._state(options)
            if dist.get_rank() == 0:
                target.mkdir(parents=True)
                torch.save(state, target / "checkpoint.pt")
            dist.barrier()
        elif self._way == "dcp_async":
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
    """The most memory of its own that this process has had since ``peak`` was set, sampled every 2 ms; files' pages do
    not count.
    """

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peak = 0
        self.start()

    def run(self) -> None:
        while True:
            self.peak = max(self.peak, own_memory())
            time.sleep(0.002)


def own_memory() -> int:
    """Bytes of anonymous memory that this process has resident."""
    found = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def main() -> None:
    """Measure the way ``sys.argv[1]`` with files in ``sys.argv[2]``; other arguments are training's."""
    way, folder = sys.argv[1], Path(sys.argv[2])
    arguments = parse(TrainArguments, sys.argv[3:])
    shape = read_shape(arguments.model.model_name)
    fabric = build_fabric(arguments, shape.layer_classes)
    model: Any = load_model(shape, torch.float32)
    decayed = decayed_names(model)
    model = setup_model(fabric, model, shape.layer_classes, arguments)
    optimizer = fabric.setup_optimizers(build_optimizer(named_parameters(model), decayed, arguments.training))
    if way.startswith("ours"):
        _, kind, manner = way.split("_")
        system: Any = Ours(fabric, model, optimizer, folder, kind, manner == "async")
    else:
        system = Torchs(model, optimizer, folder, way)
    step = partial(train_step, fabric, model, optimizer, system, random_window(shape.vocab_size, fabric.global_rank))
    step()  # makes the optimizer's state
    sampler = MemorySampler()
    for _ in range(WARM_UP_STEPS):
        step()
    of_training = sampler.peak
    saves, alone, beside_steps = [], 0, 0
    for number in range(NUM_SAVES):
        fabric.barrier()
        before, sampler.peak = own_memory(), 0
        stall = timed(partial(system.save, number))
        alone, sampler.peak = max(alone, sampler.peak - before), 0
        steps = [step() for _ in range(STEPS_BETWEEN)]
        stall += sum(step_stall for step_stall, _ in steps) + timed(system.finish)
        beside_steps = max(beside_steps, sampler.peak)
        saves.append({"stall_seconds": stall, "step_seconds": [seconds for _, seconds in steps]})
    extra = max(alone, beside_steps - of_training)
    told = json.dumps({"rank": fabric.global_rank, "extra_bytes": extra, "saves": saves})
    print(f"{told}\n", end="", flush=True)  # at one go: the ranks write into one file


def random_window(vocab_size: int, rank: int) -> Window:
    """One micro-batch of one row."""
    ids = torch.randint(0, vocab_size, (1, NUM_TOKENS), generator=torch.Generator().manual_seed(rank))
    return Window(1, 0, False, np.arange(2), 1, [Batch(ids, ids)])


def train_step(fabric: Any, model: Any, optimizer: Any, system: Any, window: Window) -> tuple[float, float]:
    """Train a step; return the seconds that a save under way has held it up, and those of the whole step."""
    started = time.perf_counter()
    accumulate(fabric, model, window)
    clip(fabric, model, optimizer, 1.0)
    stall = system.before_step()
    optimizer.step()
    optimizer.zero_grad()
    return stall + system.after_step(), time.perf_counter() - started


def timed(function: Callable[[], Any]) -> float:
    """Return the seconds that a call takes."""
    started = time.perf_counter()
    function()
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
