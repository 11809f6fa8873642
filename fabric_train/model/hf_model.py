"""The Hugging Face causal language model: its configurations, its shape and its tokenizer."""

import copy
import logging
from collections.abc import Iterable
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
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_INDEX_NAME, cached_file
from transformers.utils import logging as transformers_logging

from fabric_train.cli.errors import InputError, first_line, raise_reached_limit
from fabric_train.files.regular_file import check_no_pipes, read_json
from fabric_train.model.adapter import Adapter, attach
from fabric_train.model.computed_settings import fault_of_quantization
from fabric_train.model.flops import ModelFlops, model_flops
from fabric_train.model.model_folder import check_model_folder
from fabric_train.model.trained_parts import ALL_PARTS, Parts, choose_trained, describe_parts, names_of_parameters
from fabric_train.model.weight_files import check_weight_files, shard_names
from fabric_train.token_dataset.manifest import load_manifest
from fabric_train.tokenization.tokenizers.fast_tokenizer import panics_as_errors

DEFAULT_LAYER_CLASS = "LlamaDecoderLayer"
_MOST_LAYERS = 10_000  # a forged number of layers would take hours to build, also on the meta device
GENERATION_CONFIG = "generation_config.json"
_FETCH_OR_REPLACE = "fetch it again, or use another"
_CORRECT_OR_FETCH = "correct the file, or fetch it again"
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")


@dataclass(frozen=True)
class ModelShape:
    """What the configuration of a model determines.

    ``num_parameters`` counts tied weights once, and none of an ``adapter``. ``trained`` has the names and shapes of the
    parameters that train; if ``parts`` chose them, ``frozen`` has the others. ``names`` are of all parameters, see
    ``trained_parts.Names``. ``layer_classes`` are the classes of the decoder layers, FSDP's units. ``max_positions`` is
    None if the configuration has no limit. ``is_new``: the model has no pretrained weights. ``longest_row`` are the
    tokens of the longest row that the model gets, by which rotary frequencies that depend on the length are chosen
    once (``rope_frequencies``); None leaves that to transformers.
    """

    source: str
    config: PretrainedConfig
    num_parameters: int
    trained: dict[str, torch.Size]
    names: dict[str, tuple[str, ...]]
    flops: ModelFlops
    layer_classes: frozenset[type[nn.Module]]
    vocab_size: int
    max_positions: int | None
    is_new: bool = False
    adapter: Adapter | None = None
    parts: Parts = ALL_PARTS
    frozen: dict[str, torch.Size] = field(default_factory=dict)
    longest_row: int | None = None

    @property
    def num_trained(self) -> int:
        return sum(size.numel() for size in self.trained.values())

    def describe_trained(self) -> str:
        """Return the modules that train, with their numbers of parameters."""
        return describe_parts(self.trained, self.frozen) if self.frozen else f"all {self.num_trained:,} parameters"

    def describe_frozen(self) -> str:
        """Return the modules that ``parts`` froze, with their numbers of parameters."""
        return describe_parts(self.frozen, self.trained)


def read_shape(
    source: str, layer_class: str = DEFAULT_LAYER_CLASS, attention: str | None = None, adapter: Adapter | None = None
) -> ModelShape:
    """Read the configuration of a hub name or folder and return the shape of its model, built on the meta device.

    ``layer_class`` is the name of the decoder layer's class. ``attention`` is written into ``config``; None:
    transformers chooses. An InputError if there is no such causal language model, layer or attention.
    """
    quiet_transformers()
    return shape_from_config(_read_config(source), source, layer_class, attention, adapter=adapter)


def shape_from_config(
    config: PretrainedConfig,
    source: str,
    layer_class: str,
    attention: str | None,
    is_new: bool = False,
    adapter: Adapter | None = None,
) -> ModelShape:
    """Return the shape of a configuration's model, built on the meta device; see :func:`read_shape`."""
    name = source if is_new else f"--model_name {source}"
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        kind = getattr(config, "model_type", type(config).__name__)
        raise InputError(f"{name}: a {kind} is not a causal language model; give one that is")
    try:
        num_layers = getattr(config.get_text_config(), "num_hidden_layers", None)
    except ValueError:  # it has several models of text, such as MusicGen's encoder and decoder
        num_layers = None
    if num_layers is None:
        raise InputError(f"{name}: a {config.model_type} is no stack of decoder layers; give another model")
    if isinstance(num_layers, int) and num_layers > _MOST_LAYERS:
        raise InputError(f"{name}: {num_layers} layers are more than any model has; give fewer than {_MOST_LAYERS}")
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    except (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError) as error:
        reason = f"{type(error).__name__}: {first_line(error).rstrip('.')}"
        cause, advice = ("these sizes", "give other sizes") if is_new else ("its config.json", "fetch it again")
        raise InputError(f"{name}: cannot build a model from {cause} ({reason}); {advice}") from error
    except (ImportError, ValueError) as error:
        if attention not in (None, "eager") and _builds_with_eager(config, error):
            kind = config.model_type
            raise InputError(
                f"{name}: transformers has no {attention} attention for a {kind}; give --attention eager"
            ) from error
        option = f" with --attention {attention}" if attention else ""
        advice = "use another"
        if isinstance(error, ImportError):  # of the attention's package, or of one that the model needs
            advice = "install it" if attention in (None, "eager", "sdpa") else "install it or use --attention sdpa"
        raise InputError(f"{name}{option}: {first_line(error).rstrip('.')}; {advice}") from error
    if adapter and trains_head_apart(model, adapter):
        config = copy.deepcopy(config)
        config.tie_word_embeddings = False
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
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


def _builds_with_eager(config: PretrainedConfig, error: Exception) -> bool:
    """Return whether a model that was not built for want of an attention is built with its plain one."""
    if isinstance(error, ImportError):  # of a package that can be installed
        return False
    try:
        with torch.device("meta"):
            AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation="eager")
    except (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError):
        return False
    return True


def with_parts(shape: ModelShape, parts: Parts) -> ModelShape:
    """Return the shape of a model that trains only some parts; for an InputError see ``Parts.choose``."""
    if shape.parts == parts:
        return shape
    chosen = parts.choose(shape.names, shape.source)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(shape.config)
    sizes = {name: parameter.shape for name, parameter in model.named_parameters()}
    trained = {name: size for name, size in sizes.items() if name in chosen}
    frozen = {name: size for name, size in sizes.items() if name not in chosen}
    return replace(shape, trained=trained, flops=model_flops(model, trained), parts=parts, frozen=frozen)


def trains_head_apart(model: Any, adapter: Adapter) -> bool:
    """Return whether an adapter trains a head without the embedding that the model ties it to."""
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
    for name in (SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_INDEX_NAME):
        index = cached_file(
            source, name, _raise_exceptions_for_missing_entries=False, _raise_exceptions_for_connection_errors=False
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
    folder = Path(source)
    name, advice = check_model_folder(source)
    try:
        config = AutoConfig.from_pretrained(source, trust_remote_code=False)
    except StrictDataclassError as error:  # the first line of its text names the field, the last line the fault
        reason = " ".join(str(error).split())
        raise InputError(f"{name}: its config.json is invalid: {reason}; {advice}") from error
    except (ArithmeticError, AttributeError, LookupError, OSError, TypeError, ValueError) as error:
        raise_reached_limit(error)
        reason = first_line(error).rstrip(".")
        if "trust_remote_code" in str(error):
            reason = "the model comes with Python code, which is never run here"
        if folder.is_dir():
            raise InputError(f"{name}: {reason}; {advice}") from error
        raise InputError(
            f"{name}: no such folder, and the hub does not provide it: {reason}; check the name and the network "
            "(docs/reference/errors.md#no-internet)"
        ) from error
    if fault := fault_of_quantization(config):
        raise InputError(f"{name}: {fault}")
    return config


def _layer_classes(model: PreTrainedModel, wanted: str, source: str) -> frozenset[type[nn.Module]]:
    """Return the class called ``wanted``, or the model's own layer classes if ``wanted`` is the default of Llama."""
    classes = {type(module).__name__: type(module) for module in model.modules()}
    if wanted in classes:
        return frozenset([classes[wanted]])
    own = frozenset(classes[name] for name in (model._no_split_modules or ()) if name in classes)
    if wanted == DEFAULT_LAYER_CLASS and own:
        return own
    if not own:
        raise InputError(f"--model_name {source}: it has no decoder layers; give another model")
    names = ", ".join(sorted(kind.__name__ for kind in own))
    raise InputError(f"--auto_wrap_policy {wanted}: {source} has no such layer; its decoder layers are {names}")


def read_generation_config(source: str, config: PretrainedConfig) -> GenerationConfig:
    """Return the generation settings of a folder or hub name; without its own, those that follow from ``config``."""
    file = Path(source) / GENERATION_CONFIG
    if file.exists():
        read_json(file, dict, _CORRECT_OR_FETCH)  # transformers would wait for a pipe
    try:
        found = GenerationConfig.from_pretrained(source)
    except OSError as error:
        raise_reached_limit(error)
        if file.is_file():
            raise _damaged(file, error) from error
        return GenerationConfig.from_model_config(config)
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise _damaged(file, error) from error
    if not all(type(end) is int and end >= 0 for end in _ends(found)):
        raise InputError(
            f"{file}: eos_token_id {found.eos_token_id!r} is not a token id or a list of them; {_CORRECT_OR_FETCH}"
        )
    return found


def add_stop_tokens(generation_config: GenerationConfig, token_ids: Iterable[int]) -> None:
    """Let generation stop at ``token_ids`` too; those that it stops at already come first."""
    known = _ends(generation_config)
    both = list(dict.fromkeys((*known, *token_ids)))
    if both != known:
        generation_config.eos_token_id = both if len(both) > 1 else both[0]


def checkpoint_generation_config(checkpoint: Path, config: PretrainedConfig) -> GenerationConfig:
    """Return a checkpoint's generation settings, with every token that ends a document or a turn in its data.

    Checkpoints of earlier versions name these tokens only in their ``manifest.json``.
    """
    generation_config = read_generation_config(str(checkpoint), config)
    manifest = load_manifest(checkpoint)
    if manifest is not None:
        add_stop_tokens(generation_config, manifest.tokenizer.stop_token_ids)
    return generation_config


def write_generation_config(folder: Path, generation_config: GenerationConfig) -> None:
    """Write ``generation_config.json``.

    ``save_pretrained`` refuses changed settings whose flags contradict each other, such as a temperature without
    ``do_sample``. Published models have such flags, and transformers ignores them when it generates.
    """
    generation_config.to_json_file(folder / GENERATION_CONFIG, keys_to_pop=["compile_config"])


def _ends(generation_config: GenerationConfig) -> list[int]:
    ends = generation_config.eos_token_id
    return ends if isinstance(ends, list) else [] if ends is None else [ends]


def _damaged(file: Path, error: BaseException) -> InputError:
    return InputError(f"{file}: damaged, {type(error).__name__}: {first_line(error)}; {_CORRECT_OR_FETCH}")


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
    except Exception as error:
        raise_reached_limit(error)
        reason = first_line(error).rstrip(".")
        raise InputError(f"{source}: its tokenizer cannot be loaded: {reason}; {_FETCH_OR_REPLACE}") from error
