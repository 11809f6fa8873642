"""Training files of other programs become ours: the same steps, losses and data, and a word for everything else."""

import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fabric_train.arguments import TrainArguments, parse
from fabric_train.cli import yaml_core
from fabric_train.cli.errors import InputError
from fabric_train.cli.parser import flatten
from fabric_train.programs import tokenize_dataset
from fabric_train.token_dataset.manifest import load_manifest
from fabric_train.translate.__main__ import main
from fabric_train.translate.foreign_file import recognise

AXOLOTL = """
base_model: meta-llama/Meta-Llama-3-8B
load_in_4bit: true
adapter: qlora
lora_r: 8
lora_alpha: 12
lora_dropout: 0.1
lora_target_linear: true
datasets:
  - path: corpus/chats.jsonl
    type: chat_template
    field_messages: turns
val_set_size: 0.1
sequence_len: 1024
sample_packing: true
output_dir: out/qlora
micro_batch_size: 2
gradient_accumulation_steps: 3
num_epochs: 3
optimizer: paged_adamw_8bit
lr_scheduler: cosine
cosine_min_lr_ratio: 0.1
learning_rate: 2e-4
warmup_ratio: 0.1
evals_per_epoch: 2
saves_per_epoch: 1
bf16: auto
tf32: false
gradient_checkpointing: true
attn_implementation: flash_attention_2
special_tokens: {pad_token: "<|end|>"}
wandb_project:
liger_rope: true
surprise: 7
"""
TRL = """
model_name_or_path: org/model
dataset_name: org/pairs
dataset_config: main
beta: 0.05
learning_rate: 5.0e-7
per_device_train_batch_size: 4
gradient_accumulation_steps: 2
num_processes: 8
max_length: 512
max_steps: 100
lr_scheduler_type: constant_with_warmup
warmup_ratio: 0.15
optim: adamw_torch
dtype: bfloat16
save_strategy: epoch
eval_strategy: steps
eval_steps: 0.2
output_dir: out/dpo
report_to: [wandb, tensorboard]
hub_model_id: me/model
"""
LLAMA_FACTORY = """
model_name_or_path: org/model
stage: sft
finetuning_type: full
deepspeed: examples/deepspeed/ds_z2_offload_config.json
dataset: mine
template: llama3
cutoff_len: 2048
packing: true
mask_history: true
val_size: 0.02
per_device_train_batch_size: 2
gradient_accumulation_steps: 4
learning_rate: 1.0e-5
num_train_epochs: 2.5
lr_scheduler_type: cosine
warmup_steps: 20
bf16: true
max_samples: 500
output_dir: saves/full
"""
TORCHTUNE = """
output_dir: /tmp/out
model:
  _component_: torchtune.models.llama3.lora_llama3_8b
  lora_attn_modules: [q_proj, output_proj]
  apply_lora_to_mlp: true
  lora_rank: 4
  lora_alpha: 8
checkpointer:
  _component_: torchtune.training.FullModelHFCheckpointer
  checkpoint_dir: /models/llama
  checkpoint_files: [model.safetensors]
  output_dir: ${output_dir}
tokenizer:
  _component_: torchtune.models.llama3.llama3_tokenizer
  path: /models/llama/original/tokenizer.model
  max_seq_len: 256
dataset:
  _component_: torchtune.datasets.alpaca_cleaned_dataset
  packed: true
batch_size: 3
epochs: 2
gradient_accumulation_steps: 4
optimizer: {_component_: bitsandbytes.optim.PagedAdamW8bit, lr: 3e-4, weight_decay: 0.02}
lr_scheduler:
  _component_: torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup
  num_warmup_steps: 10
dtype: bf16
compile: false
enable_activation_checkpointing: false
profiler: {_component_: torchtune.training.setup_torch_profiler, enabled: false, wait_steps: 5}
"""
PROGRAMS = {"axolotl": AXOLOTL, "trl": TRL, "llama-factory": LLAMA_FACTORY, "torchtune": TORCHTUNE}

Translate = Callable[..., "Result"]


class Result:
    """A translation: its file, what it sets, the printed lines and the command that tokenizes."""

    def __init__(self, file: Path, printed: str) -> None:
        self.text = file.read_text(encoding="utf-8")
        self.printed = printed
        self.values: dict[str, Any] = yaml_core.load(self.text)
        self.arguments = flatten(parse(TrainArguments, ["--config", str(file)]))  # our program takes it
        command = re.search(r"^tokenize  (.*)$", printed, re.MULTILINE)
        self.command = shlex.split(command[1])[2:] if command else []

    def tokenizes_with(self, option: str) -> list[str]:
        """Return the values of an option of the tokenize command."""
        start = self.command.index(f"--{option}") + 1
        end = next((place for place in range(start, len(self.command)) if self.command[place].startswith("--")), None)
        return self.command[start:end]


@pytest.fixture
def translate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Translate:
    """Return ``translate(text, words…)``, which translates a file with this text."""
    numbers = iter(range(100))

    def run(text: str, *words: str) -> Result:
        number = next(numbers)
        theirs = tmp_path / f"theirs{number}.yaml"
        theirs.write_text(text, encoding="utf-8")
        ours = tmp_path / f"ours{number}.yaml"
        main([str(theirs), "--output", str(ours), *words])
        return Result(ours, capsys.readouterr().out)

    return run


def faults(text: str, tmp_path: Path, *words: str) -> tuple[str, ...]:
    theirs = tmp_path / "theirs.yaml"
    theirs.write_text(text, encoding="utf-8")
    before = sorted(tmp_path.iterdir())
    with pytest.raises(InputError) as error:
        main([str(theirs), "--output", str(tmp_path / "ours.yaml"), *words])
    assert sorted(tmp_path.iterdir()) == before  # nothing was written
    return error.value.faults


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_file_is_recognised_and_every_setting_is_accounted_for(program: str, translate: Translate) -> None:
    content = yaml_core.load(PROGRAMS[program])
    assert recognise(content) == program
    result = translate(PROGRAMS[program])
    counts = [int(number) for number in re.findall(r"^ +(\d+)  ", result.printed, re.MULTILINE)]
    total = re.search(r"with (\d+) settings", result.printed)
    assert total is not None
    assert sum(counts) == int(total[1])


def test_a_file_of_axolotl_keeps_batches_adapter_and_schedule(translate: Translate) -> None:
    result = translate(AXOLOTL, "--devices", "4")
    expected = {
        "model_name": "meta-llama/Meta-Llama-3-8B",
        "attention": "flash_attention_2",
        "precision": "bf16-true",
        "adapter": "lora",
        "base_weights": "nf4_double",  # axolotl quantizes the scales too
        "lora_rank": 8,
        "lora_alpha": 12.0,
        "lora_dropout": 0.1,
        "lora_targets": ["all-linear"],
        "micro_batch_size": 2,
        "total_batch_size": 2 * 3 * 4,
        "number_epochs": 3,
        "lr": 2e-4,
        "lr_schedule": "cosine",
        "min_lr": pytest.approx(2e-5),
        "optimizer_states": "8bit",
        "activation_checkpointing": "full",
        # what axolotl does where the file says nothing
        "weight_decay": 0.0,
        "beta2": 0.999,
        "seed": 42,
    }
    assert {name: result.arguments[name] for name in expected} == expected
    assert result.tokenizes_with("packing") == ["best_fit"]
    assert result.tokenizes_with("too_long") == ["drop"]
    assert result.tokenizes_with("train_on") == ["assistant"]
    assert result.tokenizes_with("validation_split") == ["0.1"]
    for left_out in ("datasets[0].field_messages", "special_tokens", "liger_rope", "surprise"):
        assert re.search(rf"^#   {re.escape(left_out)}", result.text, re.MULTILINE), left_out


def test_pairs_of_trl_get_room_for_both_answers_and_their_defaults(translate: Translate) -> None:
    result = translate(TRL)
    expected = {
        "objective": "dpo",
        "dpo_beta": 0.05,
        "lr_schedule": "constant",
        "total_batch_size": 4 * 2 * 8,
        "max_step": 100,
        "warmup_steps": 15,
        "eval_step_interval": 20,
        "weight_decay": 0.0,
        "activation_checkpointing": "full",
        "loggers": ["wandb", "tensorboard"],
    }
    assert {name: result.arguments[name] for name in expected} == expected
    assert result.tokenizes_with("max_length") == ["1024"]
    assert result.tokenizes_with("dataset") == ["org/pairs:main"]
    assert result.tokenizes_with("validation_dataset") == ["org/pairs:main:test"]
    assert result.tokenizes_with("packing") == ["none"]


def test_a_file_of_llama_factory_keeps_zero_fp32_weights_and_packing(translate: Translate) -> None:
    result = translate(LLAMA_FACTORY)
    expected = {
        "parallelism": "fsdp",
        "sharding_strategy": "SHARD_GRAD_OP",
        "cpu_offload": True,
        "precision": "bf16-mixed",  # trained weights stay in fp32 there
        "isolate_documents": False,  # packing without neat_packing
        "number_epochs": 3,
        "warmup_steps": 20,
        "adapter": None,
    }
    assert {name: result.arguments[name] for name in expected} == expected
    assert "# max_step: ceil(2.5 × ceil(rows / rows of a step))" in result.text
    assert result.tokenizes_with("train_on") == ["last"]
    assert result.tokenizes_with("max_documents") == ["500"]
    assert "dataset_info.json is not here" in result.printed


def test_a_file_of_torchtune_keeps_components_and_interpolations(translate: Translate) -> None:
    result = translate(TORCHTUNE)
    expected = {
        "output_dir": "/tmp/out",
        "model_name": "/models/llama",
        "precision": "bf16-true",
        "lora_targets": ["q_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
        "lora_alpha": 8.0,
        "micro_batch_size": 3,
        "grad_clip": 0.0,  # without clip_grad_norm nothing is clipped
        "optimizer_states": "8bit",
        "weight_decay": 0.02,
        "activation_checkpointing": "none",
        "profile": None,
    }
    assert {name: result.arguments[name] for name in expected} == expected
    assert result.tokenizes_with("dataset") == ["yahma/alpaca-cleaned"]
    assert result.tokenizes_with("train_on") == ["all"]  # alpaca's prompts are supervised there


def test_names_in_dataset_info_become_files_and_hub_names(translate: Translate, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    info = '{"mine": {"file_name": "a.json"}, "hub": {"hf_hub_url": "org/hub", "subset": "en", "split": "train"}}'
    (folder / "dataset_info.json").write_text(info)
    result = translate(LLAMA_FACTORY.replace("dataset: mine", "dataset: mine,hub"))
    assert result.tokenizes_with("dataset") == [str(folder / "a.json"), "org/hub:en:train"]


def test_a_template_in_the_file_is_written_beside_the_result(translate: Translate) -> None:
    result = translate(TRL.replace("beta: 0.05", "assistant_only_loss: true\nchat_template: '{{ messages }}'"))
    (file,) = result.tokenizes_with("chat_template")
    assert Path(file).read_text() == "{{ messages }}"
    assert result.tokenizes_with("train_on") == ["assistant"]


def test_texts_for_a_number_of_steps_are_streamed(translate: Translate) -> None:
    text = "base_model: m\npretraining_dataset: [{path: org/web, name: en, type: pretrain, text_column: body}]\n"
    result = translate(f"{text}max_steps: 50\nlearning_rate: 1e-4\nsequence_len: 128\nmicro_batch_size: 1\n")
    assert result.command == []
    expected = {"streaming_dataset": ["org/web:en"], "text_column": "body", "max_length": 128, "max_step": 50}
    assert {name: result.arguments[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ("fsdp: [full_shard, auto_wrap]", {"parallelism": "fsdp", "sharding_strategy": "FULL_SHARD"}),
        ("fsdp: [shard_grad_op, offload]", {"sharding_strategy": "SHARD_GRAD_OP", "cpu_offload": True}),
        (
            "fsdp_version: 2\nfsdp_config: {reshard_after_forward: false, state_dict_type: SHARDED_STATE_DICT}",
            {"parallelism": "fsdp2", "sharding_strategy": "SHARD_GRAD_OP", "state_dict_type": "sharded"},
        ),
        ("deepspeed: deepspeed_configs/zero3_bf16.json", {"parallelism": "fsdp", "sharding_strategy": "FULL_SHARD"}),
        ("deepspeed: {zero_optimization: {stage: 1}}", {"sharding_strategy": "SHARD_GRAD_OP"}),
        ("rl: simpo\nrl_beta: 2\nsimpo_gamma: 1.2", {"objective": "simpo", "dpo_beta": 2.0, "simpo_gamma": 1.2}),
        ("rl: orpo\norpo_alpha: 0.2", {"objective": "orpo", "dpo_beta": 0.2}),
        (
            "rl: kto\nrl_beta: 0.2\nkto_desirable_weight: 1.2\nkto_undesirable_weight: 0.7",
            {"objective": "kto", "dpo_beta": 0.2, "kto_desirable_weight": 1.2, "kto_undesirable_weight": 0.7},
        ),
        ("max_steps: 7", {"max_step": 7, "warmup_steps": 0}),
        ("loraplus_lr_ratio: 16", {"lr_of": ["lora_B=0.0032"]}),
        ("tensor_model_parallel_size: 2", {"tensor_parallel_size": 2, "parallelism": "fsdp2"}),
        ("rl: apo_zero\nref_model: org/base", {"objective": "apo_zero", "reference": "org/base"}),
        ("peft_use_dora: true\nlora_modules_to_save: [lm_head]", {"adapter": "dora", "train_also": ["lm_head"]}),
        ("fp8: true\ncontext_parallel_size: 2", {"float8": True, "context_parallel_size": 2, "parallelism": "fsdp2"}),
    ],
)
def test_settings_that_differ_in_meaning(change: str, expected: dict[str, Any], translate: Translate) -> None:
    result = translate(AXOLOTL.replace("surprise: 7", change))
    assert {name: result.arguments[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (TRL.replace("optim: adamw_torch", "optim: muon"), {"optimizer": "muon"}),
        # TRL's defaults of an adapter
        (f"{TRL}use_peft: true\n", {"adapter": "lora", "lora_rank": 16, "lora_alpha": 32.0, "lora_dropout": 0.05}),
        (
            f"{TRL}loss_type: [sigmoid_norm, sft]\nloss_weights: [1.0, 0.25]\n",
            {"objective": "dpo", "length_normalised": True, "sft_weight": 0.25},
        ),
        (f"{TRL}loss_type: orpo\nrpo_alpha: 0.3\n", {"objective": "orpo", "sft_weight": 0.0}),  # it has factor 1
        (f"{TRL}desirable_weight: 0.9\n", {"objective": "kto", "dpo_beta": 0.05, "kto_desirable_weight": 0.9}),
        (f"{TRL}loss_type: apo_zero_unpaired\n", {"objective": "apo_zero_unpaired", "dpo_beta": 0.05}),
        (
            LLAMA_FACTORY.replace("stage: sft", "stage: kto\npref_beta: 0.3\nkto_rejected_weight: 1.1"),
            {"objective": "kto", "dpo_beta": 0.3, "kto_undesirable_weight": 1.1},
        ),
        (LLAMA_FACTORY, {"activation_checkpointing": "full"}),
        (f"{LLAMA_FACTORY}disable_gradient_checkpointing: true\n", {"activation_checkpointing": "none"}),
        (AXOLOTL.replace("wandb_project:", "wandb_project: fables"), {"loggers": ["wandb"], "project": "fables"}),
        (AXOLOTL.replace("wandb_project:", "wandb_project: fables\nuse_wandb: false"), {"loggers": None}),
    ],
)
def test_defaults_and_switches_are_those_of_the_program(
    text: str, expected: dict[str, Any], translate: Translate
) -> None:
    arguments = translate(text).arguments
    assert {name: arguments[name] for name in expected} == expected


def test_devices_that_compute_a_row_together_read_it_once(translate: Translate, tmp_path: Path) -> None:
    text = AXOLOTL.replace("surprise: 7", "context_parallel_size: 2")
    assert translate(text, "--devices", "4").arguments["total_batch_size"] == 2 * 3 * (4 // 2)
    (fault,) = faults(text, tmp_path, "--devices", "3")
    assert fault == "--devices 3: not a multiple of the 2 devices that compute a row together"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (AXOLOTL.replace("surprise: 7", "rl: grpo"), "rl: grpo: this project has the preference losses dpo, ipo"),
        (TRL + "loss_type: [sigmoid, bco_pair]\n", "this project uses one preference loss at a time"),
        ("stage: sft\nmodel_name_or_path: a\ntrain_dataset: data.yaml\n", "a file for LLaMA-Factory v1"),
        (LLAMA_FACTORY.replace("stage: sft", "stage: rm"), "stage: rm: this project trains the stages"),
        (TRL + "reward_funcs: accuracy\n", "reward_funcs is for GRPO"),
        (AXOLOTL.replace("2e-4", "fast"), "learning_rate: expected a number, got 'fast'"),
        (AXOLOTL.replace("lora_r: 8", "lora_r: .nan"), "lora_r: expected a number, got nan"),
        (AXOLOTL.replace("0.1\nlearning", "[1]\nlearning"), "cosine_min_lr_ratio: expected a number, got [1]"),
        (TRL + "datasets: [{path: a, weight: x}]\n", "datasets[0].weight: expected a number, got 'x'"),
        (AXOLOTL.replace("2e-4", "-1"), "learning_rate: expected a number above 0"),
        (AXOLOTL.replace("micro_batch_size: 2", "micro_batch_size: 1.5"), "micro_batch_size: expected a whole number"),
        (TRL.replace("dataset_name: org/pairs\n", ""), "it does not name a dataset"),
        ("a: 1\n", "give --from PROGRAM"),
        ("- 1\n", "expected a training file with lines 'name: value'"),
        ("base_model: *x\n", "an alias"),
    ],
)
def test_a_file_that_cannot_be_translated_gets_one_line(text: str, said: str, tmp_path: Path) -> None:
    (fault,) = faults(text, tmp_path)
    assert said in fault


def test_the_program_may_be_named_and_an_output_is_never_overwritten(translate: Translate, tmp_path: Path) -> None:
    text = "model_name_or_path: m\ndataset_name: org/texts\nlearning_rate: 1e-5\n"
    assert translate(text, "--from", "trl").arguments["model_name"] == "m"
    (fault,) = faults(text, tmp_path, "--from", "nanogpt")
    assert fault.startswith("--from: expected one of axolotl")
    (tmp_path / "ours.yaml").write_text("")
    (fault,) = faults(text, tmp_path)
    assert "already exists" in fault


def test_the_command_tokenizes_and_the_steps_then_decide_the_shares(
    translate: Translate, tiny_model_dir: Path, shakespeare_jsonl: Path, tmp_path: Path
) -> None:
    text = (
        f"base_model: {tiny_model_dir}\ndatasets: [{{path: {shakespeare_jsonl}, type: completion}}]\n"
        "sequence_len: 32\nsample_packing: true\nval_set_size: 0.1\nlearning_rate: 1e-3\nwarmup_ratio: 0.2\n"
        "num_epochs: 1.5\nmicro_batch_size: 2\ngradient_accumulation_steps: 4\nevals_per_epoch: 3\n"
        f"bf16: false\noutput_dir: {tmp_path / 'run'}\ndataset_processes: 1\n"
    )
    first = translate(text)
    assert "# warmup_steps: floor(0.2 × steps)" in first.text
    tokens = tmp_path / "tokens"
    place = first.command.index("--output_dir") + 1
    tokenize_dataset.main([*first.command[:place], str(tokens), *first.command[place + 1 :], "--max_documents", "40"])
    manifest = load_manifest(tokens)
    assert manifest is not None
    rows = manifest.ledger.splits["train"].rows

    result = translate(text, "--train_data_dir", str(tokens), "--devices", "2")
    steps = -(-3 * -(-rows // 16) // 2)
    expected = {
        "train_data_dir": str(tokens),
        "precision": "32-true",
        "total_batch_size": 16,
        "max_step": steps,
        "warmup_steps": steps // 5,
        "eval_step_interval": -(-2 * steps // 9),
    }
    assert {name: result.arguments[name] for name in expected} == expected


def test_steps_need_the_number_of_devices(tmp_path: Path) -> None:
    (fault,) = faults(AXOLOTL, tmp_path, "--train_data_dir", str(tmp_path))
    assert fault.startswith("--train_data_dir: the number of steps depends on the number of devices; give --devices")


@pytest.mark.parametrize("output_dir", ["data/sft", "./data/sft/", "data/sft/run", "data"])
def test_the_token_dataset_gets_another_folder_than_the_run(output_dir: str, translate: Translate) -> None:
    result = translate(f"model_name_or_path: org/model\ndataset_name: org/texts\noutput_dir: {output_dir}\n")
    run = Path(result.values["output_dir"])
    tokens = Path(result.values["train_data_dir"])
    assert result.command[result.command.index("--output_dir") + 1] == str(tokens)
    assert not run.is_relative_to(tokens)
    assert not tokens.is_relative_to(run)


def test_an_expression_with_brackets_stays_a_text_in_a_list(translate: Translate) -> None:
    pattern = r"model.layers.[\d]+.(q|k)_proj"
    result = translate(f"{TRL}use_peft: true\nlora_target_modules: '{pattern}'\n")
    assert result.arguments["lora_targets"] == [pattern]


def test_gkd_of_trl_becomes_distillation_from_its_teacher(translate: Translate) -> None:
    text = (
        "model_name_or_path: MODEL\nteacher_model_name_or_path: TEACHER\nlmbda: 0\nbeta: 0.3\ndisable_dropout: true\n"
        "temperature: 0.9\ndataset_name: d.jsonl\noutput_dir: out\n"
    )
    training = translate(text).values
    assert training["objective"] == "distill"
    assert training["teacher"] == "TEACHER"
    assert (training["divergence"], training["jsd_beta"]) == ("jsd", 0.3)
    assert "dpo_beta" not in training
    forward = translate(text.replace("beta: 0.3", "beta: 0")).values
    assert forward["divergence"] == "forward_kl"
    assert "jsd_beta" not in forward


@pytest.mark.parametrize("setting", ["", "lmbda: 0.5\n", "lmbda: 0\nseq_kd: true\n"])
def test_gkd_on_sampled_answers_is_refused(translate: Translate, setting: str) -> None:
    text = f"model_name_or_path: MODEL\nteacher_model_name_or_path: TEACHER\n{setting}dataset_name: d.jsonl\n"
    with pytest.raises(InputError, match="this project distils on the answers of the dataset"):
        translate(text)


def test_axolotls_distillation_from_stored_log_probabilities_is_refused(translate: Translate) -> None:
    text = "base_model: MODEL\nkd_temperature: 2.0\ndatasets: [{path: d.jsonl, type: completion}]\n"
    with pytest.raises(InputError, match="kd_temperature is for distillation"):
        translate(text)
