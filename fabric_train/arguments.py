"""The arguments of training, by group: type, default, help text and checks. Other programs have theirs beside them.

A field's docstring is its help text, and the lines below the first one of a program's docstring are examples of its
use. ``faults`` of a group returns what the types cannot check; the programs report all faults of the command line and
the ``--config`` file at once. It has the names and defaults of the system that this project continues.
"""

import os
import re
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Annotated, Any, Literal, TypeVar

from fabric_train.cli.argument_types import (
    LayerSize,
    NameIn,
    NonNegativeFloat,
    NonNegativeInt,
    NonNegativeInt64,
    NumLayers,
    NumWorkers,
    PositiveFloat,
    PositiveInt,
    PositiveShare,
    RowLength,
    Seconds,
    TeacherWeights,
    Temperature,
    UnitInterval,
    given_twice,
    parse_size,
    range_of_steps,
)
from fabric_train.cli.errors import InputError
from fabric_train.cli.launcher import launcher_arguments
from fabric_train.cli.parser import parse_arguments
from fabric_train.cli.shares import Shares, named_numbers
from fabric_train.cli.tables import LOGGERS, METRICS, OBJECTIVES, OPTIMIZERS, Table, resolve_settings

T = TypeVar("T")

Precision = Literal["auto", "bf16-true", "bf16-mixed", "32-true", "16-mixed"]
Parallelism = Literal["auto", "fsdp", "fsdp2", "ddp", "single", "xla"]
ShardingStrategy = Literal["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"]
Schedule = Literal["cosine", "linear", "constant", "step", "exponential", "wsd"]
DecayForm = Literal["1-sqrt", "linear", "cosine"]
OptimizerStates = Literal["float32", "bfloat16", "8bit"]
MuonAdjustLr = Literal["match_rms_adamw", "original"]
ObjectiveName = Annotated[str, NameIn(OBJECTIVES)]
OptimizerName = Annotated[str, NameIn(OPTIMIZERS)]
MetricName = Annotated[str, NameIn(METRICS)]
LoggerName = Annotated[str, NameIn(LOGGERS)]
PROJECT = "fabric_llama"
_TRACKERS = {"wandb", "trackio", "mlflow"}
_TRACKER_ARGUMENTS = ("project", "run_name", "tags", "group", "notes")
_MAX_NAME_LENGTHS = {"project": 128, "run_name": 128, "group": 128, "tags": 64}
_MIXTURE_ARGUMENTS = ("shares", "token_shares", "phases")
OBJECTIVE_ARGUMENTS: dict[str, tuple[str, ...]] = {
    "sft": (),
    "distill": (
        "teacher",
        "teacher_weights",
        "teacher_states",
        "divergence",
        "jsd_beta",
        "distill_temperature",
        "distill_on",
        "sft_weight",
    ),
    "rl": ("reference", "sft_weight"),
    "dpo": ("dpo_beta", "length_normalised", "label_smoothing", "sft_weight", "reference"),
    "ipo": ("dpo_beta", "sft_weight", "reference"),
    "simpo": ("dpo_beta", "label_smoothing", "sft_weight", "simpo_gamma"),
    "orpo": ("dpo_beta",),
    "apo_zero": ("dpo_beta", "sft_weight", "reference"),
    "dpop": ("dpo_beta", "sft_weight", "dpop_lambda", "reference"),
    "kto": ("dpo_beta", "kto_desirable_weight", "kto_undesirable_weight", "reference"),
    "apo_zero_unpaired": ("dpo_beta", "kto_desirable_weight", "kto_undesirable_weight", "reference"),
}
"""The arguments that each objective uses."""
SAMPLER_ARGUMENTS: dict[str, tuple[str, ...]] = {
    "in_process": ("sampler_batch_size",),
    "vllm": ("vllm_python", "sampler_devices"),
}
"""The arguments that only one sampler uses; ``training.samplers.SAMPLERS`` has the samplers themselves."""
REWARD_ARGUMENTS = (
    "rewards",
    "reward_weights",
    "reward_settings",
    "on_reward_error",
    "reward_timeout",
    "reward_memory_gb",
    "advantage",
    "refill",
    "loss_normalisation",
    "kl_weight",
)
"""The arguments of completions that only an objective with rewards uses."""
LOWEST_TEMPERATURE = 0.01
"""The lowest ``--temperature``. Below it, differences of logits overflow."""
TOKEN_OBJECTIVES = ("sft", "distill", "rl")
"""The objectives that train on tokens, not on pairs of answers."""
COMPLETION_OBJECTIVES = ("rl", "distill")
"""The objectives that can train on completions that the run samples."""
UNPAIRED_OBJECTIVES = ("kto", "apo_zero_unpaired")
"""The objectives that train on unpaired answers."""
_MUON_ARGUMENTS = ("muon_lr", "muon_momentum", "muon_adjust_lr")
PARTS = ("train_only", "freeze")
_SCALING = r"(llama3|yarn|linear):([0-9]{1,6}(?:\.[0-9]{1,6})?)"
_REQUIRED_SIZES = ("hidden_width", "num_layers", "num_heads", "intermediate_size", "max_context_width", "vocab_size")
_OPTIONAL_SIZES = ("num_key_value_heads", "architecture")


@dataclass(frozen=True)
class DeviceArguments:
    """Devices"""

    devices: int | str = "auto"
    """Number of devices on each machine, or their indices (0,2,3). auto and -1 use all GPUs, or one process on CPU."""
    accelerator: Literal["auto", "cpu", "cuda", "gpu", "tpu"] = "auto"
    """Device type. auto uses CUDA if there is a GPU, otherwise the CPU; tpu is one PyTorch/XLA device."""
    num_nodes: PositiveInt = 1
    """Number of machines."""
    tpu: bool = False
    """Same as --accelerator tpu."""
    rank_timeout: Seconds = 120.0
    """Seconds before the run ends because a rank is silent or keeps the others waiting; ten times as long while
    loading, while saving and in a process's first step. 0 waits forever, for debugging. A rank that dies ends the run
    immediately.
    """

    def __post_init__(self) -> None:
        """Let --tpu choose the accelerator."""
        if self.tpu and self.accelerator == "auto":
            object.__setattr__(self, "accelerator", "tpu")

    def faults(self) -> list[str]:
        """Return invalid values of --devices, and an accelerator that contradicts --tpu."""
        faults = []
        if not re.fullmatch(r"auto|-1|[1-9][0-9]{0,5}|[0-9]{1,4}(,[0-9]{1,4})+", str(self.devices)):
            faults.append(f"--devices: expected auto, a number above 0, or indices such as 0,2,3; got {self.devices!r}")
        if self.tpu and self.accelerator != "tpu":
            faults.append(
                f"--tpu true and --accelerator {self.accelerator} contradict each other; give only one of them"
            )
        return faults


@dataclass(frozen=True)
class DataArguments:
    """Data"""

    train_data_dir: str | list[str] | None = None
    """Token datasets written by fabric-train tokenize: folders with train/ and validation/. You can train on several
    that have the same tokenizer and --max_length; every optimizer step then has rows from each, in proportion to their
    shares.
    """
    shares: list[PositiveFloat] | list[dict[str, Any]] | list[str] | None = None
    """How much of each --train_data_dir an epoch reads: 1 reads every row once, 2 twice, and 0.15 reads 15 % of the
    rows, a different 15 % in the next epoch. Default: 1. By name: FOLDER=1, or FOLDER:SOURCE=0.15 for a source in a
    folder; 0 leaves it out. With --streaming_dataset: how much of each source a pass reads, also by name; this mixes
    the documents. With --prompts: how many of each source's prompts an epoch takes.
    """
    token_shares: list[PositiveFloat] | list[dict[str, Any]] | list[str] | None = None
    """Instead of --shares: each source's share of the tokens in every step, such as 0.7 0.2 0.1, or by name. An epoch
    has as many rows as all sources together.
    """
    phases: str | None = None
    """YAML file that divides the run into phases with different shares or learning rates. Each phase begins at a step
    or at a fraction of the run: [{from: 0.9, token_shares: [0.5, 0.5], lr: 1e-5}]. Needs --max_step.
    """
    streaming_dataset: list[str] | None = None
    """Train on texts or chats without a token dataset, tokenizing them on the fly: files, globs, folders, save_to_disk
    folders or hub names, also as NAME:SUBSET:SPLIT@REVISION; es=PATH names a source es. Sources are read one after the
    other, or mixed with --shares. If --train_data_dir is given too, only its validation/ is used.
    """
    prompts: list[str] | None = None
    """Train on completions that the model samples: files (.jsonl or .parquet), folders, globs or hub names with a
    column prompt, a text or the messages of a chat. Other columns go to the rewards. math=PATH names a source math.
    """
    shuffle_buffer: NonNegativeInt = 0
    """Draw the next document of --streaming_dataset from a buffer of this many documents, which every worker keeps in
    memory; 0 keeps the original order.
    """
    text_column: str = "text"
    """Column of --streaming_dataset that holds the text. Sources without it must hold chats or instructions.
    NAME:SEPARATOR joins lists of texts.
    """
    max_length: RowLength = 2048
    """Tokens per row of --streaming_dataset, and the most of a prompt of --prompts and its completion; 8k is 8192."""
    isolate_documents: bool = True
    """Keep the documents of a packed row separate: no attention between them, and positions restart at 0 in each
    document. false lets documents attend to the earlier ones in their row.
    """
    num_workers: NumWorkers = 1
    """Processes per rank that read batches ahead of the training loop; 0 reads in the loop."""
    seed: NonNegativeInt64 = 0
    """Seed of the sample order, dropout, stochastic rounding and a new model's random weights. It changes the order of
    a stream only with --shares or --shuffle_buffer.
    """

    def faults(self) -> list[str]:
        """Return missing data, and sources that cannot be streamed."""
        faults = self._check_shares() + self._check_folders()
        if self.streaming_dataset is None:
            if self.shuffle_buffer:
                faults.append(
                    "--shuffle_buffer only applies to --streaming_dataset; leave out --shuffle_buffer, since the rows "
                    "of a token dataset are always shuffled"
                )
            if self.prompts is not None:
                faults += self._check_prompts()
            elif not self.data_dirs:
                faults.insert(0, "--train_data_dir, --streaming_dataset or --prompts is required")
            return faults
        if self.prompts is not None:
            faults.append("--streaming_dataset and --prompts exclude each other; leave out one of them")
        for name in self.streaming_dataset:
            if "://" in name:
                faults.append(
                    f"--streaming_dataset {name}: cannot stream a URL; download the file, or tokenize it with "
                    "fabric-train tokenize"
                )
        if not self.streaming_dataset:
            faults.append("--streaming_dataset is empty; give files or hub names")
        if self.max_length < 2:
            faults.append("--max_length 1 leaves no token to predict; give 2 or more")
        return faults

    @property
    def data_dirs(self) -> list[str]:
        """The folders of --train_data_dir."""
        if self.train_data_dir is None:
            return []
        if isinstance(self.train_data_dir, str):
            return [self.train_data_dir] if self.train_data_dir else []
        return self.train_data_dir

    def _check_prompts(self) -> list[str]:
        """Return what does not work with the prompts."""
        faults = []
        if not self.prompts:
            faults.append("--prompts is empty; give files or hub names")
        if len(self.data_dirs) > 1:
            faults.append("--prompts takes one --train_data_dir beside it; merge the others into it")
        for name in ("token_shares", "phases"):
            if getattr(self, name) is not None:
                faults.append(f"--{name} does not work with --prompts; give --shares, or leave out --{name}")
        return faults

    @property
    def mixes(self) -> bool:
        """Whether rows of token datasets come from several, or from a share of one, which may change."""
        if len(self.data_dirs) > 1:
            return True
        has_shares = any(getattr(self, name) is not None for name in _MIXTURE_ARGUMENTS)
        return has_shares and self.streaming_dataset is None and self.prompts is None

    @property
    def shares_of_epochs(self) -> Shares:
        """What --shares or --token_shares says, or that an epoch reads every row once."""
        if self.token_shares is not None:
            return Shares("--token_shares", self.token_shares, counts_tokens=True)
        return Shares("--shares", self.shares)

    def _check_folders(self) -> list[str]:
        """Return a fault for each folder of --train_data_dir that is given again, also by another path."""
        return [
            f"--train_data_dir: {fault}, or use --shares {name}=2 to read its rows twice per epoch"
            for name, fault in given_twice(self.data_dirs)
        ]

    def _check_shares(self) -> list[str]:
        """Return what is wrong with the shares of the data: --shares, --token_shares, and --phases of a stream."""
        if self.shares is not None and self.token_shares is not None:
            return ["--shares and --token_shares contradict each other; give only one of them"]

        # arguments that a stream does not have
        if self.streaming_dataset is not None:
            if self.token_shares is not None:
                return [
                    "--token_shares does not work with --streaming_dataset, whose token counts are unknown before it "
                    "is read; give --shares"
                ]
            if self.phases is not None:  # phases change the shares
                return [
                    "--phases does not work with --streaming_dataset, whose shares are the same in all steps; "
                    "tokenize the texts and give --train_data_dir"
                ]

        # --shares or --token_shares: the names, or one number for each source
        shares = self.shares_of_epochs
        if shares.values is None:  # neither of them is given
            return []
        num_sources = len(self.data_dirs)
        sources = "folders of --train_data_dir"
        if self.prompts is not None:
            num_sources = len(self.prompts)
            sources = "sources of --prompts"
        if self.streaming_dataset is not None:
            num_sources = len(self.streaming_dataset)
            sources = "sources of --streaming_dataset"
        try:
            has_names = shares.by_name() is not None
        except InputError as error:
            return list(error.faults)
        if not has_names and len(shares.values) != num_sources:
            return [
                f"{shares.option} has {len(shares.values)} numbers for {num_sources} {sources}; give one number for "
                "each"
            ]
        return []


@dataclass(frozen=True)
class ModelArguments:
    """Model"""

    model_name: str = "meta-llama/Meta-Llama-3-8B"
    """Hugging Face causal language model: a hub name or a folder. Or a checkpoint (RUN, RUN/best, RUN/latest or
    RUN/step-500) whose weights a new run starts from.
    """
    attention: Literal["sdpa", "flash_attention_2", "flex_attention", "eager"] = "sdpa"
    """Attention implementation. sdpa is torch's scaled_dot_product_attention, which on a GPU uses torch's kernel for
    documents; flash_attention_2 needs a GPU and the flash-attn package.
    """
    precision: Precision = "auto"
    """bf16-true keeps weights and optimizer states in bfloat16; mixed keeps them in fp32 and computes in 16 bits. auto
    is bf16-true, or bf16-mixed with --accelerator tpu.
    """
    float8: bool = False
    """Compute the matrix products of the decoder layers in float8; needs torchao, --compile true and an Ada or newer
    GPU.
    """
    from_scratch: str | None = None
    """Train a new model of this family (llama, gpt2, gpt_neox, mistral, mixtral, qwen3, gemma, ...) with random weights
    and the sizes below. --model_name then only provides the tokenizer for --streaming_dataset. If you give sizes
    without a family, the model is a Llama.
    """
    hidden_width: LayerSize | None = None
    """New model: hidden size."""
    num_layers: NumLayers | None = None
    """New model: number of decoder layers."""
    num_heads: LayerSize | None = None
    """New model: number of attention heads."""
    num_key_value_heads: LayerSize | None = None
    """New model: number of key-value heads (grouped-query attention); default: --num_heads."""
    intermediate_size: LayerSize | None = None
    """New model: hidden size of the feed-forward layers."""
    max_context_width: RowLength | None = None
    """New model: number of positions, which is the maximum row length."""
    vocab_size: LayerSize | None = None
    """New model: number of embedding rows, at least as many as the tokenizer has ids."""
    architecture: dict[str, Any] | None = None
    """New model: other config.json values, such as {tie_word_embeddings: true}; see configs/."""

    rope_scaling: str | None = None
    """Extend the model's positions for longer rows: llama3:8, yarn:8 or linear:8 extend the original context 8 times;
    none removes scaling. Default: as in the model's config.json (docs/long_rows.md).
    """
    rope_theta: PositiveFloat | None = None
    """Base of the rotary positions, such as 500000. Without --rope_scaling, the model then accepts as many positions as
    the rows have. Default: as in the model's config.json.
    """
    train_only: list[str] | None = None
    """Train only these parts of the model and freeze the rest: names of modules or parameters (embed_tokens lm_head),
    or regular expressions ('layers.(0|1|31)'). all trains the entire model.
    """
    freeze: list[str] | None = None
    """Freeze these parts, named as for --train_only, and train the rest of the model, or the rest of --train_only."""

    def faults(self) -> list[str]:
        """Return wrong values, lists of parts that are empty, and sizes that are missing or do not fit together."""
        faults = [
            f"--{name} is empty; give parts of the model, or leave it out"
            for name in PARTS
            if getattr(self, name) == []
        ]
        if self.rope_scaling is not None and self.scaling is None:
            expected = "llama3:FACTOR, yarn:FACTOR or linear:FACTOR with a factor above 1, or none"
            faults.append(f"--rope_scaling: expected {expected}; got {self.rope_scaling!r}")
        return faults + self._check_sizes()

    @property
    def scaling(self) -> tuple[str, float] | None:
        """Kind and factor of --rope_scaling, 1 for none; None if it is not given or wrong."""
        if self.rope_scaling == "none":
            return "none", 1.0
        match = re.fullmatch(_SCALING, self.rope_scaling or "")
        if match is None:
            return None
        kind = match[1]
        factor = float(match[2])
        return (kind, factor) if factor > 1 else None

    def _check_sizes(self) -> list[str]:
        """Return a message for each size of a new model that is missing or is not a multiple of another size."""
        if self.family is None:  # a pretrained model has its sizes
            return []
        missing = [f"--{name}" for name in _REQUIRED_SIZES if getattr(self, name) is None]
        if missing and self.from_scratch is not None:
            return [f"--from_scratch {self.from_scratch} also needs {', '.join(missing)}"]
        if missing:
            # Without --from_scratch, a size asks for a new model: at least one is given.
            given_size, *_ = self._list_sizes()
            return [
                f"{given_size} creates a new model, which also needs {', '.join(missing)}; add them, or leave "
                f"{given_size} out"
            ]

        assert self.hidden_width is not None  # nothing in _REQUIRED_SIZES is missing
        assert self.num_heads is not None
        num_key_value_heads = self.num_key_value_heads or self.num_heads
        faults = []
        if self.hidden_width % self.num_heads:
            faults.append(f"--hidden_width {self.hidden_width} is not a multiple of --num_heads {self.num_heads}")
        if self.num_heads % num_key_value_heads:
            faults.append(
                f"--num_heads {self.num_heads} is not a multiple of --num_key_value_heads {num_key_value_heads}"
            )
        return faults

    @property
    def family(self) -> str | None:
        """Family of the new model; None for a pretrained one."""
        if self.from_scratch:
            return self.from_scratch
        return "llama" if self._list_sizes() else None

    def _list_sizes(self) -> list[str]:
        """Return the options of the new model that the user has given."""
        names = (*_REQUIRED_SIZES, *_OPTIONAL_SIZES)
        return [f"--{name}" for name in names if getattr(self, name) is not None]


@dataclass(frozen=True)
class AdapterArguments:
    """Adapter"""

    adapter: Literal["lora", "dora"] | None = None
    """Train an adapter on top of the model's frozen weights: lora, or dora, which also trains the norms of the weight
    rows. The other arguments of this group need it; --lora_rank alone implies lora.
    """
    lora_rank: PositiveInt | None = None
    """Rank of the adapter's matrices; default: 16."""
    lora_alpha: PositiveFloat | None = None
    """The adapter's output is scaled by alpha / rank; default: twice the rank."""
    lora_dropout: UnitInterval = 0.0
    """Dropout probability of the adapter's inputs."""
    lora_targets: list[str] = field(default_factory=lambda: ["all-linear"])
    """Linear layers that get an adapter: names (q_proj v_proj), or a regular expression that matches the full name.
    all-linear means all linear layers except the head.
    """
    lora_rslora: bool = False
    """Scale by alpha / √rank, so that high ranks learn as fast as low ranks."""
    base_weights: Literal["nf4", "nf4_double"] | None = None
    """Keep the frozen matrices of the decoder layers in 4 bits with bitsandbytes (QLoRA), at 4.5 bits of memory per
    weight; nf4_double also quantizes the scales (double quantization) and takes 4.14 bits. Default: as set by
    --precision.
    """
    train_also: list[str] | None = None
    """Modules to train in full alongside the adapter, such as embed_tokens lm_head."""
    init_adapter: str | None = None
    """Start the new adapter from the weights of an existing one: RUN, RUN/best, a checkpoint or a peft folder."""

    def __post_init__(self) -> None:
        """Fill in values that depend on others, unless --init_adapter has them."""
        if self.init_adapter is not None:
            return
        if self.adapter or self.lora_rank:
            rank = self.lora_rank or 16
            object.__setattr__(self, "adapter", self.adapter or "lora")
            object.__setattr__(self, "lora_rank", rank)
            object.__setattr__(self, "lora_alpha", self.lora_alpha or 2.0 * rank)

    @property
    def is_given(self) -> bool:
        """Whether an adapter trains."""
        return self.adapter is not None or self.init_adapter is not None

    def faults(self) -> list[str]:
        """Return values that belong to an adapter where there is none, and values that no adapter has."""
        faults = []
        if self.lora_dropout == 1:
            faults.append("--lora_dropout must be below 1")
        if not self.lora_targets:
            faults.append("--lora_targets is empty; give layers, or leave it out")
        if not self.is_given:
            defaults = asdict(AdapterArguments())
            for name, value in asdict(self).items():
                if value != defaults[name]:
                    faults.append(f"--{name} needs --adapter lora or dora; without an adapter, all weights train")
        return faults


@dataclass(frozen=True)
class PreferenceArguments:
    """Objective"""

    objective: ObjectiveName = "sft"
    """The loss. sft is the cross entropy of the supervised tokens. distill is the divergence from a teacher's
    distributions of the next token. kto and apo_zero_unpaired train on unpaired answers: they make desirable answers
    more likely and undesirable answers less likely. The others train on preference pairs: they make the chosen answer
    more likely than the rejected one. dpo, ipo, apo_zero, dpop, kto and apo_zero_unpaired compare with a reference
    model. --extensions can register more objectives.
    """
    objective_settings: dict[str, Any] | None = None
    """Settings of an objective registered by --extensions, such as {gamma: 2.0}."""
    dpo_beta: PositiveFloat = 0.1
    """Scale of the rewards; with orpo, scale of the odds ratio. SimPO's authors use 2 to 10."""
    length_normalised: bool = False
    """With dpo: divide each answer's log-probability by its number of tokens, as Tülu 3 does; use a larger --dpo_beta,
    such as 5.
    """
    label_smoothing: UnitInterval = 0.0
    """With dpo and simpo: assumed share of pairs with swapped answers; below 0.5."""
    sft_weight: NonNegativeFloat = 0.0
    """Weight of the cross entropy that is added to the loss: of the next token with distill, of the chosen answer per
    token with preference pairs, and with rl of the rows of --train_data_dir, of which each step reads
    --total_batch_size. Not for orpo, which always adds it with weight 1.
    """
    dpop_lambda: NonNegativeFloat = 50.0
    """With dpop: weight of the penalty for chosen answers that are less likely than under the reference model."""
    simpo_gamma: NonNegativeFloat = 0.5
    """With simpo: margin by which the chosen answer's reward should exceed the rejected answer's."""
    kto_desirable_weight: NonNegativeFloat = 1.0
    """With kto and apo_zero_unpaired: weight of the loss of desirable answers."""
    kto_undesirable_weight: NonNegativeFloat = 1.0
    """With kto and apo_zero_unpaired: weight of the loss of undesirable answers."""
    reference: str | None = None
    """With dpo, ipo, apo_zero, dpop, kto and apo_zero_unpaired: the reference model (a hub name, a folder, a
    checkpoint, RUN or RUN/best); the same with rl and --kl_weight. Default: the weights that the run starts from,
    without a new adapter.
    """
    teacher: str | None = None
    """With distill: the teacher, with the same tokenizer as the model (a hub name, a folder, a checkpoint, RUN or
    RUN/best).
    """
    teacher_weights: TeacherWeights = "16bit"
    """With distill: hold the teacher's decoder layers in 16 bits (32 with --precision 32-true), or in 4 bits with
    bitsandbytes, as --base_weights does. With --teacher_states, give what fabric-train teach had.
    """
    teacher_states: list[str] | None = None
    """With distill, instead of --teacher: folders of fabric-train teach with the teacher's values, one for each token
    dataset.
    """
    divergence: Literal["forward_kl", "reverse_kl", "jsd"] = "forward_kl"
    """With distill: the divergence between the distributions of teacher and student. forward_kl covers all that the
    teacher finds likely, reverse_kl avoids what it finds unlikely, and jsd is between both.
    """
    jsd_beta: UnitInterval = 0.5
    """With --divergence jsd: the teacher's share of the mixture; near 0 it behaves like forward_kl, near 1 like
    reverse_kl.
    """
    distill_temperature: Temperature = 1.0
    """With distill: both models' logits are divided by it; above 1, unlikely tokens count more."""
    distill_on: Literal["supervised", "all"] = "supervised"
    """With distill: learn the teacher's distributions of the supervised tokens, or of all tokens, including prompts.
    --sft_weight still applies to supervised tokens only.
    """

    @property
    def compares_answers(self) -> bool:
        """Whether the objective is one of this project's that train on preference pairs or unpaired answers."""
        return self.objective not in TOKEN_OBJECTIVES and self.objective in OBJECTIVE_ARGUMENTS

    @property
    def learns_from_rewards(self) -> bool:
        """Whether the objective learns from rewards of completions that the run samples."""
        return self.objective == "rl"

    @property
    def trains_on_completions(self) -> bool:
        """Whether the objective can train on completions that the run samples."""
        return self.objective in COMPLETION_OBJECTIVES

    @property
    def needs_unpaired(self) -> bool:
        """Whether the objective is one of this project's that train on unpaired answers."""
        return self.objective in UNPAIRED_OBJECTIVES

    @property
    def needs_reference(self) -> bool:
        """Whether the objective compares answers with a reference model."""
        return self.compares_answers and "reference" in OBJECTIVE_ARGUMENTS[self.objective]

    def faults(self) -> list[str]:
        """Return values that the objective does not use."""
        faults = []
        if self.label_smoothing >= 0.5:
            faults.append("--label_smoothing must be below 0.5")
        if self.objective == "distill":
            faults += self._faults_of_teacher()
        if self.jsd_beta in (0, 1):
            faults.append("--jsd_beta must be between 0 and 1; give --divergence forward_kl for 0, or reverse_kl for 1")
        if self.jsd_beta != 0.5 and self.divergence != "jsd":
            faults.append(f"--jsd_beta only applies to --divergence jsd, not {self.divergence}; leave out --jsd_beta")
        faults += _check_settings(OBJECTIVES, self.objective, self.objective_settings)
        defaults = asdict(PreferenceArguments())
        used = ("objective", "objective_settings", *OBJECTIVE_ARGUMENTS.get(self.objective, ()))
        for name, value in asdict(self).items():
            if name not in used and value != defaults[name]:
                objectives = [objective for objective, names in OBJECTIVE_ARGUMENTS.items() if name in names]
                faults.append(
                    f"--{name} only applies to --objective {', '.join(objectives)}, not {self.objective}; leave out "
                    f"--{name}"
                )
        return faults

    def _faults_of_teacher(self) -> list[str]:
        """Return a fault unless there is one teacher: a model, or its stored values."""
        if self.teacher is None and self.teacher_states is None:
            return [
                "--objective distill needs --teacher; give the model whose distributions the run learns, or its stored "
                "values with --teacher_states"
            ]
        if self.teacher is not None and self.teacher_states is not None:
            return ["--teacher and --teacher_states exclude each other; leave out one of them"]
        if self.teacher_states is not None and not self.teacher_states:
            return ["--teacher_states is empty; give at least one folder"]
        return []


@dataclass(frozen=True)
class RolloutArguments:
    """Completions and rewards, with --prompts"""

    prompts_per_step: PositiveInt = 16
    """Prompts whose completions an optimizer step trains on."""
    group_size: PositiveInt = 8
    """Completions that are sampled for each prompt."""
    max_new_tokens: RowLength = 512
    """Largest number of tokens of a completion; longer completions are cut."""
    temperature: PositiveFloat = 1.0
    """Temperature of sampling, and of the probabilities in the loss. The full distribution is sampled: top-p, top-k and
    min-p would make the ratio of probabilities wrong.
    """
    rewards: list[str] | None = None
    """With rl: the rewards, whose weighted sum is maximized: names of built-in ones (exact_answer, math, regex,
    json_schema, language, length), or FILE.py:NAME for a function NAME(completions, prompts, **columns) that returns a
    number for each completion.
    """
    reward_weights: dict[str, Any] | None = None
    """Weight of each reward, such as {exact_answer: 1, language: 0.2}; default: 1."""
    reward_settings: dict[str, Any] | None = None
    """Values that a reward gets instead of a column of the prompts, such as {length: {max_characters: 400}}."""
    on_reward_error: Literal["zero", "stop"] = "zero"
    """When a reward function fails or takes too long: count its reward as 0, or stop the run."""
    reward_timeout: PositiveFloat = 10.0
    """Seconds that a call of a reward function with the completions of a step may take."""
    reward_memory_gb: PositiveFloat = 4.0
    """Memory that the process of a reward may use, in GB of address space."""
    advantage: Literal["mean", "group_norm"] = "mean"
    """Advantage of a completion: its reward minus the mean of its group (mean), or that divided by the group's standard
    deviation as well, as in GRPO (group_norm).
    """
    refill: bool = False
    """Replace prompts whose completions all have the same reward, from which nothing is learned, with other prompts; up
    to four times in a step.
    """
    loss_normalisation: Literal["tokens", "constant"] = "tokens"
    """Divide the loss of a step by its completion tokens, or by the constant --max_new_tokens times its completions."""
    kl_weight: NonNegativeFloat = 0.0
    """With rl: weight of the divergence from the reference model, which keeps the model close to it."""
    sampler: Literal["in_process", "vllm"] = "in_process"
    """What samples: the model in the processes that train, or vLLM in a server process that the run starts; vLLM has an
    environment of its own.
    """
    sampler_batch_size: PositiveInt = 64
    """With --sampler in_process: completions that a rank samples at once."""
    vllm_python: str = ".cache/vllm/bin/python"
    """With --sampler vllm: Python of the environment that has vLLM; `make install-vllm` creates the default."""
    sampler_devices: str | None = None
    """With --sampler vllm: GPUs of its own for the server of each machine, such as 6,7: their numbers on the machine,
    regardless of CUDA_VISIBLE_DEVICES. Default: the run's GPUs, whose memory the server frees while the model trains.
    """
    keep_rollouts: PositiveInt | None = None
    """How many of the newest steps keep their completions in OUTPUT_DIR/rollouts. Default: all."""

    @property
    def changed_names(self) -> list[str]:
        """The arguments whose values are not their defaults."""
        return [field.name for field in fields(self) if getattr(self, field.name) != field.default]

    @property
    def changed_reward_names(self) -> list[str]:
        """The arguments whose values are not their defaults, of those that only an objective with rewards uses."""
        return [name for name in self.changed_names if name in REWARD_ARGUMENTS]

    @property
    def reward_retry_seconds(self) -> float:
        """The seconds for scoring each completion of a rank alone, after a call with all of them has failed."""
        return 4 * self.reward_timeout

    @property
    def most_reward_seconds(self) -> float:
        """The most seconds that the rewards of a rank may take in a step, while the other ranks wait for it.

        Rewards are computed at the same time, but those that fail are repeated one after another.
        """
        if not self.rewards:
            return 0.0
        return self.reward_timeout + len(self.rewards) * self.reward_retry_seconds

    def faults(self) -> list[str]:
        """Return temperatures by which logits cannot be divided, and arguments of another sampler."""
        faults = []
        if self.temperature < LOWEST_TEMPERATURE:
            faults.append(f"--temperature must be at least {LOWEST_TEMPERATURE}, because logits are divided by it")
        for sampler, names in SAMPLER_ARGUMENTS.items():
            for name in names:
                if sampler != self.sampler and name in self.changed_names:
                    faults.append(f"--{name} does not apply to --sampler {self.sampler}; leave it out")
        if self.sampler_devices is not None:
            devices = self.sampler_devices.split(",")
            if not re.fullmatch(r"[0-9]{1,4}(,[0-9]{1,4})*", self.sampler_devices):
                faults.append(f"--sampler_devices: expected indices such as 6,7; got {self.sampler_devices!r}")
            elif len(set(devices)) < len(devices):
                faults.append(f"--sampler_devices {self.sampler_devices} names a GPU twice; give each GPU once")
        return faults


@dataclass(frozen=True)
class FSDPArguments:
    """FSDP and other parallelism"""

    parallelism: Parallelism = "auto"
    """fsdp is Fabric's FSDPStrategy; fsdp2 is torch's fully_shard. auto uses fsdp for several processes, otherwise
    single. xla is Fabric's XLAFSDPStrategy, the only choice with --accelerator tpu.
    """
    auto_wrap_policy: str = "LlamaDecoderLayer"
    """Layer class that FSDP shards as one unit. The default is replaced for other model families."""
    sharding_strategy: ShardingStrategy = "FULL_SHARD"
    """What to shard: everything (FULL_SHARD), gradients and optimizer states (SHARD_GRAD_OP), or nothing (NO_SHARD).
    Within each machine only: everything (HYBRID_SHARD), or gradients and optimizer states (_HYBRID_SHARD_ZERO2, torch's
    name).
    """
    tensor_parallel_size: PositiveInt = 1
    """Number of devices that share each matrix of a decoder layer; needs --parallelism fsdp2."""
    context_parallel_size: PositiveInt = 1
    """Number of devices that share each row, for rows too long for one device's memory; needs --parallelism fsdp2."""
    state_dict_type: Literal["full", "sharded"] = "full"
    """Checkpoint files: full writes one file of weights and one of optimizer states; sharded writes one of each per
    rank.
    """
    limit_all_gathers: bool = True
    """Limit how many layers have their parameters gathered in memory at the same time. Only for --parallelism fsdp."""
    cpu_offload: bool = False
    """Keep parameters, gradients and optimizer states in host memory between uses (slow)."""
    gradient_reduction: Literal["step", "micro_batch"] = "step"
    """With fsdp and fsdp2: step reduces gradients once per step and keeps them unsharded on each device until then;
    micro_batch reduces them after each micro-batch, which takes less memory and more communication (with --cpu_offload,
    only in fsdp2).
    """
    activation_checkpointing: Literal["auto", "none", "selective", "full"] = "auto"
    """Recompute decoder layers in the backward pass instead of storing their activations. full stores only each layer's
    input; selective also stores what fits into --activation_memory_budget. auto recomputes as little as the GPU's
    memory allows, as computed by --plan, and nothing on CPU.
    """
    activation_memory_budget: UnitInterval = 0.5
    """With selective: share of all activations to store, starting with the results of the most expensive operations;
    auto sets it.
    """
    activation_offload: bool = False
    """With full: keep the stored inputs in pinned host memory until the backward pass."""
    mlp_tile_size: RowLength | Literal["auto", "none"] = "auto"
    """Compute the MLP and the norms in tiles of this many tokens, and recompute them in the backward pass, so that
    longer rows fit. Does not work with compiled layers. auto uses tiles of 4096 on a GPU if the run does not fit even
    with all layers recomputed.
    """
    compile: bool | Literal["auto"] = "auto"
    """Compile the decoder layers and a bf16 optimizer step: the first step takes a minute longer, and later steps are
    faster. auto compiles on a GPU if the run is long enough for this to pay off.
    """

    @property
    def is_hybrid(self) -> bool:
        """Whether each machine has a whole copy of the model."""
        return self.sharding_strategy in ("HYBRID_SHARD", "_HYBRID_SHARD_ZERO2")

    @property
    def ranks_of_rows(self) -> int:
        """The number of ranks that compute the same rows together."""
        return self.tensor_parallel_size * self.context_parallel_size

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
            faults.append(
                "--activation_offload true needs --activation_checkpointing full, whose stored inputs it offloads"
            )
        faults += self._check_tiles()
        if self.gradient_reduction == "micro_batch" and self.parallelism in ("ddp", "single"):
            faults.append(f"--gradient_reduction micro_batch needs --parallelism fsdp or fsdp2, not {self.parallelism}")
        if self.parallelism == "fsdp2" and self.sharding_strategy == "NO_SHARD":
            faults.append("--sharding_strategy NO_SHARD needs --parallelism fsdp, not fsdp2")
        for name in ("tensor_parallel_size", "context_parallel_size"):
            size = getattr(self, name)
            if self.parallelism != "fsdp2" and size > 1:
                faults.append(f"--{name} {size} needs --parallelism fsdp2, not {self.parallelism}")
        return faults

    def _check_tiles(self) -> list[str]:
        """Return what --mlp_tile_size does not work with."""
        if not isinstance(self.mlp_tile_size, int):
            return []
        option = f"--mlp_tile_size {self.mlp_tile_size}"
        faults = []
        if self.compile is True:
            faults.append(f"{option} does not work with --compile true; leave one out")
        if self.activation_checkpointing == "selective":
            faults.append(f"{option} does not work with --activation_checkpointing selective; give full or none")
        if self.tensor_parallel_size > 1:
            faults.append(
                f"{option} does not work with --tensor_parallel_size {self.tensor_parallel_size}; leave one out"
            )
        return faults


@dataclass(frozen=True)
class CheckpointArguments:
    """Checkpoint"""

    resume: bool = False
    """Continue from the newest complete checkpoint in --output_dir, or from --checkpoint. If there is no checkpoint,
    start a new run.
    """
    checkpoint: str | None = None
    """Start from this checkpoint instead of the newest in --output_dir: RUN (its newest checkpoint), RUN/best (by
    validation loss), RUN/latest, RUN/step-500, or the checkpoint's folder.
    """
    branch: str | None = None
    """Start a new run from another run's checkpoint: RUN@STEP such as runs/1@5000, RUN@latest, RUN/best or the
    checkpoint's folder. Weights, optimizer and counters continue; data, schedule and length may change. With --resume
    true, continue the branch in --output_dir if it exists.
    """
    weights_only: bool = False
    """Load only the weights of --checkpoint; the optimizer, the step and the data order start from scratch."""
    allow_changes: bool = False
    """Continue from a checkpoint even if arguments that change the losses differ, such as lr. If the run now has more
    steps, stretch the learning rate schedule to its new length.
    """

    def faults(self) -> list[str]:
        """Return contradictions."""
        if self.weights_only and self.checkpoint is None:
            return ["--weights_only true needs --checkpoint; give the checkpoint to load the weights from"]
        if self.weights_only and self.resume:
            return ["--weights_only true starts a new run and --resume true continues one; give only one of them"]
        if self.branch is None:
            return []
        if self.checkpoint is not None:
            return [
                f"--branch {self.branch} and --checkpoint {self.checkpoint} contradict each other; give only one of "
                "them"
            ]
        if not re.fullmatch(r".+(@(latest|best|[0-9]{1,18})|/(latest|best|step-[0-9]{1,18})/*)", self.branch):
            return [f"--branch: expected RUN@STEP such as runs/1@5000, RUN@latest or RUN/best; got {self.branch!r}"]
        return []

    def faults_on_line(self, names: Collection[str]) -> list[str]:
        """Return a fault if the command line, which has ``names``, says --resume false beside a checkpoint.

        A config.yaml that a run has written has the default there.
        """
        refuses_resume = "resume" in names and not self.resume
        continues_checkpoint = self.checkpoint is not None and not self.weights_only
        if not refuses_resume or not continues_checkpoint:
            return []
        return [
            f"--resume false contradicts --checkpoint {self.checkpoint}; leave --resume out to continue from the "
            "checkpoint; to start a new run, add --weights_only true to start from its weights, or leave "
            "--checkpoint out to start from --model_name"
        ]


@dataclass(frozen=True)
class TrainingArguments:
    """Training"""

    number_epochs: PositiveInt = 2
    """Passes over the rows. A stream is read until --max_step instead."""
    max_step: PositiveInt | None = None
    """Number of optimizer steps; default: all rows in all epochs."""
    micro_batch_size: PositiveInt = 1
    """Rows per forward pass on each device."""
    gradient_accumulation_steps: PositiveInt = 64
    """Micro-batches per optimizer step on each device."""
    total_batch_size: PositiveInt | None = None
    """Rows per optimizer step over all devices. Sets gradient_accumulation_steps."""
    grad_clip: NonNegativeFloat = 1.0
    """Maximum global gradient norm; 0 turns clipping off."""
    lr: PositiveFloat = 2e-5
    """Peak learning rate."""
    min_lr: NonNegativeFloat = 0.0
    """Learning rate that the schedule would reach one step after the last."""
    lr_decay: bool = True
    """Decay the learning rate; false keeps it at lr after warm-up."""
    lr_schedule: Schedule = "cosine"
    """Learning rate schedule. All except constant fall to min_lr. wsd (warmup-stable-decay) stays at lr until the last
    --decay_steps.
    """
    decay_steps: PositiveInt | None = None
    """With wsd: number of steps at the end of the run over which the learning rate falls."""
    decay_share: PositiveShare | None = None
    """With wsd, instead of --decay_steps: the share of all steps to decay over, such as 0.1."""
    decay_form: DecayForm | None = None
    """With wsd: shape of the decay. Default: 1-sqrt, one minus the square root of the decay's progress."""
    warmup_steps: NonNegativeInt = 0
    """Steps over which the learning rate rises linearly to lr."""
    optimizer: OptimizerName = "adamw"
    """Optimizer. muon uses Muon for the matrices of the decoder layers and AdamW for the other weights; it runs on one
    device or with fsdp2 or ddp. --extensions can register more optimizers.
    """
    optimizer_settings: dict[str, Any] | None = None
    """Settings of an optimizer registered by --extensions, such as {momentum: 0.9}."""
    muon_lr: PositiveFloat | None = None
    """With --optimizer muon: peak learning rate of the matrices that Muon updates, which follows the same schedule as
    --lr. Default: --lr.
    """
    muon_momentum: UnitInterval = 0.95
    """With --optimizer muon: decay of the moving average of the gradient."""
    muon_adjust_lr: MuonAdjustLr = "match_rms_adamw"
    """With --optimizer muon: match_rms_adamw scales the updates so that AdamW learning rates apply (arXiv:2502.16982);
    original scales them as in Keller Jordan's Muon, which needs a --muon_lr such as 0.02.
    """
    weight_decay: NonNegativeFloat = 0.01
    """Weight decay of AdamW and Muon. It applies to matrices only, not to norms and biases."""
    beta1: UnitInterval = 0.9
    """Decay of AdamW's first moment."""
    beta2: UnitInterval = 0.95
    """Decay of AdamW's second moment."""
    optimizer_states: OptimizerStates | None = None
    """Data type of AdamW's moments; default: the type of the weights. 8bit keeps the moments of norms and biases in
    fp32.
    """
    stochastic_rounding: bool = True
    """Round bfloat16 weights and moments stochastically, which preserves small updates; false rounds to nearest."""
    lr_of: list[str] | list[dict[str, Any]] | None = None
    """Peak learning rates of parts of the model, as PATTERN=RATE, such as embed_tokens=1e-4 'layers.*=1e-5'. Patterns
    work as in --train_only; if several match, the last one applies. The schedule scales all rates alike.
    """
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """What to do if the loss or a gradient is NaN or infinite: save the state before that step and stop, or skip the
    step.
    """

    def faults(self) -> list[str]:
        """Return values that contradict each other."""
        faults = []
        if self.min_lr > self.lr:
            faults.append(f"--min_lr {self.min_lr:g} is above --lr {self.lr:g}")
        if self.lr_schedule == "exponential" and self.lr_decay and self.min_lr == 0:
            faults.append("--lr_schedule exponential never reaches 0; give a --min_lr above 0")
        faults += self._check_decay()
        if self.max_step is not None and self.warmup_steps > self.max_step:
            faults.append(f"--warmup_steps {self.warmup_steps} is more than --max_step {self.max_step}")
        faults += [f"--{name} must be below 1" for name in ("beta1", "beta2") if getattr(self, name) == 1]
        faults += _check_settings(OPTIMIZERS, self.optimizer, self.optimizer_settings)
        faults += self._check_muon()
        if self.lr_of is not None:
            rates = list(named_numbers(self.lr_of))
            if not rates or any(not name or not rate for name, rate in rates):
                faults.append(f"--lr_of: expected PATTERN=RATE with a rate above 0; got {self.lr_of}")
        return faults

    @property
    def rates_of_parts(self) -> dict[str, float]:
        """The peak learning rates of --lr_of by pattern."""
        return {name: rate for name, rate in named_numbers(self.lr_of or []) if rate}

    @property
    def orthogonalizes(self) -> bool:
        """Whether the optimizer needs whole matrices, which not every kind of sharding lets ranks collect."""
        return self.optimizer == "muon"

    def _check_muon(self) -> list[str]:
        """Return what is wrong with the arguments of Muon, and an argument that Muon does not know."""
        if not self.orthogonalizes:
            defaults = asdict(TrainingArguments())
            names = [name for name in _MUON_ARGUMENTS if getattr(self, name) != defaults[name]]
            faults = []
            for name in names:
                faults.append(f"--{name} only applies to --optimizer muon, not {self.optimizer}; leave out --{name}")
            return faults
        faults = []
        if self.muon_momentum == 1:
            faults.append("--muon_momentum must be below 1")
        if self.optimizer_states is not None:
            faults.append(
                f"--optimizer_states {self.optimizer_states} only applies to --optimizer adamw, since Muon's "
                "momentum has the type of the weights; leave out --optimizer_states"
            )
        return faults

    def _check_decay(self) -> list[str]:
        """Return what is wrong with the arguments of the wsd schedule."""
        names = [name for name in ("decay_steps", "decay_share", "decay_form") if getattr(self, name) is not None]
        if self.lr_schedule != "wsd":
            return [f"--{name} needs --lr_schedule wsd, not {self.lr_schedule}" for name in names]
        if self.decay_steps is not None and self.decay_share is not None:
            return [
                f"--decay_steps {self.decay_steps} and --decay_share {self.decay_share:g} contradict each other; "
                "give only one of them"
            ]
        if self.lr_decay and self.decay_steps is None and self.decay_share is None:
            return ["--lr_schedule wsd needs --decay_steps, or --decay_share such as 0.1"]
        return []


@dataclass(frozen=True)
class EvaluationArguments:
    """Evaluation"""

    eval_batch_size: PositiveInt = 1
    """Rows per forward pass on each device during evaluation."""
    eval_iters: PositiveInt | None = None
    """Number of validation batches over all devices. The rows are spread over the validation split, equally many from
    each source, and are the same in every evaluation. Default: the entire split.
    """
    eval_step_interval: PositiveInt = 500
    """Optimizer steps between evaluations. Every epoch and the run also end with one."""
    eval_at_start: bool = True
    """Also evaluate a new run before its first step, so that you can see what it learned and what it forgot."""
    best_by: str = "all"
    """Source whose validation loss decides which checkpoint is the best (RUN/best, and what --keep_checkpoints keeps);
    all uses the entire validation split. With --validation_prompts, the reward decides.
    """
    metrics: list[MetricName] | None = None
    """Metrics registered by --extensions to compute in each evaluation; default: all of them."""
    validation_prompts: list[str] | None = None
    """With --objective rl: held-out prompts, given like --prompts. At each evaluation, the model completes each of them
    once, and the mean reward is the validation result.
    """
    sample_prompts: str | None = None
    """File of prompts (.txt with one per line, or .jsonl with "prompt" text or chat "messages") that the model
    continues at each evaluation, always choosing the most likely token. Written to RUN/samples.jsonl, TensorBoard and
    W&B.
    """
    sample_tokens: RowLength = 64
    """Maximum number of new tokens for each of --sample_prompts; each takes one forward pass."""
    early_stopping: str | None = None
    """Source, or all, optionally with a patience, such as es or es:5: end the run after 5 evaluations (default: 3)
    without a lower validation loss (with --validation_prompts: a higher reward) of that source.
    """
    eval_only: bool = False
    """Evaluate the model (or --checkpoint) on the validation split and exit."""
    self_check: bool = False
    """Compute the loss and gradients of a few rows, split in several ways, and exit with code 0 if they agree,
    otherwise 1.
    """

    @property
    def computed_metrics(self) -> list[str]:
        """The registered metrics that each evaluation computes."""
        return METRICS.registered if self.metrics is None else self.metrics

    @property
    def only_reads(self) -> bool:
        """Whether nothing is trained, so that a run in --output_dir does not change."""
        return self.eval_only or self.self_check

    def faults(self) -> list[str]:
        """Return contradictions."""
        faults = []
        if self.eval_only and self.self_check:
            faults.append("--eval_only true and --self_check true contradict each other; give only one of them")
        if self.validation_prompts is not None and not self.validation_prompts:
            faults.append("--validation_prompts is empty; give files or hub names")
        return faults


@dataclass(frozen=True)
class SaveArguments:
    """Save"""

    output_dir: str = "runs/fabric_llama"
    """Run folder: config.yaml, metrics.csv, run.log, checkpoints/. A run that is already there is never overwritten."""
    save_step_interval: PositiveInt = 1000
    """Optimizer steps between checkpoints. Every epoch and the run also end with one."""
    keep_checkpoints: PositiveInt | None = None
    """Number of newest checkpoints to keep, in addition to the best by validation loss or reward; default: all."""
    save_best: bool = True
    """After an evaluation with the best validation loss or reward so far, save a checkpoint regardless of the interval.
    It replaces the previous best checkpoint, unless that one was saved at an interval.
    """
    async_save: bool = True
    """Write checkpoints in the background, from a copy of the model and optimizer in host memory."""


@dataclass(frozen=True)
class LoggingArguments:
    """Logging"""

    log_step_interval: PositiveInt = 1
    """Optimizer steps between logged lines of metrics."""
    loggers: list[LoggerName] | None = None
    """Where to log metrics, in addition to RUN/metrics.csv, which is always written; csv adds nothing. jsonl writes
    RUN/metrics.jsonl. trackio and mlflow need pip install 'fabric-train[trackio]' or 'fabric-train[mlflow]'. Default:
    csv, tensorboard and the loggers registered by --extensions; also wandb (Weights & Biases) if you give --entity or
    change --project.
    """
    entity: str | None = None
    """Weights & Biases (wandb) team or user."""
    project: str = PROJECT
    """wandb and trackio project; mlflow experiment."""
    run_name: str | None = None
    """Name of the run in wandb, trackio and mlflow. Default: the folder's name; wandb makes one up."""
    tags: list[str] | None = None
    """Tags of the run in wandb and mlflow; in trackio, part of the configuration."""
    group: str | None = None
    """Group of the run in wandb and trackio; in mlflow, a tag of this name."""
    notes: str | None = None
    """Notes on the run in wandb and mlflow; in trackio, part of the configuration."""
    log_model: Literal["none", "last", "all"] = "none"
    """Checkpoints to upload to wandb, trackio and mlflow. If --loggers has none of these, last and all add wandb."""
    report: bool = True
    """Write RUN/report.html and report.md at the end of the run: curves, results, health, data, checkpoints."""
    profile: str | None = None
    """Steps to trace into RUN/profile/, as FIRST:LAST, such as 10:12; on a GPU, with a memory history."""
    profile_ranks: Literal["first", "all"] = "first"
    """Ranks that --profile traces."""

    @property
    def opened_loggers(self) -> list[LoggerName]:
        """The loggers of --loggers, and wandb if other arguments need it."""
        chosen: list[LoggerName] = ["csv", "tensorboard", *LOGGERS.registered]
        if self.loggers is not None:
            chosen = self.loggers
        uploads_without_tracker = self.log_model != "none" and not _TRACKERS & set(chosen)
        if uploads_without_tracker or (self._wandb_options and "wandb" not in chosen):
            return [*chosen, "wandb"]
        return chosen

    @property
    def note(self) -> str | None:
        """Why --loggers has wandb, or which arguments no logger uses; else None."""
        if self._wandb_options and self.log_model == "none":
            options = " ".join(self._wandb_options)
            return f"{options}: metrics are also logged to Weights & Biases, as with --loggers csv tensorboard wandb"
        opened = set(self.opened_loggers)
        used = set[str]()
        if "wandb" in opened:
            used.add("entity")
        if _TRACKERS & opened:
            used.update(_TRACKER_ARGUMENTS)
        unused = []
        for name in ("entity", *_TRACKER_ARGUMENTS):
            if name not in used and getattr(self, name) not in (None, PROJECT):
                unused.append(f"--{name}")
        return f"{', '.join(unused)}: no logger uses this; add wandb to --loggers" if unused else None

    @property
    def _wandb_options(self) -> list[str]:
        """The options that turn Weights & Biases on, if --loggers does not say which loggers to use."""
        if self.loggers is not None:
            return []
        options = []
        if self.entity is not None:
            options.append(f"--entity {self.entity}")
        if self.project != PROJECT:
            options.append(f"--project {self.project}")
        return options

    @property
    def profiled_steps(self) -> tuple[int, int] | None:
        """First and last step to trace, both included; None to trace nothing."""
        return range_of_steps(self.profile or "")

    def faults(self) -> list[str]:
        """Return invalid steps, and names that Weights & Biases, Trackio or MLflow refuses."""
        faults = []
        for option, max_length in _MAX_NAME_LENGTHS.items():
            for name in self._list_names(option):
                if not name.strip() or len(name) > max_length or not name.isprintable():
                    faults.append(
                        f"--{option}: expected a name of 1 to {max_length} characters on one line, got {name!r}"
                    )
        refused_character = re.search(r"[/\\#?%:]", self.project)
        if refused_character:
            faults.append(
                f"--project {self.project!r}: a project name cannot contain {refused_character[0]}; remove it"
            )
        if self.profile is not None and self.profiled_steps is None:
            faults.append(f"--profile: expected a first and a last step such as 10:12, got {self.profile!r}")
        return faults

    def _list_names(self, option: str) -> list[str]:
        """Return the names that an option gives: one, several tags, or none."""
        value: str | list[str] | None = getattr(self, option)
        if value is None:
            return []
        return [value] if isinstance(value, str) else value


@dataclass(frozen=True)
class ExtensionArguments:
    """Extensions"""

    extensions: list[str] | None = None
    """Python modules that register objectives, optimizers, metrics and loggers, such as my_losses for my_losses.py in
    the current folder (docs/how-to/extend.md). Their code runs on every rank.
    """


@dataclass(frozen=True)
class PlanArguments:
    """Plan"""

    plan: bool | Literal["check"] = False
    """Print the memory, disk space, communication and steps that the run will need, and exit, with an error if they do
    not fit. With --device_memory, you can plan for --devices that this machine does not have. check only checks the
    arguments, files and data, and also runs on a machine without the --devices.
    """
    device_memory: str | None = None
    """Memory of each GPU to plan for, such as 80GB. Default: the memory of this machine's GPUs, or of this machine on
    CPU.
    """
    interconnect: str | None = None
    """One-way bandwidth between the devices of a machine to plan for; 450GB/s is NVLink 4."""
    network: str | None = None
    """One-way bandwidth from one machine to the others to plan for; 50GB/s is one 400 Gbit/s port."""
    mtbf_hours: PositiveFloat | None = None
    """Mean hours between failures of one device, including its share of the machine and network failures. The plan
    shows the save interval that loses the least time. Default: 50,677, the rate of Llama 3's 16,384 GPUs (419
    interruptions in 54 days).
    """

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
        faults = []
        for name, example in examples.items():
            size = getattr(self, name)
            if size is not None and parse_size(size) is None:
                faults.append(f"--{name}: expected a size such as {example}, got {size!r}")
        if not self.plan:
            for name in (*examples, "mtbf_hours"):
                if getattr(self, name) is not None:
                    faults.append(f"--{name} needs --plan true")
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
    adapter: AdapterArguments
    preference: PreferenceArguments
    rollouts: RolloutArguments
    fsdp: FSDPArguments
    checkpoint: CheckpointArguments
    training: TrainingArguments
    evaluation: EvaluationArguments
    save: SaveArguments
    logging: LoggingArguments
    extensions: ExtensionArguments
    planning: PlanArguments

    def __post_init__(self) -> None:
        """Let the accelerator choose the precision."""
        if self.model.precision == "auto":
            precision: Precision = "bf16-mixed" if self.device.accelerator == "tpu" else "bf16-true"
            object.__setattr__(self, "model", replace(self.model, precision=precision))


def _check_settings(table: Table[Any], name: str, settings: dict[str, Any] | None) -> list[str]:
    """Return what is wrong with the settings of a part that was registered."""
    try:
        resolve_settings(table, name, settings)
    except InputError as error:
        return list(error.faults)
    return []


def parse(arguments: type[T], argv: list[str] | None = None, environment: Mapping[str, str] = os.environ) -> T:
    """Parse the command line of a program that a launcher may start; see :func:`parse_arguments`.

    ``environment`` has the launcher's variables.

    Raises:
        InputError: every fault at once, including contradictions with the launcher's variables.
    """
    try:
        launcher = launcher_arguments(environment)
    except ValueError as error:
        raise InputError(*error.args) from error
    return parse_arguments(arguments, argv, launcher)
