"""The source of an export: the weights of a checkpoint, of a base with its adapter in them, or the average of several.

A tensor is computed a block at a time. An adapter's matrix is merged in fp32, and rounded once, by whoever writes it:
W + scale · B A, and for DoRA each of its rows scaled to the trained magnitude. W is the original weight, or for an
adapter that was trained on weights in 4 bits also what these stand for. The uniform average of the last checkpoints of
a run often has a lower loss than each of them (LAWA, arXiv:2209.14981).
"""

import functools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import xxhash

from fabric_train.checkpoint import read_trainer_json
from fabric_train.checkpoint.adapter_folder import (
    AdapterTensors,
    find_base,
    is_adapter,
    open_adapted,
    read_adapter,
    trained_adapter,
)
from fabric_train.checkpoint.files import CHECKSUMS
from fabric_train.cli.errors import InputError
from fabric_train.export.hub_format import blocks
from fabric_train.files.regular_file import check_links, read_json
from fabric_train.files.requirements import check_package
from fabric_train.model import hf_model
from fabric_train.model.adapter import adapted_layers, is_adapter_parameter
from fabric_train.model.hf_model import load_hf_tokenizer
from fabric_train.model.load_weights import MetaModel, tied_weight_names
from fabric_train.model.nf4 import BLOCK, NF4Linear, check_installed
from fabric_train.model.weight_files import StoredTensors, Weights, open_weights

_BLOCK = 1 << 23  # elements that are averaged at once: 64 MB in fp64
_OF_NO_WEIGHT = ("dtype", "use_cache", "transformers_version", "bos_token_id", "eos_token_id", "pad_token_id")
MergeInto = Literal["original", "dequantized"]
"""The weights of a base that an adapter is merged into: its own, or what its weights in 4 bits stand for."""


def open_whole(checkpoint: Path, into: MergeInto | None = None) -> StoredTensors:
    """Open all weights of a checkpoint; an adapter is merged ``into`` the weights of its base."""
    return MergedTensors(checkpoint, into or "original") if is_adapter(checkpoint) else open_weights(checkpoint)


def is_in_4_bits(checkpoint: Path) -> bool:
    """Return whether the base of a checkpoint's adapter was in 4 bits in its training."""
    return read_trainer_json(checkpoint).arguments.get("base_weights") is not None


def open_unmerged(
    checkpoint: Path, dtype: torch.dtype, base_weights: MergeInto = "original"
) -> tuple[MetaModel, hf_model.ModelShape]:
    """Open the base and the adapter of a checkpoint side by side, on the meta device.

    Raises:
        InputError: the base is gone, its weights cannot be read in parts, or bitsandbytes is missing.
    """
    base = find_base(None, checkpoint)
    shape = hf_model.read_shape(str(checkpoint), adapter=read_adapter(checkpoint))
    opened = open_adapted(shape, base, dtype, 0, checkpoint)
    if opened.weights is None:
        raise InputError(f"{base.place}: its weights cannot be read in parts; save it again with save_pretrained")
    if base_weights == "dequantized":
        of_training = getattr(torch, read_trainer_json(checkpoint).content["weights_dtype"])
        in_4_bits = open_adapted(replace(shape, adapter=trained_adapter(checkpoint)), base, of_training, 0, checkpoint)
        opened = replace(opened, weights=_Dequantized(in_4_bits))
    return opened, shape


class _Dequantized:
    """The weights of a model, in fp32 for those that it has in 4 bits; see ``Weights``."""

    def __init__(self, in_4_bits: MetaModel) -> None:
        assert in_4_bits.weights is not None
        self._weights: Weights = in_4_bits.weights
        modules = in_4_bits.model.named_modules()
        self._layers = {f"{name}.weight": module for name, module in modules if isinstance(module, NF4Linear)}

    def read_block(self, name: str, offsets: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
        if name not in self._layers:
            return self._weights.read_block(name, offsets, shape)
        from bitsandbytes.functional import QuantState, dequantize_4bit, get_4bit_type

        layer, (first, column) = self._layers[name], offsets
        packed, scales = (
            self._weights.read_block(f"{name}{end}", (first, 0), (shape[0], stored.shape[1])).view(torch.uint8)
            for end, stored in (("", layer.weight), ("_scales", layer.weight_scales))
        )
        if not shape[0]:
            return torch.empty(tuple(shape))
        state = QuantState(
            absmax=scales.view(torch.float32).flatten(),
            shape=torch.Size((shape[0], layer.in_features)),
            code=get_4bit_type("nf4", device="cpu"),
            blocksize=BLOCK,
            quant_type="nf4",
            dtype=torch.float32,
        )
        rows: torch.Tensor = dequantize_4bit(packed.reshape(-1, 1), state)
        return rows[:, column : column + shape[1]]


class MergedTensors:
    """The tensors of a model with its adapter merged, fp32, by their names in memory; see ``StoredTensors``."""

    def __init__(self, checkpoint: Path, into: MergeInto = "original") -> None:
        opened, shape = open_unmerged(checkpoint, torch.float32, into)
        assert opened.weights is not None
        assert shape.adapter is not None
        self._weights = opened.weights
        self._adapter = shape.adapter
        self._stored = AdapterTensors(checkpoint)
        self._targets = {f"{name}.weight": name for name, _ in adapted_layers(opened.model)}
        tied = tied_weight_names(opened.model)
        state = opened.model.state_dict()
        own = [name for name in state if name not in tied and not is_adapter_parameter(name)]
        self._shapes = {name: state[name].shape for name in own}

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)

    def shape(self, name: str) -> torch.Size:
        return self._shapes[name]

    def dtype(self, name: str) -> torch.dtype:
        return torch.float32

    def read(self, name: str) -> torch.Tensor:
        """Return the full tensor on the CPU, with the bits of its blocks: a product's bits depend on its shape."""
        shape = self._shapes[name]
        return torch.cat([*blocks(self, name, shape)]) if shape else self.read_block(name, (), ())

    def read_block(self, name: str, offsets: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
        """Return a block; a merged one is of whole rows, since DoRA needs their norms."""
        if name not in self._targets:
            return self._weights.read_block(name, offsets, shape).float()
        layer = self._targets[name]
        columns = self._shapes[name][1]
        rows = self._weights.read_block(name, (offsets[0], 0), (shape[0], columns)).float()
        low = self._stored.read_block(f"{layer}.lora_B.weight", (offsets[0], 0), (shape[0], self._adapter.rank))
        rows = rows + (low.float() @ self._stored.read(f"{layer}.lora_A.weight").float()) * self._adapter.scale
        if self._adapter.kind == "dora":
            magnitude = self._stored.read_block(f"{layer}.lora_magnitude_vector", offsets[:1], shape[:1]).float()
            rows *= (magnitude / torch.linalg.vector_norm(rows, dim=1))[:, None]
        return rows[:, offsets[1] : offsets[1] + shape[1]]


@dataclass(frozen=True)
class AveragePart:
    """A checkpoint in an average. Its share is its ``weight`` by the sum of all weights."""

    checkpoint: Path
    weight: float = 1.0


class CombinedTensors:
    """Tensors that are computed from the tensors of several models, in fp32 and a block at a time.

    ``_first`` says which tensors there are. One without floating-point numbers is the one of this model.
    """

    def __init__(self, models: Sequence[StoredTensors], first: StoredTensors) -> None:
        self._models = models
        self._first = first

    def __iter__(self) -> Iterator[str]:
        return iter(self._first)

    def shape(self, name: str) -> torch.Size:
        return self._first.shape(name)

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype in which the tensor is read: float32, unless it has no floating-point numbers."""
        stored = self._first.dtype(name)
        return torch.float32 if stored.is_floating_point else stored

    def read(self, name: str) -> torch.Tensor:
        """Return the full tensor on the CPU. Beside it, only blocks of the models are in memory."""
        shape = self.shape(name)
        if not shape or 0 in shape:
            return self.read_block(name, (0,) * len(shape), shape)
        combined = torch.empty(shape, dtype=self.dtype(name))
        rows = max(1, _BLOCK // shape[1:].numel())
        for begin in range(0, shape[0], rows):
            block = combined[begin : begin + rows]
            block.copy_(self.read_block(name, (begin, *(0,) * (len(shape) - 1)), block.shape))
        return combined

    def read_block(self, name: str, offsets: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
        """Return the block of ``shape`` that begins at ``offsets`` of the full tensor, on the CPU."""
        if not self._first.dtype(name).is_floating_point:
            return self._first.read_block(name, offsets, shape)
        return self._combine(name, offsets, (model.read_block(name, offsets, shape) for model in self._models))

    def _combine(self, name: str, offsets: Sequence[int], blocks: Iterable[torch.Tensor]) -> torch.Tensor:
        raise NotImplementedError


def weighted_mean(blocks: Iterable[torch.Tensor], weights: Sequence[float]) -> torch.Tensor:
    """Return the mean of blocks in fp32, summed in fp64; only one of them is in memory beside the sum."""
    terms = (block.to(torch.float64, copy=True).mul_(weight) for block, weight in zip(blocks, weights, strict=True))
    return functools.reduce(torch.Tensor.add_, terms).div_(sum(weights)).float()


class AveragedTensors(CombinedTensors):
    """The average of the tensors of checkpoints.

    Integer tensors come from the last part. An InputError if the parts have other tensors or shapes.
    """

    def __init__(self, parts: Sequence[AveragePart], merges: MergeInto | None = None) -> None:
        opened = [open_whole(part.checkpoint, merges) for part in parts]
        super().__init__(opened, opened[-1])
        self._weights = [part.weight for part in parts]
        wanted = {name: list(self._first.shape(name)) for name in self._first}
        for part, tensors in zip(parts, opened, strict=True):
            found = {name: list(tensors.shape(name)) for name in tensors}
            if name := next((name for name in sorted({*found, *wanted}) if found.get(name) != wanted.get(name)), None):
                fault = f"{name} is {found.get(name, 'absent')}, not {wanted.get(name, 'absent')}"
                raise _cannot_be_averaged(part.checkpoint, parts[-1].checkpoint, fault)

    def _combine(self, name: str, offsets: Sequence[int], blocks: Iterable[torch.Tensor]) -> torch.Tensor:
        return weighted_mean(blocks, self._weights)


class PlainAverage(AveragedTensors):
    """The same average as one formula of numpy, which holds a block of every part: for verification."""

    def _combine(self, name: str, offsets: Sequence[int], blocks: Iterable[torch.Tensor]) -> torch.Tensor:
        terms = [weight * np.asarray(block.double()) for block, weight in zip(blocks, self._weights, strict=True)]
        with np.errstate(all="ignore"):  # an overflow ends as infinity, as in torch
            return torch.from_numpy(np.asarray(functools.reduce(np.add, terms) / sum(self._weights), dtype=np.float32))


def check_one_model(checkpoints: Sequence[Path]) -> None:
    """Raise an InputError if a configuration, the tensors or a tokenizer's vocabulary differ from the last one's."""
    last = checkpoints[-1]
    AveragedTensors([AveragePart(checkpoint) for checkpoint in checkpoints])
    configuration = _configuration(last)
    vocabulary = _vocabulary(last)
    for checkpoint in checkpoints[:-1]:
        other = _configuration(checkpoint)
        names = [name for name in {**configuration, **other} if configuration.get(name) != other.get(name)]
        if names:
            fault = f"{names[0]} is {other.get(names[0])} in its config.json, not {configuration.get(names[0])}"
            raise _cannot_be_averaged(checkpoint, last, fault)
        if _vocabulary(checkpoint) != vocabulary:
            raise _cannot_be_averaged(checkpoint, last, "its tokenizer has another vocabulary")


def _configuration(checkpoint: Path) -> dict[str, Any]:
    """Return what the model's weights mean, without the tokens that end a text and the versions of packages."""
    content = read_json(checkpoint / "config.json", dict, "use another checkpoint")
    return {name: value for name, value in content.items() if name not in _OF_NO_WEIGHT}


def _vocabulary(checkpoint: Path) -> Any:
    folder = checkpoint / "tokenizer"
    return load_hf_tokenizer(folder).get_vocab() if folder.is_dir() else None


def _cannot_be_averaged(one: Path, other: Path, fault: str) -> InputError:
    return InputError(f"{one} cannot be averaged with {other}: {fault}; give checkpoints of one model")


@dataclass(frozen=True)
class ExportSource:
    """A complete checkpoint, full or sharded, whose weights are exported; with ``parts``, up to it, their average.

    One of an adapter is exported as an adapter, unless ``merges`` says into which weights of its base it is merged.
    """

    checkpoint: Path
    parts: tuple[AveragePart, ...] = ()
    merges: MergeInto | None = None

    @property
    def is_adapter(self) -> bool:
        return is_adapter(self.checkpoint) and not self.merges

    def check_needs(self) -> None:
        """Raise an InputError if the base of an adapter, or a package that its export takes, is not there."""
        for checkpoint in (self.checkpoint, *(part.checkpoint for part in self.parts)):
            if is_adapter(checkpoint):
                find_base(None, checkpoint)
                if self.is_adapter:
                    check_package("peft", f"{checkpoint}: the export of an adapter, which is compared in peft,")
                elif is_in_4_bits(checkpoint):
                    check_installed()

    @property
    def tokenizer(self) -> Path:
        """Return the folder from which transformers loads the tokenizer; it may be absent."""
        return self.checkpoint / "tokenizer"

    def tokenizer_files(self) -> dict[str, Path]:
        """Return the files of the tokenizer by their paths in the export. An InputError for a link out of them."""
        check_links(self.tokenizer)
        files = sorted(path for path in self.tokenizer.rglob("*") if path.is_file())
        return {path.relative_to(self.tokenizer).as_posix(): path for path in files}

    def verification_command(self) -> list[str]:
        """Return the module that verifies an export of this source, and the words that say which source it is."""
        parts = [f"{part.checkpoint}={part.weight!r}" for part in self.parts]
        merged = ["--merged", self.merges] if self.merges else []
        return ["fabric_train.export.verification", str(self.checkpoint), *merged, *parts]

    def open_tensors(self) -> StoredTensors:
        return AveragedTensors(self.parts, self.merges) if self.parts else open_whole(self.checkpoint, self.merges)

    def open_reference(self) -> StoredTensors:
        """Open the tensors to verify an export with: an average is computed in another way than for the export."""
        return PlainAverage(self.parts, self.merges) if self.parts else open_whole(self.checkpoint, self.merges)

    def identity(self) -> str:
        """Return a hash of the content that is exported, from the checksums of the checkpoints and their weights."""
        digest = xxhash.xxh3_128()
        for part in self.parts or (AveragePart(self.checkpoint),):
            digest.update((part.checkpoint / CHECKSUMS).read_bytes() + repr(part.weight).encode())
        if self.merges:
            digest.update(b"merged" if self.merges == "original" else b"merged, dequantized")
        return digest.hexdigest()

    def describe(self) -> str:
        """Return the step, or the number of parts, in words."""
        step = f"step {read_trainer_json(self.checkpoint).state.step}"
        into = " into the dequantized weights" if self.merges == "dequantized" else ""
        merged = f", its adapter merged{into}" if self.merges else ""
        return f"average of {len(self.parts)} checkpoints up to {step}{merged}" if self.parts else f"{step}{merged}"
