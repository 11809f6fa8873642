"""Written by python -m tests.api_stub from the classes of arguments: do not edit."""

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

from fabric_train.api import ConvertResult as ConvertResult
from fabric_train.api import Export as Export
from fabric_train.api import Run as Run
from fabric_train.api import TokenizeResult as TokenizeResult
from fabric_train.api import TrainResult as TrainResult
from fabric_train.cli.errors import InputError as InputError
from fabric_train.cli.errors import RunError as RunError
from fabric_train.cli.tables import CHAT_FORMATS as CHAT_FORMATS
from fabric_train.cli.tables import LOGGERS as LOGGERS
from fabric_train.cli.tables import METRICS as METRICS
from fabric_train.cli.tables import OBJECTIVES as OBJECTIVES
from fabric_train.cli.tables import OPTIMIZERS as OPTIMIZERS

StrPath: TypeAlias = str | os.PathLike[str]
__version__: str
__all__: list[str]

def tokenize(
    *,
    dataset: StrPath | Sequence[StrPath] | Iterable[Mapping[str, Any]],
    tokenizer_name: StrPath,
    output_dir: StrPath,
    push_to_hub: StrPath | None = None,
    private: bool = True,
    revision: StrPath | None = None,
    create_pr: bool = False,
    commit_message: StrPath | None = None,
    license: StrPath | None = None,
    card_language: StrPath | Sequence[StrPath] | None = None,
    language: StrPath | None = None,
    language_by: Literal["document", "paragraph"] = "document",
    quality: StrPath | None = None,
    near_duplicates: float | None = None,
    boilerplate: int | StrPath | None = None,
    redact: StrPath | None = None,
    decontaminate: StrPath | Sequence[StrPath] | None = None,
    contaminated: Literal["drop", "mark"] = "drop",
    max_length: int | str = 2048,
    packing: Literal["concat", "best_fit", "none"] | None = None,
    overlap: int | str = 0,
    data_format: str = "auto",
    extensions: StrPath | Sequence[StrPath] | None = None,
    text_column: StrPath = "text",
    chat_template: StrPath | None = None,
    train_on: Literal["assistant", "all", "last"] = "assistant",
    too_long: Literal["cut_end", "cut_start", "drop"] = "cut_end",
    validation_split: float = 0.05,
    validation_dataset: StrPath | Sequence[StrPath] | None = None,
    weights: Sequence[float] | None = None,
    deduplicate: bool = False,
    on_bad_rows: Literal["fail", "skip"] = "fail",
    stream: bool = False,
    num_proc: int | None = None,
    shard: StrPath | None = None,
    parts: bool = False,
    seed: int = 0,
    max_documents: int | None = None,
    max_tokens: int | str | None = None,
    config: StrPath | None = None,
) -> TokenizeResult:
    """Turn documents, chats or preference pairs into a token dataset, as ``tokenize_dataset.py`` does.

    ``dataset`` may also be an iterable of mappings, such as ``{"text": ...}`` or ``{"messages": [...]}``. It is read
    once and written to ``OUTPUT_DIR.jsonl``, which becomes the source: the manifest has its name and hash, and
    documents are traced to its lines. If the tokenization fails, the file is removed.

    Raises:
        InputError: the arguments or the input cannot be used; nothing is written.
        RunError: the push to the hub failed; the token dataset is complete."""

def train(
    *,
    devices: int | StrPath = "auto",
    accelerator: Literal["auto", "cpu", "cuda", "gpu", "tpu"] = "auto",
    num_nodes: int = 1,
    tpu: bool = False,
    rank_timeout: float = 120.0,
    train_data_dir: StrPath | Sequence[StrPath] | None = None,
    shares: Sequence[float] | Sequence[Mapping[str, Any]] | StrPath | Sequence[StrPath] | None = None,
    token_shares: Sequence[float] | Sequence[Mapping[str, Any]] | StrPath | Sequence[StrPath] | None = None,
    phases: StrPath | None = None,
    streaming_dataset: StrPath | Sequence[StrPath] | None = None,
    prompts: StrPath | Sequence[StrPath] | None = None,
    shuffle_buffer: int = 0,
    text_column: StrPath = "text",
    max_length: int | str = 2048,
    isolate_documents: bool = True,
    num_workers: int = 1,
    seed: int = 0,
    model_name: StrPath = "meta-llama/Meta-Llama-3-8B",
    attention: Literal["sdpa", "flash_attention_2", "flex_attention", "eager"] = "sdpa",
    precision: Literal["auto", "bf16-true", "bf16-mixed", "32-true", "16-mixed"] = "auto",
    float8: bool = False,
    from_scratch: StrPath | None = None,
    hidden_width: int | None = None,
    num_layers: int | None = None,
    num_heads: int | None = None,
    num_key_value_heads: int | None = None,
    intermediate_size: int | None = None,
    max_context_width: int | str | None = None,
    vocab_size: int | None = None,
    architecture: Mapping[str, Any] | None = None,
    rope_scaling: StrPath | None = None,
    rope_theta: float | None = None,
    train_only: StrPath | Sequence[StrPath] | None = None,
    freeze: StrPath | Sequence[StrPath] | None = None,
    adapter: Literal["lora", "dora"] | None = None,
    lora_rank: int | None = None,
    lora_alpha: float | None = None,
    lora_dropout: float = 0.0,
    lora_targets: StrPath | Sequence[StrPath] = ...,
    lora_rslora: bool = False,
    base_weights: Literal["nf4", "nf4_double"] | None = None,
    train_also: StrPath | Sequence[StrPath] | None = None,
    init_adapter: StrPath | None = None,
    objective: str = "sft",
    objective_settings: Mapping[str, Any] | None = None,
    dpo_beta: float = 0.1,
    length_normalised: bool = False,
    label_smoothing: float = 0.0,
    sft_weight: float = 0.0,
    dpop_lambda: float = 50.0,
    simpo_gamma: float = 0.5,
    kto_desirable_weight: float = 1.0,
    kto_undesirable_weight: float = 1.0,
    reference: StrPath | None = None,
    teacher: StrPath | None = None,
    teacher_weights: Literal["16bit", "nf4", "nf4_double"] = "16bit",
    teacher_states: StrPath | Sequence[StrPath] | None = None,
    divergence: Literal["forward_kl", "reverse_kl", "jsd"] = "forward_kl",
    jsd_beta: float = 0.5,
    distill_temperature: float = 1.0,
    distill_on: Literal["supervised", "all"] = "supervised",
    prompts_per_step: int = 16,
    group_size: int = 8,
    max_new_tokens: int | str = 512,
    temperature: float = 1.0,
    rewards: StrPath | Sequence[StrPath] | None = None,
    reward_weights: Mapping[str, Any] | None = None,
    reward_settings: Mapping[str, Any] | None = None,
    on_reward_error: Literal["zero", "stop"] = "zero",
    reward_timeout: float = 10.0,
    reward_memory_gb: float = 4.0,
    advantage: Literal["mean", "group_norm"] = "mean",
    refill: bool = False,
    loss_normalisation: Literal["tokens", "constant"] = "tokens",
    kl_weight: float = 0.0,
    sampler: Literal["in_process", "vllm"] = "in_process",
    sampler_batch_size: int = 64,
    vllm_python: StrPath = ".cache/vllm/bin/python",
    sampler_devices: StrPath | None = None,
    keep_rollouts: int | None = None,
    parallelism: Literal["auto", "fsdp", "fsdp2", "ddp", "single", "xla"] = "auto",
    auto_wrap_policy: StrPath = "LlamaDecoderLayer",
    sharding_strategy: Literal[
        "FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"
    ] = "FULL_SHARD",
    tensor_parallel_size: int = 1,
    context_parallel_size: int = 1,
    state_dict_type: Literal["full", "sharded"] = "full",
    limit_all_gathers: bool = True,
    cpu_offload: bool = False,
    gradient_reduction: Literal["step", "micro_batch"] = "step",
    activation_checkpointing: Literal["auto", "none", "selective", "full"] = "auto",
    activation_memory_budget: float = 0.5,
    activation_offload: bool = False,
    mlp_tile_size: int | str | Literal["auto", "none"] = "auto",
    compile: bool | Literal["auto"] = "auto",
    resume: bool = False,
    checkpoint: StrPath | None = None,
    branch: StrPath | None = None,
    weights_only: bool = False,
    allow_changes: bool = False,
    number_epochs: int = 2,
    max_step: int | None = None,
    micro_batch_size: int = 1,
    gradient_accumulation_steps: int = 64,
    total_batch_size: int | None = None,
    grad_clip: float = 1.0,
    lr: float = 2e-05,
    min_lr: float = 0.0,
    lr_decay: bool = True,
    lr_schedule: Literal["cosine", "linear", "constant", "step", "exponential", "wsd"] = "cosine",
    decay_steps: int | None = None,
    decay_share: float | None = None,
    decay_form: Literal["1-sqrt", "linear", "cosine"] | None = None,
    warmup_steps: int = 0,
    optimizer: str = "adamw",
    optimizer_settings: Mapping[str, Any] | None = None,
    muon_lr: float | None = None,
    muon_momentum: float = 0.95,
    muon_adjust_lr: Literal["match_rms_adamw", "original"] = "match_rms_adamw",
    weight_decay: float = 0.01,
    beta1: float = 0.9,
    beta2: float = 0.95,
    optimizer_states: Literal["float32", "bfloat16", "8bit"] | None = None,
    stochastic_rounding: bool = True,
    lr_of: StrPath | Sequence[StrPath] | Sequence[Mapping[str, Any]] | None = None,
    on_nonfinite: Literal["stop", "skip"] = "stop",
    eval_batch_size: int = 1,
    eval_iters: int | None = None,
    eval_step_interval: int = 500,
    eval_at_start: bool = True,
    best_by: StrPath = "all",
    metrics: Sequence[str] | None = None,
    validation_prompts: StrPath | Sequence[StrPath] | None = None,
    sample_prompts: StrPath | None = None,
    sample_tokens: int | str = 64,
    early_stopping: StrPath | None = None,
    eval_only: bool = False,
    self_check: bool = False,
    output_dir: StrPath = "runs/fabric_llama",
    save_step_interval: int = 1000,
    keep_checkpoints: int | None = None,
    save_best: bool = True,
    async_save: bool = True,
    log_step_interval: int = 1,
    loggers: Sequence[str] | None = None,
    entity: StrPath | None = None,
    project: StrPath = "fabric_llama",
    run_name: StrPath | None = None,
    tags: StrPath | Sequence[StrPath] | None = None,
    group: StrPath | None = None,
    notes: StrPath | None = None,
    log_model: Literal["none", "last", "all"] = "none",
    report: bool = True,
    profile: StrPath | None = None,
    profile_ranks: Literal["first", "all"] = "first",
    extensions: StrPath | Sequence[StrPath] | None = None,
    plan: bool | Literal["check"] = False,
    device_memory: StrPath | None = None,
    interconnect: StrPath | None = None,
    network: StrPath | None = None,
    mtbf_hours: float | None = None,
    config: StrPath | None = None,
) -> TrainResult:
    """Train a Hugging Face causal language model on a token dataset or texts, as ``fabric run fabric_train`` does.

    On one device, or in a rank that a launcher has started, the training runs in this process. On several devices, this
    process starts a process of ``python -m fabric_train`` for each rank. The ranks import the modules that have
    registered objectives, optimizers, metrics and loggers here. A part that the script itself has registered cannot be
    imported, so it is refused.

    The log is printed and written to ``RUN/run.log``. A stop signal, such as Ctrl-C, saves a checkpoint and ends the
    run, and the ``state`` of the result is "stopped". If there is nothing to save, Ctrl-C raises KeyboardInterrupt.

    Raises:
        InputError: the arguments, the data and the model do not fit together; nothing is written.
        RunError: the training failed; checkpoints that were saved before are kept."""

def convert(
    *,
    checkpoint: StrPath | Sequence[StrPath],
    output_dir: StrPath,
    push_to_hub: StrPath | None = None,
    private: bool = True,
    revision: StrPath | None = None,
    create_pr: bool = False,
    commit_message: StrPath | None = None,
    license: StrPath | None = None,
    average: StrPath | None = None,
    average_decay: float = 1.0,
    merge: bool = False,
    merge_into: Literal["original", "dequantized"] = "original",
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16",
    max_shard_size: StrPath = "5GB",
    base_model: StrPath | None = None,
    language: StrPath | Sequence[StrPath] | None = None,
    config: StrPath | None = None,
) -> ConvertResult:
    """Convert checkpoints to verified Hugging Face folders, as ``convert_to_hf.py`` does.

    Raises:
        InputError: the arguments or the checkpoints cannot be used.
        RunError: an export does not match its checkpoint, or a push failed. Other exports are finished."""

def evaluate(
    *,
    models: StrPath | Sequence[StrPath] | None = None,
    output_dir: StrPath | None = None,
    texts: StrPath | Sequence[StrPath] | None = None,
    pairs: StrPath | Sequence[StrPath] | None = None,
    teacher: StrPath | None = None,
    text_column: StrPath = "text",
    max_length: int | str = 2048,
    overlap: int | str = 1,
    batch_tokens: int | str = 8192,
    seed: int = 0,
    watch: StrPath | None = None,
    tasks: StrPath | None = None,
    wait: bool = True,
    batch_size: int = 8,
    config: StrPath | None = None,
) -> dict[str, Any]:
    """Compare models by their loss on texts, or run tasks on models or a run's checkpoints, as ``evaluate.py`` does.

    Return the content of ``OUTPUT_DIR/evaluation.json``, which has figures by model and source. With ``pairs``, return
    the content of ``pairs.json`` instead; with ``tasks``, the rows of ``scores.csv`` under the key "scores".

    Raises:
        InputError: the arguments, the models and the texts do not fit together; nothing is written.
        RunError: a model's loss is not finite, or a checkpoint cannot be evaluated. The others are evaluated."""

def generate(
    *,
    model_name: StrPath,
    base_model: StrPath | None = None,
    prompt: StrPath | None = None,
    chat: bool = False,
    system: StrPath | None = None,
    prompts: StrPath | Iterable[str | Mapping[str, Any]] | None = None,
    output: StrPath | None = None,
    batch_size: int = 8,
    num_tokens: int | str = 100,
    temperature: float = 0.0,
    top_p: float = 1.0,
    top_k: int = 0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    stop: StrPath | Sequence[StrPath] = ...,
    seed: int = 0,
    device_memory: StrPath | None = None,
    config: StrPath | None = None,
) -> list[str]:
    """Continue a prompt, answer it as a chat, or write texts for many prompts, as ``generate.py`` does.

    Return the new text after each prompt. ``prompts`` may also be a list of texts, or of mappings with ``messages``.
    With ``prompts``, ``output`` may be left out.

    Raises:
        InputError: the arguments, the prompts and the model do not fit together."""

def load_run(path: StrPath) -> Run:
    """Read a run folder: also a copy, an old run, or one that is still training. A checkpoint, RUN/best, means its run.

    Raises:
        InputError: the folder is not a run, or one of its files is damaged."""
