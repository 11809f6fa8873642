"""Train with litgpt's pretraining loop; print its speed, losses and memory as JSON."""

import os
from pathlib import Path
from typing import Any

import torch
from lightning import Fabric
from litgpt import pretrain
from litgpt.args import EvalArgs, TrainArgs
from litgpt.config import Config
from litgpt.model import GPT
from litgpt.scripts.convert_hf_checkpoint import copy_weights_hf_llama
from safetensors.torch import load_file

from benchmarks.peers.step_clock import StepClock
from benchmarks.peers.training_task import adamw_groups, parse_task


class ClockedFabric(Fabric):
    """A Fabric that adds each micro-batch to the clock."""

    clock: StepClock
    tokens_per_row: int

    def backward(self, tensor: torch.Tensor, *arguments: Any, **options: Any) -> None:
        """Run the backward pass of a micro-batch."""
        super().backward(tensor, *arguments, **options)
        self.clock.add_micro_batch(tensor, self.tokens_per_row)


def main() -> None:
    """Train with ``litgpt.pretrain.fit``, without its validation and saves."""
    task = parse_task()
    clock = StepClock()
    rows = torch.stack([row["input_ids"] for row in task.rows])
    length = rows.shape[1]
    fabric = ClockedFabric(accelerator="cpu", devices=1)
    fabric.clock = clock
    fabric.tokens_per_row = length
    model: Any = _load_model(task.model_name)
    model.max_seq_length = length - 1  # litgpt takes the last token as a label only
    if task.compile:
        model = torch.compile(model)
    model = fabric.setup(model)
    optimizer = torch.optim.AdamW(adamw_groups(model), lr=task.lr, betas=(0.9, 0.95), fused=True)
    clock.start(optimizer)
    state = {"model": model, "optimizer": fabric.setup_optimizers(optimizer), "iter_num": 0, "step_count": 0}
    train = TrainArgs(
        global_batch_size=task.accumulation,
        micro_batch_size=1,
        max_tokens=len(rows) * (length - 1),
        max_norm=1.0,
        min_lr=task.lr,
        lr_warmup_steps=0,
        save_interval=None,
    )
    pretrain.validate = lambda *_, **__: torch.zeros(())  # fit() validates once before training
    never = EvalArgs(interval=10**9, initial_validation=False, final_validation=False)
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        fabric.print = lambda *words, **_: print(*words, file=nowhere)  # type: ignore[method-assign]
        pretrain.fit(fabric, 1, state, rows.split(1), None, Path(), None, train, never)
    clock.print_result()


def _load_model(folder: str) -> GPT:
    config = Config.from_name("SmolLM2-135M", padded_vocab_size=49152)
    weights: dict[str, torch.Tensor] = {}
    copy_weights_hf_llama(config, {}, weights, load_file(Path(folder) / "model.safetensors"))
    with torch.device("meta"):
        model = GPT(config)
    model.max_seq_length = config.block_size
    model.to_empty(device="cpu")
    model.lm_head.weight = model.transformer.wte.weight
    model.load_state_dict({name: weight.float() for name, weight in weights.items()}, strict=False)
    model.reset_parameters()
    return model


if __name__ == "__main__":
    main()
