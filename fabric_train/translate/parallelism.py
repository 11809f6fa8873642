"""Translate how a model is divided among devices, and what is recomputed or moved to save memory."""

import json
import re
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
        translation.train("parallelism", "fsdp2", comment="what torchtune's distributed recipes use")
        translation.train("cpu_offload", True, "fsdp_cpu_offload")
    _translate_sizes(translation)
    _translate_recomputation(translation)
    compiles = file.names("torch_compile", "compile")
    if compiles and isinstance(file.get(*compiles), bool | str):
        value = file.get(*compiles)
        translation.train("compile", value if value == "auto" else as_bool(value), *compiles)


def _fsdp_settings(translation: Translation) -> dict[str, str]:
    """Return the names of the file's FSDP settings by their name without prefixes."""
    file = translation.file
    named: dict[str, str] = {}
    if file.program == "torchtune":
        return named
    for name, value in file.settings.items():
        if value in (None, "", [], {}) or not name.startswith(("fsdp", "fsdp_config.")):
            continue
        named["fsdp" if name == "fsdp" else _PREFIX.sub("", name)] = name
    return named


def _translate_fsdp(translation: Translation) -> None:
    file = translation.file
    named = _fsdp_settings(translation)
    flags = file.get("fsdp")
    words = flags if isinstance(flags, list) else str(flags or "").replace(",", " ").split()
    if flags is False:
        translation.ignore(*named.values())
        return
    values = {name: file.settings[origin] for name, origin in named.items()}
    is_second = str(values.get("version", "1")) == "2"
    translation.train(
        "parallelism", "fsdp2" if is_second else "fsdp", *[named[key] for key in ("fsdp", "version") if key in named]
    )
    strategy = next((_STRATEGIES[word] for word in map(str.lower, map(str, words)) if word in _STRATEGIES), None)
    named_strategy = _STRATEGIES.get(str(values.get("sharding_strategy", "")).lower())
    reshards = values.get("reshard_after_forward")
    if reshards is not None and str(reshards).lower() in _STRATEGIES:
        named_strategy = _STRATEGIES[str(reshards).lower()]
    elif reshards is not None:
        strategy = "FULL_SHARD" if as_bool(reshards) else "SHARD_GRAD_OP"
    origins = [named[key] for key in ("sharding_strategy", "reshard_after_forward") if key in named]
    chosen = named_strategy or strategy
    if chosen == "NO_SHARD":
        translation.train("parallelism", "ddp", *origins)
        chosen = None
    if chosen:
        translation.train("sharding_strategy", chosen, *origins)
    if as_bool(values.get("offload_params")) or "offload" in words:
        translation.train("cpu_offload", True, *[named[key] for key in ("offload_params",) if key in named])
    kind = str(values.get("state_dict_type", "")).upper()
    if kind in ("FULL_STATE_DICT", "SHARDED_STATE_DICT"):
        translation.train(
            "state_dict_type", "full" if kind == "FULL_STATE_DICT" else "sharded", named["state_dict_type"]
        )
    layer = values.get("transformer_layer_cls_to_wrap")
    if isinstance(layer, list) and len(layer) == 1:
        layer = layer[0]
    if isinstance(layer, str):
        translation.train("auto_wrap_policy", layer, named["transformer_layer_cls_to_wrap"])
    if as_bool(values.get("activation_checkpointing")):
        translation.train("activation_checkpointing", "full", named["activation_checkpointing"])
    if "limit_all_gathers" in values and not is_second:
        translation.train("limit_all_gathers", as_bool(values["limit_all_gathers"]), named["limit_all_gathers"])
    # what follows from the strategy here
    done = ("auto_wrap_policy", "sync_module_states", "use_orig_params", "cpu_ram_efficient_loading", "fsdp")
    translation.ignore(*[named[key] for key in done if key in named])
    translation.ignore(*[origin for key, origin in named.items() if values[key] is False])


def _translate_deepspeed(translation: Translation) -> None:
    """Translate the ZeRO stage of a DeepSpeed configuration: a mapping, a file, or the name of one elsewhere."""
    given = translation.file.get("deepspeed")
    stage, offloads = _stage_of(given)
    if stage is None:
        advice = (
            "its stage is not known here: 2 is sharding_strategy SHARD_GRAD_OP, 3 is FULL_SHARD, of --parallelism fsdp"
        )
        translation.leave_out(advice, "deepspeed")
        translation.notes.append(f"deepspeed: {given}: {advice}")
        return
    if stage == 0:
        translation.train("parallelism", "ddp", "deepspeed", comment="ZeRO 0")
        return
    translation.train("parallelism", "fsdp", "deepspeed", comment=f"ZeRO {stage}")
    strategy = "FULL_SHARD" if stage == 3 else "SHARD_GRAD_OP"
    words = f"ZeRO {stage}"
    if stage == 1:
        words += " divides optimizer states only; the nearest one here divides gradients too"
    translation.train("sharding_strategy", strategy, "deepspeed", comment=words)
    if offloads:
        translation.train("cpu_offload", True, "deepspeed")


def _stage_of(given: Any) -> tuple[int | None, bool]:
    """Return the ZeRO stage and whether parameters or optimizer states are offloaded; None if the stage is unknown."""
    if isinstance(given, str) and Path(given).is_file():
        try:
            given = json.loads(Path(given).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            given = Path(given).name
    if isinstance(given, dict):
        zero = given.get("zero_optimization")
        if not isinstance(zero, dict):
            return 0, False
        stage = zero.get("stage", 0)
        devices = [zero.get(name) for name in ("offload_param", "offload_optimizer")]
        offloads = any(isinstance(one, dict) and one.get("device") not in (None, "none") for one in devices)
        return (stage if stage in (0, 1, 2, 3) else None), offloads
    name = Path(str(given)).name.lower()
    found = re.search(r"(?:zero|z|stage)[_-]?([0-3])", name)
    return (int(found[1]) if found else None), "offload" in name or "cpu" in name


def _translate_sizes(translation: Translation) -> None:
    file = translation.file
    sizes = {
        "tensor_parallel_size": ("tensor_parallel_size", "tensor_parallel_dim", "tensor_model_parallel_size"),
        "context_parallel_size": ("context_parallel_size", "sequence_parallel_degree", "context_parallel_dim"),
    }
    for argument, keys in sizes.items():
        size = translation.number(*keys)
        if size is not None and size > 1:
            translation.train(argument, int(size), *file.names(*keys))
            translation.train("parallelism", "fsdp2", comment=f"{argument} needs it")
        else:
            translation.ignore(*file.names(*keys))


def _translate_recomputation(translation: Translation) -> None:
    """Translate what is recomputed in the backward pass, and whether what is stored is moved to host memory."""
    file = translation.file
    names = file.names("gradient_checkpointing", "enable_activation_checkpointing", "disable_gradient_checkpointing")
    values = file.get("gradient_checkpointing", "enable_activation_checkpointing")
    offload_names = file.names("activation_offloading", "enable_activation_offloading")
    offloads = file.is_on("activation_offloading", "enable_activation_offloading") or values in ("offload", "unsloth")
    is_on = as_bool(values) or values in ("offload", "unsloth")
    if file.program == "llama-factory" and "gradient_checkpointing" not in file.settings:
        is_on = not file.is_on("disable_gradient_checkpointing")
    if file.program == "trl" and values is None:
        is_on = True
    already = translation.training.get("activation_checkpointing")
    if is_on or offloads or already:
        translation.train("activation_checkpointing", "full", *names, comment="" if names or already else "its default")
    elif names or file.program in ("axolotl", "torchtune"):
        translation.train("activation_checkpointing", "none", *names, comment="" if names else "its default")
    if offloads:
        translation.train("activation_offload", True, *offload_names)
    else:
        translation.ignore(*offload_names)
    nested = [name for name in file.settings if name.startswith("gradient_checkpointing_kwargs")]
    translation.ignore(*nested, *file.names("use_reentrant_gc"))
