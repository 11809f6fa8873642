"""Train in plain PyTorch on one device, a whole window in one batch; print losses and gradient norms as JSON.

A window's loss is the mean over its supervised tokens.
"""

import argparse
import json

import torch
from datasets import load_from_disk
from transformers import AutoModelForCausalLM


def main() -> None:
    """Train on the rows in their order on disk, ``--rows_per_window`` of them an optimizer step."""
    parser = argparse.ArgumentParser()
    for name in ("--model_name", "--train_data_dir"):
        parser.add_argument(name, required=True)
    parser.add_argument("--rows_per_window", type=int, required=True)
    parser.add_argument("--lr", type=float, required=True)
    parser.add_argument("--grad_clip", type=float, required=True)
    arguments = parser.parse_args()

    rows = load_from_disk(arguments.train_data_dir)["train"].with_format("torch")
    model = AutoModelForCausalLM.from_pretrained(arguments.model_name, dtype=torch.float32)
    matrices = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.01}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=arguments.lr, betas=(0.9, 0.95))
    losses = []
    norms = []
    for window in rows.iter(batch_size=arguments.rows_per_window):
        logits = model(input_ids=window["input_ids"], use_cache=False).logits[:, :-1].flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(logits, window["labels"][:, 1:].flatten())
        loss.backward()
        # in fp64: on CPU, torch's own norm of so large a gradient has an error above the benchmark's tolerance
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        norm = torch.stack([gradient.double().norm() for gradient in gradients]).norm()
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), arguments.grad_clip, norm)
        norms.append(float(norm))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    print(json.dumps({"losses": losses, "grad_norms": norms}))


if __name__ == "__main__":
    main()
