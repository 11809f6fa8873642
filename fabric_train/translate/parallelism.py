"""Translate how a model is divided among devices, and what is recomputed or offloaded to save memory."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fabric_train.translate.foreign_file import as_bool
from fabric_train.translate.translation import Translation

_STRATEGIES = {
    "full_shard": "FULL_SHARD",
    "shard_grad_op": "SHARD_GRAD_OP",
    "hybrid_shard": "HYBRID_SHARD",
    "hybrid_shard_zero2": "_HYBRID_SHARD_ZERO2",
    "no_shard": "NO_SHARD",
}
_PREFIX = re.compile(r"^(fsdp_config\.)?(fsdp_)?")


def translate_parallelism(translation: Translation) -> None:
    """Translate FSDP, DeepSpeed, tensor and context parallelism, recomputation and compilation."""
    file = translation.file
    if file.names("deepspeed"):
        _translate_deepspeed(translation)
    elif _fsdp_settings(translation):
        _translate_fsdp(translation)
    if file.program == "torchtune" and file.is_on("fsdp_cpu_offload"):
        translation.set_training("parallelism", "fsdp2", comment="what torchtune's distributed recipes use")
        translation.set_training("cpu_offload", True, "fsdp_cpu_offload")
    _translate_sizes(translation)
    _translate_recomputation(translation)
    compile_names = file.names("torch_compile", "compile")
    compile_value = file.get(*compile_names)
    if isinstance(compile_value, bool | str):
        if compile_value != "auto":
            compile_value = as_bool(compile_value)
        translation.set_training("compile", compile_value, *compile_names)


def _fsdp_settings(translation: Translation) -> dict[str, str]:
    """Return the names of the file's FSDP settings by their names without prefixes, such as version."""
    file = translation.file
    origins: dict[str, str] = {}
    if file.program == "torchtune":
        return origins
    for name, value in file.settings.items():
        if not name.startswith("fsdp") or value in (None, "", [], {}):
            continue
        key = "fsdp" if name == "fsdp" else _PREFIX.sub("", name)
        origins[key] = name
    return origins


def _translate_fsdp(translation: Translation) -> None:
    file = translation.file
    origins = _fsdp_settings(translation)
    flags = file.get("fsdp")
    if flags is False:
        translation.ignore(*origins.values())
        return
    words = flags if isinstance(flags, list) else str(flags or "").replace(",", " ").split()
    values = {key: file.settings[origin] for key, origin in origins.items()}

    def origins_of(*keys: str) -> list[str]:
        """Return the names in the file of those settings that it has."""
        return [origins[key] for key in keys if key in origins]

    # which FSDP
    is_fsdp2 = str(values.get("version", "1")) == "2"
    translation.set_training("parallelism", "fsdp2" if is_fsdp2 else "fsdp", *origins_of("fsdp", "version"))

    # what is sharded
    strategy = _find_sharding_strategy(values, words)
    strategy_origins = origins_of("sharding_strategy", "reshard_after_forward")
    if strategy == "NO_SHARD":
        translation.set_training("parallelism", "ddp", *strategy_origins)
    elif strategy:
        translation.set_training("sharding_strategy", strategy, *strategy_origins)
    if as_bool(values.get("offload_params")) or "offload" in words:
        translation.set_training("cpu_offload", True, *origins_of("offload_params"))

    # how checkpoints are written, layers wrapped and recomputed
    state_dict_type = str(values.get("state_dict_type", "")).upper()
    if state_dict_type == "FULL_STATE_DICT":
        translation.set_training("state_dict_type", "full", origins["state_dict_type"])
    elif state_dict_type == "SHARDED_STATE_DICT":
        translation.set_training("state_dict_type", "sharded", origins["state_dict_type"])
    layer_class = values.get("transformer_layer_cls_to_wrap")
    if isinstance(layer_class, list) and len(layer_class) == 1:
        layer_class = layer_class[0]
    if isinstance(layer_class, str):
        translation.set_training("auto_wrap_policy", layer_class, origins["transformer_layer_cls_to_wrap"])
    if as_bool(values.get("activation_checkpointing")):
        translation.set_training("activation_checkpointing", "full", origins["activation_checkpointing"])
    if "limit_all_gathers" in values and not is_fsdp2:  # fsdp2 has no such limit
        limits_all_gathers = as_bool(values["limit_all_gathers"])
        translation.set_training("limit_all_gathers", limits_all_gathers, origins["limit_all_gathers"])

    # settings that are always so here, and those that are off
    translation.ignore(*origins_of("auto_wrap_policy", "sync_module_states", "use_orig_params"))
    translation.ignore(*origins_of("cpu_ram_efficient_loading", "fsdp"))
    translation.ignore(*[origin for key, origin in origins.items() if values[key] is False])


def _find_sharding_strategy(values: dict[str, Any], words: Sequence[Any]) -> str | None:
    """Return the sharding strategy; None if the file does not have it.

    ``reshard_after_forward`` may be the name of a strategy, which overrides ``sharding_strategy``, or a bool, which
    only overrides the ``words`` of the setting fsdp.
    """
    named_strategy = _STRATEGIES.get(str(values.get("sharding_strategy", "")).lower())
    reshard_after_forward = values.get("reshard_after_forward")
    if reshard_after_forward is not None:
        named_strategy = _STRATEGIES.get(str(reshard_after_forward).lower(), named_strategy)
    if named_strategy:
        return named_strategy
    if reshard_after_forward is not None:
        return "FULL_SHARD" if as_bool(reshard_after_forward) else "SHARD_GRAD_OP"
    for word in words:
        if str(word).lower() in _STRATEGIES:
            return _STRATEGIES[str(word).lower()]
    return None


def _translate_deepspeed(translation: Translation) -> None:
    """Translate the ZeRO stage of a DeepSpeed configuration: a mapping, a file, or the name of a missing file."""
    config = translation.file.get("deepspeed")
    stage, offloads = _read_zero_stage(config)
    if stage is None:
        advice = "its stage is unknown: 2 is sharding_strategy SHARD_GRAD_OP, 3 is FULL_SHARD, of --parallelism fsdp"
        translation.leave_out(advice, "deepspeed")
        translation.notes.append(f"deepspeed: {config}: {advice}")
        return
    if stage == 0:
        translation.set_training("parallelism", "ddp", "deepspeed", comment="ZeRO 0")
        return
    translation.set_training("parallelism", "fsdp", "deepspeed", comment=f"ZeRO {stage}")
    strategy = "FULL_SHARD" if stage == 3 else "SHARD_GRAD_OP"
    words = f"ZeRO {stage}"
    if stage == 1:
        words += " shards optimizer states only; the closest strategy here also shards gradients"
    translation.set_training("sharding_strategy", strategy, "deepspeed", comment=words)
    if offloads:
        translation.set_training("cpu_offload", True, "deepspeed")


def _read_zero_stage(config: Any) -> tuple[int | None, bool]:
    """Return the ZeRO stage of a DeepSpeed configuration, and whether parameters or optimizer states are offloaded.

    The stage is None if it is unknown.
    """
    if isinstance(config, str) and Path(config).is_file():
        try:
            config = json.loads(Path(config).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            config = Path(config).name

    if isinstance(config, dict):
        zero = config.get("zero_optimization")
        if not isinstance(zero, dict):
            return 0, False
        stage = zero.get("stage", 0)
        offloads = False
        for name in ("offload_param", "offload_optimizer"):
            offload = zero.get(name)
            if isinstance(offload, dict) and offload.get("device") not in (None, "none"):
                offloads = True
        return stage if stage in (0, 1, 2, 3) else None, offloads

    # The file is missing or cannot be read, but names such as zero3_offload.json say enough.
    file_name = Path(str(config)).name.lower()
    match = re.search(r"(?:zero|z|stage)[_-]?([0-3])", file_name)
    stage = int(match[1]) if match else None
    return stage, "offload" in file_name or "cpu" in file_name


def _translate_sizes(translation: Translation) -> None:
    """Translate the sizes of tensor and context parallelism; 1 means off."""
    file = translation.file
    sizes = {
        "tensor_parallel_size": ("tensor_parallel_size", "tensor_parallel_dim", "tensor_model_parallel_size"),
        "context_parallel_size": ("context_parallel_size", "sequence_parallel_degree", "context_parallel_dim"),
    }
    for argument, keys in sizes.items():
        size = translation.number(*keys)
        if size is not None and size > 1:
            translation.set_training(argument, int(size), *file.names(*keys))
            translation.set_training("parallelism", "fsdp2", comment=f"{argument} needs it")
        else:
            translation.ignore(*file.names(*keys))


def _translate_recomputation(translation: Translation) -> None:
    """Translate what is recomputed in the backward pass, and whether stored activations are moved to host memory."""
    file = translation.file
    names = file.names("gradient_checkpointing", "enable_activation_checkpointing", "disable_gradient_checkpointing")
    value = file.get("gradient_checkpointing", "enable_activation_checkpointing")
    offload_names = file.names("activation_offloading", "enable_activation_offloading")
    offloads = file.is_on("activation_offloading", "enable_activation_offloading") or value in ("offload", "unsloth")

    # LLaMA-Factory and TRL recompute unless their files turn it off.
    recomputes = as_bool(value) or value in ("offload", "unsloth")
    if file.program == "llama-factory" and "gradient_checkpointing" not in file.settings:
        recomputes = not file.is_on("disable_gradient_checkpointing")
    if file.program == "trl" and value is None:
        recomputes = True

    is_set_by_fsdp = "activation_checkpointing" in translation.training
    if recomputes or offloads or is_set_by_fsdp:
        comment = "" if names or is_set_by_fsdp else "its default"
        translation.set_training("activation_checkpointing", "full", *names, comment=comment)
    elif names or file.program in ("axolotl", "torchtune"):
        comment = "" if names else "its default"
        translation.set_training("activation_checkpointing", "none", *names, comment=comment)
    if offloads:
        translation.set_training("activation_offload", True, *offload_names)
    else:
        translation.ignore(*offload_names)
    nested = [name for name in file.settings if name.startswith("gradient_checkpointing_kwargs")]
    translation.ignore(*nested, *file.names("use_reentrant_gc"))
