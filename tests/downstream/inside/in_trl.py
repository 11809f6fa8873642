"""Compute TRL's distillation losses of stored tensors: ``TENSORS.npz DIVERGENCES``; writes gradients, prints JSON."""

import json
import sys
from pathlib import Path

import numpy as np
import torch
import trl
from trl.experimental.gkd import GKDTrainer
from trl.trainer.distillation_trainer import _chunked_divergence_loss


def main() -> None:
    """Print both trainers' losses of each divergence ``[beta, temperature]``, and write their gradients."""
    file = Path(sys.argv[1])
    stored = {name: torch.from_numpy(array) for name, array in np.load(file).items()}
    mask = torch.ones(1, len(stored["hidden"]), dtype=torch.int64)
    losses: dict[str, list[float]] = {"GKDTrainer": [], "DistillationTrainer": []}
    gradients = {}
    for index, (beta, temperature) in enumerate(json.loads(sys.argv[2])):
        # GKD takes logits
        weight = stored["weight"].clone().requires_grad_()
        logits = stored["hidden"] @ weight.T
        teacher_logits = stored["teacher_hidden"] @ stored["teacher_weight"].T
        loss = GKDTrainer.generalized_jsd_loss(
            logits[None], teacher_logits[None], labels=mask, beta=beta, temperature=temperature
        )
        loss.backward()
        losses["GKDTrainer"].append(float(loss))
        assert weight.grad is not None
        gradients[f"GKDTrainer-{index}"] = weight.grad.numpy()

        # DistillationTrainer takes hidden states and heads
        weight = stored["weight"].clone().requires_grad_()
        loss, _, _ = _chunked_divergence_loss(
            stored["hidden"][None],
            stored["teacher_hidden"][None],
            weight,
            stored["teacher_weight"],
            mask,
            beta,
            temperature=temperature,
        )
        loss.backward()
        losses["DistillationTrainer"].append(float(loss))
        assert weight.grad is not None
        gradients[f"DistillationTrainer-{index}"] = weight.grad.numpy()
    np.savez(file.with_name("gradients.npz"), allow_pickle=False, **gradients)
    print(json.dumps({"version": trl.__version__, "losses": losses}))


if __name__ == "__main__":
    main()
