"""Random weights of a new model or adapter, a function of the seed and the parameter's name; and rows never trained.

For ``--from_scratch``, transformers' own initialization runs on a model on the meta device, while this module records
the distribution of each parameter. The numbers are then drawn in chunks. Each chunk has its own random stream, so each
rank draws only its part of a parameter, and gets the same numbers as a single process that draws all of it.
"""

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, PreTrainedModel

from fabric_train.cli.argument_types import nearest_name
from fabric_train.cli.errors import InputError, first_line
from fabric_train.data.token_dataset import TokenDataset
from fabric_train.model.adapter import is_adapter_parameter
from fabric_train.model.hf_model import ModelShape, shape_from_config
from fabric_train.model.load_weights import MetaModel, build_on_meta, tied_weight_names
from fabric_train.model.weight_files import StoredTensors, Weights

if TYPE_CHECKING:
    from fabric_train.arguments import ModelArguments

_CHUNK = 1 << 18  # elements; a different number changes the weights
_SIZES = {  # names of a size in the configurations of model families
    "hidden_width": ("hidden_size",),
    "num_layers": ("num_hidden_layers",),
    "num_heads": ("num_attention_heads",),
    "num_key_value_heads": ("num_key_value_heads",),
    "intermediate_size": ("intermediate_size", "n_inner", "ffn_dim"),
    "max_context_width": ("max_position_embeddings",),
    "vocab_size": ("vocab_size",),
}
# A row without gradients decays to almost nothing, or stays next to the other untrained rows. In SmolLM2, eleven
# reserved tokens and four others are within 0.003 of the median norm of each other. Of the other rows, none has less
# than half of the median norm, and only one pair is closer than 0.05.
_SMALL_NORM = 0.1
_SMALL_DISTANCE = 0.01
_CHUNK_ROWS = 8192


def new_shape(
    arguments: "ModelArguments", layer_class: str, bos_token_id: int | None = None, eos_token_id: int | None = None
) -> ModelShape:
    """Return the shape of a model with the family and sizes in ``arguments``, and the given document tokens."""
    family = str(arguments.family)
    try:
        default = AutoConfig.for_model(family)
    except ValueError:
        raise InputError(
            f"--from_scratch {family}: transformers has no such family; give one such as llama, gpt2, gpt_neox, "
            "mistral, mixtral, qwen3 or gemma"
        ) from None
    values: dict[str, Any] = {}
    for size, names in _SIZES.items():
        given = getattr(arguments, size)
        if given is None and size == "num_key_value_heads":
            given = arguments.num_heads if hasattr(default, names[0]) else None
        if given is None:
            continue
        name = next((name for name in names if hasattr(default, name)), None)
        if name is None:
            raise InputError(f"--{size} {given}: a {family} has no such size; leave it out")
        values[name] = given
    if hasattr(default, "head_dim"):
        assert arguments.hidden_width is not None  # the arguments are checked
        assert arguments.num_heads is not None
        values["head_dim"] = arguments.hidden_width // arguments.num_heads
    if eos_token_id is not None:
        values |= {"bos_token_id": bos_token_id, "eos_token_id": eos_token_id}
    known = default.to_dict()
    for name in arguments.architecture or {}:
        if name not in known:
            hint = nearest_name(name, known)
            raise InputError(f"--architecture {name}: the configuration of a {family} has no such value{hint}")
    values |= arguments.architecture or {}
    try:
        config = AutoConfig.for_model(family, **values)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise InputError(f"--from_scratch {family}: no model can have these sizes: {first_line(error)}") from error
    return shape_from_config(config, f"--from_scratch {family}", layer_class, arguments.attention, is_new=True)


def open_new(shape: ModelShape, dtype: torch.dtype, seed: int) -> MetaModel:
    """Build the model of ``shape`` in ``dtype`` on the meta device, with random weights to read."""
    model = build_on_meta(shape, dtype)
    return MetaModel(model, RandomWeights(model, shape.source, seed))


@dataclass(frozen=True)
class _Values:
    """How to fill the elements from ``begin`` to ``end`` of a flattened parameter."""

    kind: str  # "constant", "normal" or "uniform"
    numbers: tuple[float, ...]  # the constant; mean and standard deviation; lower and upper bound
    begin: int
    end: int


class RandomWeights:
    """Random weights of a model whose parameters are on the meta device; implements ``weight_files.Weights``."""

    def __init__(self, model: PreTrainedModel, source: str, seed: int) -> None:
        self._seed = seed
        self._values = _record_initialization(model, source)
        self._shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
        self._buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}

    def read_block(self, name: str, offsets: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
        """Return the block of ``shape`` that begins at ``offsets`` of the full parameter, in fp32."""
        slices = tuple(slice(begin, begin + size) for begin, size in zip(offsets, shape, strict=True))
        if name in self._buffers:
            return self._buffers[name][slices]
        full = self._shapes[name]
        row = math.prod(full[1:])
        begin, end = (offsets[0] * row, (offsets[0] + shape[0]) * row) if full else (0, 1)
        rows = torch.from_numpy(self._draw(name, begin, end)).reshape((*shape[:1], *full[1:]))
        columns = (slice(None), *slices[1:])
        return rows[columns] if full else rows

    def _draw(self, name: str, begin: int, end: int) -> np.ndarray:
        """Return the elements from ``begin`` to ``end`` of the flattened parameter."""
        drawn = np.empty(end - begin, np.float32)
        for values in self._values[name]:
            first = max(begin, values.begin)
            last = min(end, values.end)
            if first >= last:
                continue
            if values.kind == "constant":
                drawn[first - begin : last - begin] = values.numbers[0]
                continue
            for chunk in range(first // _CHUNK, -(-last // _CHUNK)):
                digest = int.from_bytes(hashlib.sha256(name.encode()).digest()[:16], "little")
                seeds = np.random.SeedSequence([self._seed, digest, chunk])
                stream = np.random.Generator(np.random.SFC64(seeds))
                start = chunk * _CHUNK
                count, (shift, scale) = min(last - start, _CHUNK), values.numbers
                if values.kind == "uniform":
                    numbers = stream.random(count).astype(np.float32)
                    scale = scale - shift
                else:
                    numbers = stream.standard_normal(count, np.float32)
                part = numbers[max(first - start, 0) :] * np.float32(scale) + np.float32(shift)
                at = max(start, first) - begin
                drawn[at : at + len(part)] = part
        return drawn


class _InitRecorder(TorchDispatchMode):
    """A dispatch mode that records all writes into parameters on the meta device."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        # by storage, because views of a parameter, such as the padding token's row, are written to as well
        self._names = {parameter.untyped_storage()._cdata: name for name, parameter in model.named_parameters()}
        self._numbers = {name: parameter.numel() for name, parameter in model.named_parameters()}
        self.values: dict[str, list[_Values]] = {name: [] for name in self._names.values()}
        self.unknown: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        target = args[0] if args else None
        operation = func.overloadpacket.__name__
        if isinstance(target, torch.Tensor) and target.is_meta and operation.endswith("_"):
            self._record(target, operation, args[1:], kwargs or {})
        return func(*args, **(kwargs or {}))

    def _record(self, target: torch.Tensor, operation: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        name = self._names.get(target.untyped_storage()._cdata)
        if name is None:
            return
        place = (int(target.storage_offset()), int(target.storage_offset()) + target.numel())
        if operation == "normal_":
            mean, std = _two_arguments(args, kwargs, {"mean": 0.0, "std": 1.0})
            values = _Values("normal", (mean, std), *place)
        elif operation == "uniform_":
            low, high = _two_arguments(args, kwargs, {"from": 0.0, "to": 1.0})
            values = _Values("uniform", (low, high), *place)
        elif operation in ("fill_", "zero_") and target.is_contiguous():
            values = _Values("constant", (float(args[0]) if args else 0.0,), *place)
        else:
            self.unknown.append(f"{name} ({operation})")
            return
        covers = place == (0, self._numbers[name])
        self.values[name] = [values] if covers else [*self.values[name], values]


def _two_arguments(args: Sequence[Any], kwargs: Mapping[str, Any], defaults: dict[str, float]) -> list[float]:
    """Return two arguments of an operation, each positional, by keyword, or from ``defaults``."""
    positional = dict(zip(defaults, args, strict=False))
    return [float((defaults | dict(kwargs) | positional)[name]) for name in defaults]


def _record_initialization(model: Any, source: str) -> dict[str, list[_Values]]:
    for module in model.modules():
        module._is_hf_initialized = False
    for parameter in model.parameters():
        parameter._is_hf_initialized = False
    for name in tied_weight_names(model):  # the embedding initializes the tied weight, not the head
        model.get_submodule(name.rpartition(".")[0])._is_hf_initialized = True
    recorder = _InitRecorder(model)
    with recorder:
        model.initialize_weights()
    unknown = recorder.unknown + [name for name, values in recorder.values.items() if not values]
    if unknown:
        raise InputError(
            f"{source}: cannot initialize {len(unknown)} of its weights, {unknown[0]} first; "
            "train another family, or start from a pretrained model"
        )
    return recorder.values


def note_on_end_of_turn(meta_model: MetaModel, dataset: TokenDataset) -> str | None:
    """Return a note for the user if the model was never trained on the token that ends the dataset's chat turns."""
    manifest = dataset.manifest
    token_id = manifest.tokenizer.end_of_turn_token_id if manifest else None
    if token_id is None or not find_untrained(meta_model, [token_id]):
        return None
    token = Tokenizer.from_file(str(dataset.folder / "tokenizer" / "tokenizer.json")).id_to_token(token_id)
    return (
        f"{token} (id {token_id}) ends every turn of {dataset.folder}, and this model was never trained on it: it "
        "learns it here if there are many chats; for few, start from the instruct model, or tokenize with a chat "
        "template whose end of turn the model knows"
    )


def find_untrained(meta_model: MetaModel, token_ids: list[int]) -> list[int]:
    """Return the token ids whose row in the input embedding or the output layer was never trained.

    A row counts as untrained if its norm is less than a tenth of the median norm, or if two other rows are closer than
    a hundredth of it, because training moves rows apart.
    """
    model = meta_model.model
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    layers = {model.get_input_embeddings(), model.get_output_embeddings()} - {None}
    matrices = {names[id(layer.weight)] for layer in layers}  # one if they are tied
    return [token_id for token_id in token_ids if any(_is_untrained(meta_model, name, token_id) for name in matrices)]


def _is_untrained(meta_model: MetaModel, name: str, token_id: int) -> bool:
    """Return whether row ``token_id`` of the matrix ``name`` [V, hidden size] was never trained."""
    row = meta_model.read_rows(name, token_id, token_id + 1).float()
    norms = []
    distances = []
    num_rows = meta_model.model.get_parameter(name).shape[0]
    for begin in range(0, num_rows, _CHUNK_ROWS):
        rows = meta_model.read_rows(name, begin, min(begin + _CHUNK_ROWS, num_rows)).float()
        norms.append(rows.norm(dim=1))
        distances.append((rows - row).norm(dim=1))
    median = torch.cat(norms).median()
    num_close = int((torch.cat(distances) < _SMALL_DISTANCE * median).sum())
    return bool(row.norm() < _SMALL_NORM * median) or num_close > 2  # one is the row itself


class AdaptedWeights:
    """The weights of a base model and of its adapter: new ones, or the ``stored`` ones.

    New ones are as in peft: ``lora_A`` is drawn uniformly from ±1/√in (He's initialization with a = √5), ``lora_B`` is
    zero. They depend on ``seed`` and their name alone, not on the number of ranks. ``stored`` may also have weights of
    the base, those that were trained whole.
    """

    def __init__(self, base: Weights | None, seed: int, stored: StoredTensors | None = None) -> None:
        self._base = base
        self._seed = seed
        self._stored = stored
        self._names = set(stored or ())

    @property
    def is_new(self) -> bool:
        return self._stored is None

    def read_block(self, name: str, offsets: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
        """Return a block of a weight; see ``Weights``. New magnitudes of DoRA are zero until ``start_magnitudes``."""
        if self._stored is not None and name in self._names:
            return self._stored.read_block(name, offsets, shape)
        if not is_adapter_parameter(name):
            assert self._base is not None  # a base that is in memory is not read
            return self._base.read_block(name, offsets, shape)
        if not name.endswith("lora_A.weight"):
            return torch.zeros(tuple(shape))
        digest = hashlib.sha256(f"{self._seed} {name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        bound = 1 / math.sqrt(shape[1])
        return torch.empty(tuple(shape)).uniform_(-bound, bound, generator=generator)
