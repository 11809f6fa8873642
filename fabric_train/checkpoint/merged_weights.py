"""This rank's part of a model's weights as other software loads them: in one dtype, with the adapter merged.

Nothing is gathered. Each tensor is converted when it is read, so a whole model needs no second copy of its weights.
"""

from typing import Any

import torch

from fabric_train.checkpoint.tensors import LocalTensor, align_to_rows, local_model_weights
from fabric_train.model.adapter import adapted_layers, is_adapter_parameter, merge_rows


class MergedWeights:
    """The weights of a model that ``setup_model`` returned. The model must not change while they are read."""

    def __init__(self, model: Any, dtype: torch.dtype, device: torch.device) -> None:
        """Find this rank's part of each tensor. All ranks call this together.

        Args:
            model: The model; the matrices with an adapter are not in 4 bits.
            dtype: The dtype of the merged weights.
            device: The device of this rank, from which it sends parts of rows, see ``align_to_rows``.
        """
        self._dtype = dtype
        self._layers = {f"{name}.weight": layer for name, layer in adapted_layers(model)}
        """The layers with an adapter by the names of their weights."""
        tensors = [tensor for tensor in local_model_weights(model) if not is_adapter_parameter(tensor.name)]
        if self._layers:  # whole rows are merged
            tensors = align_to_rows(tensors, device)
        self.tensors: list[LocalTensor] = tensors
        """The tensors of the model without its adapter, and this rank's part of each before the merge."""

    def dtype(self, tensor: LocalTensor) -> torch.dtype:
        """Return the dtype that a tensor is converted to; integers stay as they are."""
        return self._dtype if tensor.dtype.is_floating_point else tensor.dtype

    @torch.no_grad()
    def read(self, tensor: LocalTensor) -> torch.Tensor:
        """Return this rank's part of a tensor in :meth:`dtype`, flat and merged in fp32; the rank has a part of it."""
        local = torch.cat(tensor.segments) if len(tensor.segments) > 1 else tensor.segments[0]
        layer = self._layers.get(tensor.name)
        if layer is None:
            return local.to(self.dtype(tensor))

        row_length = tensor.shape[1]
        base_rows = local.view(-1, row_length).float()
        first_row = tensor.begin // row_length
        end_row = first_row + len(base_rows)
        device = local.device  # the host's with --cpu_offload, which leaves the adapter on the GPU
        lora_a = layer.lora_A.weight.to(device).float()
        lora_b = layer.lora_B.weight[first_row:end_row].to(device).float()
        magnitudes = None
        if layer.adapter.kind == "dora":
            magnitudes = layer.lora_magnitude_vector[first_row:end_row].to(device).float()
        rows = merge_rows(layer.adapter, base_rows, lora_a, lora_b, magnitudes)
        return rows.to(self._dtype).flatten()
