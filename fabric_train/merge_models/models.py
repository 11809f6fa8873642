"""The models of a merge: find and open them, compare their shapes, and give the same tokens the same rows.

A model can also be opened with only some of its decoder layers.
"""

import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from transformers.utils import cached_file

from fabric_train.checkpoint.adapter_folder import is_exported_adapter
from fabric_train.checkpoint.base_weights import open_base_weights
from fabric_train.cli.errors import InputError, naming_option, note
from fabric_train.export.merged_adapter import open_whole
from fabric_train.inference.load_model import find_own_checkpoint
from fabric_train.model.hf_model import ModelShape, check_readable, load_hf_tokenizer, read_shape
from fabric_train.model.layer_settings import KeptLayers
from fabric_train.model.load_weights import MetaModel, open_pretrained, open_tensors, tied_weight_names
from fabric_train.model.weight_files import StoredTensors

LEAST_SHARE = 0.5
"""The least share of the first model's tokens that another model's vocabulary must have."""
_TOKENIZER = re.compile(
    r"(tokenizer|vocab|merges|special_tokens_map|added_tokens|chat_template|spiece|sentencepiece)[^/]*"
    r"|[^/]+\.tiktoken|additional_chat_templates/[^/]+"
)
_IGNORED_SETTINGS = (
    *("dtype", "use_cache", "transformers_version", "_name_or_path", "architectures", "vocab_size", "pad_token_id"),
    *("bos_token_id", "eos_token_id"),
)
"""Settings of a configuration that may differ, because they do not change what the layers compute."""


def find_folder(name: str, option: str = "--models") -> Path:
    """Return the folder of a model: a checkpoint, a Hugging Face folder, or the cached folder of a hub name.

    ``option`` is the argument that gives the model.

    Raises:
        InputError: there is no such model, or it is an adapter without its base.
    """
    folder = Path(name)
    if is_exported_adapter(folder):
        advice = "convert its checkpoint with --merge true, and give that export"
        raise InputError(f"{option} {name}: this is an adapter without its base; {advice}")
    checkpoint = find_own_checkpoint(name)
    if checkpoint:
        return checkpoint
    with naming_option(option):
        shape = read_shape(name)
        if folder.is_dir():
            check_readable(name)
            return folder
        # fetch what the cache lacks
        open_pretrained(shape, torch.float32)
        load_hf_tokenizer(name)
        return Path(str(cached_file(name, "config.json"))).parent


def find_layers(ranges: Sequence[tuple[int, int]], folder: Path) -> list[int]:
    """Return the numbers of the layers in ranges, first and last included; InputError if a model does not have one."""
    with naming_option("", instead_of="--model_name "):
        num_layers = read_shape(str(folder)).config.get_text_config().num_hidden_layers
    layers: list[int] = []
    for first, last in ranges:
        if last >= num_layers:
            has = f"{folder} has {num_layers} layers, 0 to {num_layers - 1}"
            raise InputError(f"--layers: there is no layer {last}: {has}; give layers of the model")
        layers += range(first, last + 1)
    repeated = [layer for layer, count in Counter(layers).items() if count > 1]
    if repeated:
        note(f"--layers has layer {repeated[0]} more than once; a range includes both of its ends")
    return layers


def is_checkpoint(folder: Path) -> bool:
    """Return whether a model's folder is a checkpoint of a run."""
    return (folder / "trainer.json").is_file()


def tokenizer_of(folder: Path) -> Path:
    """Return the folder from which transformers loads a model's tokenizer."""
    return folder / "tokenizer" if is_checkpoint(folder) else folder


def tokenizer_files(folder: Path) -> dict[str, Path]:
    """Return a tokenizer's files in a Hugging Face folder, by path there; they may be links, as in the cache."""
    files: dict[str, Path] = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and _TOKENIZER.fullmatch(name):
            files[name] = path
    return files


def read_vocabulary(folder: Path) -> dict[str, int] | None:
    """Return the ids of a model's tokens by their texts; None if it has no tokenizer."""
    tokenizer = tokenizer_of(folder)
    if not tokenizer.is_dir() or not tokenizer_files(tokenizer):
        return None
    vocabulary: dict[str, int] = load_hf_tokenizer(tokenizer).get_vocab()
    return vocabulary


def note_on_rounding(folders: Sequence[Path], dtype: torch.dtype) -> str | None:
    """Return a note if models have another type than ``dtype``, to which the merged weights are rounded."""
    if dtype == torch.float32:
        return None
    stored_dtypes = {str(folder): _stored_dtype(folder) for folder in folders}
    rounded = {folder: stored for folder, stored in stored_dtypes.items() if stored != dtype}
    if not rounded:
        return None
    kinds = sorted({str(stored).removeprefix("torch.") for stored in rounded.values()})
    written = str(dtype).removeprefix("torch.")
    models = f"those of {', '.join(rounded)} are {' and '.join(kinds)}"
    return f"the merged weights are rounded to {written}: {models} (--dtype)"


def _stored_dtype(folder: Path) -> torch.dtype:
    """Return the widest type in which a model's weights are stored; a merged adapter is computed in fp32."""
    tensors = open_whole(folder) if is_checkpoint(folder) else open_base_weights(str(folder))
    return max((tensors.dtype(name) for name in tensors), key=lambda dtype: dtype.itemsize)


class ModelTensors(StoredTensors):
    """All tensors of a model in fp32, by their names in memory; tied tensors occur once."""

    def __init__(self, folder: Path) -> None:
        """Open the weights of a checkpoint or a Hugging Face folder."""
        self.folder = folder
        self.shape_of_model: ModelShape
        self._meta_model: MetaModel
        with naming_option("", instead_of="--model_name "):  # the folder says which model it is
            self.shape_of_model = read_shape(str(folder))
            if is_checkpoint(folder):
                self._meta_model = open_tensors(self.shape_of_model, open_whole(folder), torch.float32)
            else:
                self._meta_model = open_pretrained(self.shape_of_model, torch.float32)
        model: Any = self._meta_model.model
        tied = tied_weight_names(model)
        state = model.state_dict()  # on the meta device, or the weights themselves if they were loaded in full
        self._outline: dict[str, torch.Tensor] = {name: tensor for name, tensor in state.items() if name not in tied}

        # the matrices (and biases) with a row for each token
        token_parameters: set[int] = set()
        for module in (model.get_output_embeddings(), model.get_input_embeddings()):
            if module is not None:
                token_parameters.update(id(parameter) for parameter in module.parameters())
        named_parameters = model.named_parameters()
        self.rows_by_token = [name for name, parameter in named_parameters if id(parameter) in token_parameters]

    def __iter__(self) -> Iterator[str]:
        return iter(self._outline)

    def shape(self, name: str) -> torch.Size:
        return self._outline[name].shape

    def dtype(self, name: str) -> torch.dtype:
        return self._outline[name].dtype

    def read_block(self, name: str, offsets: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
        weights = self._meta_model.weights
        if weights is None:  # a pickle, which was loaded in full
            block = tuple(slice(begin, begin + size) for begin, size in zip(offsets, shape, strict=True))
            return self._outline[name].detach()[block]
        return weights.read_block(name, offsets, shape).to(self.dtype(name))


class AlignedTensors(StoredTensors):
    """The tensors of a model, with the rows of the first model's tokens in that model's order.

    ``row_indices``, int64 [V of the first model], has the index of each row in the model itself, and -1 for a row that
    is taken from the first model.
    """

    def __init__(self, model: ModelTensors, first_model: ModelTensors, row_indices: torch.Tensor) -> None:
        self._model = model
        self._first_model = first_model
        self._row_indices = row_indices
        self._read_full = lru_cache(maxsize=1)(model.read)

    def __iter__(self) -> Iterator[str]:
        return iter(self._first_model)

    def shape(self, name: str) -> torch.Size:
        return self._first_model.shape(name)

    def dtype(self, name: str) -> torch.dtype:
        return self._model.dtype(name)

    def read_block(self, name: str, offsets: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
        if name not in self._model.rows_by_token:
            return self._model.read_block(name, offsets, shape)
        # the first model's rows, then over them the model's own rows of the same tokens
        block = self._first_model.read_block(name, offsets, shape).clone()
        column_slices = [slice(begin, begin + size) for begin, size in zip(offsets[1:], shape[1:], strict=True)]
        columns = (slice(None), *column_slices)
        row_indices = self._row_indices[offsets[0] : offsets[0] + shape[0]]
        has_own_row = row_indices >= 0
        own_rows = self._read_full(name)[columns]  # in the model's own order
        block[has_own_row] = own_rows[row_indices[has_own_row]]
        return block


class KeptTensors(StoredTensors):
    """The tensors of a model with only some of its decoder layers, by the names that they have in the result."""

    def __init__(self, model: ModelTensors, kept: KeptLayers) -> None:
        self._model = model
        self._old_names: dict[str, str] = {}
        """The name in the model of each tensor of the result."""
        names_by_layer: dict[int, list[str]] = {}
        for name in model:
            if name.startswith(kept.prefix):
                layer, _, name_in_layer = name.removeprefix(kept.prefix).partition(".")
                names_by_layer.setdefault(int(layer), []).append(name_in_layer)
            else:
                self._old_names[name] = name
        for new, old in enumerate(kept.layers):
            for name_in_layer in names_by_layer.get(old, ()):
                self._old_names[f"{kept.prefix}{new}.{name_in_layer}"] = f"{kept.prefix}{old}.{name_in_layer}"

    def __iter__(self) -> Iterator[str]:
        return iter(self._old_names)

    def shape(self, name: str) -> torch.Size:
        return self._model.shape(self._old_names[name])

    def dtype(self, name: str) -> torch.dtype:
        return self._model.dtype(self._old_names[name])

    def read_block(self, name: str, offsets: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
        return self._model.read_block(self._old_names[name], offsets, shape)


@dataclass(frozen=True)
class MatchedTokens:
    """How many tokens a model has in common with the first one, and how many only one of them has."""

    common: int
    missing: int = 0  # of the first model's
    left_out: int = 0  # of the model's own


@dataclass
class OpenedModels:
    """The opened models of a merge; ``matched`` has an entry for each whose vocabulary is not the first model's."""

    first_model: ModelTensors
    tensors: list[StoredTensors] = field(default_factory=list)
    matched: dict[Path, MatchedTokens] = field(default_factory=dict)


def open_models(folders: Sequence[Path]) -> OpenedModels:
    """Open models, with the tokens of the first one.

    Raises:
        InputError: a model has another architecture or other sizes, or too few of the first model's tokens.
    """
    first_model, *other_models = map(ModelTensors, folders)
    opened = OpenedModels(first_model, [first_model])
    first_vocabulary = read_vocabulary(first_model.folder)
    for model in other_models:
        _check_sizes(model, first_model)  # before its vocabulary is read, which takes longer
        vocabulary = read_vocabulary(model.folder)
        has_same_vocab_size = model.shape_of_model.vocab_size == first_model.shape_of_model.vocab_size
        if vocabulary == first_vocabulary and has_same_vocab_size:  # also if both are without a tokenizer
            opened.tensors.append(model)
            continue

        # otherwise the same tokens are found by their texts, for which both need a tokenizer
        if vocabulary is None or first_vocabulary is None:
            without_tokenizer = first_model.folder if first_vocabulary is None else model.folder
            fault = f"{without_tokenizer} has no tokenizer, so its tokens cannot be matched"
            raise _cannot_be_merged(model, first_model, fault)
        aligned, matched = _align(model, first_model, vocabulary, first_vocabulary)
        opened.tensors.append(aligned)
        opened.matched[model.folder] = matched
    return opened


def _align(
    model: ModelTensors, first_model: ModelTensors, vocabulary: dict[str, int], first_vocabulary: dict[str, int]
) -> tuple[AlignedTensors, MatchedTokens]:
    """Give a model's tokens the rows of the first model's tokens; vocabularies map the texts of tokens to ids."""
    # a tokenizer may have ids beyond the rows of the model, which are left out
    num_first_rows = first_model.shape_of_model.vocab_size
    num_rows = model.shape_of_model.vocab_size
    first_rows = {token: row for token, row in first_vocabulary.items() if row < num_first_rows}
    rows = {token: row for token, row in vocabulary.items() if row < num_rows}
    num_common = len(first_rows.keys() & rows.keys())
    if num_common < LEAST_SHARE * len(first_rows):
        fault = f"only {num_common:,} of the {len(first_rows):,} tokens are in both vocabularies"
        raise _cannot_be_merged(model, first_model, fault, "give models with related tokenizers")
    # for each row of the first model, the row of the same token in this model, or -1
    row_indices = torch.full((num_first_rows,), -1)
    for token, first_row in first_rows.items():
        row_indices[first_row] = rows.get(token, -1)
    matched = MatchedTokens(num_common, missing=len(first_rows) - num_common, left_out=len(rows) - num_common)
    return AlignedTensors(model, first_model, row_indices), matched


def _check_sizes(model: ModelTensors, first_model: ModelTensors) -> None:
    """Raise an InputError unless a model has the first model's architecture and shapes; print differing settings."""
    config = model.shape_of_model.config
    first_config = first_model.shape_of_model.config
    if config.model_type != first_config.model_type:
        fault = f"it is a {config.model_type}, not a {first_config.model_type}"
        raise _cannot_be_merged(model, first_model, fault)

    # the same tensors of the same shapes
    shapes = {name: list(model.shape(name)) for name in model}
    first_shapes = {name: list(first_model.shape(name)) for name in first_model}
    for name in sorted({*shapes, *first_shapes}):
        shape = shapes.get(name, ["absent"])  # shown in the message
        first_shape = first_shapes.get(name, ["absent"])
        if name in model.rows_by_token and name in first_model.rows_by_token:
            # each row belongs to a token, and rows are matched by token: their number may differ
            is_same_shape = shape[1:] == first_shape[1:]
        else:
            is_same_shape = shape == first_shape
        if not is_same_shape:
            raise _cannot_be_merged(model, first_model, f"{name} is {shape}, not {first_shape}")

    # other settings may differ
    settings = config.to_dict()
    first_settings = first_config.to_dict()
    for name in sorted({*settings, *first_settings}.difference(_IGNORED_SETTINGS)):
        value = settings.get(name)
        first_value = first_settings.get(name)
        if value != first_value:
            values = f"{value} in {model.folder}, {first_value} in {first_model.folder}"
            print(f"note: {name} is {values}; the result has the first model's value", file=sys.stderr)


def _cannot_be_merged(
    model: ModelTensors,
    first_model: ModelTensors,
    fault: str,
    advice: str = "give models of the same architecture and size",
) -> InputError:
    return InputError(f"{model.folder} cannot be merged with {first_model.folder}: {fault}; {advice}")
