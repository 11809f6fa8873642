"""The Hugging Face causal language model: what its configuration says before it is built, and the model with its
weights.
"""

import logging
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from huggingface_hub.utils import disable_progress_bars
from huggingface_hub.utils import logging as hub_logging
from safetensors import SafetensorError
from torch import nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_INDEX_NAME, cached_file
from transformers.utils import logging as transformers_logging

from fabric_train.cli.errors import InputError, first_line
from fabric_train.model.flops import ModelFlops, model_flops
from fabric_train.model.weight_files import refuse_unreadable_weights, shard_names

DEFAULT_LAYER_CLASS = "LlamaDecoderLayer"


@dataclass(frozen=True)
class ModelShape:
    """What is known of a model from its configuration alone.

    ``num_parameters`` counts tied weights once; ``flops`` is what tokens cost; ``layer_classes`` are the classes of the
    repeated layer, FSDP's unit; ``max_positions`` is None where the model names no limit; ``is_new`` is a model that
    has no weights yet.
    """

    source: str
    config: PretrainedConfig
    num_parameters: int
    flops: ModelFlops
    layer_classes: frozenset[type[nn.Module]]
    vocab_size: int
    max_positions: int | None
    is_new: bool = False


def read_shape(source: str, layer_class: str = DEFAULT_LAYER_CLASS, attention: str | None = None) -> ModelShape:
    """Read the configuration of a hub name or folder and build the model without memory, on the meta device.

    Args:
        source: hub name or folder.
        layer_class: of the repeated layer.
        attention: implementation of attention, which goes into ``config``; None leaves it to transformers.

    Raises:
        InputError: where there is no such model, it is no causal language model, has no layer of class
        ``layer_class``, or cannot compute attention so.
    """
    quiet_transformers()
    return shape_of(_read_config(source), source, layer_class, attention)


def shape_of(
    config: PretrainedConfig, source: str, layer_class: str, attention: str | None, is_new: bool = False
) -> ModelShape:
    """Build the model of a configuration without memory and return its shape; see :func:`read_shape`."""
    said = source if is_new else f"--model_name {source}"
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        kind = getattr(config, "model_type", type(config).__name__)
        raise InputError(f"{said}: a {kind} is not a causal language model: give one that is")
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    except (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError) as error:
        reason = f"{type(error).__name__}: {first_line(error).rstrip('.')}"
        mend = "give other sizes" if is_new else "fetch it again"
        asked = "these sizes say" if is_new else "its config.json says"
        raise InputError(f"{said}: no model can be built as {asked} ({reason}); {mend}") from error
    except (ImportError, ValueError) as error:
        wanted = f" with --attention {attention}" if attention else ""
        mend = "install it or use --attention sdpa" if isinstance(error, ImportError) else "use another"
        raise InputError(f"{said}{wanted}: {first_line(error).rstrip('.')}; {mend}") from error
    return ModelShape(
        source=source,
        config=config,
        num_parameters=sum(parameter.numel() for parameter in model.parameters()),
        flops=model_flops(model),
        layer_classes=_layer_classes(model, layer_class, source),
        vocab_size=model.get_input_embeddings().num_embeddings,
        max_positions=getattr(config.get_text_config(), "max_position_embeddings", None),
        is_new=is_new,
    )


def refuse_unreadable(source: str) -> None:
    """Refuse weights of a hub name or folder that cannot be read, as far as it is seen without reading them.

    Raises:
        InputError: naming the file.
    """
    folder = Path(source)
    if folder.is_dir():
        refuse_unreadable_weights(folder)
        return
    for name in (SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_INDEX_NAME):
        index = cached_file(
            source,
            name,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
        )
        if index:
            shard_names(Path(index))


def load_model(shape: ModelShape, dtype: torch.dtype) -> PreTrainedModel:
    """Load the pretrained weights in ``dtype`` on the CPU; rotary frequencies and other computed buffers stay fp32.

    Raises:
        InputError: where the weights are missing or are not those of the configuration.
    """
    refuse_unreadable(shape.source)
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            shape.source,
            dtype=dtype,
            attn_implementation=shape.config._attn_implementation,
            trust_remote_code=False,
            weights_only=True,  # of a pickle
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are refused below, in one line
        )
    except (OSError, ValueError, RuntimeError, SafetensorError, UnpicklingError) as error:
        raise InputError(
            f"--model_name {shape.source}: cannot load its weights: {first_line(error).rstrip('.')}; "
            "fetch the model again, or give another"
        ) from error
    model, report = loaded
    mismatched = [key if isinstance(key, str) else key[0] for key in report.get("mismatched_keys", ())]
    refuse_wrong_weights(shape.source, [*report["missing_keys"], *mismatched])
    return model


def build_model(shape: ModelShape, weights: dict[str, torch.Tensor], dtype: torch.dtype) -> PreTrainedModel:
    """Build the model of ``shape`` with the given full CPU tensors (tied duplicates may be absent) in ``dtype``.

    Raises:
        InputError: where a weight is missing, unknown or of another shape.
    """
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(shape.config, dtype=dtype)
    refuse_misfit(shape.source, model, {name: tensor.shape for name, tensor in weights.items()})
    return type(model).from_pretrained(None, config=shape.config, state_dict=weights, dtype=dtype)


def refuse_wrong_weights(source: str, wrong: list[str]) -> None:
    """Refuse a pretrained model of whose weights some are wrong.

    Raises:
        InputError: with their number and the first name.
    """
    if wrong:
        raise InputError(
            f"--model_name {source}: {len(wrong)} weights are missing or of another shape than config.json "
            f"says, {min(wrong)} first; fetch the model again, or give another"
        )


def refuse_misfit(source: str, model: PreTrainedModel, shapes: dict[str, torch.Size]) -> None:
    """Refuse weights, of which the names and shapes are known, that are not the model's (tied ones may be absent).

    Raises:
        InputError: where a weight is missing, unknown or of another shape.
    """
    expected = {name: tensor.shape for name, tensor in model.state_dict().items()}
    wrong = [name for name, shape in shapes.items() if expected.get(name) != shape]
    wrong += [name for name in expected if name not in shapes and name not in tied_weight_names(model)]
    if wrong:
        raise InputError(f"{source}: {len(wrong)} weights do not fit its config.json, {wrong[0]} first")


def tied_weight_names(model: PreTrainedModel) -> set[str]:
    """Names in the state dict that are another parameter under a second name, such as a tied ``lm_head.weight``."""
    seen: dict[int, str] = {}
    tied = set()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if seen.setdefault(id(parameter), name) != name:
            tied.add(name)
    return tied


def quiet_transformers() -> None:
    """Leave transformers' errors and drop its advice and bars, which would drown our own lines on every rank."""
    disable_progress_bars()
    hub_logging.set_verbosity(hub_logging.CRITICAL)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    logging.getLogger("torch.distributed").setLevel(logging.ERROR)


def _read_config(source: str) -> PretrainedConfig:
    folder = Path(source)
    is_checkpoint = (folder / "trainer.json").is_file()
    name = source if is_checkpoint else f"--model_name {source}"
    mend = "use another checkpoint" if is_checkpoint else "give a Hugging Face model folder"
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise InputError(f"{name}: the folder has no config.json; {mend}")
    if folder.is_file():
        raise InputError(f"{name}: a file; give the folder that holds the model's config.json and weights")
    if not folder.is_dir() and (source.startswith(("/", ".", "~")) or source.count("/") > 1):
        raise InputError(f"{name}: no such folder")  # no hub name looks like this
    try:
        return AutoConfig.from_pretrained(source, trust_remote_code=False)
    except StrictDataclassError as error:  # its first line names the field, the last what is wrong with it
        reason = " ".join(str(error).split())
        raise InputError(f"{name}: its config.json cannot be: {reason}; {mend}") from error
    except (ArithmeticError, AttributeError, LookupError, OSError, TypeError, ValueError) as error:
        reason = first_line(error).rstrip(".")
        if "trust_remote_code" in str(error):
            reason = "it brings Python code of its own, which is never run here"
        hint = "" if folder.is_dir() else "no such folder, and the hub does not give it: "
        advice = mend if folder.is_dir() else "check the name, and the network"
        raise InputError(f"{name}: {hint}{reason}; {advice}") from error


def _layer_classes(model: PreTrainedModel, wanted: str, source: str) -> frozenset[type[nn.Module]]:
    """Return the class named, or for another family than the default's the layers that the model says not to split."""
    classes = {type(module).__name__: type(module) for module in model.modules()}
    if wanted in classes:
        return frozenset([classes[wanted]])
    own = frozenset(classes[name] for name in (model._no_split_modules or ()) if name in classes)
    if wanted == DEFAULT_LAYER_CLASS and own:
        return own
    if not own:
        raise InputError(f"--model_name {source}: no decoder layer is found in it; give another model")
    names = ", ".join(sorted(kind.__name__ for kind in own))
    raise InputError(f"--auto_wrap_policy {wanted}: {source} has no such layer; its decoder layers: {names}")
