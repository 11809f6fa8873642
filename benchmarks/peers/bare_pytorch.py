"""A minimal PyTorch training loop: forward, backward, clip, step. Prints its speed, losses and memory as JSON."""

import torch
from transformers import AutoModelForCausalLM

from benchmarks.peers.step_clock import StepClock
from benchmarks.peers.training_task import adamw_groups, parse_task


def main() -> None:
    """Train on the rows in the given order, one row a micro-batch, ``--accumulation`` micro-batches a step."""
    task = parse_task()
    model = AutoModelForCausalLM.from_pretrained(task.model_name, dtype=torch.float32)
    model.train()
    optimizer = torch.optim.AdamW(adamw_groups(model), lr=task.lr, betas=(0.9, 0.95), fused=True)
    if task.compile:
        model.compile()
    clock = StepClock()
    clock.start(optimizer)
    for first in range(0, len(task.rows), task.accumulation):
        for row in range(first, first + task.accumulation):
            input_ids = task.rows[row]["input_ids"][None]
            loss = model(input_ids=input_ids, labels=input_ids, use_cache=False).loss / task.accumulation
            loss.backward()
            clock.add_micro_batch(loss, input_ids.numel())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    clock.print_result()


if __name__ == "__main__":
    main()
