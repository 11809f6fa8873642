"""The least loop that trains in PyTorch: forward, backward, clip, step; prints its speed, losses and memory as JSON."""

import argparse
import json
import resource
import sys
import time

import torch
from datasets import load_from_disk
from transformers import AutoModelForCausalLM


def main() -> None:
    """Train one optimizer step for every ``--accumulation`` of the rows, each row a micro-batch, in the order given."""
    parser = argparse.ArgumentParser()
    for name in ("--model_name", "--train_data_dir"):
        parser.add_argument(name, required=True)
    parser.add_argument("--rows", required=True, help="indices of the rows, comma-separated")
    parser.add_argument("--accumulation", type=int, required=True)
    parser.add_argument("--lr", type=float, required=True)
    arguments = parser.parse_args()
    order = [int(row) for row in arguments.rows.split(",")]

    rows = load_from_disk(arguments.train_data_dir)["train"].select_columns("input_ids").with_format("torch")
    model = AutoModelForCausalLM.from_pretrained(arguments.model_name, dtype=torch.float32)
    model.train()
    matrices = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.01}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=arguments.lr, betas=(0.9, 0.95), fused=True)

    speeds, losses = [], []
    for first in range(0, len(order), arguments.accumulation):
        started = time.perf_counter()
        num_tokens, total = 0, torch.zeros(())
        for row in order[first : first + arguments.accumulation]:
            input_ids = rows[row]["input_ids"][None]
            loss = model(input_ids=input_ids, labels=input_ids, use_cache=False).loss / arguments.accumulation
            loss.backward()
            total += loss.detach()
            num_tokens += input_ids.numel()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total.item())
        speeds.append(num_tokens / (time.perf_counter() - started))

    unit = 1 if sys.platform == "darwin" else 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    print(json.dumps({"tokens_per_second": speeds, "losses": losses, "peak_rss_bytes": peak}))


if __name__ == "__main__":
    main()
