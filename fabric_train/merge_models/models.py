"""The models of a merge: find and open them, compare their shapes, and give the same tokens the same rows."""

import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from operator import add
from pathlib import Path
from typing import Any

import torch
from transformers.utils import cached_file

from fabric_train.checkpoint.adapter_folder import is_exported_adapter
from fabric_train.checkpoint.base_weights import open_base_weights
from fabric_train.cli.errors import InputError, naming_option
from fabric_train.export.merged_adapter import open_whole
from fabric_train.inference.load_model import find_own_checkpoint
from fabric_train.model.hf_model import ModelShape, check_readable, load_hf_tokenizer, read_shape
from fabric_train.model.load_weights import MetaModel, open_pretrained, open_tensors, tied_weight_names
from fabric_train.model.weight_files import StoredTensors

LEAST_SHARE = 0.5
"""The least share of the first model's tokens that another model's vocabulary must have."""
_TOKENIZER = re.compile(
    r"(tokenizer|vocab|merges|special_tokens_map|added_tokens|chat_template|spiece|sentencepiece)[^/]*"
    r"|[^/]+\.tiktoken|additional_chat_templates/[^/]+"
)
_OF_NO_WEIGHT = (
    *("dtype", "use_cache", "transformers_version", "_name_or_path", "architectures", "vocab_size", "pad_token_id"),
    *("bos_token_id", "eos_token_id"),
)


def find_folder(name: str, option: str = "--models") -> Path:
    """Return the folder of a model: a checkpoint's, a Hugging Face folder, or the one of a hub name in the cache.

    ``option`` is the argument that gives the model.

    Raises:
        InputError: there is no such model, or it is an adapter apart from its base.
    """
    folder = Path(name)
    if is_exported_adapter(folder):
        advice = "convert its checkpoint with --merge true, and give that export"
        raise InputError(f"{option} {name}: this is an adapter without its base; {advice}")
    if checkpoint := find_own_checkpoint(name):
        return checkpoint
    with naming_option(option):
        shape = read_shape(name)
        if folder.is_dir():
            check_readable(name)
        else:  # fetch what the cache lacks
            open_pretrained(shape, torch.float32)
            load_hf_tokenizer(name)
            folder = Path(str(cached_file(name, "config.json"))).parent
    return folder


def is_checkpoint(folder: Path) -> bool:
    """Return whether a model's folder is a checkpoint of a run."""
    return (folder / "trainer.json").is_file()


def tokenizer_of(folder: Path) -> Path:
    """Return the folder from which transformers loads a model's tokenizer."""
    return folder / "tokenizer" if is_checkpoint(folder) else folder


def tokenizer_files(folder: Path) -> dict[str, Path]:
    """Return the files of the tokenizer in a Hugging Face folder by their paths there; also links, as in the cache."""
    files = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}
    return {name: path for name, path in files.items() if _TOKENIZER.fullmatch(name)}


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
    stored = {str(folder): _stored_dtype(folder) for folder in folders}
    rounded = [folder for folder, of_folder in stored.items() if of_folder != dtype]
    if not rounded:
        return None
    kinds = sorted({str(stored[folder]).removeprefix("torch.") for folder in rounded})
    of_models = f"those of {', '.join(rounded)} are {' and '.join(kinds)}"
    written = str(dtype).removeprefix("torch.")
    return f"the merged weights are rounded to {written}: {of_models} (--dtype)"


def _stored_dtype(folder: Path) -> torch.dtype:
    """Return the widest type in which a model's weights are stored; a merged adapter is computed in fp32."""
    tensors = open_whole(folder) if is_checkpoint(folder) else open_base_weights(str(folder))
    return max((tensors.dtype(name) for name in tensors), key=lambda dtype: dtype.itemsize)


class ModelTensors(StoredTensors):
    """All tensors of a model in fp32, by the names in memory; tied ones once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.shape_of_model: ModelShape
        self._opened: MetaModel
        with naming_option("", instead_of="--model_name "):  # the folder says which model it is
            self.shape_of_model = read_shape(str(folder))
            if is_checkpoint(folder):
                self._opened = open_tensors(self.shape_of_model, open_whole(folder), torch.float32)
            else:
                self._opened = open_pretrained(self.shape_of_model, torch.float32)
        model: Any = self._opened.model
        tied = tied_weight_names(model)
        self._outline: dict[str, torch.Tensor] = {
            name: tensor for name, tensor in model.state_dict().items() if name not in tied
        }
        head = model.get_output_embeddings()
        embedding = model.get_input_embeddings()
        by_token = {id(each) for module in (head, embedding) if module is not None for each in module.parameters()}
        self.rows_by_token = [name for name, parameter in model.named_parameters() if id(parameter) in by_token]

    def __iter__(self) -> Iterator[str]:
        return iter(self._outline)

    def shape(self, name: str) -> torch.Size:
        return self._outline[name].shape

    def dtype(self, name: str) -> torch.dtype:
        return self._outline[name].dtype

    def read_block(self, name: str, offsets: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
        if self._opened.weights is None:  # a pickle, which was loaded in full
            block = tuple(slice(begin, begin + size) for begin, size in zip(offsets, shape, strict=True))
            return self._outline[name].detach()[block]
        return self._opened.weights.read_block(name, offsets, shape).to(self.dtype(name))


class AlignedTensors(StoredTensors):
    """The tensors of a model, with the rows of the first model's tokens in that model's order.

    ``rows`` has the number of each row in the model itself, and -1 for a row that is taken from the first model.
    """

    def __init__(self, own: ModelTensors, first: ModelTensors, rows: torch.Tensor) -> None:
        self._own = own
        self._first = first
        self._rows = rows
        self._whole = lru_cache(maxsize=1)(own.read)

    def __iter__(self) -> Iterator[str]:
        return iter(self._first)

    def shape(self, name: str) -> torch.Size:
        return self._first.shape(name)

    def dtype(self, name: str) -> torch.dtype:
        return self._own.dtype(name)

    def read_block(self, name: str, offsets: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
        if name not in self._own.rows_by_token:
            return self._own.read_block(name, offsets, shape)
        block = self._first.read_block(name, offsets, shape).clone()
        rows = self._rows[offsets[0] : offsets[0] + shape[0]]
        columns = (slice(None), *map(slice, offsets[1:], map(add, offsets[1:], shape[1:])))
        block[rows >= 0] = self._whole(name)[columns][rows[rows >= 0]]
        return block


@dataclass(frozen=True)
class Matched:
    """The tokens of a model that the first model has too: their number, and how many of either are missing."""

    common: int
    missing: int = 0  # of the first model's
    left_out: int = 0  # of the model's own


@dataclass
class OpenedModels:
    """The opened models of a merge; ``matched`` has an entry for each whose vocabulary is not the first model's."""

    first: ModelTensors
    tensors: list[StoredTensors] = field(default_factory=list)
    matched: dict[Path, Matched] = field(default_factory=dict)


def open_models(folders: Sequence[Path]) -> OpenedModels:
    """Open models, with the tokens of the first one.

    Raises:
        InputError: a model has another architecture or other sizes, or too few of the first model's tokens.
    """
    first, *others = map(ModelTensors, folders)
    opened = OpenedModels(first, [first])
    vocabulary = read_vocabulary(folders[0])
    for model in others:
        _check_sizes(model, first)
        own = read_vocabulary(model.folder)
        rows = [tensors.shape_of_model.vocab_size for tensors in (first, model)]
        if own is None or vocabulary is None:
            if rows[0] != rows[1] or (own is None) != (vocabulary is None):
                without = folders[0] if vocabulary is None else model.folder
                raise _cannot_be_merged(model, first, f"{without} has no tokenizer to find the same tokens by")
            opened.tensors.append(model)
        elif own == vocabulary and rows[0] == rows[1]:
            opened.tensors.append(model)
        else:
            aligned, opened.matched[model.folder] = _match(model, first, own, vocabulary)
            opened.tensors.append(aligned)
    return opened


def _match(
    model: ModelTensors, first: ModelTensors, own: dict[str, int], vocabulary: dict[str, int]
) -> tuple[AlignedTensors, Matched]:
    num_first = first.shape_of_model.vocab_size
    num_own = model.shape_of_model.vocab_size
    wanted = {token: row for token, row in vocabulary.items() if row < num_first}
    there = {token: row for token, row in own.items() if row < num_own}
    rows = torch.full((num_first,), -1)
    for token, row in wanted.items():
        rows[row] = there.get(token, -1)
    common = len(wanted.keys() & there.keys())
    if common < LEAST_SHARE * len(wanted):
        share = f"only {common:,} of the {len(wanted):,} tokens are in both vocabularies"
        raise _cannot_be_merged(model, first, share, "give models whose tokenizers have a common origin")
    return AlignedTensors(model, first, rows), Matched(common, len(wanted) - common, len(there) - common)


def _check_sizes(model: ModelTensors, first: ModelTensors) -> None:
    kinds = [tensors.shape_of_model.config.model_type for tensors in (model, first)]
    if kinds[0] != kinds[1]:
        raise _cannot_be_merged(model, first, f"it is a {kinds[0]}, not a {kinds[1]}")
    shapes = [{name: list(tensors.shape(name)) for name in tensors} for tensors in (model, first)]
    for name in sorted({*model, *first}):
        found, wanted = (by_name.get(name, ["absent"]) for by_name in shapes)
        are_rows = name in first.rows_by_token and name in model.rows_by_token
        if found[are_rows:] != wanted[are_rows:]:
            raise _cannot_be_merged(model, first, f"{name} is {found}, not {wanted}")
    settings = [tensors.shape_of_model.config.to_dict() for tensors in (model, first)]
    for name in sorted({*settings[0], *settings[1]}.difference(_OF_NO_WEIGHT)):
        if settings[0].get(name) != settings[1].get(name):
            values = f"{settings[0].get(name)} in {model.folder}, {settings[1].get(name)} in {first.folder}"
            print(f"note: {name} is {values}; the result has the latter", file=sys.stderr)


def _cannot_be_merged(
    model: ModelTensors, first: ModelTensors, fault: str, advice: str = "give models of one architecture and size"
) -> InputError:
    return InputError(f"{model.folder} cannot be merged with {first.folder}: {fault}; {advice}")
