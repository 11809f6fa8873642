"""Count the kernels of compiled decoder layers as Inductor schedules them for CUDA, without a GPU and without Triton.

torch.compile skips code in which a dispatch mode is active, and fake tensors are one. So AOTAutograd traces the layers
instead of Dynamo, with the decompositions, passes and partitioner of torch.compile. Inductor lowers and fuses the two
graphs, as it would on a GPU; only the code of the kernels is not generated.
"""

import copy
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.fx import GraphModule, Node

from benchmarks.kernels import Kernel, kernels_of
from benchmarks.op_counts import ADAPTER, COMPILED, NORMS_OF_DORA, PRODUCTS, StepCounter, is_cuda
from fabric_train.preflight.memory_gpu import Compiled, compile_for_trace, run_buffers


class LayerCompiler:
    """Replaces the ``forward`` of layers by one that counts compiled kernels; see ``decoder_layers.compile_layers``."""

    def __init__(self, counter: StepCounter, adapter_rank: int) -> None:
        self._counter = counter
        self._adapter_rank = adapter_rank

    def compile_layers(self, layers: Iterable[nn.Module], *, any_length: bool, budget: float) -> None:
        """Compile layers for rows of one length; all layers share their graphs."""
        layers = list(layers)
        compile_for_trace(layers, budget, "counted", self._compile_graph)
        for layer in layers:
            layer.forward = self._without_tracing(layer.forward)

    def _without_tracing(self, forward: Compiled) -> Compiled:
        """Return a ``forward`` whose operations are not counted while its graphs are traced."""

        def call(*args: Any, **kwargs: Any) -> Any:
            self._counter.is_paused = True
            try:
                return forward(*args, **kwargs)
            finally:
                self._counter.is_paused = False

        return call

    def _compile_graph(self, gm: GraphModule, example_inputs: Sequence[Any]) -> Compiled:
        """Return a function that allocates a graph's buffers and counts its kernels."""
        kernels = scheduled_kernels(copy.deepcopy(gm), example_inputs, self._adapter_rank)
        allocate = run_buffers(gm, example_inputs)

        def run(args: list[Any]) -> list[Any]:
            was_paused = self._counter.is_paused
            self._counter.is_paused = False
            for kernel in kernels:
                assert kernel.part is not None
                self._counter.add_kernel(kernel.part, kernel)
            results: list[Any] = allocate(args)
            self._counter.is_paused = was_paused
            return results

        run._boxed_call = True  # type: ignore[attr-defined] # torch passes a list, which is emptied
        return run


def scheduled_kernels(gm: GraphModule, example_inputs: Sequence[Any], adapter_rank: int) -> list[Kernel]:
    """Return the kernels of a graph of fake CUDA tensors, each with its part of a step; the graph is changed."""
    from torch._inductor import compile_fx
    from torch._inductor.debug import DebugContext
    from torch._inductor.graph import GraphLowering
    from torch._inductor.virtualized import V

    compile_fx.view_to_reshape(gm)
    fake_mode = compile_fx.fake_tensor_prop(gm, example_inputs)
    kernels: list[Kernel] = []
    with V.set_fake_mode(fake_mode), patch("torch._inductor.scheduler.has_triton", lambda: True):
        compile_fx._recursive_post_grad_passes(gm)
        graph = GraphLowering(gm, example_inputs=example_inputs, shape_env=fake_mode.shape_env)
        with V.set_graph_handler(graph), DebugContext():
            graph.run(*example_inputs)
            graph._update_scheduler()
            for node in graph.scheduler.nodes:
                if node.is_extern():
                    kernels += _kernels_of_extern(node, adapter_rank)
                elif node.get_write_buffer_sizes():
                    read = node.get_read_buffer_sizes()
                    kernels.append(Kernel(read, node.get_write_buffer_sizes(), part=COMPILED))
    return kernels


def _kernels_of_extern(scheduled: Any, adapter_rank: int) -> list[Kernel]:
    """Return the kernels of an operation that Inductor calls as it is: a product, attention, or a custom operator."""
    from torch._inductor.ir import MultiOutput

    if isinstance(scheduled.node, MultiOutput):  # one of the results of an operation, which is scheduled too
        return []
    node = scheduled.node.get_origin_node()
    if node is None:  # an operation with several results
        operation = scheduled.node.op_overload
        node = next(origin for origin in scheduled.node.get_origins() if origin.target is operation)
    args = torch.fx.node.map_arg(node.args, _value)
    kwargs = torch.fx.node.map_arg(node.kwargs, _value)
    part = _part_of_extern(node, adapter_rank)
    kernels: list[Kernel] = []
    for kernel in kernels_of(node.target, args, kwargs, node.meta["val"], is_cuda):
        kernels.append(replace(kernel, part=kernel.part or part))
    return kernels


def _value(node: Node) -> Any:
    return node.meta["val"]


def _part_of_extern(node: Node, adapter_rank: int) -> str:
    """Return the part of an operation; products of an adapter have its rank as one of their sizes."""
    name = str(node.target)
    if "attn" in name or "attention" in name:
        return "attention"
    operands = [_value(operand) for operand in node.all_input_nodes]
    sizes = {size for operand in operands for size in operand.shape}
    if adapter_rank not in sizes:
        return PRODUCTS
    has_activations = not all(map(_is_weight, node.all_input_nodes))
    if has_activations and operands[0].dtype != torch.float32:
        return ADAPTER
    return NORMS_OF_DORA


def _is_weight(node: Node) -> bool:
    """Return whether a tensor is an input of the layer, or a view or cast of one, and not a saved activation."""
    while len(node.all_input_nodes) == 1:
        node = node.all_input_nodes[0]
    return node.op == "placeholder" and node.name.startswith("primals")
