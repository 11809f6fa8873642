"""Set up a model as a run does, train a step, and print the dtypes inside as one line of JSON on rank 0.

Start it with forked ranks: ``program="tests.support.step_dtypes"`` and the arguments of a run.
"""

import json
import sys
from collections.abc import Mapping, Sequence

import numpy as np
import torch
import torch.distributed as dist
from lightning.fabric.wrappers import _FabricModule, _FabricOptimizer
from torch import nn
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fabric_train.arguments import TrainArguments, parse
from fabric_train.data.batch import Batch
from fabric_train.data.step_sampler import Window
from fabric_train.distributed.gradients import clip_grad_norm
from fabric_train.distributed.precision import weights_dtype
from fabric_train.distributed.strategy import build_fabric
from fabric_train.model.hf_model import read_shape
from fabric_train.model.load_weights import load_model
from fabric_train.model.parallelize import setup_model
from fabric_train.optim.optimizer import build_optimizer, decayed_names
from fabric_train.training.step import accumulate

_SEQUENCE_LENGTH = 32
_MAX_STATISTICS = 64
"""A step also reduces counts and norms, in tensors of at most so many elements."""


def main() -> None:
    """Print the dtypes inside a run with the options of the command line."""
    dtypes = dtypes_inside(sys.argv[1:])
    if dist.get_rank() == 0:
        print(json.dumps(dtypes))


def dtypes_inside(options: list[str]) -> dict[str, list[str]]:
    """Train one step with these options, and return the names of the dtypes by where they are.

    Returns:
        ``weights`` after the step, ``rotary`` (frequencies), ``products`` (outputs of the query projections),
        ``reduced`` (gradients that enter a reducing collective), ``loss`` and ``moments`` (of the optimizer).
    """
    arguments = parse(TrainArguments, options)
    shape = read_shape(arguments.model.model_name)
    fabric = build_fabric(arguments, shape.layer_classes)
    unwrapped_model = load_model(shape, weights_dtype(arguments.model.precision))
    decayed = decayed_names(unwrapped_model)
    model: _FabricModule = setup_model(fabric, unwrapped_model, shape.layer_classes, arguments)
    optimizer = fabric.setup_optimizers(build_optimizer(model.named_parameters(), decayed, arguments.training))
    assert isinstance(optimizer, _FabricOptimizer)

    # a window of two micro-batches, so that gradients are also accumulated
    random = torch.Generator().manual_seed(fabric.global_rank)
    input_ids = torch.randint(0, shape.vocab_size, (1, _SEQUENCE_LENGTH), generator=random)
    batches = [Batch(input_ids, input_ids), Batch(input_ids.flip(1), input_ids.flip(1))]
    window = Window(step=1, epoch=0, ends_epoch=False, rows=np.arange(4), micro_batch_size=1, batches=batches)

    dtypes = record_forward_dtypes(model)
    if arguments.fsdp.parallelism == "ddp" and arguments.model.precision != "bf16-true":
        # DDP all-reduces the gradients in C++ threads, which a dispatch mode does not see; it does not cast them
        loss = accumulate(fabric, model, window)
        gradients = [parameter.grad for parameter in model.parameters()]
        dtypes["reduced"] = {str(gradient.dtype) for gradient in gradients if gradient is not None}
    else:
        with ReducedDtypes() as reduced:
            loss = accumulate(fabric, model, window)
        dtypes["reduced"] = reduced.dtypes
    clip_grad_norm(fabric, model, optimizer, 1.0)
    optimizer.step()

    dtypes["loss"] = {str(loss.mean.dtype)}
    dtypes["weights"] = {str(parameter.dtype) for parameter in model.parameters()}
    dtypes["moments"] = set()
    for state in optimizer.optimizer.state.values():
        dtypes["moments"].add(str(state["exp_avg"].dtype))
        dtypes["moments"].add(str(state["exp_avg_sq"].dtype))
    return {name: sorted(names) for name, names in dtypes.items()}


def record_forward_dtypes(model: nn.Module) -> dict[str, set[str]]:
    """Return sets that fill while the model runs: dtypes of the rotary frequencies, and of matrix products."""
    dtypes: dict[str, set[str]] = {"rotary": set(), "products": set()}

    def record_frequencies(module: nn.Module, inputs: object, output: object) -> None:
        assert isinstance(module.inv_freq, torch.Tensor)
        dtypes["rotary"].add(str(module.inv_freq.dtype))

    def record_product(module: nn.Module, inputs: object, output: torch.Tensor) -> None:
        dtypes["products"].add(str(output.dtype))

    for name, module in model.named_modules():
        if name.endswith("rotary_emb"):
            module.register_forward_hook(record_frequencies)
        elif name.endswith("q_proj"):
            module.register_forward_hook(record_product)
    return dtypes


class ReducedDtypes(TorchDispatchMode):
    """A dispatch mode that records the dtype of every gradient that enters a reducing collective."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: set[str] = set()

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        if "reduce" in func.__name__ and func.namespace in ("c10d", "_c10d_functional"):
            for leaf in tree_leaves(args):
                if isinstance(leaf, torch.Tensor) and leaf.numel() > _MAX_STATISTICS:
                    self.dtypes.add(str(leaf.dtype))
        return func(*args, **(kwargs or {}))


if __name__ == "__main__":
    main()
