"""Every argument of every program, by group: its type, default, help text and checks.

A field's docstring is its help text, and the lines below the first one of a program's docstring are examples of its
use. ``faults`` of a group returns what the types cannot check; the programs report all faults of the command line and
the ``--config`` file at once. Names and defaults are those of the system that this project continues.
"""

import os
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar

from fabric_train.cli.argument_types import (
    POSITIONAL,
    LayerSize,
    NonNegativeFloat,
    NonNegativeInt,
    NonNegativeInt64,
    NumLayers,
    NumProcesses,
    NumWorkers,
    Overlap,
    PositiveFloat,
    PositiveInt,
    PositiveInt64,
    PositiveShare,
    RowLength,
    Seconds,
    Shares,
    TokenCount,
    UnitInterval,
    is_language_code,
    parse_size,
)
from fabric_train.cli.errors import InputError
from fabric_train.cli.launcher import launcher_arguments
from fabric_train.cli.output import redact
from fabric_train.cli.parser import parse_arguments

T = TypeVar("T")

Precision = Literal["auto", "bf16-true", "bf16-mixed", "32-true", "16-mixed"]
Parallelism = Literal["auto", "fsdp", "fsdp2", "ddp", "single", "xla"]
ShardingStrategy = Literal["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"]
LoggerName = Literal["csv", "tensorboard", "wandb"]
DataFormat = Literal["auto", "text", "messages", "conversations", "alpaca", "prompt_completion"]
_OF_MIXTURES = ("shares", "token_shares", "phases")
_SIZES = ("hidden_width", "num_layers", "num_heads", "intermediate_size", "max_context_width", "vocab_size")
_FURTHER_SIZES = ("num_key_value_heads", "architecture")
Schedule = Literal["cosine", "linear", "constant", "step", "exponential", "wsd"]
DecayForm = Literal["1-sqrt", "linear", "cosine"]
PROJECT = "fabric_llama"
_REPOSITORY = r"[A-Za-z0-9_.-]+/[A-Za-z0-9_.-]+"
_BRANCH = r"refs/pr/[1-9][0-9]{0,8}|(?!refs/)(?!.*\.\.)[A-Za-z0-9_][A-Za-z0-9_.-]*(/[A-Za-z0-9_][A-Za-z0-9_.-]*)*"
_LANGUAGES = r"[a-z]{2,3}(,[a-z]{2,3})*(:(0(\.[0-9]{1,6})?|1(\.0{1,6})?))?"
_QUALITY_RULES = ("gopher", "c4", "fineweb")
_PERSONAL_DATA = ("email", "phone", "iban", "dni", "ip")
OptimizerStates = Literal["float32", "bfloat16", "8bit"]


def _given_twice(folders: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield each folder that is given again, also by another path, with the fault; a folder given thrice, twice."""
    paths = [os.path.realpath(os.path.expanduser(name)) for name in folders]
    for number, name in enumerate(folders):
        first = folders[paths.index(paths[number])]
        if paths.index(paths[number]) < number:
            yield first, f"{first} is given twice{'' if name == first else f', also as {name}'}; give it once"


# ---------------------------------------------------------------------------------------------------- training


@dataclass(frozen=True)
class DeviceArguments:
    """Devices"""

    devices: int | str = "auto"
    """Number of devices on each machine, or their indices (0,2,3); auto or -1 takes all GPUs, or one process on CPU."""
    accelerator: Literal["auto", "cpu", "cuda", "gpu", "tpu"] = "auto"
    """Device type; auto takes CUDA if there is a GPU, else the CPU. tpu is one device of PyTorch/XLA."""
    num_nodes: PositiveInt = 1
    """Number of machines."""
    tpu: bool = False
    """The same as --accelerator tpu."""
    rank_timeout: Seconds = 120.0
    """Seconds after which the run ends because a rank is silent or keeps the others waiting; ten times as long while
    loading, while saving and in a process's first step. 0 waits forever, for a debugger. A rank that dies ends the run
    at once.
    """

    def __post_init__(self) -> None:
        """Let --tpu choose the accelerator."""
        if self.tpu and self.accelerator == "auto":
            object.__setattr__(self, "accelerator", "tpu")

    def faults(self) -> list[str]:
        """Return invalid values of --devices, and an accelerator that contradicts --tpu."""
        faults = []
        if not re.fullmatch(r"auto|-1|[1-9][0-9]{0,5}|[0-9]{1,4}(,[0-9]{1,4})+", str(self.devices)):
            faults.append(f"--devices: expected auto, a number above 0 or indices such as 0,2,3; got {self.devices!r}")
        if self.tpu and self.accelerator != "tpu":
            faults.append(f"--tpu true and --accelerator {self.accelerator}: give one of them")
        return faults


@dataclass(frozen=True)
class DataArguments:
    """Data"""

    train_data_dir: str | list[str] | None = None
    """Token datasets from tokenize_dataset.py: folders with train/ and validation/. Those of one tokenizer and
    --max_length can be trained on together; then every optimizer step has rows of each in its share.
    """
    shares: list[PositiveFloat] | list[dict[str, Any]] | list[str] | None = None
    """How much of each --train_data_dir an epoch reads: 1 is every row once, 2 twice, 0.15 is 15 % of the rows, in the
    next epoch other 15 %. Default: 1. By name as FOLDER=1 or, of a source in it, FOLDER:SOURCE=0.15; 0 leaves it out.
    Of each --streaming_dataset, also by name, how much a pass reads; its documents are mixed then.
    """
    token_shares: list[PositiveFloat] | list[dict[str, Any]] | list[str] | None = None
    """Instead of --shares: the share of each in the tokens of every step, such as 0.7 0.2 0.1 or by name; an epoch has
    as many rows as all of them together.
    """
    phases: str | None = None
    """YAML file with parts of the run, each from a step or share of the run on, that have other shares or another
    learning rate: a list such as [{from: 0.9, token_shares: [0.5, 0.5], lr: 1e-5}]. The run then has --max_step steps.
    """
    streaming_dataset: list[str] | None = None
    """Train on texts or chats without a token dataset, tokenized on the fly: files, globs, folders, save_to_disk
    folders or hub names, also as NAME:SUBSET:SPLIT@REVISION; es=PLACE names a source. They are read one after the
    other, or with --shares together. With --train_data_dir as well, only its validation/ is used.
    """
    shuffle_buffer: NonNegativeInt = 0
    """Draw the next document of --streaming_dataset from a buffer of this number of documents, which every worker
    holds in memory; 0 keeps their order.
    """
    text_column: str = "text"
    """Column with the text in --streaming_dataset; sources without it have chats or instructions. NAME:SEPARATOR joins
    lists of texts.
    """
    max_length: RowLength = 2048
    """Tokens per row of --streaming_dataset; 8k is 8192."""
    isolate_documents: bool = True
    """Keep the documents of a packed row apart: no attention between them, and each starts again at position 0; false
    joins them.
    """
    num_workers: NumWorkers = 1
    """Processes on each rank that read batches ahead of the training loop; 0 reads in the loop."""
    seed: NonNegativeInt64 = 0
    """Seed of the sample order, dropout, stochastic rounding and the random weights of a new model. The order of a
    stream depends on it only with --shares or --shuffle_buffer.
    """

    def faults(self) -> list[str]:
        """Return missing data, and sources that cannot be streamed."""
        faults = self._faults_of_shares() + self._faults_of_folders()
        if self.streaming_dataset is None:
            if self.shuffle_buffer:
                faults.append(
                    "--shuffle_buffer is of --streaming_dataset; the rows of a token dataset are shuffled anyway"
                )
            missing = "--train_data_dir is required, or --streaming_dataset"
            return faults if self.data_dirs else [missing, *faults]
        faults += [
            f"--streaming_dataset {name}: a URL is not streamed; download it, or tokenize it with tokenize_dataset.py"
            for name in self.streaming_dataset
            if "://" in name
        ]
        if not self.streaming_dataset:
            faults.append("--streaming_dataset names nothing: give files or hub names")
        if self.max_length < 2:
            faults.append("--max_length 1 leaves no token to predict: give 2 or more")
        return faults

    @property
    def data_dirs(self) -> list[str]:
        """The folders of --train_data_dir."""
        given = self.train_data_dir or []
        return [given] if isinstance(given, str) else given

    @property
    def mixes(self) -> bool:
        """Whether rows of token datasets come from several, or from a share of one, which may change."""
        has_shares = self.streaming_dataset is None and any(getattr(self, name) is not None for name in _OF_MIXTURES)
        return len(self.data_dirs) > 1 or has_shares

    @property
    def shares_of_epochs(self) -> Shares:
        """What --shares or --token_shares says, or that an epoch reads every row once."""
        of_tokens = self.token_shares is not None
        given = self.token_shares if of_tokens else self.shares
        return Shares("--token_shares" if of_tokens else "--shares", given, of_tokens)

    def _faults_of_folders(self) -> list[str]:
        """Return a fault for a folder of --train_data_dir that is given again, also by another path."""
        advice = "--shares {}=2 reads its rows twice in an epoch"
        return [f"--train_data_dir: {fault}, {advice.format(name)}" for name, fault in _given_twice(self.data_dirs)]

    def _faults_of_shares(self) -> list[str]:
        if self.shares is not None and self.token_shares is not None:
            return ["--shares and --token_shares contradict each other: give one of them"]
        places, option = self.data_dirs, "folders of --train_data_dir"
        if self.streaming_dataset is not None:
            places, option = self.streaming_dataset, "places of --streaming_dataset"
            if self.token_shares is not None:
                return ["--token_shares: how many tokens a stream has is known when it is read; give --shares"]
            if self.phases is not None:
                return ["--phases: a stream has the same shares in all steps; tokenize it and give --train_data_dir"]
        shares = self.shares_of_epochs
        try:
            if shares.given is not None and shares.by_name() is None and len(shares.given) != len(places):
                return [f"{shares.option} has {len(shares.given)} numbers for {len(places)} {option}; give one each"]
        except InputError as error:
            return list(error.faults)
        return []


@dataclass(frozen=True)
class ModelArguments:
    """Model"""

    model_name: str = "meta-llama/Meta-Llama-3-8B"
    """Causal language model of Hugging Face: a hub name or a folder; or a checkpoint, RUN, RUN/best, RUN/latest or
    RUN/step-500, whose weights a new run begins with.
    """
    attention: Literal["sdpa", "flash_attention_2", "flex_attention", "eager"] = "sdpa"
    """Attention implementation: sdpa is torch's own, on a GPU its kernel for documents; flash_attention_2 needs a GPU
    and the package flash-attn.
    """
    precision: Precision = "auto"
    """bf16-true keeps weights and optimizer states in bfloat16; mixed keeps them in fp32 and computes in 16 bits. auto
    is bf16-true, and bf16-mixed with --accelerator tpu.
    """
    float8: bool = False
    """Compute matrix products of decoder layers in float8; needs torchao, --compile true and an Ada or newer GPU."""
    from_scratch: str | None = None
    """Train a new model of this family (llama, gpt2, gpt_neox, mistral, mixtral, qwen3, gemma, ...) with random weights
    and the sizes below; --model_name is then only the tokenizer of --streaming_dataset. Sizes without a family make a
    Llama.
    """
    hidden_width: LayerSize | None = None
    """New model: hidden size."""
    num_layers: NumLayers | None = None
    """New model: number of decoder layers."""
    num_heads: LayerSize | None = None
    """New model: number of attention heads."""
    num_key_value_heads: LayerSize | None = None
    """New model: number of key and value heads (grouped-query attention); default: --num_heads."""
    intermediate_size: LayerSize | None = None
    """New model: size of the feed-forward layer."""
    max_context_width: RowLength | None = None
    """New model: number of positions, the largest length of a row."""
    vocab_size: LayerSize | None = None
    """New model: rows of the embedding, at least as many as the tokenizer has ids."""
    architecture: dict[str, Any] | None = None
    """New model: other values of its config.json, such as {tie_word_embeddings: true}; see configs/."""

    def faults(self) -> list[str]:
        """Return sizes that are missing or that do not fit together."""
        if self.family is None:
            return []
        given = [f"--{name}" for name in (*_SIZES, *_FURTHER_SIZES) if self._has(name)]
        missing = [f"--{name}" for name in _SIZES if not self._has(name)]
        if missing and self.from_scratch is None:
            return [f"{given[0]} makes a new model, which needs {', '.join(missing)} too; or leave it out"]
        if missing:
            return [f"--from_scratch {self.from_scratch} needs {', '.join(missing)} too"]
        assert self.hidden_width is not None
        assert self.num_heads is not None
        heads = self.num_key_value_heads or self.num_heads
        faults = []
        if self.hidden_width % self.num_heads:
            faults.append(f"--hidden_width {self.hidden_width} is not a multiple of --num_heads {self.num_heads}")
        if self.num_heads % heads:
            faults.append(f"--num_heads {self.num_heads} is not a multiple of --num_key_value_heads {heads}")
        return faults

    @property
    def family(self) -> str | None:
        """Family of the new model; None for a pretrained one."""
        return self.from_scratch or ("llama" if any(map(self._has, (*_SIZES, *_FURTHER_SIZES))) else None)

    def _has(self, name: str) -> bool:
        return getattr(self, name) is not None


@dataclass(frozen=True)
class FSDPArguments:
    """FSDP and other parallelism"""

    parallelism: Parallelism = "auto"
    """fsdp is Fabric's FSDPStrategy, fsdp2 is fully_shard; auto takes fsdp for several processes, else single. xla is
    Fabric's XLAFSDPStrategy, the only one with --accelerator tpu.
    """
    auto_wrap_policy: str = "LlamaDecoderLayer"
    """Layer class that FSDP shards as one unit; the default is replaced for models of other families."""
    sharding_strategy: ShardingStrategy = "FULL_SHARD"
    """What is sharded: all; gradients and optimizer states (SHARD_GRAD_OP); nothing; or within each machine all
    (HYBRID_SHARD), or gradients and optimizer states (_HYBRID_SHARD_ZERO2, as torch names it).
    """
    tensor_parallel_size: PositiveInt = 1
    """Number of devices that each matrix of a decoder layer is split over; needs --parallelism fsdp2."""
    state_dict_type: Literal["full", "sharded"] = "full"
    """Checkpoint files: full is one for weights and one for optimizer states, sharded is one of each per rank."""
    limit_all_gathers: bool = True
    """Limit the layers whose gathered parameters are in memory at the same time; of --parallelism fsdp."""
    cpu_offload: bool = False
    """Keep parameters, gradients and optimizer states in host memory between uses (slow)."""
    gradient_reduction: Literal["step", "micro_batch"] = "step"
    """With fsdp and fsdp2: step reduces gradients once per step and keeps them unsharded on each device until then;
    micro_batch reduces them after each micro-batch, with less memory and more communication (with --cpu_offload, in
    fsdp2 only).
    """
    activation_checkpointing: Literal["auto", "none", "selective", "full"] = "auto"
    """Recompute decoder layers in the backward pass instead of storing their activations: full stores only a layer's
    input, selective also what fits into --activation_memory_budget; auto takes the least that fits into a GPU's memory
    as --plan computes it, and none on CPU.
    """
    activation_memory_budget: UnitInterval = 0.5
    """With selective: the share of all activations that is stored, results of the most expensive operations first; auto
    sets it.
    """
    activation_offload: bool = False
    """With full: keep the stored inputs in pinned host memory until the backward pass."""
    compile: bool | Literal["auto"] = "auto"
    """Compile the decoder layers and a bf16 optimizer step: the first step takes a minute longer, others are faster;
    auto compiles on a GPU if the run takes so long that this pays.
    """

    @property
    def is_hybrid(self) -> bool:
        """Whether each machine has a whole copy of the model."""
        return self.sharding_strategy in ("HYBRID_SHARD", "_HYBRID_SHARD_ZERO2")

    @property
    def keeps_gathered(self) -> bool:
        """Whether gathered weights stay from the forward to the backward pass."""
        return self.sharding_strategy in ("SHARD_GRAD_OP", "_HYBRID_SHARD_ZERO2")

    def faults(self) -> list[str]:
        """Return combinations that no strategy supports."""
        faults = []
        if self.cpu_offload and self.parallelism in ("ddp", "single"):
            faults.append(f"--cpu_offload true needs --parallelism fsdp or fsdp2, not {self.parallelism}")
        if self.activation_offload and self.activation_checkpointing != "full":
            faults.append("--activation_offload true needs --activation_checkpointing full: it moves what that stores")
        if self.gradient_reduction == "micro_batch" and self.parallelism in ("ddp", "single"):
            faults.append(f"--gradient_reduction micro_batch needs --parallelism fsdp or fsdp2, not {self.parallelism}")
        if self.parallelism == "fsdp2" and self.sharding_strategy == "NO_SHARD":
            faults.append("--sharding_strategy NO_SHARD needs --parallelism fsdp, not fsdp2")
        if self.parallelism != "fsdp2" and self.tensor_parallel_size > 1:
            faults.append(
                f"--tensor_parallel_size {self.tensor_parallel_size} needs --parallelism fsdp2, not {self.parallelism}"
            )
        return faults


@dataclass(frozen=True)
class CheckpointArguments:
    """Checkpoint"""

    resume: bool = False
    """Continue from the newest complete checkpoint in --output_dir, or from --checkpoint; without one, start a run."""
    checkpoint: str | None = None
    """Start from this checkpoint instead of the newest in --output_dir: RUN (its newest one), RUN/best (by validation
    loss), RUN/latest, RUN/step-500, or its folder.
    """
    branch: str | None = None
    """Start a new run from a checkpoint of another: RUN@STEP such as runs/1@5000, RUN@latest, RUN/best or its folder.
    Weights, optimizer and counters go on; data, schedule and length may differ. With --resume true, continue the branch
    in --output_dir if there is one.
    """
    weights_only: bool = False
    """Load only the weights of --checkpoint; optimizer, step and data order start from the beginning."""
    allow_changes: bool = False
    """Continue from a checkpoint even if arguments that change the losses differ, such as lr; with more steps than
    before, stretch the learning rate schedule.
    """

    def faults(self) -> list[str]:
        """Return contradictions."""
        if self.weights_only and self.checkpoint is None:
            return ["--weights_only true needs --checkpoint: the checkpoint whose weights to start from"]
        if self.weights_only and self.resume:
            return ["--weights_only true starts a new run and --resume true continues one: give one of them"]
        if self.branch is None:
            return []
        if self.checkpoint is not None:
            return [f"--branch {self.branch} and --checkpoint {self.checkpoint}: give one of them"]
        if not re.fullmatch(r".+(@(latest|best|[0-9]{1,18})|/(latest|best|step-[0-9]{1,18})/*)", self.branch):
            return [f"--branch: expected RUN@STEP such as runs/1@5000, RUN@latest or RUN/best; got {self.branch!r}"]
        return []

    def faults_on_line(self, names: Collection[str]) -> list[str]:
        """Return a fault if the command line, which has ``names``, says --resume false beside a checkpoint.

        A config.yaml that a run has written has the default there.
        """
        if "resume" not in names or self.resume or self.checkpoint is None or self.weights_only:
            return []
        return [
            f"--resume false and --checkpoint {self.checkpoint}: leave --resume out to continue from the checkpoint; "
            "to start a new run, add --weights_only true for its weights, or leave --checkpoint out for --model_name"
        ]


@dataclass(frozen=True)
class TrainingArguments:
    """Training"""

    number_epochs: PositiveInt = 2
    """Passes over the rows; a stream is read until --max_step."""
    max_step: PositiveInt | None = None
    """Number of optimizer steps; default: all rows of all epochs."""
    micro_batch_size: PositiveInt = 1
    """Rows per forward pass on each device."""
    gradient_accumulation_steps: PositiveInt = 64
    """Micro-batches per optimizer step on each device."""
    total_batch_size: PositiveInt | None = None
    """Rows per optimizer step over all devices; sets gradient_accumulation_steps."""
    grad_clip: NonNegativeFloat = 1.0
    """Largest global gradient norm; 0 turns clipping off."""
    lr: PositiveFloat = 2e-5
    """Peak learning rate."""
    min_lr: NonNegativeFloat = 0.0
    """Learning rate that the schedule reaches one step after the last."""
    lr_decay: bool = True
    """Decay the learning rate; false keeps it at lr after the warm-up."""
    lr_schedule: Schedule = "cosine"
    """Learning rate schedule; all except constant fall to min_lr. wsd (warm-up, stable, decay) stays at lr until its
    last --decay_steps.
    """
    decay_steps: PositiveInt | None = None
    """With wsd: number of steps at the end of the run in which the learning rate falls."""
    decay_share: PositiveShare | None = None
    """With wsd, instead of --decay_steps: their share of all steps, such as 0.1."""
    decay_form: DecayForm | None = None
    """With wsd: how the learning rate falls; default: 1-sqrt, one minus the square root of the decay's progress."""
    warmup_steps: NonNegativeInt = 0
    """Steps over which the learning rate rises linearly to lr."""
    weight_decay: NonNegativeFloat = 0.01
    """Weight decay of AdamW, for matrices only, not for norms and biases."""
    beta1: UnitInterval = 0.9
    """Decay of AdamW's first moment."""
    beta2: UnitInterval = 0.95
    """Decay of AdamW's second moment."""
    optimizer_states: OptimizerStates | None = None
    """Type of AdamW's moments; default: the type of the weights. 8bit keeps those of norms and biases in fp32."""
    stochastic_rounding: bool = True
    """Round bfloat16 weights and moments stochastically, which keeps small updates; false rounds to nearest."""
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """If the loss or a gradient is NaN or infinite: save the state before that step and stop, or skip the step."""

    def faults(self) -> list[str]:
        """Return values that contradict each other."""
        faults = []
        if self.min_lr > self.lr:
            faults.append(f"--min_lr {self.min_lr:g} is above --lr {self.lr:g}")
        if self.lr_schedule == "exponential" and self.lr_decay and self.min_lr == 0:
            faults.append("--lr_schedule exponential never reaches 0: give a --min_lr above 0")
        faults += self._faults_of_wsd()
        if self.max_step is not None and self.warmup_steps > self.max_step:
            faults.append(f"--warmup_steps {self.warmup_steps} is more than --max_step {self.max_step}")
        faults += [f"--{name} must be below 1" for name in ("beta1", "beta2") if getattr(self, name) == 1]
        return faults

    def _faults_of_wsd(self) -> list[str]:
        names = [name for name in ("decay_steps", "decay_share", "decay_form") if getattr(self, name) is not None]
        if self.lr_schedule != "wsd":
            return [f"--{name} needs --lr_schedule wsd, not {self.lr_schedule}" for name in names]
        if self.decay_steps is not None and self.decay_share is not None:
            return [f"--decay_steps {self.decay_steps} and --decay_share {self.decay_share:g}: give one of them"]
        if self.lr_decay and self.decay_steps is None and self.decay_share is None:
            return ["--lr_schedule wsd needs --decay_steps or --decay_share, such as 0.1: the steps of the decay"]
        return []


@dataclass(frozen=True)
class EvaluationArguments:
    """Evaluation"""

    eval_batch_size: PositiveInt = 1
    """Rows per forward pass of the evaluation on each device."""
    eval_iters: PositiveInt | None = None
    """Number of validation batches, over all devices together: rows from all over the validation split, equally many of
    each source, the same each time; default: the whole split.
    """
    eval_step_interval: PositiveInt = 500
    """Optimizer steps between evaluations; the end of each epoch and of the run has one too."""
    eval_at_start: bool = True
    """Evaluate a new run before its first step too, so that it shows what it learned and what it forgot."""
    best_by: str = "all"
    """Source whose validation loss says which checkpoint is the best (RUN/best, and what --keep_checkpoints keeps); all
    is the whole validation split.
    """
    sample_prompts: str | None = None
    """File of prompts (.txt with one on each line, or .jsonl with a text "prompt" or the "messages" of a chat) that the
    model continues at each evaluation, by the most likely tokens: RUN/samples.jsonl, TensorBoard, W&B.
    """
    sample_tokens: RowLength = 64
    """Largest number of new tokens for each of --sample_prompts; each takes one forward pass."""
    early_stopping: str | None = None
    """Source, or all, such as es or es:5: end the run after 5 evaluations (default: 3) in which its validation loss is
    not lower than before.
    """
    eval_only: bool = False
    """Evaluate the model (or --checkpoint) on the validation split and exit."""
    self_check: bool = False
    """Compute loss and gradients of a few rows, split in several ways, and exit: 0 if they agree, else 1."""

    @property
    def only_reads(self) -> bool:
        """Whether nothing is trained, so that a run in --output_dir does not change."""
        return self.eval_only or self.self_check

    def faults(self) -> list[str]:
        """Return contradictions."""
        both = self.eval_only and self.self_check
        return ["--eval_only true and --self_check true: give one of them"] if both else []


@dataclass(frozen=True)
class SaveArguments:
    """Save"""

    output_dir: str = "runs/fabric_llama"
    """Run folder: config.yaml, metrics.csv, run.log, checkpoints/. A run in it is never overwritten."""
    save_step_interval: PositiveInt = 1000
    """Optimizer steps between checkpoints; the end of each epoch and of the run has one too."""
    keep_checkpoints: PositiveInt | None = None
    """Number of newest checkpoints to keep, next to the best by validation loss; default: all."""
    save_best: bool = True
    """After an evaluation with the lowest validation loss so far, save a checkpoint, whatever the interval; it replaces
    the one that the lowest loss before was saved in, unless that is one of the interval.
    """
    async_save: bool = True
    """Write checkpoints in the background, from a copy of model and optimizer in host memory."""


@dataclass(frozen=True)
class LoggingArguments:
    """Logging"""

    log_step_interval: PositiveInt = 1
    """Optimizer steps between lines of metrics."""
    loggers: list[LoggerName] | None = None
    """Where metrics are logged, in addition to RUN/metrics.csv, which is always written; csv adds nothing. Default: csv
    tensorboard, and wandb (Weights & Biases) too if --entity or --project is given.
    """
    entity: str | None = None
    """Team or user of Weights & Biases (wandb)."""
    project: str = PROJECT
    """Project of Weights & Biases (wandb)."""
    log_model: Literal["none", "last", "all"] = "none"
    """Checkpoints to upload to Weights & Biases; last and all add wandb to the loggers."""
    profile: str | None = None
    """Steps first:last to trace into RUN/profile/, such as 10:12; on a GPU, with a memory history."""
    profile_ranks: Literal["first", "all"] = "first"
    """Ranks that --profile traces."""

    @property
    def opened_loggers(self) -> list[LoggerName]:
        """The loggers of --loggers, and those that other arguments need."""
        needs_wandb = self.log_model != "none" or (self.loggers is None and bool(self._of_wandb))
        chosen: list[LoggerName] = ["csv", "tensorboard"] if self.loggers is None else self.loggers
        return [*chosen, "wandb"] if needs_wandb and "wandb" not in chosen else chosen

    @property
    def note(self) -> str | None:
        """Why --loggers has wandb, or that it lacks it, though other arguments are for it; else None."""
        if not self._of_wandb or "wandb" in (self.loggers or ()) or self.log_model != "none":
            return None
        if self.loggers is None:
            return f"{self._of_wandb}: metrics go to Weights & Biases too, as with --loggers csv tensorboard wandb"
        return f"{self._of_wandb} is for Weights & Biases, which --loggers leaves out: add wandb to it"

    @property
    def _of_wandb(self) -> str:
        entity = [] if self.entity is None else [f"--entity {self.entity}"]
        project = [] if self.project == PROJECT else [f"--project {self.project}"]
        return " ".join([*entity, *project])

    @property
    def profiled_steps(self) -> tuple[int, int] | None:
        """First and last step to trace, both included; None to trace nothing."""
        return _range_of_steps(self.profile or "")

    def faults(self) -> list[str]:
        """Return invalid steps."""
        if self.profile is not None and self.profiled_steps is None:
            return [f"--profile: expected a first and a last step such as 10:12, got {self.profile!r}"]
        return []


@dataclass(frozen=True)
class PlanArguments:
    """Plan"""

    plan: bool | Literal["check"] = False
    """Print the memory, disk space, communication and steps that the run will need, and exit; it is an error if they do
    not fit. With --device_memory, the --devices need not be on this machine. check only says whether arguments, files
    and data are in order, also where the --devices are not.
    """
    device_memory: str | None = None
    """Memory of each GPU to plan for, such as 80GB; default: that of the GPUs here, or of this machine on CPU."""
    interconnect: str | None = None
    """Bandwidth in one direction between the devices of a machine, to plan for: 450GB/s is NVLink 4."""
    network: str | None = None
    """Bandwidth in one direction from a machine to the others, to plan for: 50GB/s is one port of 400 Gbit/s."""

    @property
    def plans_for_others(self) -> bool:
        """Whether the plan is for GPUs that need not be on this machine."""
        return self.checks or (bool(self.plan) and self.device_memory is not None)

    @property
    def checks(self) -> bool:
        """Whether the run is only checked, as far as that needs no device."""
        return self.plan == "check"

    def faults(self) -> list[str]:
        """Return invalid sizes, and arguments that need --plan."""
        examples = {"device_memory": "80GB", "interconnect": "450GB/s", "network": "50GB/s"}
        given = {name: getattr(self, name) for name in examples if getattr(self, name) is not None}
        faults = [
            f"--{name}: expected a size such as {examples[name]}, got {value!r}"
            for name, value in given.items()
            if parse_size(value) is None
        ]
        faults += [f"--{name} needs --plan true" for name in given if not self.plan]
        return faults


@dataclass(frozen=True)
class TrainArguments:
    """Train a Hugging Face causal language model on a token dataset

    PROGRAM --devices 8 --train_data_dir data/tokens --model_name meta-llama/Meta-Llama-3-8B --output_dir runs/1
    PROGRAM --devices 8 --config configs/recipes/llama-3-8b-pretraining.yaml --plan true --device_memory 80GB
    PROGRAM --devices 8 --config runs/1/config.yaml --resume true
    """

    device: DeviceArguments
    data: DataArguments
    model: ModelArguments
    fsdp: FSDPArguments
    checkpoint: CheckpointArguments
    training: TrainingArguments
    evaluation: EvaluationArguments
    save: SaveArguments
    logging: LoggingArguments
    planning: PlanArguments

    def __post_init__(self) -> None:
        """Let the accelerator choose the precision."""
        if self.model.precision == "auto":
            precision: Precision = "bf16-mixed" if self.device.accelerator == "tpu" else "bf16-true"
            object.__setattr__(self, "model", replace(self.model, precision=precision))


def _not_language_codes(name: str, codes: list[str] | None) -> list[str]:
    return [
        f"--{name}: expected ISO 639 codes such as en, es or ca, got {code!r}"
        for code in codes or ()
        if not is_language_code(code)
    ]


def _range_of_steps(text: str) -> tuple[int, int] | None:
    """Return first and last step of a text such as 10:12, None if it is no such text."""
    found = re.fullmatch(r"([1-9][0-9]{0,8}):([1-9][0-9]{0,8})", text)
    steps = (int(found[1]), int(found[2])) if found else None
    return steps if steps and steps[0] <= steps[1] else None


# ----------------------------------------------------------------------------------------- the other programs


@dataclass(frozen=True)
class ReplayArguments:
    """Train steps of a run again and compare them; the exit code is 0, or 1 if something differs

    PROGRAM runs/1 --steps 120:125
    PROGRAM runs/1 --steps 120:125 --devices 1
    PROGRAM runs/1 --steps 120:125 --devices 1 --accelerator cpu
    """

    run: str = field(metadata=POSITIONAL)
    """Run folder: the --output_dir of training; a checkpoint of it, such as RUN/best, means its run."""
    steps: str
    """Steps first:last of its metrics.csv, such as 120:125. Those after the checkpoint before them are trained too."""
    devices: int | str | None = None
    """Number of devices on each machine, or their indices (0,2,3); default: as in the run."""
    num_nodes: PositiveInt | None = None
    """Number of machines; default: as in the run."""
    accelerator: Literal["auto", "cpu", "cuda", "gpu"] | None = None
    """Device type; default: as in the run."""

    @property
    def first_and_last(self) -> tuple[int, int] | None:
        """First and last step, both included; None if they are not valid."""
        return _range_of_steps(self.steps)

    def faults(self) -> list[str]:
        """Return invalid steps and devices."""
        steps = [f"--steps: expected a first and a last step such as 120:125, got {self.steps!r}"]
        devices = [] if self.devices is None else DeviceArguments(devices=self.devices).faults()
        return [*([] if self.first_and_last else steps), *devices]


@dataclass(frozen=True, kw_only=True)
class PushArguments:
    """Card and publication on the Hugging Face hub"""

    push_to_hub: str | None = None
    """Push the finished folder to the repository OWNER/NAME. If --output_dir has it already, it is only pushed."""
    private: bool = True
    """Make a repository that the push creates private."""
    revision: str | None = None
    """Branch to push to, created if it is missing; refs/pr/N is an open pull request. Default: main."""
    create_pr: bool = False
    """Open a pull request instead of changing main."""
    commit_message: str | None = None
    """Message of the commit, and title of the pull request."""
    license: str | None = None
    """For the card: the licence's identifier on the hub, such as apache-2.0; default of a model: its base model's."""

    def faults(self) -> list[str]:
        """Return names that the hub refuses, and options of a push without one."""
        faults = []
        if self.license is not None and not re.fullmatch(r"[a-z0-9][a-z0-9.+-]*", self.license):
            faults.append(f"--license: expected an identifier of the hub such as apache-2.0, got {self.license!r}")
        if self.license == "other":
            faults.append("--license other needs a name and a text: leave it out, to take those of the base model")
        if self.push_to_hub is not None and not re.fullmatch(_REPOSITORY, self.push_to_hub):
            faults.append(f"--push_to_hub: expected OWNER/NAME, got {self.push_to_hub!r}")
        if self.revision is not None and not re.fullmatch(_BRANCH, self.revision):
            faults.append(f"--revision: expected a branch such as step-500, or refs/pr/N, got {self.revision!r}")
        if self.create_pr and self.revision is not None:
            faults.append("--create_pr true opens a pull request for main: leave out --revision")
        if self.push_to_hub is None:
            given = {"revision": self.revision, "create_pr": self.create_pr, "commit_message": self.commit_message}
            faults += [f"--{name} needs --push_to_hub OWNER/NAME" for name, value in given.items() if value]
        return faults


@dataclass(frozen=True, kw_only=True)
class CleaningArguments:
    """Cleaning of documents, each drop and change counted"""

    language: str | None = None
    """Keep the documents in these languages, such as es,ca: ISO 639 codes, and va, which is Valencian. A number may
    follow, as in es,ca:0.8: the least probability at which the identifier is certain; default: 0.65. Of chats, what
    user and assistant say counts.
    """
    language_by: Literal["document", "paragraph"] = "document"
    """With --language: leave out documents in other languages, or, of texts, remove paragraphs in other languages
    first.
    """
    quality: str | None = None
    """Leave out documents of text that published rules find to be of low quality: gopher, c4, fineweb, or several, such
    as gopher,fineweb. Those of c4 also remove lines.
    """
    near_duplicates: PositiveShare | None = None
    """Leave out texts and chats that nearly repeat an earlier one, of any source: the smallest share of 5-grams of
    words, such as 0.8, that they have in common (estimated by MinHash). System messages do not count.
    """
    boilerplate: PositiveInt64 | str | None = None
    """Remove lines of 15 letters or more that are in this number of documents or more, of all sources together: such as
    10 for a small corpus, 1000 for millions of documents. Sources are read twice. With --shard, a number only counts
    lines. A merge adds them up into a folder of repeated lines: then give this folder instead of the number.
    """
    redact: str | None = None
    """Personal data to replace by placeholders such as <EMAIL>: email,phone,iban,dni,ip or some of these kinds. All but
    email and ip need pip install 'fabric-train[cleaning]'.
    """
    decontaminate: list[str] | None = None
    """Files with the items of evaluation tasks, as JSON lines such as lm_eval's samples: documents with 13 words in a
    row that an item has too are left out (docs/cleaning.md).
    """
    contaminated: Literal["drop", "mark"] = "drop"
    """With --decontaminate: leave these documents out, or only list them in contamination.jsonl."""

    def faults(self) -> list[str]:
        """Return values of no known kind, and options without the one that they belong to."""
        faults = []
        if self.boilerplate == 1:
            faults.append("--boilerplate 1 removes every line: give 2 or more")
        elif isinstance(self.boilerplate, str) and re.fullmatch(r"-?[\d.,_]+", self.boilerplate):
            faults.append(f"--boilerplate {self.boilerplate}: give a whole number from 2 on, or leave it out")
        if self.language is not None and not re.fullmatch(_LANGUAGES, self.language):
            faults.append(f"--language: expected codes such as es,ca or es,ca:0.8, got {self.language!r}")
        if self.language is None and self.language_by != "document":
            faults.append(f"--language_by {self.language_by} needs --language: the codes to keep, such as es,ca")
        if self.quality is not None and not set(self.quality.split(",")) <= set(_QUALITY_RULES):
            faults.append(
                f"--quality: expected {', '.join(_QUALITY_RULES)} or several with commas, got {self.quality!r}"
            )
        if self.redact is not None and not set(self.redact.split(",")) <= set(_PERSONAL_DATA):
            faults.append(f"--redact: expected {', '.join(_PERSONAL_DATA)} or several with commas, got {self.redact!r}")
        if self.decontaminate == []:
            faults.append("--decontaminate names nothing: give the files of the tasks")
        if self.decontaminate is None and self.contaminated != "drop":
            faults.append("--contaminated needs --decontaminate: give the files of the tasks")
        return faults


@dataclass(frozen=True)
class TokenizeArguments(CleaningArguments, PushArguments):
    """Turn documents or chats into a token dataset

    PROGRAM --dataset corpus/ --tokenizer_name meta-llama/Meta-Llama-3-8B --max_length 8k --output_dir data/tokens
    PROGRAM --dataset chats.jsonl --tokenizer_name TOKENIZER --packing best_fit --output_dir data/chats
    PROGRAM --dataset ca=ca.jsonl es=es/ --weights 0.7 0.3 --tokenizer_name TOKENIZER --output_dir data/mixed
    """

    dataset: list[str]
    """Sources: files (txt, md, csv, json, jsonl, parquet, also .gz and .zst), globs, folders, URLs, save_to_disk
    folders or hub names; of a dataset on the hub or a copy of it, a part as NAME:SUBSET:SPLIT@REVISION (each may be
    left out, as in NAME:SUBSET, NAME::SPLIT or NAME@REVISION). es=corpus/es/ calls a source es; by default it has the
    name that is given. A path that begins like a name and = is written with ./ before it.
    """
    tokenizer_name: str
    """Tokenizer: a hub name, a folder, or a tokenizer.model file."""
    output_dir: str
    """Token dataset to write; must not exist yet."""
    max_length: RowLength = 2048
    """Tokens per row; 8k is 8192."""
    packing: Literal["concat", "best_fit", "none"] | None = None
    """concat joins documents and cuts them at row ends; best_fit fills rows with whole documents; none puts one
    document into each row and pads it. Default: best_fit if a source has chats or instructions, else concat.
    """
    overlap: Overlap = 0
    """Tokens repeated from the last row when a document continues in the next; they are not supervised again."""
    data_format: DataFormat = "auto"
    """Content of a source's rows: text in --text_column, a chat or an instruction; auto looks at the first row."""
    text_column: str = "text"
    """Column with the text in csv, json, jsonl, parquet and datasets. NAME:SEPARATOR joins lists of texts, such as
    'moves: ' with a space.
    """
    chat_template: str | None = None
    """Jinja file with the chat template to use instead of the tokenizer's own; checkpoints and exports get it too."""
    train_on: Literal["assistant", "all", "last"] = "assistant"
    """Supervised tokens of a chat: the assistant's turns, all tokens, or the assistant's last turn."""
    too_long: Literal["cut_end", "cut_start", "drop"] = "cut_end"
    """Chats longer than --max_length lose turns at the end, or at the start after the system turn, or are dropped."""
    validation_split: UnitInterval = 0.05
    """Share of the documents for validation/; 0 for none."""
    validation_dataset: list[str] | None = None
    """Sources of validation/ instead of a split; read and named like --dataset."""
    weights: list[PositiveFloat] | None = None
    """Relative weight of each --dataset in the tokens of train/; default: every document is used once."""
    deduplicate: bool = False
    """Leave out documents with the same content as an earlier one."""
    on_bad_rows: Literal["fail", "skip"] = "fail"
    """Rows that cannot be read: report the first and stop, or count them and leave them out."""
    stream: bool = False
    """Read hub datasets as a stream instead of downloading them first."""
    num_proc: NumProcesses | None = None
    """Processes that encode; default: one per core."""
    shard: str | None = None
    """I/N: only encode slice I of N of the input, into --output_dir. N such tasks, on any number of machines, and
    python -m fabric_train.tokenization.merge of their folders give what one run gives. With --boilerplate, tasks count
    lines first.
    """
    seed: NonNegativeInt64 = 0
    """Seed of the validation split and of the sampling by --weights."""
    max_documents: PositiveInt64 | None = None
    """Stop after this number of documents."""
    max_tokens: TokenCount | None = None
    """Stop after the document that reaches this number of tokens, such as 200k, 5m or 1.5b; with --weights, tokens of
    train/.
    """
    card_language: list[str] | None = None
    """For the card: ISO 639 codes, such as es ca."""

    def faults(self) -> list[str]:
        """Return values that leave nothing to train on, and contradictions."""
        faults = [*PushArguments.faults(self), *CleaningArguments.faults(self)]
        faults += [f"--{name} names nothing: give a source" for name in self._without_sources()]
        if self.validation_split == 1:
            faults.append("--validation_split 1 leaves nothing to train on: give a share below 1")
        if self.max_length < 2:
            faults.append("--max_length 1 leaves no token to predict: give 2 or more")
        if isinstance(self.boilerplate, int) and self.stream:
            faults.append(
                f"--boilerplate {self.boilerplate} reads sources twice, which --stream would download twice: leave out "
                "--stream, or give a folder of repeated lines (docs/cleaning.md)"
            )
        if self.overlap >= self.max_length > 1:
            faults.append(f"--overlap {self.overlap} fills rows of --max_length {self.max_length}: give less")
        faults += _not_language_codes("card_language", self.card_language)
        if self.push_to_hub is None:  # the card is written for the hub
            given = [name for name in ("license", "card_language") if getattr(self, name) is not None]
            faults += [f"--{name} needs --push_to_hub OWNER/NAME" for name in given]
        if self.weights and len(self.weights) != len(self.dataset):
            faults.append(f"--weights has {len(self.weights)} numbers for {len(self.dataset)} sources of --dataset")
        return [*faults, *self._faults_of_shard()]

    @property
    def part(self) -> tuple[int, int] | None:
        """The two numbers of --shard; None without it."""
        found = re.fullmatch(r"([1-9][0-9]{0,5})/([1-9][0-9]{0,5})", self.shard or "")
        numbers = (int(found[1]), int(found[2])) if found else None
        return numbers if numbers and numbers[0] <= numbers[1] else None

    @property
    def counts_lines(self) -> bool:
        """Whether this is a task that counts the lines of its slice for --boilerplate, and does not encode it."""
        return self.shard is not None and isinstance(self.boilerplate, int)

    def _faults_of_shard(self) -> list[str]:
        if self.shard is None:
            return []
        faults = [] if self.part else [f"--shard: expected I/N such as 3/64, from 1/64 to 64/64, got {self.shard!r}"]
        if self.push_to_hub is not None:
            faults.append("--push_to_hub and --shard: merge the slices, then give this command without --shard to push")
        urls = [place for place in (*self.dataset, *(self.validation_dataset or ())) if "://" in place]
        faults += [
            f"--shard: every task would download {redact(url)}; download it once, and give its path" for url in urls
        ]
        if self.stream:
            faults.append("--shard needs files that all tasks see: leave out --stream true, or download them once")
        return faults

    def _without_sources(self) -> list[str]:
        return [name for name in ("dataset", "validation_dataset") if getattr(self, name) == []]


@dataclass(frozen=True)
class ConvertArguments(PushArguments):
    """Convert checkpoints to verified Hugging Face folders

    PROGRAM --checkpoint runs/1/best --output_dir exports/1 --push_to_hub OWNER/NAME
    PROGRAM --checkpoint runs/1/all --dtype float32 --output_dir exports/all
    PROGRAM --checkpoint runs/1 --average last:5 --output_dir exports/average
    """

    checkpoint: list[str]
    """Checkpoints: RUN (its newest one), RUN/best (by validation loss), RUN/latest, RUN/step-500, or their folders;
    RUN/all means each checkpoint of the run.
    """
    output_dir: str
    """Folder to write; with several checkpoints, it gets one folder for each, named step-...; those that are there from
    an earlier command are kept.
    """
    average: str | None = None
    """Export one model, the average of weights: last:5, of the 5 newest checkpoints of a run, without those that a
    signal saved; all, of the checkpoints that --checkpoint lists, or of the whole run that it names.
    """
    average_decay: PositiveShare = 1.0
    """Weight of each checkpoint in --average, relative to the next newer one (or the next in the list), such as 0.8; 1
    weighs all the same.
    """
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    """Type of the exported weights."""
    max_shard_size: str = "5GB"
    """Largest safetensors file."""
    base_model: str | None = None
    """For the model card: OWNER/NAME of the model that training began with; default: the one in the checkpoint."""
    language: list[str] | None = None
    """For the card: ISO 639 codes, such as es ca."""

    def faults(self) -> list[str]:
        """Return an invalid size or name, and several checkpoints that would be pushed to one place."""
        faults = [*super().faults(), *_not_language_codes("language", self.language)]
        if not self.checkpoint:
            faults.append("--checkpoint names nothing: give a checkpoint or a run")
        if self.base_model is not None and not re.fullmatch(_REPOSITORY, self.base_model):
            faults.append(f"--base_model: expected OWNER/NAME on the hub, got {self.base_model!r}")
        if not re.fullmatch(r"(?=.*[1-9])[0-9]{1,6}(\.[0-9]{1,6})?[KMGT]B", self.max_shard_size):
            faults.append(f"--max_shard_size: expected a size such as 5GB or 500MB, got {self.max_shard_size!r}")
        if self.average is not None and not re.fullmatch(r"all|last:(?!1$)[1-9][0-9]{0,5}", self.average):
            faults.append(f"--average: expected last:K such as last:5, or all; got {self.average!r}")
        if self.average_decay != 1 and self.average is None:
            faults.append(f"--average_decay {self.average_decay:g} needs --average: last:K, or all")
        are_several = len(self.checkpoint) > 1 or any(os.path.basename(path) == "all" for path in self.checkpoint)
        if are_several and self.average is None and (self.revision or self.create_pr):
            faults.append(
                "--revision and --create_pr take one checkpoint: several are pushed to branches of their names, such "
                "as step-00000500"
            )
        return faults


@dataclass(frozen=True)
class GenerateArguments:
    """Continue a prompt, chat with a model, or write texts for a file of prompts

    PROGRAM --model_name runs/1 --prompt "La llengua" --temperature 0.7 --top_p 0.9
    PROGRAM --model_name exports/1 --chat true --system "Answer briefly."
    PROGRAM --model_name runs/1/best --prompts prompts.jsonl --output texts.jsonl --batch_size 16
    """

    model_name: str
    """Checkpoint (RUN, RUN/best, RUN/latest, RUN/step-500 or its folder), exported folder, hub name, or folder with an
    adapter of peft.
    """
    base_model: str | None = None
    """Model of an adapter; default: the one in its adapter_config.json."""
    prompt: str | None = None
    """Text to continue, or with --chat true the user's turn."""
    chat: bool = False
    """Prompt with the model's chat template. Without --prompt and --prompts, chat in the terminal."""
    system: str | None = None
    """Text of the system turn of a chat."""
    prompts: str | None = None
    """File of prompts: .txt with one on each line, or .jsonl with a text "prompt" or the "messages" of a chat."""
    output: str | None = None
    """With --prompts: file to write, a JSON line for each prompt in their order. Lines that it has are kept."""
    batch_size: PositiveInt = 8
    """With --prompts: prompts that are continued together."""
    num_tokens: RowLength = 100
    """Largest number of new tokens; 1k is 1024."""
    temperature: NonNegativeFloat = 0.0
    """0 takes the most likely token each time; above 0 samples."""
    top_p: UnitInterval = 1.0
    """Sample from the most likely tokens that together have this probability (nucleus sampling, arXiv:1904.09751)."""
    top_k: NonNegativeInt = 0
    """Sample from this number of most likely tokens; 0 for all."""
    min_p: UnitInterval = 0.0
    """Sample from tokens at least this share as likely as the most likely one (arXiv:2407.01082)."""
    repetition_penalty: PositiveFloat = 1.0
    """Above 1 makes tokens that prompt and text have already less likely (arXiv:1909.05858)."""
    stop: list[str] = field(default_factory=list)
    """Texts at which generation ends, in addition to the tokens that end a document or a turn."""
    seed: NonNegativeInt64 = 0
    """Seed of the sampling. Each prompt of a file has a random stream of its own."""
    device_memory: str | None = None
    """Most memory of a GPU for weights, such as 20GB; default: 85 % of what is free. A model that needs more is spread
    over all GPUs, and what does not fit there stays in host memory (slow).
    """

    def faults(self) -> list[str]:
        """Return contradictions, a --top_p that leaves no token, and a --temperature at which numbers overflow."""
        faults = self._faults_of_prompts()
        if self.top_p == 0:
            faults.append("--top_p 0 leaves no token to choose from: give a number above 0")
        if 0 < self.temperature < 0.001:
            faults.append(f"--temperature {self.temperature:g} is too low: give 0 for the most likely tokens")
        if "" in self.stop:
            faults.append("--stop has an empty text, at which every text ends: leave it out")
        if self.device_memory is not None and not parse_size(self.device_memory):
            faults.append(f"--device_memory: expected a size such as 20GB, got {self.device_memory!r}")
        return faults

    def _faults_of_prompts(self) -> list[str]:
        faults = []
        if self.prompt is None and self.prompts is None and not self.chat:
            faults.append("--prompt is required, or --prompts FILE, or --chat true")
        if self.prompt is not None and self.prompts is not None:
            faults.append("--prompt and --prompts: give one of them")
        if (self.prompts is None) != (self.output is None):
            faults.append("--prompts and --output need each other: the file to read and the file to write")
        if self.system is not None and not self.chat:
            faults.append("--system is of a chat: give --chat true, too")
        return faults


@dataclass(frozen=True)
class EvaluateArguments:
    """Compare models by their loss on texts, with confidence intervals; evaluate each checkpoint of a run as it trains

    PROGRAM --models models/llama-3-8b runs/1/best runs/1 --texts es=es.jsonl ca=ca/ --output_dir eval/1
    PROGRAM --models meta-llama/Meta-Llama-3-8B runs/1/all --max_length 4k --overlap 1k --output_dir eval/2
    PROGRAM --watch runs/1 --tasks tasks.yaml --texts es=es.jsonl --models models/llama-3-8b
    """

    models: list[str] | None = None
    """Models: RUN (its newest checkpoint), RUN/best, RUN/latest, RUN/step-500, RUN/all (each of its checkpoints), a
    checkpoint's folder, a Hugging Face folder, one with an adapter of peft, or a hub name. The others are compared with
    the first one. With --watch, they are evaluated too, once.
    """
    output_dir: str | None = None
    """Folder for the results and for finished parts. With the same folder, a stopped evaluation goes on, and further
    models and texts are added to those that are there. Default with --watch: RUN/evaluation.
    """
    texts: list[str] | None = None
    """What the loss is of, by source: es=PLACE, where PLACE is anything with text that tokenize_dataset.py reads, or a
    token dataset, whose validation split is meant. Default: the validation split of the first checkpoint in --models.
    """
    text_column: str = "text"
    """Column with the text in csv, json, jsonl, parquet and datasets. NAME:SEPARATOR joins lists of texts, such as
    'moves: ' with a space.
    """
    max_length: RowLength = 2048
    """Tokens that a model sees at once; 8k is 8192. Longer documents are read in windows."""
    overlap: RowLength = 1
    """Tokens before a window's first predicted token that the window has at least, so that it has context."""
    batch_tokens: RowLength = 8192
    """Tokens in one forward pass, padding included; fewer take less memory."""
    seed: NonNegativeInt64 = 0
    """Seed of the bootstrap."""
    watch: str | None = None
    """Evaluate each checkpoint of this run on --texts, on --tasks with lm_eval, or on both."""
    tasks: str | None = None
    """With --watch: YAML file with lm_eval's tasks by language."""
    wait: bool = True
    """With --watch: wait for further checkpoints until the run has ended; false ends after those that are there."""
    batch_size: PositiveInt = 8
    """With --watch: requests of lm_eval in one forward pass."""

    def faults(self) -> list[str]:
        """Return missing names, models given twice, windows that overlap wholly, and arguments of the other mode."""
        faults = [f"--{name} names nothing: give one" for name in ("models", "texts") if getattr(self, name) == []]
        if self.watch is None:
            faults += [f"--{name} is required" for name in ("models", "output_dir") if getattr(self, name) is None]
            faults += ["--tasks needs --watch: give the run"] if self.tasks is not None else []
        else:
            has_none = self.tasks is None and self.texts is None
            faults += ["--watch needs --tasks or --texts: give one of them"] if has_none else []
        models = self.models or []
        twice = {model for model in models if models.count(model) > 1}
        faults += [f"--models {model} is given twice: give it once" for model in sorted(twice)]
        if self.overlap >= self.max_length:
            faults.append(f"--overlap {self.overlap} fills windows of --max_length {self.max_length}: give less")
        return faults


@dataclass(frozen=True)
class DownloadArguments:
    """Download a model or a tokenizer, for machines without internet

    PROGRAM --model_name meta-llama/Meta-Llama-3-8B --output_dir models/llama-3-8b
    PROGRAM --model_name meta-llama/Meta-Llama-3-8B --tokenizer_only true --output_dir models/llama-3-tokenizer
    PROGRAM --model_name OWNER/NAME --revision v1.0 --output_dir models/name
    """

    model_name: str
    """Hub name, OWNER/NAME."""
    output_dir: str
    """Folder to write; must not exist yet."""
    revision: str = "main"
    """Branch, tag or commit."""
    tokenizer_only: bool = False
    """Download only the tokenizer and the configuration, not the weights."""
    pickles: bool = False
    """Download pickled weights if there are no safetensors."""


@dataclass(frozen=True)
class BundleArguments:
    """Collect everything that a run needs on a machine without internet

    PROGRAM --model meta-llama/Meta-Llama-3-8B --data data/tokens --output bundle
    PROGRAM --model models/8b --data data/ca data/es --recipe configs/recipes/llama-3-8b-chat.yaml --output bundle
    PROGRAM --model runs/1-hf --data data/tokens --python 3.12 --cuda none --output bundle
    """

    output: str
    """Folder to write; must not exist yet."""
    model: str | None = None
    """Model and tokenizer: a hub name, a Hugging Face folder with safetensors, or a full checkpoint: RUN, RUN/best,
    RUN/latest, RUN/step-500 or its folder. Default: model_name of the recipe.
    """
    data: list[str] | None = None
    """Token datasets from tokenize_dataset.py: for a recipe that mixes, those of its train_data_dir in the same order;
    otherwise the first one is trained on. Default: train_data_dir of the recipe.
    """
    recipe: str | None = None
    """YAML file with arguments of the run, as in configs/recipes/ or RUN/config.yaml; the bundle's model, data and
    output replace those in it, and files of phases and prompts are copied. Default: the defaults of training.
    """
    tasks: str | None = None
    """YAML file of evaluate.py --watch: the bundle has it and the task files that it names, at their places in this
    folder, and the wheels of lm_eval. Data on the hub is not in the bundle.
    """
    python: Literal["3.10", "3.11", "3.12", "3.13", "3.14"] | None = None
    """Python of the other machine; default: that of this machine."""
    cuda: str = "13.0"
    """CUDA version that torch is built for, such as 12.6; none takes the build for CPUs."""

    def faults(self) -> list[str]:
        """Return a --data without a folder, and a --cuda that is no version."""
        faults = ["--data names nothing: give a token dataset"] if self.data == [] else []
        if not re.fullmatch(r"none|1[0-9]\.[0-9]", self.cuda):
            faults.append(f"--cuda: expected a version such as 13.0, or none; got {self.cuda!r}")
        return faults


@dataclass(frozen=True)
class InspectArguments:
    """Show what is in a token dataset; the exit code is 0, or 1 if there are problems

    PROGRAM data/tokens --html tokens.html
    PROGRAM data/tokens --split validation --rows 10 --start 100
    PROGRAM --compare data/before data/after --html compared.html
    """

    dataset_dir: str | None = field(default=None, metadata=POSITIONAL)
    """Token dataset: a folder written by tokenize_dataset.py."""
    compare: list[str] | None = None
    """Two token datasets to compare, instead of one to show: sources, languages, lengths, tokens per byte, and the
    words that each has more often. Their tokenizers may differ.
    """
    split: Literal["train", "validation"] = "train"
    """Split whose document lengths and rows are shown, or that is compared; of one dataset, all splits are checked."""
    rows: NonNegativeInt = 3
    """Number of rows to show."""
    start: NonNegativeInt64 = 0
    """First row to show, counted from 0."""
    html: str | None = None
    """Also write everything to this file as an HTML page."""

    def faults(self) -> list[str]:
        """Return datasets that are not one, or two to compare, and an --html that cannot be a file."""
        faults = []
        if self.compare is None and self.dataset_dir is None:
            faults.append("DATASET_DIR is required; give --dataset_dir DIR, or --compare A B")
        if self.compare is not None and self.dataset_dir is not None:
            faults.append(f"--compare takes both token datasets: write --compare {self.dataset_dir} OTHER")
        elif self.compare is not None and len(self.compare) != 2:
            faults.append(f"--compare: expected two token datasets, got {len(self.compare)}")
        if self.compare is not None and self.start:
            faults.append("--compare shows no rows; leave out --start")
        if self.html and (os.path.isdir(self.html) or not os.path.isdir(os.path.dirname(self.html) or ".")):
            faults.append(f"--html {self.html}: expected a file in an existing folder, such as page.html")
        return faults


@dataclass(frozen=True)
class MergeArguments:
    """Merge token datasets that were made with the same tokenizer and --max_length, or the slices of --shard

    PROGRAM data/part-1 data/part-2 --output_dir data/whole
    PROGRAM slices/* --output_dir data/tokens
    PROGRAM counts/* --output_dir lines
    """

    dataset_dirs: list[str] = field(metadata=POSITIONAL)
    """Token datasets, in the order of their rows in the result; or all slices made by --shard, in any order, encoded or
    with their lines counted for --boilerplate.
    """
    output_dir: str
    """Token dataset to write, or of counted lines, the folder for --boilerplate; must not exist yet."""

    def faults(self) -> list[str]:
        """Return a fault for a folder that is given again."""
        return [f"--dataset_dirs: {fault}" for _, fault in _given_twice(self.dataset_dirs)]


@dataclass(frozen=True)
class DoctorArguments:
    """Check this machine for what stops or slows runs; the exit code is 0, or 1 if something would stop one

    PROGRAM
    PROGRAM --output_dir /scratch/runs
    PROGRAM --json
    """

    output_dir: str | None = None
    """Folder that runs will write into, to be checked as well; it need not exist yet."""
    json: bool = False
    """Print the results as JSON."""


@dataclass(frozen=True)
class TraceArguments:
    """Show which documents a step read, or which steps and checkpoints read a document

    PROGRAM runs/1 --step 5000
    PROGRAM runs/1 --step 5000 --rank 3
    PROGRAM runs/1 --document corpus/es/news.jsonl:17
    """

    run: str = field(metadata=POSITIONAL)
    """Run or checkpoint: RUN (its newest checkpoint), RUN/best, RUN/latest, RUN/step-500, or a checkpoint's folder."""
    step: PositiveInt64 | None = None
    """Print the documents of this step."""
    rank: NonNegativeInt | None = None
    """With --step: only those that this rank read."""
    document: str | None = None
    """Print the steps and checkpoints that read this document: FILE:LINE, with the name of the file in manifest.json or
    its end, and the line or row in it from 1.
    """
    train_data_dir: list[str] | None = None
    """Token datasets of the run, in its order, if they are no longer where it read them."""
    json: bool = False
    """Print the results as JSON."""

    def faults(self) -> list[str]:
        """Return a question that is missing, or not complete."""
        if (self.step is None) == (self.document is None):
            return ["give one of --step and --document"]
        if self.rank is not None and self.step is None:
            return ["--rank needs --step"]
        if self.document is not None and not re.fullmatch(r".+:[1-9][0-9]{0,9}", self.document):
            return [f"--document: expected FILE:LINE such as corpus/es/news.jsonl:17, got {self.document!r}"]
        return []


# ---------------------------------------------------------------------------------------------------- parsing


def parse(arguments: type[T], argv: list[str] | None = None) -> T:
    """Parse a program's command line, its ``--config`` file and, for training, the launcher's variables.

    Args:
        arguments: a dataclass of this module.
        argv: the command line without the program's name; None takes ``sys.argv``.

    Raises:
        InputError: every fault at once, including contradictions with the launcher.
    """
    try:
        launcher = launcher_arguments() if arguments in (TrainArguments, ReplayArguments) else {}
    except ValueError as error:
        raise InputError(*error.args) from error
    return parse_arguments(arguments, argv, launcher)
