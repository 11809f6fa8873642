"""Train the smallest language model, whose gradients can be worked out by hand, for one step on several ranks.

``main`` accumulates the window of ``BATCHES``, clips, takes a step of SGD with learning rate 1 and prints the loss, the
norm and the weights as JSON. The weights start at 0, so they end as the negative gradient.
"""

import json
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from transformers.modeling_outputs import CausalLMOutput

from fabric_train.arguments import TrainArguments, parse
from fabric_train.data.batch import IGNORED_LABEL, Batch
from fabric_train.data.step_sampler import Window
from fabric_train.distributed.gradients import clip_grad_norm
from fabric_train.distributed.strategy import build_fabric
from fabric_train.model.parallelize import setup_model
from fabric_train.training.step import accumulate

VOCABULARY = 5
_NOT = IGNORED_LABEL
# two micro-batches (ids, labels) for each of two ranks
BATCHES = (
    (([0, 1, 4, 4], [0, 1, _NOT, _NOT]), ([3, 3, 3], [_NOT, _NOT, _NOT])),
    (([0, 2, 2, 3], [0, 2, 2, 3]), ([1, 0], [1, 0])),
)


class Bigram(nn.Module):
    """A model whose logits of the next token are a row of one matrix [V, V]."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(_attn_implementation="eager")
        self.table = nn.Embedding(VOCABULARY, VOCABULARY)
        nn.init.zeros_(self.table.weight)

    def forward(self, input_ids: torch.Tensor, use_cache: bool) -> CausalLMOutput:
        return CausalLMOutput(logits=self.table(input_ids))

    def get_input_embeddings(self) -> nn.Module:
        return self.table

    get_output_embeddings = get_input_embeddings


def main() -> None:
    """Train one step on this rank's micro-batches."""
    arguments = parse(TrainArguments, sys.argv[1:])
    units = frozenset([nn.Embedding])
    fabric = build_fabric(arguments, units)
    model = setup_model(fabric, Bigram(), units, arguments)
    optimizer: Any = fabric.setup_optimizers(torch.optim.SGD(model.parameters(), lr=1.0))
    batches = [Batch(torch.tensor([ids]), torch.tensor([labels])) for ids, labels in BATCHES[fabric.global_rank]]
    loss = accumulate(fabric, model, Window(1, 0, False, np.arange(4), 1, batches))
    norm = clip_grad_norm(fabric, model, optimizer, arguments.training.grad_clip)
    optimizer.step()
    weights: dict[str, Any] = get_model_state_dict(
        model._forward_module, options=StateDictOptions(full_state_dict=True)
    )
    if fabric.is_global_zero:
        result = {"loss": float(loss.mean), "norm": float(norm), "weights": weights["table.weight"].tolist()}
        print(json.dumps(result))
