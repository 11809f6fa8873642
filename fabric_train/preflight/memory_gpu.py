"""Make fake CPU tensors take as much memory as on a GPU, with its attention kernels and compiled layers.

Nothing is compiled. torch's own partitioner chooses what a compiled layer keeps for the backward pass, with inductor's
decompositions. It needs neither a GPU nor a compiler. Which buffers inductor would allocate for the two graphs is
approximated; see :class:`_Buffers`.
"""

import importlib
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from operator import getitem
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

Compiled = Callable[..., Any]
GraphCompiler = Callable[[GraphModule, Sequence[Any]], Compiled]
"""A function that makes a function of the list of its inputs from a graph; see ``aot_function``."""


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
    """Do what ``scaled_dot_product_attention`` does on a recent GPU (torch/nn/functional.py has the same arguments).

    Without a mask and in 16 bits, this is the flash kernel, which allows fewer heads of keys and values. Otherwise it
    is the memory-efficient kernel, which has a mask of numbers to add.
    """
    aten: Any = torch.ops.aten
    if attn_mask is None and query.dtype != torch.float32:
        flash_outputs: tuple[torch.Tensor, ...] = aten._scaled_dot_product_flash_attention(
            query, key, value, dropout_p, is_causal, False, scale=scale
        )
        return flash_outputs[0]  # [batch, heads, length, head_dim]

    # the memory-efficient kernel needs as many heads of keys and values as of queries
    if enable_gqa:
        num_heads = query.shape[1]
        key = key.repeat_interleave(num_heads // key.shape[1], dim=1)
        value = value.repeat_interleave(num_heads // value.shape[1], dim=1)
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(~attn_mask, float("-inf"))
        attn_mask = attn_mask.expand(*query.shape[:-1], key.shape[-2])  # [batch, heads, length, keys]
    requires_grad = query.requires_grad or key.requires_grad or value.requires_grad
    needs_logsumexp = torch.is_grad_enabled() and requires_grad  # kept for the backward pass
    efficient_outputs: tuple[torch.Tensor, ...] = aten._scaled_dot_product_efficient_attention(
        query, key, value, attn_mask, needs_logsumexp, dropout_p, is_causal, scale=scale
    )
    return efficient_outputs[0]


def attention_with_gathered_keys(attention: Callable[..., torch.Tensor], num_ranks: int) -> Callable[..., torch.Tensor]:
    """Make attention use the keys and values of ``num_ranks`` ranks, whose gradients are added in fp32.

    Each rank repeats its own keys and values instead of gathering them, which takes the same memory; see
    ``model.context_parallel``.
    """

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        # [batch, heads, length, head_dim] -> [batch, heads, num_ranks * length, head_dim]
        key = key.float().repeat(1, 1, num_ranks, 1).to(key.dtype)
        value = value.float().repeat(1, 1, num_ranks, 1).to(value.dtype)
        return attention(query, key, value, *args, **kwargs)

    return attend


def run_buffers(gm: GraphModule, example_inputs: Sequence[Any]) -> Compiled:
    """Return a function that allocates the buffers of a graph's compiled kernels, and computes nothing."""
    buffers = _Buffers(gm)

    def run(args: list[Any]) -> list[Any]:
        return buffers.run(args)

    run._boxed_call = True  # type: ignore[attr-defined] # torch passes a list, which is emptied
    return run


def compile_for_trace(
    layers: Iterable[nn.Module], budget: float, operations_key: Hashable, compile_graph: GraphCompiler = run_buffers
) -> None:
    """Replace each layer's ``forward`` as ``decoder_layers.compile_layers`` does, for fake tensors.

    The outputs have shapes and no content.

    Args:
        layers: Layers with modules of the same classes, sizes and constants share their graphs.
        budget: The share of activations that the compiler keeps.
        operations_key: Everything else that a layer's operations depend on; layers of several models share their graphs
            if it is the same.
        compile_graph: Compiles the graphs of forward and backward passes.
    """
    for layer in layers:
        layer.forward = _compiled_forward(layer, layer.forward, budget, operations_key, compile_graph)


@dataclass(frozen=True)
class _LayerCall:
    """Everything that a layer's graphs depend on: two calls that are equal share their graphs."""

    function: Compiled = field(compare=False)  # takes weights and tensors; the fields below decide what it computes
    num_weights: int
    operations_key: Hashable
    compile_graph: GraphCompiler
    budget: float
    inputs: tuple[tuple[tuple[int, ...], torch.dtype, bool], ...]  # shape, dtype and requires_grad of each tensor
    structure: TreeSpec
    has_gradient: bool
    constants: tuple[Any, ...]


def _compiled_forward(
    layer: nn.Module, forward: Compiled, budget: float, operations_key: Hashable, compile_graph: GraphCompiler
) -> Compiled:
    """Return a ``forward`` that allocates the buffers of a layer's compiled graphs; see ``compile_for_trace``."""

    def compiled(*args: Any, **kwargs: Any) -> Any:
        # read in each call: parameters on the meta device are replaced after the layer is compiled
        names, weights = zip(*layer.named_parameters(), strict=True)
        # aot_function takes tensors only: everything else is a constant of the function that it traces
        leaves, structure = tree_flatten((args, kwargs))
        tensor_indices = [index for index, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        tensors = [leaves[index] for index in tensor_indices]

        def call_with_tensors(weights: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> Any:
            call_leaves = list(leaves)
            for index, tensor in zip(tensor_indices, tensors, strict=True):
                call_leaves[index] = tensor
            args, kwargs = tree_unflatten(call_leaves, structure)
            with _reparametrize_module(layer, dict(zip(names, weights, strict=True))):
                return forward(*args, **kwargs)

        call = _LayerCall(
            function=call_with_tensors,
            num_weights=len(weights),
            operations_key=operations_key,
            compile_graph=compile_graph,
            budget=budget,
            inputs=tuple((tuple(tensor.shape), tensor.dtype, tensor.requires_grad) for tensor in (*weights, *tensors)),
            structure=structure,
            has_gradient=torch.is_grad_enabled(),
            constants=_constants(layer),
        )
        graphs = _graphs_of(call)
        # the graphs are traced in their first call, with these settings
        functorch_config = importlib.import_module("torch._functorch.config")
        with functorch_config.patch(activation_memory_budget=budget, force_non_lazy_backward_lowering=True):
            return graphs(weights, tensors)

    return compiled


def _constants(layer: nn.Module) -> tuple[Any, ...]:
    """Return the classes of a layer's modules, and the numbers and names in them, which compiled code contains."""
    constants: list[Any] = []
    for path, module in layer.named_modules():
        constants.append((path, type(module)))
        for name, value in vars(module).items():
            if isinstance(value, bool | int | float | str) and name != "layer_idx":
                constants.append((name, value))
    return tuple(constants)


@cache
def _graphs_of(call: _LayerCall) -> Compiled:
    """Return a function of weights and tensors that traces the graphs of a call when it is first called."""
    from torch._functorch.aot_autograd import aot_function
    from torch._inductor.compile_fx import partition_fn
    from torch._inductor.decomposition import select_decomp_table

    compile_graph: Any = call.compile_graph  # torch's protocol fixes the names of its parameters
    return aot_function(
        call.function,
        fw_compiler=compile_graph,
        bw_compiler=compile_graph,
        partition_fn=partition_fn,
        decompositions=select_decomp_table(),
        num_params_buffers=call.num_weights,
    )


@dataclass
class _Allocation:
    """A buffer, those to free before it is allocated, and those to free after that."""

    buffer: Node
    freed_before: list[Node] = field(default_factory=list)
    freed_after: list[Node] = field(default_factory=list)


class _Buffers:
    """The buffers that the compiled kernels of a graph would allocate.

    Matrix products, attention and unknown operations are separate kernels, which read and write buffers. All other
    operations are fused. A fused operation has a buffer only if it reduces, if one of these kernels reads it, or if the
    graph returns it. It writes over a buffer that it is the last to read. The order is the graph's. This does not model
    inductor's other choices: several results of one kernel, results that it stores to compute them once, another order,
    the workspace of kernels.
    """

    def __init__(self, graph: GraphModule) -> None:
        from torch._functorch.partitioners import get_default_op_list

        self._op_kinds = get_default_op_list()
        nodes = list(graph.graph.nodes)
        self._inputs = [node for node in nodes if node.op == "placeholder"]
        output_node = next(node for node in nodes if node.op == "output")
        (self._outputs,) = output_node.args
        returned = {self._base(node) for node in self._outputs if isinstance(node, Node)}

        # the nodes with a buffer: returned, read by a kernel, written by a kernel, or a reduction
        self._stored = set(returned)
        for node in nodes:
            if _is_item(node):
                self._stored.add(node)
                continue
            if node.op != "call_function" or self._is_view(node):
                continue
            is_kernel = self._is_kernel(node)
            if is_kernel:
                self._stored |= {self._base(operand) for operand in node.all_input_nodes}
            is_reduction = torch.Tag.reduction in getattr(node.target, "tags", ())
            if (is_kernel or is_reduction) and not _has_items(node):
                self._stored.add(node)
        self._buffers_read: dict[Node, frozenset[Node]] = {}  # by node; see _find_buffers_read
        self._allocations = self._plan_allocations(nodes, returned)

    def run(self, args: list[Any]) -> list[Any]:
        """Allocate and free the buffers, and return the outputs. ``args`` is emptied, as torch's kernels do."""
        live_tensors = dict(zip(self._inputs, args, strict=True))
        args.clear()
        for allocation in self._allocations:
            for node in allocation.freed_before:
                del live_tensors[node]
            value = allocation.buffer.meta.get("val")
            if allocation.buffer not in live_tensors and isinstance(value, torch.Tensor):
                live_tensors[allocation.buffer] = torch.empty_strided(
                    value.size(), value.stride(), dtype=value.dtype, device=value.device
                )
            for node in allocation.freed_after:
                del live_tensors[node]
        return [self._evaluate(node, live_tensors) if isinstance(node, Node) else node for node in self._outputs]

    def _evaluate(self, node: Node, live_tensors: dict[Node, Any]) -> Any:
        """Return the tensor of an output: a buffer, or a view of one."""
        if node in live_tensors:
            return live_tensors[node]
        args = [self._evaluate(arg, live_tensors) if isinstance(arg, Node) else arg for arg in node.args]
        target: Any = node.target
        return target(*args, **node.kwargs)

    def _plan_allocations(self, nodes: list[Node], returned: set[Node]) -> list[_Allocation]:
        """Return an allocation for each buffer, the inputs first, with the buffers to free before and after it."""
        allocations = [_Allocation(node) for node in nodes if node in self._stored or node in self._inputs]
        last_uses: dict[Node, _Allocation] = {}
        for allocation in allocations:
            last_uses[allocation.buffer] = allocation
            if allocation.buffer not in self._inputs:
                last_uses |= dict.fromkeys(self._find_buffers_read(allocation.buffer), allocation)

        for node, allocation in last_uses.items():
            if node in returned:
                continue
            if self._can_overwrite(node, allocation):
                allocation.freed_before.append(node)
            else:
                allocation.freed_after.append(node)
        return allocations

    def _can_overwrite(self, node: Node, allocation: _Allocation) -> bool:
        """Return whether the operation that allocates a buffer may write its result over ``node`` instead."""
        buffer = allocation.buffer
        if node is buffer or self._is_kernel(buffer) or _is_item(buffer):
            return False
        if node.name.startswith(("primals", "tangents")):  # the caller's, not the graph's own
            return False
        num_bytes = _num_bytes(node)
        has_overwritten = any(_num_bytes(other_node) == num_bytes for other_node in allocation.freed_before)
        return num_bytes == _num_bytes(buffer) and not has_overwritten

    def _find_buffers_read(self, node: Node) -> frozenset[Node]:
        """Return the buffers that are read to compute a node, also by operations that are fused into it."""
        if node not in self._buffers_read:
            operation = node.args[0] if _is_item(node) else node
            assert isinstance(operation, Node)
            buffers_read: set[Node] = set()
            for operand in operation.all_input_nodes:
                base = self._base(operand)
                if base in self._stored or base.op == "placeholder":
                    buffers_read.add(base)
                else:  # fused: it has no buffer of its own
                    buffers_read |= self._find_buffers_read(base)
            self._buffers_read[node] = frozenset(buffers_read)
        return self._buffers_read[node]

    def _base(self, node: Node) -> Node:
        """Return the node that a view is a view of, or the node itself."""
        while node.op == "call_function" and self._is_view(node) and not _is_item(node):
            node = node.all_input_nodes[0]
        return node

    def _is_view(self, node: Node) -> bool:
        return bool(self._op_kinds.is_view(node) or getattr(node.target, "is_view", False))

    def _is_kernel(self, node: Node) -> bool:
        return node.op == "call_function" and not self._op_kinds.is_fusible(node) and not self._is_view(node)


def _has_items(node: Node) -> bool:
    """Return whether an operation has several results."""
    return isinstance(node.meta.get("val"), tuple | list)


def _is_item(node: Node) -> bool:
    """Return whether a node is one of several results of an operation."""
    return node.target is getitem and isinstance(node.args[0], Node) and _has_items(node.args[0])


def _num_bytes(node: Node) -> int:
    value = node.meta.get("val")
    return value.nbytes if isinstance(value, torch.Tensor) else 0
