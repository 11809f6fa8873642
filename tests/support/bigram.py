"""Train the smallest language model, whose gradients can be worked out by hand, for one step on several ranks.

``main`` accumulates the window of ``MICRO_BATCHES``, clips, takes a step of SGD with learning rate 1, and prints the
loss, the norm and the weights as JSON. The weights start at 0, so they end as the negative gradient.
"""

import json
import sys
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import torch
from lightning.fabric.wrappers import _FabricModule, _FabricOptimizer
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from transformers.modeling_outputs import CausalLMOutput

from fabric_train.arguments import TrainArguments, parse
from fabric_train.data.batch import IGNORED_LABEL, Batch
from fabric_train.data.step_sampler import Window
from fabric_train.distributed.gradients import clip_grad_norm
from fabric_train.distributed.strategy import LayerClasses, build_fabric
from fabric_train.model.parallelize import setup_model
from fabric_train.training.step import accumulate

VOCABULARY = 5
_X = IGNORED_LABEL


@dataclass(frozen=True)
class MicroBatch:
    """One row of token ids and its labels."""

    ids: list[int]
    labels: list[int]


MICRO_BATCHES = (
    (MicroBatch([0, 1, 4, 4], [0, 1, _X, _X]), MicroBatch([3, 3, 3], [_X, _X, _X])),
    (MicroBatch([0, 2, 2, 3], [0, 2, 2, 3]), MicroBatch([1, 0], [1, 0])),
)
"""Two micro-batches for each of two ranks."""


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
    layer_classes: LayerClasses = frozenset([nn.Embedding])
    fabric = build_fabric(arguments, layer_classes)
    model: _FabricModule = setup_model(fabric, Bigram(), layer_classes, arguments)
    optimizer = fabric.setup_optimizers(torch.optim.SGD(model.parameters(), lr=1.0))
    assert isinstance(optimizer, _FabricOptimizer)

    batches = []
    for micro_batch in MICRO_BATCHES[fabric.global_rank]:
        batches.append(Batch(torch.tensor([micro_batch.ids]), torch.tensor([micro_batch.labels])))
    window = Window(step=1, epoch=0, ends_epoch=False, rows=np.arange(4), micro_batch_size=1, batches=batches)
    loss = accumulate(fabric, model, window)
    grad_norm = clip_grad_norm(fabric, model, optimizer, arguments.training.grad_clip)
    optimizer.step()

    # all ranks take part in gathering the full weights
    state_dict = get_model_state_dict(model._forward_module, options=StateDictOptions(full_state_dict=True))
    if fabric.is_global_zero:
        weights = state_dict["table.weight"]
        assert isinstance(weights, torch.Tensor)
        print(json.dumps({"loss": float(loss.mean), "norm": float(grad_norm), "weights": weights.tolist()}))
