"""Every argument of every program, by group: what a user may set, its default, and what forbids a value.

A field's docstring is its help text. ``faults`` of a group names what types cannot say; the programs report all
faults of a command line and its ``--config`` file at once. Names and defaults are those of the system this project
continues.
"""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar

from fabric_train.cli.errors import InputError
from fabric_train.cli.launcher import launcher_arguments
from fabric_train.cli.parser import POSITIONAL, parse_arguments
from fabric_train.files.sizes import parse_size

if TYPE_CHECKING:
    PositiveInt: TypeAlias = int
    NonNegativeInt: TypeAlias = int
    PositiveFloat: TypeAlias = float
    NonNegativeFloat: TypeAlias = float
    ClosedUnitInterval: TypeAlias = float
else:
    from jsonargparse.typing import ClosedUnitInterval, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

T = TypeVar("T")

Precision = Literal["bf16-true", "bf16-mixed", "32-true", "16-mixed"]
Parallelism = Literal["auto", "fsdp", "fsdp2", "ddp", "single"]
LoggerName = Literal["csv", "tensorboard", "wandb"]
DataFormat = Literal["auto", "text", "messages", "conversations", "alpaca", "prompt_completion"]
_SIZES = ("hidden_width", "num_layers", "num_heads", "intermediate_size", "max_context_width", "vocab_size")
_FURTHER_SIZES = ("num_key_value_heads", "architecture")
Schedule = Literal["cosine", "linear", "constant", "step", "exponential"]
OptimizerStates = Literal["float32", "bfloat16", "8bit"]


# ---------------------------------------------------------------------------------------------------- training


@dataclass(frozen=True)
class DeviceArguments:
    """Devices"""

    devices: int | str = "auto"
    """How many devices on this machine, or their indices (0,2,3); auto or -1 is every GPU, else one CPU process."""
    accelerator: Literal["auto", "cpu", "cuda", "gpu"] = "auto"
    """Where to compute; auto is CUDA where there is a GPU."""
    num_nodes: PositiveInt = 1
    """How many machines take part."""
    tpu: bool = False
    """Train on a TPU. Not built yet: true is refused."""
    rank_timeout: NonNegativeFloat = 120.0
    """Seconds after which a rank that is silent or keeps the others waiting ends the run (ten times that in loading,
    saving and a process's first step); 0 waits for ever, for a debugger. A rank that dies ends it at once.
    """

    def faults(self) -> list[str]:
        """Name what the types let through."""
        faults = []
        if not re.fullmatch(r"auto|-1|[1-9]\d*|\d+(,\d+)+", str(self.devices)):
            faults.append(f"--devices: expected auto, a number above 0 or indices such as 0,2,3; got {self.devices!r}")
        if self.tpu:
            faults.append("--tpu true: training on TPU is not available; leave it out to train on GPU or CPU")
        return faults


@dataclass(frozen=True)
class DataArguments:
    """Data"""

    train_data_dir: str | None = None
    """Token dataset made by tokenize_dataset.py (train/ and validation/ in one folder)."""
    streaming_dataset: list[str] | None = None
    """Train on these texts without a token dataset: files, globs, folders, save_to_disk folders or hub names, tokenized
    on the fly; of --train_data_dir, if given too, only validation/ is used.
    """
    text_column: str = "text"
    """Column of --streaming_dataset that holds the text."""
    max_length: PositiveInt = 2048
    """Tokens in a row of --streaming_dataset."""
    isolate_documents: bool = True
    """Let no document of a packed row see another: attention ends and positions begin at its border; false joins them.
    """
    num_workers: NonNegativeInt = 1
    """Processes that read batches ahead of the loop, on each rank; 0 reads in the loop."""
    seed: NonNegativeInt = 0
    """Seed of the sample order, which is a function of this seed, the epoch and the position alone. A stream is read in
    its own order.
    """

    def faults(self) -> list[str]:
        """Name what leaves nothing to train on, and what cannot be streamed."""
        if self.streaming_dataset is None:
            return [] if self.train_data_dir else ["--train_data_dir is required, or --streaming_dataset"]
        faults = [
            f"--streaming_dataset {name}: a URL is not streamed; download it, or tokenize it with tokenize_dataset.py"
            for name in self.streaming_dataset
            if "://" in name
        ]
        if not self.streaming_dataset:
            faults.append("--streaming_dataset names nothing: give files or hub names")
        if self.max_length < 2:
            faults.append("--max_length 1 leaves no token to predict: give 2 or more")
        return faults


@dataclass(frozen=True)
class ModelArguments:
    """Model"""

    model_name: str = "meta-llama/Meta-Llama-3-8B"
    """Hugging Face causal language model: a hub name or a folder."""
    attention: Literal["sdpa", "flash_attention_2", "flex_attention", "eager"] = "sdpa"
    """Implementation of attention; flash_attention_2 needs a GPU and the package flash-attn."""
    precision: Precision = "bf16-true"
    """bf16-true holds weights and optimizer in bfloat16; the mixed ones keep fp32 weights and compute in 16 bits."""
    float8: bool = False
    """Compute the layers' matrix products in 8 bits beside bf16; needs torchao, --compile true and a GPU of 2023 on."""
    from_scratch: str | None = None
    """Train a new model of this family (llama, gpt2, gpt_neox, mistral, mixtral, qwen3, gemma, ...) of the sizes that
    follow, with random weights from --seed; --model_name is then only the tokenizer of --streaming_dataset. Sizes
    without it are a Llama's.
    """
    hidden_width: PositiveInt | None = None
    """Of a new model: width of its layers' input and output."""
    num_layers: PositiveInt | None = None
    """Of a new model: decoder layers."""
    num_heads: PositiveInt | None = None
    """Of a new model: attention heads."""
    num_key_value_heads: PositiveInt | None = None
    """Of a new model: heads of keys and values, each shared by several heads; left out, as many as --num_heads."""
    intermediate_size: PositiveInt | None = None
    """Of a new model: width inside the feed-forward part."""
    max_context_width: PositiveInt | None = None
    """Of a new model: positions, the longest row that it takes."""
    vocab_size: PositiveInt | None = None
    """Of a new model: rows of its embedding, at least the tokenizer's ids."""
    architecture: dict[str, Any] | None = None
    """Of a new model: further values of its config.json, such as {tie_word_embeddings: true}; see configs/."""

    def faults(self) -> list[str]:
        """Name the sizes that are missing, that make no model, and that no new model asks for."""
        if self.family is None:
            return []
        given = [f"--{name}" for name in (*_SIZES, *_FURTHER_SIZES) if self._has(name)]
        missing = [f"--{name}" for name in _SIZES if not self._has(name)]
        if missing and self.from_scratch is None:
            return [f"{given[0]} is of a new model, which needs {', '.join(missing)} too; or leave it out"]
        if missing:
            return [f"--from_scratch {self.from_scratch} needs {', '.join(missing)} too"]
        assert self.hidden_width is not None
        assert self.num_heads is not None
        heads = self.num_key_value_heads or self.num_heads
        faults = []
        if self.hidden_width % self.num_heads:
            faults.append(f"--hidden_width {self.hidden_width} is no multiple of --num_heads {self.num_heads}")
        if self.num_heads % heads:
            faults.append(f"--num_heads {self.num_heads} is no multiple of --num_key_value_heads {heads}")
        return faults

    @property
    def family(self) -> str | None:
        """Family of the new model to be trained; None where it is a pretrained one."""
        return self.from_scratch or ("llama" if any(map(self._has, (*_SIZES, *_FURTHER_SIZES))) else None)

    def _has(self, name: str) -> bool:
        return getattr(self, name) is not None


@dataclass(frozen=True)
class FSDPArguments:
    """FSDP and other parallelism"""

    parallelism: Parallelism = "auto"
    """fsdp is Fabric's FSDPStrategy, fsdp2 fully_shard; auto is fsdp with several processes, else single."""
    auto_wrap_policy: str = "LlamaDecoderLayer"
    """Class of the layer that FSDP shards as one unit; for other families it is found from the model."""
    sharding_strategy: Literal["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD"] = "FULL_SHARD"
    """What is sharded: everything, gradients and optimizer, nothing, or everything within a machine."""
    tensor_parallel_size: PositiveInt = 1
    """Devices that compute each row together, every matrix of a layer cut among them; needs --parallelism fsdp2."""
    state_dict_type: Literal["full", "sharded"] = "full"
    """Checkpoints as one file gathered on rank 0, or as one shard a rank."""
    limit_all_gathers: bool = True
    """Hold back all-gathers so that fewer layers' parameters are in memory at once."""
    cpu_offload: bool = False
    """Keep parameters, gradients and optimizer in host memory between uses (slow)."""
    gradient_reduction: Literal["step", "micro_batch"] = "step"
    """When gradients are summed over devices: once a step, whole on each until then, or after each micro-batch, which
    takes less memory and sends more. Of fsdp and fsdp2.
    """
    activation_checkpointing: Literal["none", "full", "selective"] = "none"
    """Recompute each decoder layer in the backward pass instead of storing its activations: full stores its input
    alone, selective as much more as --activation_memory_budget allows.
    """
    activation_memory_budget: ClosedUnitInterval = 0.5
    """With selective: what is stored, as a share of all activations; results of the costliest operations first."""
    activation_offload: bool = False
    """With full: keep the layers' inputs in pinned host memory until the backward pass."""
    compile: bool = False
    """Compile decoder layers, and the step of an optimizer in bf16: the first step takes a minute more, others less."""

    def faults(self) -> list[str]:
        """Name the combinations that no strategy offers."""
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
    """Go on from the newest complete checkpoint in --output_dir, or from --checkpoint; start anew where there is none.
    """
    checkpoint: str | None = None
    """Start from this checkpoint (step-... folder or a run folder) instead of the newest of --output_dir."""
    weights_only: bool = False
    """Take only the weights of --checkpoint: optimizer, step and data order start anew."""
    allow_changes: bool = False
    """Go on from a checkpoint also where arguments differ that decide the losses, such as lr; refused else."""

    def faults(self) -> list[str]:
        """Name what contradicts itself."""
        if self.weights_only and self.checkpoint is None:
            return ["--weights_only true needs --checkpoint: the checkpoint whose weights to start from"]
        if self.weights_only and self.resume:
            return ["--weights_only true starts anew and --resume true goes on: give one of them"]
        return []


@dataclass(frozen=True)
class TrainingArguments:
    """Training"""

    number_epochs: PositiveInt = 2
    """How many times every row is seen; a stream goes on until --max_step."""
    max_step: PositiveInt | None = None
    """Optimizer steps in all; left out, it follows from the epochs and the data."""
    micro_batch_size: PositiveInt = 1
    """Rows in one forward pass on one device."""
    gradient_accumulation_steps: PositiveInt = 64
    """Micro-batches on each device in one optimizer step."""
    total_batch_size: PositiveInt | None = None
    """Rows in one optimizer step over all devices; given, it sets gradient_accumulation_steps."""
    grad_clip: NonNegativeFloat = 1.0
    """Largest global gradient norm; 0 turns clipping off."""
    lr: PositiveFloat = 2e-5
    """Peak learning rate."""
    min_lr: NonNegativeFloat = 0.0
    """Learning rate of the last step."""
    lr_decay: bool = True
    """Whether the learning rate decays; false holds it at lr after the warm-up."""
    lr_schedule: Schedule = "cosine"
    """How it decays; every schedule but constant ends on min_lr."""
    warmup_steps: NonNegativeInt = 0
    """Steps over which the learning rate rises linearly to lr."""
    weight_decay: NonNegativeFloat = 0.01
    """AdamW's decay, on matrices only: norms and biases have none."""
    beta1: ClosedUnitInterval = 0.9
    """AdamW's first-moment decay."""
    beta2: ClosedUnitInterval = 0.95
    """AdamW's second-moment decay."""
    optimizer_states: OptimizerStates | None = None
    """What AdamW's moments are kept in; left out, in the type of the weights. 8bit leaves those of norms and biases in
    fp32.
    """
    stochastic_rounding: bool = True
    """Round weights and moments that are kept in bfloat16 up or down by chance, so that small changes add up; false
    rounds to the nearest.
    """
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """At a loss or gradient that is NaN or infinite: save the state before that step and stop, or leave the step out.
    """

    def faults(self) -> list[str]:
        """Name the values that cannot stand together."""
        faults = []
        if self.min_lr > self.lr:
            faults.append(f"--min_lr {self.min_lr:g} is above --lr {self.lr:g}")
        if self.lr_schedule == "exponential" and self.lr_decay and self.min_lr == 0:
            faults.append("--lr_schedule exponential never reaches 0: give a --min_lr above 0")
        if self.max_step is not None and self.warmup_steps > self.max_step:
            faults.append(f"--warmup_steps {self.warmup_steps} is more than --max_step {self.max_step}")
        faults += [f"--{name} must be below 1" for name in ("beta1", "beta2") if getattr(self, name) == 1]
        return faults


@dataclass(frozen=True)
class EvaluationArguments:
    """Evaluation"""

    eval_batch_size: PositiveInt = 1
    """Rows in one validation pass on one device."""
    eval_iters: PositiveInt | None = None
    """At most so many validation batches on each device; left out, the whole validation split."""
    eval_step_interval: PositiveInt = 500
    """Optimizer steps between evaluations; each epoch's end has one too."""
    eval_only: bool = False
    """Evaluate the model (or --checkpoint) on the validation split and end."""
    self_check: bool = False
    """Compute a few rows cut in several ways, compare their losses and gradients, and end: 0 where they agree, else 1.
    """

    @property
    def only_reads(self) -> bool:
        """Whether nothing is trained, and a run in --output_dir stays as it is."""
        return self.eval_only or self.self_check

    def faults(self) -> list[str]:
        """Name what cannot be done in one start."""
        both = self.eval_only and self.self_check
        return ["--eval_only true and --self_check true: give one of them"] if both else []


@dataclass(frozen=True)
class SaveArguments:
    """Save"""

    output_dir: str
    """Run folder: config.yaml, metrics.csv, checkpoints/."""
    save_step_interval: PositiveInt = 1000
    """Optimizer steps between checkpoints; each epoch's end and the run's end have one too."""
    keep_checkpoints: PositiveInt | None = None
    """Keep so many newest checkpoints, and the best by validation loss; left out, all."""
    async_save: bool = True
    """Write checkpoints in the background, out of a copy of model and optimizer in host memory."""


@dataclass(frozen=True)
class LoggingArguments:
    """Logging"""

    log_step_interval: PositiveInt = 1
    """Optimizer steps between lines of metrics."""
    loggers: list[LoggerName] = field(default_factory=lambda: ["csv", "tensorboard"])
    """Where metrics go beside RUN/metrics.csv, which is always written: csv alone, tensorboard, wandb."""
    entity: str | None = None
    """Weights & Biases team or user."""
    project: str = "fabric_llama"
    """Weights & Biases project."""
    log_model: Literal["none", "last", "all"] = "none"
    """Checkpoints uploaded to Weights & Biases: none, the last, or all."""
    profile: str | None = None
    """Trace the steps first:last, such as 10:12, into RUN/profile/, on a GPU with what its memory holds."""
    profile_ranks: Literal["first", "all"] = "first"
    """Ranks that --profile traces."""

    @property
    def profiled_steps(self) -> tuple[int, int] | None:
        """First and last step to trace, both included; None where nothing is traced."""
        found = re.fullmatch(r"([1-9]\d*):([1-9]\d*)", self.profile or "")
        steps = (int(found[1]), int(found[2])) if found else None
        return steps if steps and steps[0] <= steps[1] else None

    def faults(self) -> list[str]:
        """Name an upload that has nowhere to go, and steps that are none."""
        faults = []
        if self.log_model != "none" and "wandb" not in self.loggers:
            faults.append(f"--log_model {self.log_model} needs --loggers wandb")
        if self.profile is not None and self.profiled_steps is None:
            faults.append(f"--profile: expected a first and a last step such as 10:12, got {self.profile!r}")
        return faults


@dataclass(frozen=True)
class PlanArguments:
    """Plan"""

    plan: bool = False
    """Print what the run will take (memory, disk, traffic, steps), refuse what does not fit, and end. --devices need
    not be here if --device_memory is given.
    """
    device_memory: str | None = None
    """Memory of a GPU to plan for, such as 80GB; left out, that of the GPUs here, or of this machine on CPU."""
    interconnect: str | None = None
    """Plan the time of traffic over this line of a device to those of its machine, one way: 450GB/s is NVLink 4."""
    network: str | None = None
    """The same for the line of a machine to the others: 50GB/s is one port of 400 Gbit/s."""

    @property
    def plans_for_others(self) -> bool:
        """Whether the plan is for GPUs that need not be here."""
        return self.plan and self.device_memory is not None

    def faults(self) -> list[str]:
        """Name what is no size, and what only a plan reads."""
        examples = {"device_memory": "80GB", "interconnect": "450GB/s", "network": "50GB/s"}
        given = {name: getattr(self, name) for name in examples if getattr(self, name) is not None}
        faults = [
            f"--{name}: expected a size such as {examples[name]}, got {value!r}"
            for name, value in given.items()
            if parse_size(value) is None
        ]
        faults += [f"--{name} is read by --plan true alone" for name in given if not self.plan]
        return faults


@dataclass(frozen=True)
class TrainArguments:
    """Train a Hugging Face causal language model on a token dataset:  fabric run fabric_train --devices N ..."""

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


# ----------------------------------------------------------------------------------------- the other programs


@dataclass(frozen=True)
class TokenizeArguments:
    """Tokenization"""

    dataset: list[str]
    """Files (txt, md, csv, json, jsonl, parquet, also .gz and .zst), globs, folders, URLs, save_to_disk folders, or hub
    names.
    """
    tokenizer_name: str
    """Tokenizer: a hub name, a folder, or a tokenizer.model file."""
    output_dir: str
    """Token dataset to write; must not exist yet."""
    max_length: PositiveInt = 2048
    """Tokens in a row."""
    packing: Literal["concat", "best_fit", "none"] = "concat"
    """concat joins documents and cuts at row ends; best_fit fills rows with whole documents; none is one a row, padded.
    """
    overlap: NonNegativeInt = 0
    """Tokens of a document that are repeated at the start of a row that goes on with it; not supervised again."""
    data_format: DataFormat = "auto"
    """What a row holds: text in --text_column, or a chat or instruction; auto finds out from the first row."""
    text_column: str = "text"
    """Column that holds the text in csv, json, jsonl, parquet and datasets."""
    train_on: Literal["assistant", "all", "last"] = "assistant"
    """Tokens of a chat that are supervised: the assistant's turns, all tokens, or the assistant's last turn."""
    too_long: Literal["cut_end", "cut_start", "drop"] = "cut_end"
    """Chats beyond --max_length lose turns from the end, or from the start after the system's, or are dropped."""
    validation_split: ClosedUnitInterval = 0.05
    """Share of the documents that goes to validation/; 0 makes none."""
    validation_dataset: list[str] | None = None
    """Sources of validation/, instead of a split; read like --dataset."""
    weights: list[PositiveFloat] | None = None
    """Share of each --dataset in the tokens of train/, in any unit; left out, every document is taken once."""
    deduplicate: bool = False
    """Leave out documents whose content has been read before."""
    on_bad_rows: Literal["fail", "skip"] = "fail"
    """What to do about rows that cannot be read: stop and say where, or count and leave them out."""
    stream: bool = False
    """Read hub datasets as a stream instead of downloading them first."""
    num_proc: PositiveInt | None = None
    """Processes that encode; left out, one a core."""
    seed: NonNegativeInt = 0
    """Seed of the validation split and of the sampling by --weights."""
    max_documents: PositiveInt | None = None
    """Stop after so many documents."""
    max_tokens: PositiveInt | None = None
    """Stop after the document with which so many tokens have been read; with --weights, tokens of train/."""

    def faults(self) -> list[str]:
        """Name what leaves nothing to train on, and what contradicts itself."""
        faults = []
        if self.validation_split == 1:
            faults.append("--validation_split 1 leaves nothing to train on: give a share below 1")
        if self.max_length < 2:
            faults.append("--max_length 1 leaves no token to predict: give 2 or more")
        if self.overlap >= self.max_length > 1:
            faults.append(f"--overlap {self.overlap} fills rows of --max_length {self.max_length}: give less")
        if self.weights and len(self.weights) != len(self.dataset):
            faults.append(f"--weights has {len(self.weights)} numbers for {len(self.dataset)} sources of --dataset")
        return faults


@dataclass(frozen=True)
class ConvertArguments:
    """Conversion to Hugging Face format"""

    checkpoint: list[str]
    """Checkpoints (step-... folders), or run folders, whose newest checkpoint is taken."""
    output_dir: str
    """Folder to write; with several checkpoints, one folder each beneath it, named step-...."""
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    """Type of the exported weights."""
    max_shard_size: str = "5GB"
    """Largest safetensors file."""
    push_to_hub: str | None = None
    """Push to OWNER/NAME once the export is verified."""
    private: bool = True
    """Whether a repository that the push creates is private."""

    def faults(self) -> list[str]:
        """Name what can be seen to be wrong before any work."""
        faults = []
        if not re.fullmatch(r"(?=.*[1-9])\d+(\.\d+)?[KMGT]B", self.max_shard_size):
            faults.append(f"--max_shard_size: expected a size such as 5GB or 500MB, got {self.max_shard_size!r}")
        if self.push_to_hub and not re.fullmatch(r"[\w.-]+/[\w.-]+", self.push_to_hub):
            faults.append(f"--push_to_hub: expected OWNER/NAME, got {self.push_to_hub!r}")
        if self.push_to_hub and len(self.checkpoint) > 1:
            faults.append("--push_to_hub takes one checkpoint: give one --checkpoint")
        return faults


@dataclass(frozen=True)
class GenerateArguments:
    """Generation"""

    model_name: str
    """Checkpoint, run folder, exported folder or hub name."""
    prompt: str
    """Text to go on from."""
    num_tokens: PositiveInt = 100
    """At most so many new tokens."""
    temperature: NonNegativeFloat = 0.0
    """0 takes the likeliest token each time; above 0 samples."""
    top_p: ClosedUnitInterval = 1.0
    """Sample among the likeliest tokens that together have this probability (nucleus sampling, arXiv:1904.09751)."""
    seed: NonNegativeInt = 0
    """Seed of the sampling."""

    def faults(self) -> list[str]:
        """Name what cannot be generated from."""
        faults = []
        if not self.prompt:
            faults.append("--prompt is empty")
        if self.top_p == 0:
            faults.append("--top_p 0 leaves no token to choose from: give a number above 0")
        return faults


@dataclass(frozen=True)
class DownloadArguments:
    """Download of a model or a tokenizer, for machines without internet"""

    model_name: str
    """Hub name, OWNER/NAME."""
    output_dir: str
    """Folder to write; must not exist yet."""
    revision: str = "main"
    """Branch, tag or commit."""
    tokenizer_only: bool = False
    """Leave the weights out."""
    pickles: bool = False
    """Take pickled weights too, where there are no safetensors."""


@dataclass(frozen=True)
class InspectArguments:
    """Show what is in a token dataset; the exit code is 0, or 1 if there are problems"""

    dataset_dir: str = field(metadata=POSITIONAL)
    """Token dataset: the folder that tokenize_dataset.py wrote."""
    split: Literal["train", "validation"] = "train"
    """Split whose document lengths and rows are shown; all are examined."""
    rows: NonNegativeInt = 3
    """Rows to show."""
    start: NonNegativeInt = 0
    """The first row to show, from 0."""
    html: str | None = None
    """Write it all as one page into this file, too."""

    def faults(self) -> list[str]:
        """Name a page that has no place."""
        page = Path(self.html) if self.html is not None else None
        if page and (page.is_dir() or not page.parent.is_dir()):
            return [f"--html {self.html}: expected a file in a folder that is there, such as page.html"]
        return []


@dataclass(frozen=True)
class MergeArguments:
    """Join token datasets that were made with the same tokenizer and --max_length"""

    dataset_dirs: list[str] = field(metadata=POSITIONAL)
    """Token datasets, in the order in which their rows are to lie."""
    output_dir: str
    """Token dataset to write; must not exist yet."""

    def faults(self) -> list[str]:
        """Name what leaves nothing to join."""
        if len(self.dataset_dirs) < 2:
            return ["--dataset_dirs: give two token datasets or more"]
        return []


# ---------------------------------------------------------------------------------------------------- parsing


def parse(arguments: type[T], argv: list[str] | None = None) -> T:
    """Read a program's command line, its ``--config`` file and, for training, what the launcher has decided.

    Raises:
        InputError: with every fault at once, contradictions with the launcher among them.
    """
    try:
        launcher = launcher_arguments() if arguments is TrainArguments else {}
    except ValueError as error:
        raise InputError(str(error)) from error
    return parse_arguments(arguments, argv, launcher)
