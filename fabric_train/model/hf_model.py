"""The Hugging Face causal language model: its configuration, its shape and its tokenizer."""

import copy
import logging
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from huggingface_hub.utils import disable_progress_bars
from huggingface_hub.utils import logging as hub_logging
from torch import nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_INDEX_NAME, cached_file
from transformers.utils import logging as transformers_logging

from fabric_train.cli.errors import InputError, first_line, note, raise_if_limit_reached
from fabric_train.files.regular_file import check_no_pipes
from fabric_train.files.typed_json import read_json
from fabric_train.model.adapter import Adapter, attach
from fabric_train.model.computed_settings import describe_unknown, fault_of_quantization, leave_code_out
from fabric_train.model.flops import ModelFlops, model_flops
from fabric_train.model.model_folder import check_model_folder
from fabric_train.model.trained_parts import (
    ALL_PARTS,
    TrainedParts,
    choose_trained,
    describe_parts,
    names_of_parameters,
)
from fabric_train.model.weight_files import check_weight_files, shard_names
from fabric_train.tokenization.tokenizers.fast_tokenizer import panics_as_errors

DEFAULT_LAYER_CLASS = "LlamaDecoderLayer"
_MAX_LAYERS = 10_000  # a forged number of layers would take hours to build, also on the meta device
_FETCH_OR_REPLACE = "download it again, or use another model"
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")


@dataclass(frozen=True)
class ModelShape:
    """A model without its weights, as its configuration determines it."""

    source: str
    """The hub name, the folder, or the arguments of a new model, for messages."""
    config: PretrainedConfig
    num_parameters: int
    """The number of parameters; tied weights count once, and an ``adapter`` does not count."""
    trained: dict[str, torch.Size]
    """The shapes of the parameters that train."""
    names: dict[str, tuple[str, ...]]
    """All names of each parameter, see ``trained_parts.Names``."""
    flops: ModelFlops
    layer_classes: frozenset[type[nn.Module]]
    """The classes of the decoder layers, FSDP's units."""
    vocab_size: int
    """The number of rows of the embedding, which may exceed the tokenizer's number of tokens."""
    max_positions: int | None
    """The most positions; None if the configuration has no limit."""
    is_new: bool = False
    """Whether the model has no pretrained weights."""
    adapter: Adapter | None = None
    parts: TrainedParts = ALL_PARTS
    frozen: dict[str, torch.Size] = field(default_factory=dict)
    """The shapes of the other parameters, if ``parts`` chose which ones train."""
    longest_row: int | None = None
    """The number of tokens in the longest row that the model gets. Rotary frequencies that depend on the length are
    chosen once for it (``rope_frequencies``); None leaves the choice to transformers.
    """

    @property
    def num_trained(self) -> int:
        """The number of elements that train."""
        return sum(size.numel() for size in self.trained.values())

    def describe_trained(self) -> str:
        """Return the modules that train, with their numbers of parameters."""
        if self.frozen:
            return describe_parts(self.trained, self.frozen)
        return f"all {self.num_trained:,} parameters"

    def describe_frozen(self) -> str:
        """Return the modules that ``parts`` froze, with their numbers of parameters."""
        return describe_parts(self.frozen, self.trained)


def read_shape(
    source: str, layer_class: str = DEFAULT_LAYER_CLASS, attention: str | None = None, adapter: Adapter | None = None
) -> ModelShape:
    """Read the configuration of a hub name or folder and return the shape of its model, built on the meta device.

    Args:
        source: a hub name or a folder.
        layer_class: the name of the decoder layer's class.
        attention: the implementation of attention, which is written to ``config``; None lets transformers choose.
        adapter: an adapter that is added to the model.

    Raises:
        InputError: the causal language model, the layer or the attention does not exist.
    """
    quiet_transformers()
    return shape_from_config(_read_config(source), source, layer_class, attention, adapter=adapter)


def shape_from_config(
    config: PretrainedConfig,
    source: str,
    layer_class: str,
    attention: str | None,
    *,
    is_new: bool = False,
    adapter: Adapter | None = None,
) -> ModelShape:
    """Return the shape of a configuration's model, built on the meta device; see :func:`read_shape`."""
    name = source if is_new else f"--model_name {source}"
    _check_config(config, name)
    model: Any = _build_from_config(config, name, attention, is_new=is_new)
    if adapter and trains_head_apart(model, adapter):
        config = copy.deepcopy(config)
        config.tie_word_embeddings = False
        model = _build_from_config(config, name, attention, is_new=is_new)
    layer_classes = _layer_classes(model, layer_class, source)  # refuses a model without layers
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    if adapter:
        attach(model, adapter, source)
    trained = choose_trained(model, adapter)
    return ModelShape(
        source=source,
        config=config,
        num_parameters=num_parameters,
        trained=trained,
        names=names_of_parameters(model),
        flops=model_flops(model, trained),
        layer_classes=layer_classes,
        vocab_size=model.get_input_embeddings().num_embeddings,
        max_positions=getattr(config.get_text_config(), "max_position_embeddings", None),
        is_new=is_new,
        adapter=adapter,
    )


def _check_config(config: PretrainedConfig, name: str) -> None:
    """Check that a configuration describes a stack of decoder layers; ``name`` is the model's name in messages."""
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        model_type = getattr(config, "model_type", type(config).__name__)
        raise InputError(f"{name}: a {model_type} is not a causal language model; give a causal language model")
    try:
        num_layers = getattr(config.get_text_config(), "num_hidden_layers", None)
    except ValueError:  # it has several models of text, such as MusicGen's encoder and decoder
        num_layers = None
    if num_layers is None:
        raise InputError(f"{name}: a {config.model_type} is not a stack of decoder layers; give another model")
    if isinstance(num_layers, int) and num_layers > _MAX_LAYERS:
        raise InputError(f"{name}: {num_layers} layers are too many; give fewer than {_MAX_LAYERS}")


def _build_from_config(config: PretrainedConfig, name: str, attention: str | None, *, is_new: bool) -> PreTrainedModel:
    """Build the model of a configuration on the meta device; an InputError says what is wrong with it."""
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    except (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError) as error:
        reason = f"{type(error).__name__}: {first_line(error).rstrip('.')}"
        if is_new:
            raise InputError(f"{name}: cannot build a model from these sizes ({reason}); give other sizes") from error
        raise InputError(f"{name}: cannot build a model from its config.json ({reason}); download it again") from error
    except (ImportError, ValueError) as error:
        # the attention: one that transformers does not have for this family, or whose package is missing
        if attention not in (None, "eager") and _builds_with_eager(config, error):
            raise InputError(
                f"{name}: transformers has no {attention} attention for a {config.model_type}; give --attention eager"
            ) from error
        option = f" with --attention {attention}" if attention else ""
        if not isinstance(error, ImportError):
            advice = "use another"
        elif attention in (None, "eager", "sdpa"):  # a package that the model needs
            advice = "install it"
        else:
            advice = "install it or use --attention sdpa"
        raise InputError(f"{name}{option}: {first_line(error).rstrip('.')}; {advice}") from error


def _builds_with_eager(config: PretrainedConfig, error: Exception) -> bool:
    """Return whether a model that could not be built with the given attention can be built with plain attention."""
    if isinstance(error, ImportError):  # of a package that can be installed
        return False
    try:
        with torch.device("meta"):
            AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation="eager")
    except (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError):
        return False
    return True


def with_parts(shape: ModelShape, parts: TrainedParts) -> ModelShape:
    """Return the shape of a model that trains only some parts; for an InputError see ``TrainedParts.choose``."""
    if shape.parts == parts:
        return shape
    trained_names = parts.choose(shape.names, shape.source)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(shape.config)
    trained: dict[str, torch.Size] = {}
    frozen: dict[str, torch.Size] = {}
    for name, parameter in model.named_parameters():
        sizes = trained if name in trained_names else frozen
        sizes[name] = parameter.shape
    return replace(shape, trained=trained, flops=model_flops(model, trained), parts=parts, frozen=frozen)


def trains_head_apart(model: Any, adapter: Adapter) -> bool:
    """Return whether an adapter trains a head, but not the embedding that the model ties it to."""
    head = model.get_output_embeddings()
    embedding = model.get_input_embeddings()
    if head is None or head.weight is not embedding.weight:
        return False
    names = {module: name for name, module in model.named_modules()}
    return adapter.trains(f"{names[head]}.weight") and not adapter.trains(f"{names[embedding]}.weight")


def check_readable(source: str) -> None:
    """Check that the weights of a hub name or folder can be read, without reading the tensors."""
    folder = Path(source)
    if folder.is_dir():
        check_weight_files(folder)
        return
    for file_name in (SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_INDEX_NAME):
        index = cached_file(
            source,
            file_name,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
        )
        if index:
            shard_names(Path(index))


def quiet_transformers() -> None:
    """Silence the warnings and progress bars of transformers and the hub, which every rank would print."""
    disable_progress_bars()
    hub_logging.set_verbosity(hub_logging.CRITICAL)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    logging.getLogger("torch.distributed").setLevel(logging.ERROR)


def _read_config(source: str) -> PretrainedConfig:
    """Return the configuration of a hub name or folder; an InputError if there is none, or it is not supported."""
    name, advice = check_model_folder(source)
    try:
        config = AutoConfig.from_pretrained(source, trust_remote_code=False)
    except StrictDataclassError as error:  # the first line of its text names the field, the last line the fault
        reason = " ".join(str(error).split())
        raise InputError(f"{name}: its config.json is invalid: {reason}; {advice}") from error
    except (ArithmeticError, AttributeError, LookupError, OSError, TypeError, ValueError) as error:
        raise_if_limit_reached(error)
        reason = first_line(error).rstrip(".")
        if "trust_remote_code" in str(error):
            reason = "the model comes with Python code, which is never run"
        if Path(source).is_dir():
            raise InputError(f"{name}: {reason}; {advice}") from error
        raise InputError(
            f"{name}: no such folder, and the hub does not provide it: {reason}; check the name and the network "
            "(docs/reference/errors.md#no-internet)"
        ) from error
    fault = fault_of_quantization(config)
    if fault:
        raise InputError(f"{name}: {fault}")
    if leave_code_out(config):
        note(
            f"{name}: its config.json names Python code (auto_map), which is never run; transformers' own "
            f"{config.model_type} is used instead"
        )
    unknown_settings = describe_unknown(config)
    if unknown_settings:
        note(
            f"{name}: its config.json has settings that transformers' {type(config).__name__} does not have, so they "
            f"have no effect: {unknown_settings}"
        )
    return config


def _layer_classes(model: PreTrainedModel, layer_class: str, source: str) -> frozenset[type[nn.Module]]:
    """Return the class called ``layer_class``, or the model's own layer classes if that is the default, Llama's."""
    classes = {type(module).__name__: type(module) for module in model.modules()}
    if layer_class in classes:
        return frozenset([classes[layer_class]])
    own_names = [name for name in (model._no_split_modules or ()) if name in classes]
    if not own_names:
        raise InputError(f"--model_name {source}: it has no decoder layers; give another model")
    if layer_class == DEFAULT_LAYER_CLASS:
        return frozenset(classes[name] for name in own_names)
    shown = ", ".join(sorted(set(own_names)))
    raise InputError(
        f"--auto_wrap_policy {layer_class}: {source} has no layer of this class; its decoder layers are {shown}"
    )


def load_hf_tokenizer(source: Path | str) -> Any:
    """Return transformers' tokenizer of a folder or a hub name. No code from it runs."""
    folder = Path(source)
    if folder.is_dir():
        check_no_pipes(folder)
        for file in folder.glob("*.json"):
            if file.name in _TOKENIZER_FILES:
                read_json(file, dict, _FETCH_OR_REPLACE)
    try:
        with panics_as_errors():
            return AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    except Exception as error:  # damage ends in any exception, some of them of the Rust library
        raise_if_limit_reached(error)
        reason = first_line(error).rstrip(".")
        if folder.is_dir() and not any(folder.glob("tokenizer*")):
            reason = "the folder has no tokenizer.json"
        raise InputError(f"{source}: its tokenizer cannot be loaded: {reason}; {_FETCH_OR_REPLACE}") from error
