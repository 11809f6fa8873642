"""Set up a model as a run does, train a step, and print the dtypes inside as one line of JSON on rank 0.

These are the dtypes of the weights, the rotary frequencies, the output of a matrix product, the loss, the optimizer's
moments, and every gradient that enters a reducing collective.
"""

import json
import sys
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
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


def main() -> None:
    """Print the dtypes inside a run with the options of the command line."""
    report = dtypes_inside(sys.argv[1:])
    if dist.get_rank() == 0:
        print(json.dumps(report))


def dtypes_inside(options: list[str]) -> dict[str, list[str]]:
    """Return the names of the dtypes by where they are, after one step with these options."""
    arguments = parse(TrainArguments, options)
    shape = read_shape(arguments.model.model_name)
    fabric = build_fabric(arguments, shape.layer_classes)
    model: Any = load_model(shape, weights_dtype(arguments.model.precision))
    decayed = decayed_names(model)
    model = setup_model(fabric, model, shape.layer_classes, arguments)
    optimizer: Any = fabric.setup_optimizers(build_optimizer(model.named_parameters(), decayed, arguments.training))
    seen = watch(model)
    ids = torch.randint(0, shape.vocab_size, (1, 32), generator=torch.Generator().manual_seed(fabric.global_rank))
    window = Window(1, 0, False, np.arange(4), 1, [Batch(ids, ids), Batch(ids.flip(1), ids.flip(1))])
    if arguments.fsdp.parallelism == "ddp" and arguments.model.precision != "bf16-true":
        # DDP all-reduces the gradients without a cast, in C++ threads that a dispatch mode does not see
        loss = accumulate(fabric, model, window)
        seen["reduced"] = {str(parameter.grad.dtype) for parameter in model.parameters()}
    else:
        with ReducedDtypes() as reduced:
            loss = accumulate(fabric, model, window)
        seen["reduced"] = reduced.dtypes
    clip_grad_norm(fabric, model, optimizer, 1.0)
    optimizer.step()
    seen["loss"] = {str(loss.mean.dtype)}
    seen["weights"] = {str(parameter.dtype) for parameter in model.parameters()}
    moments = [state[name] for state in optimizer.optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    seen["moments"] = {str(moment.dtype) for moment in moments}
    return {name: sorted(types) for name, types in seen.items()}


def watch(model: Any) -> dict[str, set[str]]:
    """Return sets that fill with dtypes while the model runs."""
    seen: dict[str, set[str]] = {"rotary": set(), "products": set()}

    def rotary(module: Any, *_: Any) -> None:
        seen["rotary"].add(str(module.inv_freq.dtype))

    def product(_: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        seen["products"].add(str(output.dtype))

    for name, module in model.named_modules():
        if name.endswith("rotary_emb"):
            module.register_forward_hook(rotary)
        elif name.endswith("q_proj"):
            module.register_forward_hook(product)

    return seen


class ReducedDtypes(TorchDispatchMode):
    """A dispatch mode that records the dtype of every gradient that enters a reducing collective."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "reduce" in func.__name__ and func.namespace in ("c10d", "_c10d_functional"):
            tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)]
            gradients = [tensor for tensor in tensors if tensor.numel() > 64]  # not counts and norms
            self.dtypes |= {str(gradient.dtype) for gradient in gradients}
        return func(*args, **(kwargs or {}))


if __name__ == "__main__":
    main()
