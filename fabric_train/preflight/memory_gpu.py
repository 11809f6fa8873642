"""Let fake CPU tensors take the memory that a GPU would: its attention kernels, and layers that are compiled.

Nothing is compiled. torch's own partitioner chooses what a compiled layer keeps for the backward pass, with inductor's
decompositions. It needs neither a GPU nor a compiler. What inductor makes of the two graphs is approximated; see
:class:`_Buffers`.
"""

import importlib
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from operator import getitem
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils._pytree import tree_flatten, tree_unflatten

Compiled = Callable[..., Any]
_traced: dict[Hashable, Compiled] = {}
"""What torch has traced, by all that it depends on."""


def attention_on_gpu(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Do what ``scaled_dot_product_attention`` does on a recent GPU (torch/nn/functional.py, with the same arguments).

    Without a mask and in 16 bits it is the flash kernel, which takes fewer heads of keys and values. Otherwise it is
    the memory-efficient kernel, which takes a mask as numbers to add.
    """
    aten: Any = torch.ops.aten
    if attn_mask is None and query.dtype != torch.float32:
        found: tuple[torch.Tensor, ...] = aten._scaled_dot_product_flash_attention(
            query, key, value, dropout_p, is_causal, False, scale=scale
        )
        return found[0]
    if enable_gqa:
        key, value = (each.repeat_interleave(query.shape[1] // each.shape[1], dim=1) for each in (key, value))
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(~attn_mask, float("-inf"))
        attn_mask = attn_mask.expand(*query.shape[:-1], key.shape[-2])
    needs_grad = torch.is_grad_enabled() and any(each.requires_grad for each in (query, key, value))
    found = aten._scaled_dot_product_efficient_attention(
        query, key, value, attn_mask, needs_grad, dropout_p, is_causal, scale=scale
    )
    return found[0]


def attention_of_slices(attention: Callable[..., torch.Tensor], num_ranks: int) -> Callable[..., torch.Tensor]:
    """Let an attention take the keys and values of several ranks, whose gradients are added in fp32.

    Here each rank repeats its own, which takes as much memory; see ``model.context_parallel``.
    """

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *more: Any, **given: Any) -> torch.Tensor:
        key, value = (each.float().repeat(1, 1, num_ranks, 1).to(each.dtype) for each in (key, value))
        return attention(query, key, value, *more, **given)

    return attend


def compile_for_trace(layers: Iterable[nn.Module], budget: float, given: Hashable) -> None:
    """Replace each layer's ``forward`` as ``decoder_layers.compile_layers`` does, for fake tensors.

    The outputs have shapes and no content. ``budget`` is the share of activations that the compiler keeps. Layers with
    modules of the same classes, sizes and constants share what torch has traced, also layers of several models for
    which ``given`` is the same: it says what else a layer's operations depend on.
    """
    for layer in layers:
        layer.forward = _compiled(layer, layer.forward, budget, given)


def _compiled(layer: nn.Module, forward: Compiled, budget: float, given: Hashable) -> Compiled:
    names, weights = zip(*layer.named_parameters(), strict=True)

    def compiled(*args: Any, **kwargs: Any) -> Any:
        leaves, structure = tree_flatten((args, kwargs))
        places = [index for index, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        tensors = [leaves[place] for place in places]

        def pure(weights: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> Any:
            filled = list(leaves)
            for place, tensor in zip(places, tensors, strict=True):
                filled[place] = tensor
            args, kwargs = tree_unflatten(filled, structure)
            with _reparametrize_module(layer, dict(zip(names, weights, strict=True))):
                return forward(*args, **kwargs)

        inputs = [(tuple(tensor.shape), tensor.dtype, tensor.requires_grad) for tensor in (*weights, *tensors)]
        key = (given, budget, *inputs, structure, torch.is_grad_enabled(), _constants(layer))
        if key not in _traced:
            _traced[key] = _trace(pure, len(weights))
        with importlib.import_module("torch._functorch.config").patch(
            activation_memory_budget=budget, force_non_lazy_backward_lowering=True
        ):
            return _traced[key](weights, tensors)

    return compiled


def _constants(layer: nn.Module) -> tuple[Any, ...]:
    """Return the classes of a layer's modules, and the numbers and names in them, which compiled code contains."""
    found: list[Any] = []
    for path, module in layer.named_modules():
        found.append((path, type(module)))
        found += (
            (name, value)
            for name, value in vars(module).items()
            if isinstance(value, bool | int | float | str) and name != "layer_idx"
        )
    return tuple(found)


def _trace(function: Compiled, num_weights: int) -> Compiled:
    from torch._functorch.aot_autograd import aot_function
    from torch._inductor.compile_fx import partition_fn
    from torch._inductor.decomposition import select_decomp_table

    return aot_function(
        function,
        fw_compiler=_run_buffers,
        bw_compiler=_run_buffers,
        partition_fn=partition_fn,
        decompositions=select_decomp_table(),
        num_params_buffers=num_weights,
    )


def _run_buffers(gm: GraphModule, example_inputs: Sequence[Any]) -> Compiled:
    buffers = _Buffers(gm)

    def run(args: list[Any]) -> list[Any]:
        return buffers.run(args)

    run._boxed_call = True  # type: ignore[attr-defined] # torch passes a list, which is emptied
    return run


@dataclass
class _Step:
    """Buffers to free before one is allocated, and those to free after that."""

    buffer: Node
    before: list[Node] = field(default_factory=list)
    after: list[Node] = field(default_factory=list)


class _Buffers:
    """The buffers of a graph as compiled kernels have them.

    Matrix products, attention and unknown operations are kernels of their own, which read and write buffers. All other
    operations are fused: only those have a buffer that reduce, that one of these kernels reads, or that the graph
    returns. A fused operation writes over a buffer that it is the last to read. The order is the graph's. Not known are
    inductor's choices beyond that: several results of one kernel, results that it stores to compute them once, another
    order, workspace of kernels.
    """

    def __init__(self, graph: GraphModule) -> None:
        from torch._functorch.partitioners import get_default_op_list

        self._kinds = get_default_op_list()
        nodes = list(graph.graph.nodes)
        self._inputs = [node for node in nodes if node.op == "placeholder"]
        (self._outputs,) = next(node for node in nodes if node.op == "output").args
        returned = [node for node in self._outputs if isinstance(node, Node)]
        self._stored = {self._base(node) for node in returned}
        for node in nodes:
            if node.op == "call_function" and not self._is_view(node) and not _is_part(node):
                if self._is_kernel(node):
                    self._stored |= {self._base(read) for read in node.all_input_nodes}
                if not _has_parts(node) and (self._is_kernel(node) or _reduces(node)):
                    self._stored.add(node)
        self._stored |= {node for node in nodes if _is_part(node)}
        self._read: dict[Node, frozenset[Node]] = {}
        self._steps = self._plan(nodes, {self._base(node) for node in returned})

    def run(self, args: list[Any]) -> list[Any]:
        """Allocate and free the buffers, and return the outputs. ``args`` is emptied, as torch's kernels do."""
        alive = dict(zip(self._inputs, args, strict=True))
        args.clear()
        for step in self._steps:
            for node in step.before:
                del alive[node]
            value = step.buffer.meta.get("val")
            if step.buffer not in alive and isinstance(value, torch.Tensor):
                alive[step.buffer] = torch.empty_strided(value.size(), value.stride(), dtype=value.dtype)
            for node in step.after:
                del alive[node]
        return [self._value(node, alive) if isinstance(node, Node) else node for node in self._outputs]

    def _value(self, node: Node, alive: dict[Node, Any]) -> Any:
        if node in alive:
            return alive[node]
        args = [self._value(arg, alive) if isinstance(arg, Node) else arg for arg in node.args]
        target: Any = node.target
        return target(*args, **node.kwargs)

    def _plan(self, nodes: list[Node], returned: set[Node]) -> list[_Step]:
        """Return a step for each buffer, the inputs first."""
        steps = [_Step(node) for node in nodes if node in self._stored or node in self._inputs]
        last: dict[Node, _Step] = {}
        for step in steps:
            last[step.buffer] = step
            if step.buffer not in self._inputs:
                last |= dict.fromkeys(self._reads(step.buffer), step)
        for node, step in last.items():
            if node in returned:
                continue
            is_fused = not (self._is_kernel(step.buffer) or _is_part(step.buffer))
            writes_over = node is not step.buffer and is_fused and _size(node) == _size(step.buffer)
            taken = any(_size(other) == _size(node) for other in step.before)
            is_given = node.name.startswith(("primals", "tangents"))  # not the graph's own
            (step.before if writes_over and not taken and not is_given else step.after).append(node)
        return steps

    def _reads(self, node: Node) -> frozenset[Node]:
        """Return the buffers that are read to compute a node, also by operations that are fused into it."""
        if node not in self._read:
            operation = node.args[0] if _is_part(node) else node
            assert isinstance(operation, Node)
            found = (self._stored_in(self._base(read)) for read in operation.all_input_nodes)
            self._read[node] = frozenset().union(*found)
        return self._read[node]

    def _stored_in(self, node: Node) -> frozenset[Node]:
        return frozenset([node]) if node in self._stored or node.op == "placeholder" else self._reads(node)

    def _base(self, node: Node) -> Node:
        """Return the node that a view is a view of, or the node itself."""
        while node.op == "call_function" and self._is_view(node) and not _is_part(node):
            node = node.all_input_nodes[0]
        return node

    def _is_view(self, node: Node) -> bool:
        return bool(self._kinds.is_view(node) or getattr(node.target, "is_view", False))

    def _is_kernel(self, node: Node) -> bool:
        return node.op == "call_function" and not self._kinds.is_fusible(node) and not self._is_view(node)


def _has_parts(node: Node) -> bool:
    return isinstance(node.meta.get("val"), tuple | list)


def _is_part(node: Node) -> bool:
    """Return whether a node is one of several results of an operation."""
    return node.target is getitem and isinstance(node.args[0], Node) and _has_parts(node.args[0])


def _reduces(node: Node) -> bool:
    return torch.Tag.reduction in getattr(node.target, "tags", ())


def _size(node: Node) -> int:
    value = node.meta.get("val")
    return value.nbytes if isinstance(value, torch.Tensor) else 0
