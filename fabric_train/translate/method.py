"""Translate what is trained, and with which loss: objective, model, precision, adapter and 4-bit weights."""

from pathlib import PurePath
from typing import Any

from fabric_train.arguments import UNPAIRED_OBJECTIVES, TrainArguments
from fabric_train.cli.argument_types import types_of
from fabric_train.cli.errors import InputError
from fabric_train.translate.foreign_file import ForeignFile, as_bool
from fabric_train.translate.translation import Translation, takes_value

_OBJECTIVES = {
    "sigmoid": "dpo",
    "dpo": "dpo",
    "sigmoid_norm": "dpo",
    "ipo": "ipo",
    "simpo": "simpo",
    "orpo": "orpo",
    "apo_zero": "apo_zero",
    "kto": "kto",
    "apo_zero_unpaired": "apo_zero_unpaired",
}
"""Our objective, by the name of a preference loss."""
_PREFERENCES = "dpo, ipo, simpo, orpo, apo_zero, dpop, kto and apo_zero_unpaired"
_KTO_WEIGHTS = {
    "kto_desirable_weight": ("desirable_weight", "kto_desirable_weight", "kto_chosen_weight"),
    "kto_undesirable_weight": ("undesirable_weight", "kto_undesirable_weight", "kto_rejected_weight"),
}
"""The settings that weigh the losses of both kinds of unpaired answers, by our argument: TRL's, axolotl's,
LLaMA-Factory's.
"""
_LOSSES_OF_TORCHTUNE = {"DPOLoss": "dpo", "SimPOLoss": "simpo"}
_OTHER_LOSSES_OF_TORCHTUNE = ("RSOLoss", "PPOLoss", "GRPO", "ForwardKL", "ReverseKL", "SymmetricKL", "JensenShannon")
_BETA_NAMES = ("trl.beta", "rl_beta", "dpo_beta", "beta", "pref_beta", "loss.beta", "orpo_alpha")
_SMOOTHING_NAMES = ("dpo_label_smoothing", "label_smoothing", "loss.label_smoothing")
_CROSS_ENTROPY_NAMES = ("rpo_alpha", "pref_ftx", "cpo_alpha")
"""The settings with the weight of the chosen answers' cross entropy."""
_KEYS_OF_PAIRS = (
    *("beta", "max_prompt_length", "max_prompt_len", "precompute_ref_log_probs", "ref_model", "sync_ref_model"),
    *("f_divergence_type", "rpo_alpha", "disable_dropout", "loss_weights", "dataset_splits"),
)
"""Settings that only TRL's DPO files have; TRL itself gets the trainer from the command line."""
_OTHER_TRAINERS = {
    "reward_funcs": "GRPO or RLOO",
    "num_generations": "GRPO or RLOO",
    "center_rewards_coefficient": "a reward model",
    "reward_model_path": "PPO",
    "kl_coef": "PPO",
    "diffusion": "a diffusion model",
    "reward_model": "a reward model",
    "process_reward_model": "a reward model",
    "kd_trainer": "distillation from stored log-probabilities",
    "kd_temperature": "distillation from stored log-probabilities",
    "kd_alpha": "distillation from stored log-probabilities",
}
_KEYS_OF_DISTILLATION = ("teacher_model_name_or_path", "lmbda", "seq_kd")
"""Settings that only TRL's GKD files have."""
_MLP = ("gate_proj", "up_proj", "down_proj")
_TARGETS_OF_TORCHTUNE = {"output_proj": "o_proj", "w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
TRAINING_TYPES = types_of(TrainArguments)
_LORA_DEFAULTS: dict[str, dict[str, Any]] = {
    "axolotl": {"lora_dropout": 0.0},
    "trl": {"lora_rank": 16, "lora_alpha": 32.0, "lora_dropout": 0.05},
    "llama-factory": {"lora_rank": 8, "lora_dropout": 0.0},
    "torchtune": {"lora_rank": 8, "lora_alpha": 16.0, "lora_dropout": 0.0},
}
_RANK_NAMES = ("lora_r", "lora_rank", "model.lora_rank")
_ALPHA_NAMES = ("lora_alpha", "model.lora_alpha")
_DROPOUT_NAMES = ("lora_dropout", "model.lora_dropout")
_OF_ADAPTERS = (
    *("lora_r", "lora_alpha", "lora_rank", "lora_dropout", "lora_target", "lora_target_linear", "lora_target_modules"),
    *("lora_modules_to_save", "lora_fan_in_fan_out", "lora_model_dir", "peft_use_dora", "peft_use_rslora", "use_dora"),
    *("use_rslora", "additional_target", "loraplus_lr_ratio", "loraplus_lr_embedding", "lora_task_type"),
)
_DOUBLE_QUANTIZATION = (
    *("use_bnb_nested_quant", "double_quantization"),
    *("bnb_4bit_use_double_quant", "bnb_config_kwargs.bnb_4bit_use_double_quant"),
)


def translate_method(translation: Translation) -> str:
    """Translate objective, model, adapter and precision; return the objective."""
    objective = _translate_objective(translation)
    _translate_model(translation)
    trains_adapter = _translate_adapter(translation)
    _translate_precision(translation, trains_adapter)
    return objective


def _translate_objective(translation: Translation) -> str:
    file = translation.file
    _refuse_other_trainers(file)
    objective, origins = _objective_of(translation)
    if objective == "sft":
        translation.ignore(*origins)
        return objective
    translation.set_training("objective", objective, *origins)
    if objective == "distill":
        _translate_distillation(translation)
        return objective
    if "sigmoid_norm" in translation.texts("loss_type"):
        translation.set_training("length_normalised", True, "loss_type")
    beta = translation.number(*_BETA_NAMES)
    if beta is not None:
        translation.set_training("dpo_beta", beta, *file.names(*_BETA_NAMES))
    elif file.program == "torchtune" and objective == "simpo":
        translation.set_default("dpo_beta", 2.0)
    else:
        translation.set_default("dpo_beta", 0.1)
    if objective in UNPAIRED_OBJECTIVES:
        _translate_weights_of_answers(translation)
    _translate_extras_of_pairs(translation, objective)
    return objective


def _refuse_other_trainers(file: ForeignFile) -> None:
    """Raise an InputError for a file with a training method that this project does not have."""
    methods = f"this project trains with cross entropy, {_PREFERENCES}, and distils with --objective distill"
    for name, trainer in _OTHER_TRAINERS.items():
        for setting, value in file.settings.items():
            if setting.split(".")[0] == name and value not in (None, False):
                raise InputError(f"{file.path}: {name} is for {trainer}, but {methods}")
    if file.program != "torchtune":
        return
    component = str(file.settings.get("loss._component_", ""))
    if any(loss in component for loss in _OTHER_LOSSES_OF_TORCHTUNE):
        raise InputError(f"{file.path}: loss._component_ {component} is for another training method, but {methods}")
    for name in file.settings:
        if name.split(".")[0] in ("kd_loss", "teacher_model", "policy_model", "reward_and_value_model", "num_classes"):
            raise InputError(f"{file.path}: {name} is for another training method, but {methods}")


def _objective_of(translation: Translation) -> tuple[str, tuple[str, ...]]:
    """Return the objective of a file, and the settings from which it follows."""
    file = translation.file
    if file.program == "axolotl":
        loss = file.get("rl")
        if loss in (None, False, ""):
            return "sft", ("rl",)
        return _named_objective(translation, "rl", str(loss)), ("rl",)
    if file.program == "llama-factory":
        stage = file.get("stage") or "sft"
        if stage in ("sft", "pt"):
            return "sft", ("stage",)
        if stage == "kto":
            return "kto", ("stage",)
        if stage != "dpo":
            raise translation.fault("stage", "this project trains the stages pt, sft, dpo and kto")
        loss = file.get("pref_loss") or "sigmoid"
        return _named_objective(translation, "pref_loss", str(loss)), ("stage", "pref_loss")
    if file.program == "torchtune":
        component = str(file.get("loss._component_") or "").rpartition(".")[2]
        return _LOSSES_OF_TORCHTUNE.get(component, "sft"), ("loss._component_",)
    return _objective_of_trl(translation)


def _objective_of_trl(translation: Translation) -> tuple[str, tuple[str, ...]]:
    """Return the objective of a TRL file, which names the loss but not the trainer."""
    file = translation.file
    losses = [loss for loss in translation.texts("loss_type") if loss not in ("nll", "sft", "chunked_nll")]
    if len(losses) > 1:
        raise translation.fault(
            "loss_type", "this project uses one preference loss at a time; keep only one in the file"
        )
    if losses:
        return _named_objective(translation, "loss_type", losses[0]), ("loss_type",)
    if file.names(*_KEYS_OF_DISTILLATION):
        return "distill", ("loss_type",)
    if file.names("desirable_weight", "undesirable_weight"):
        return "kto", ("loss_type",)  # only files of KTO have these
    pair_names = file.names(*_KEYS_OF_PAIRS)
    text_names = file.names("assistant_only_loss", "completion_only_loss", "packing", "dataset_text_field")
    if pair_names and not text_names:
        translation.notes.append(
            f"{', '.join(pair_names)}: assuming a file for trl dpo; if it is for trl orpo, write objective: orpo"
        )
        return "dpo", ("loss_type",)
    return "sft", ("loss_type",)


def _named_objective(translation: Translation, name: str, loss: str) -> str:
    objective = _OBJECTIVES.get(loss.lower())
    if objective is None:
        raise translation.fault(name, f"this project has the preference losses {_PREFERENCES}")
    return objective


def _translate_distillation(translation: Translation) -> None:
    """Translate a file of TRL's GKD, which may also train on the student's own answers.

    Raises:
        InputError: the student would train on answers of its own or of the teacher, or the file names no teacher.
    """
    file = translation.file
    advice = "this project distils on the answers of the dataset; "
    own_share = translation.number("lmbda")
    if own_share is None:
        raise InputError(f"{file.path}: lmbda is 0.5 by default, but {advice}set lmbda: 0")
    if own_share:
        raise translation.fault("lmbda", f"{advice}set it to 0")
    if file.is_on("seq_kd"):
        raise translation.fault("seq_kd", f"{advice}set it to false")
    teacher = file.get("teacher_model_name_or_path")
    if not isinstance(teacher, str):
        raise InputError(f"{file.path}: it names no teacher; set teacher_model_name_or_path")
    translation.set_training("teacher", teacher, "teacher_model_name_or_path")

    # TRL interpolates between both divergences. Its temperature is that of the student's own answers.
    beta = translation.number("beta")
    beta_names = file.names("beta")
    if beta == 0:
        translation.set_training("divergence", "forward_kl", *beta_names)
    elif beta == 1:
        translation.set_training("divergence", "reverse_kl", *beta_names)
    else:
        translation.set_training("divergence", "jsd", *beta_names)
        translation.set_training("jsd_beta", 0.5 if beta is None else beta, *beta_names)
    translation.ignore(*file.names("lmbda", "seq_kd", "temperature", "max_new_tokens", "disable_dropout"))


def _translate_weights_of_answers(translation: Translation) -> None:
    """Translate the factors of the losses of desirable and undesirable answers."""
    for argument, names in _KTO_WEIGHTS.items():
        weight = translation.number(*names)
        if weight is not None:
            translation.set_training(argument, weight, *translation.file.names(*names))


def _translate_extras_of_pairs(translation: Translation, objective: str) -> None:
    """Translate label smoothing, the weight of cross entropy, SimPO's margin and the reference model."""
    file = translation.file

    # label smoothing
    smoothing = translation.number(*_SMOOTHING_NAMES)
    smoothing_names = file.names(*_SMOOTHING_NAMES)
    if smoothing and objective in ("dpo", "simpo"):
        translation.set_training("label_smoothing", smoothing, *smoothing_names)
    elif smoothing:
        translation.leave_out(f"--objective {objective} has no label smoothing", *smoothing_names)
    else:
        translation.ignore(*smoothing_names)

    # the weight of the cross entropy of the chosen answers, which TRL may list as a loss of its own, sft
    weight_names = file.names(*_CROSS_ENTROPY_NAMES)
    weight = translation.number(*_CROSS_ENTROPY_NAMES)
    losses = translation.texts("loss_type")
    if "sft" in losses:
        weights = file.get("loss_weights") or [1.0] * len(losses)
        if not isinstance(weights, list) or len(weights) != len(losses):
            raise translation.fault("loss_weights", "expected a number for each loss_type")
        weight = translation.as_number("loss_weights", weights[losses.index("sft")])
        weight_names = ["loss_type", "loss_weights"]
    if weight and objective in UNPAIRED_OBJECTIVES:
        translation.leave_out(f"--objective {objective} adds no cross entropy", *weight_names)
    elif weight and objective == "orpo":
        translation.leave_out("--objective orpo has the cross entropy with factor 1", *weight_names)
    elif weight:
        translation.set_training("sft_weight", weight, *weight_names)
    elif objective == "simpo" and file.program == "axolotl":
        translation.set_default("sft_weight", 1.0, "TRL's cpo_alpha")

    # SimPO's margin
    margin_names = file.names("simpo_gamma", "loss.gamma")
    if objective == "simpo":
        margin = translation.number("simpo_gamma", "loss.gamma")
        if margin is not None:
            translation.set_training("simpo_gamma", margin, *margin_names)
    else:
        translation.ignore(*margin_names)

    # the reference model, for objectives that compare with one
    reference = file.get("ref_model")
    if reference and objective in ("dpo", "ipo", "apo_zero", *UNPAIRED_OBJECTIVES):
        translation.set_training("reference", reference, "ref_model")


def _translate_model(translation: Translation) -> None:
    file = translation.file
    names = ("base_model", "model_name_or_path", "checkpointer.checkpoint_dir", "model")
    model = file.get(*names)
    if not isinstance(model, str):
        raise InputError(f"{file.path}: it does not name the model to train; set {' or '.join(names[:3])}")
    translation.set_training("model_name", model, *file.names(*names))

    # a revision on the hub
    revision = file.get("model_revision", "revision_of_model")
    if revision not in (None, "main"):
        folder = f"models/{PurePath(model).name}"
        advice = f"fabric-train download --model_name {model} --revision {revision} --output_dir {folder}"
        words = f"download it first, and give the folder as model_name: {advice}"
        translation.leave_out(words, "model_revision", "revision_of_model")
    else:
        translation.ignore(*file.names("model_revision", "revision_of_model"))

    # random weights
    from_scratch_names = [name for name in ("reinit_weights", "train_from_scratch") if file.is_on(name)]
    if from_scratch_names:
        advice = (
            "--from_scratch FAMILY with the model's sizes starts from random weights; this starts from the model's "
            "weights"
        )
        translation.leave_out(advice, *from_scratch_names)
        translation.notes.append(f"{from_scratch_names[0]}: {advice}")

    # what the model's folder says itself
    translation.ignore(*file.names("base_model_config", "tokenizer_type", "checkpointer.model_type"))
    if file.program != "llama-factory":
        translation.ignore(*file.names("model_type"))
    _translate_attention(translation)


def _translate_attention(translation: Translation) -> None:
    """Translate the implementation of attention: a value, or one of axolotl's switches for each implementation."""
    file = translation.file
    switches = {
        "flash_attention": "flash_attention_2",
        "sdp_attention": "sdpa",
        "eager_attention": "eager",
        "flex_attention": "flex_attention",
    }
    attention_by_name = {name: file.get(name) for name in file.names("attn_implementation", "flash_attn")}
    if file.program == "axolotl":
        attention_by_name |= {name: value for name, value in switches.items() if file.is_on(name)}
    for name, value in attention_by_name.items():
        if value in ("auto", "disabled"):
            translation.ignore(name)
        elif takes_value("attention", value):
            translation.set_training("attention", value, name)
        else:
            translation.leave_out("attention is sdpa, flash_attention_2, flex_attention or eager", name)


def _translate_adapter(translation: Translation) -> bool:
    """Translate the adapter and its frozen weights; return whether an adapter trains."""
    file = translation.file
    is_adapter, origins = _adapter_of(translation)
    if not is_adapter:
        translation.ignore(*origins, *file.names(*_OF_ADAPTERS))
        if file.is_on("load_in_4bit", "load_in_8bit") or file.get("quantization_bit"):
            reason = "frozen weights in 4 bits need an adapter here: --adapter lora"
            translation.leave_out(reason, *file.names("load_in_4bit", "load_in_8bit", "quantization_bit"))
        return False
    dora_names = ("use_dora", "peft_use_dora", "model.use_dora")
    kind = "dora" if file.is_on(*dora_names) else "lora"
    translation.set_training("adapter", kind, *origins, *file.names(*dora_names))

    # the type of the frozen weights
    component = str(file.settings.get("model._component_", ""))
    if _is_in_4_bits(file, component):
        origins_of_bits = file.names("load_in_4bit", "quantization_bit", "model.quantize_base", "adapter")
        origins_of_scales = file.names(*_DOUBLE_QUANTIZATION)
        comment = "" if origins_of_bits else "model._component_"  # torchtune's qlora_… models
        base_weights = "nf4_double" if _has_double_quantization(file) else "nf4"
        translation.set_training("base_weights", base_weights, *origins_of_bits, *origins_of_scales, comment=comment)
    elif file.is_on("load_in_8bit") or file.get("quantization_bit") is not None:
        reason = "the frozen weights are in bfloat16 here, which takes more memory; --base_weights nf4 takes less"
        translation.leave_out(reason, *file.names("load_in_8bit", "quantization_bit"))
    _translate_quantization(translation)

    # the adapter itself: its size, where it is, and what it begins with
    _translate_rank(translation)
    _translate_targets(translation)
    if file.is_on("use_rslora", "peft_use_rslora"):
        rslora_names = file.names("use_rslora", "peft_use_rslora")
        translation.set_training("lora_rslora", True, *rslora_names)
    full_module_names = file.names("lora_modules_to_save", "additional_target")
    if full_module_names:
        full_modules = translation.texts(full_module_names[0])
        translation.set_training("train_also", full_modules, *full_module_names)
    init_names = file.names("lora_model_dir", "adapter_name_or_path")
    if init_names:
        translation.set_training("init_adapter", file.get(*init_names), *init_names)
        translation.notes.append("init_adapter: rank, alpha and targets come from that adapter")
    _translate_lora_plus(translation)
    translation.ignore(*file.names("lora_task_type", "lora_fan_in_fan_out", "peft.lora_fan_in_fan_out"))
    return True


def _is_in_4_bits(file: ForeignFile, component: str) -> bool:
    """Return whether the frozen weights are in 4 bits; ``component`` is torchtune's model."""
    if file.is_on("load_in_4bit", "model.quantize_base") or file.get("quantization_bit") == 4:
        return True
    return file.get("adapter") == "qlora" or ".qlora_" in component


def _has_double_quantization(file: ForeignFile) -> bool:
    """Return whether the scales of 4-bit weights are quantized too. TRL does not do it unless the file asks for it."""
    if file.get(*_DOUBLE_QUANTIZATION) is None:
        return file.program != "trl"
    return file.is_on(*_DOUBLE_QUANTIZATION)


def _adapter_of(translation: Translation) -> tuple[bool, tuple[str, ...]]:
    """Return whether a file trains LoRA or DoRA, and the settings from which this follows."""
    file = translation.file
    if file.program == "axolotl":
        adapter = file.get("adapter")
        if adapter not in (None, "", "lora", "qlora"):
            raise translation.fault("adapter", "this project has the adapters lora and dora")
        return bool(adapter), ("adapter",)
    if file.program == "llama-factory":
        kind = file.get("finetuning_type") or "lora"
        if kind == "freeze":
            why = "name the trained layers: --train_only 'layers.(30|31)'; without it, all weights are trained"
            translation.leave_out(why, "finetuning_type")
        elif kind not in ("lora", "full"):
            raise translation.fault("finetuning_type", "this project trains lora or all weights (full)")
        return kind == "lora", ("finetuning_type",)
    if file.program == "torchtune":
        component = str(file.get("model._component_") or "")
        model = component.rpartition(".")[2]
        translation.ignore("model._component_")
        return model.startswith(("lora_", "qlora_", "dora_", "qdora_")), ("model._component_",)
    return file.is_on("use_peft"), ("use_peft",)


def _translate_quantization(translation: Translation) -> None:
    file = translation.file
    kind = file.names("bnb_4bit_quant_type", "bnb_config_kwargs.bnb_4bit_quant_type", "quantization_type")
    for name in kind:
        if file.get(name) == "nf4":
            translation.ignore(name)
        else:
            translation.leave_out("this project has the 4-bit type nf4", name)
    method = file.get("quantization_method")
    if method in ("bnb", "bitsandbytes"):
        translation.ignore("quantization_method")


def _translate_rank(translation: Translation) -> None:
    """Translate rank, alpha and dropout of LoRA, or set the other program's defaults."""
    file = translation.file
    rank = translation.whole_number(*_RANK_NAMES)
    if rank is not None:
        translation.set_training("lora_rank", rank, *file.names(*_RANK_NAMES))
    alpha = translation.number(*_ALPHA_NAMES)
    if alpha is not None:
        translation.set_training("lora_alpha", alpha, *file.names(*_ALPHA_NAMES))
    dropout = translation.number(*_DROPOUT_NAMES)
    if dropout is not None:
        translation.set_training("lora_dropout", dropout, *file.names(*_DROPOUT_NAMES))

    for argument, value in _LORA_DEFAULTS[file.program].items():
        translation.set_default(argument, value)
    if file.program == "llama-factory":
        rank_here = translation.training["lora_rank"].value
        translation.set_default("lora_alpha", 2.0 * rank_here, "twice the rank")


def _translate_targets(translation: Translation) -> None:
    file = translation.file
    if file.program == "torchtune":
        _translate_targets_of_torchtune(translation)
        return
    names = file.names("lora_target_linear", "lora_target_modules", "lora_target")
    targets: list[str] = []
    for name in file.names("lora_target_modules", "lora_target"):
        value = file.get(name)
        if isinstance(value, str) and any(char in value for char in "\\|*[]()^$"):
            targets.append(value)  # a regular expression, which is not divided at its commas
        else:
            targets += translation.texts(name)
    if file.is_on("lora_target_linear") or targets in (["all"], ["all-linear"]):
        translation.set_training("lora_targets", ["all-linear"], *names)
    elif targets:
        translation.set_training("lora_targets", targets, *names)
    elif file.program == "llama-factory":
        translation.set_default("lora_targets", ["all-linear"])
    else:
        translation.set_default(
            "lora_targets", ["q_proj", "v_proj"], "peft's choice for Llama; other families have others"
        )


def _translate_targets_of_torchtune(translation: Translation) -> None:
    file = translation.file
    names = file.names("model.lora_attn_modules", "model.apply_lora_to_mlp", "model.apply_lora_to_output")
    targets = [_TARGETS_OF_TORCHTUNE.get(name, name) for name in translation.texts("model.lora_attn_modules")]
    if file.is_on("model.apply_lora_to_mlp"):
        targets += _MLP
    if file.is_on("model.apply_lora_to_output"):
        targets.append("lm_head")
    translation.set_training("lora_targets", targets or ["all-linear"], *names)


def _translate_lora_plus(translation: Translation) -> None:
    """Translate LoRA+, in which B has its own learning rate, given by its ratio to A's."""
    ratio = translation.number("loraplus_lr_ratio")
    if ratio is None:
        translation.ignore("loraplus_lr_embedding")  # counts only with the ratio
        return
    lr = translation.number("learning_rate")
    if lr is not None:
        lr_of_b = f"lora_B={ratio * lr:g}"
        translation.set_training("lr_of", [lr_of_b], "loraplus_lr_ratio", comment="the ratio times lr")


def _translate_precision(translation: Translation, trains_adapter: bool) -> None:
    """Translate the types of weights and matrix products.

    The programs differ in whether weights are kept in fp32 with ``bf16: true``: axolotl and TRL load the model in the
    type that the file names, LLaMA-Factory keeps trained weights in fp32, and DeepSpeed keeps fp32 copies of the
    weights.
    """
    file = translation.file
    names = file.names("bf16", "fp16", "bfloat16", "float16", "pure_bf16", "dtype", "torch_dtype", "tf32")
    dtype = str(file.get("dtype", "torch_dtype") or "").removeprefix("torch.")
    uses_16_bits = file.is_on("fp16", "float16") or dtype in ("float16", "fp16")
    uses_bf16 = file.is_on("bf16", "bfloat16", "pure_bf16") or dtype in ("bfloat16", "bf16")
    if file.program == "trl" and not uses_16_bits and file.get("bf16") is None:
        uses_bf16 = True  # its default
    if "tf32" in names:
        translation.ignore("tf32")
        names.remove("tf32")
    if uses_16_bits and not uses_bf16:
        translation.set_training("precision", "16-mixed", *names)
        return
    if not uses_bf16:
        comment = "" if names else "no bf16"  # names of the file say it themselves
        translation.set_training("precision", "32-true", *names, comment=comment)
        return
    if not trains_adapter and _keeps_fp32_weights(file, dtype):
        translation.set_training("precision", "bf16-mixed", *names, comment="trained weights stay in fp32 there")
    else:
        translation.set_training("precision", "bf16-true", *names)


def _keeps_fp32_weights(file: ForeignFile, dtype: str) -> bool:
    """Return whether a program keeps trained weights in fp32 with bf16 matrix products; ``dtype`` is the model's."""
    if file.is_on("pure_bf16"):
        return False
    if file.get("deepspeed") and not as_bool(file.get("bfloat16")):
        return True
    if file.program == "llama-factory":
        return True
    return file.program == "trl" and dtype in ("", "float32", "fp32")


def run_name_of(translation: Translation) -> str:
    """Return a short name for folders, from the run's output folder or the model's name."""
    output = translation.training.get("output_dir")
    name = output.value if output else translation.training["model_name"].value
    return PurePath(str(name)).name or "translated"
