"""Names of other programs' arguments get our name, or one honest line; never a guess."""

import dataclasses
import re
from collections import Counter
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest

from fabric_train.all_arguments import ALL_ARGUMENTS
from fabric_train.arguments import TrainArguments, parse
from fabric_train.cli.argument_types import convert, types_of
from fabric_train.cli.errors import InputError
from fabric_train.cli.foreign_names import read_table
from fabric_train.cli.yaml_core import load
from fabric_train.inference.arguments import GenerateArguments

_OF_OUR_PROGRAMS = ("tokenize", "convert", "generate", "evaluate")
PROGRAMS: dict[str, type] = {
    kind.__name__: kind for kind in (TrainArguments, *(ALL_ARGUMENTS[name] for name in _OF_OUR_PROGRAMS))
}
OTHERS: dict[str, list[str]] = {
    program: names.split()
    for program, names in load(Path(__file__).with_name("other_programs_arguments.yaml").read_text()).items()
}
EVERY_PROGRAM = {"config", "debug", "help", "version"}


def faults(program: type, *argv: str) -> list[str]:
    with pytest.raises(InputError) as error:
        parse(program, list(argv))
    return list(error.value.faults)


def names_of_transformers() -> list[str]:
    from transformers import TrainingArguments  # slow: every worker would import it to collect the tests

    return [field.name for field in dataclasses.fields(TrainingArguments)]


@pytest.mark.parametrize("program", PROGRAMS.values())
@pytest.mark.parametrize("other", [*OTHERS, "transformers"])
def test_every_argument_of_another_program_is_ours_or_explained(program: type, other: str) -> None:
    names = OTHERS[other] if other in OTHERS else names_of_transformers()
    assert len(names) > 20
    ours = {*types_of(program), *types_of(TrainArguments), *EVERY_PROGRAM}
    foreign = [name for name in names if name not in ours]
    said = faults(program, *(f"--{name}=1" for name in foreign))
    unknown = {fault.split(": ")[0]: fault for fault in said if ": no such argument; " in fault}
    assert sorted(unknown) == sorted({f"--{name}" for name in foreign})
    not_explained = [fault for fault in unknown.values() if "did you mean" in fault or "--help lists" in fault]
    assert not_explained == []


def test_every_argument_that_the_table_names_is_one_of_ours() -> None:
    table = read_table()
    lines = [(PROGRAMS[program], line) for program, rows in table["names"].items() for line in rows]
    lines += [(TrainArguments, line) for line in table["absent"]]
    wrong = []
    for program, line in lines:
        for part in re.split("[,;(]", line):  # a program's name counts up to the next of these
            other = re.search(r"fabric-train (\w+)", part)
            owner = ALL_ARGUMENTS[other[1]] if other else program
            wrong += [line for name in re.findall(r"--(\w+)", part) if name not in types_of(owner)]
    assert wrong == []


def test_no_row_has_a_name_of_its_program_and_no_name_has_two_rows() -> None:
    table = read_table()
    for program, rows in table["names"].items():
        names = [name for theirs in rows.values() for name in theirs.split()]
        own = {*types_of(PROGRAMS[program]), *EVERY_PROGRAM}
        assert own & set(names) == set()
        assert [name for name, count in Counter(names).items() if count > 1] == []
    absent = [name for theirs in table["absent"].values() for name in theirs.split()]
    training = types_of(TrainArguments)
    assert [pattern for pattern in absent if any(fnmatchcase(name, pattern) for name in training)] == []
    assert [name for name, count in Counter(absent).items() if count > 1] == []


def test_every_value_that_the_table_names_is_one_of_ours() -> None:
    types: dict[str, Any] = {name: kind for program in PROGRAMS.values() for name, kind in types_of(program).items()}
    for argument, rows in read_table()["values"].items():
        for ours, theirs in rows.items():
            kind = bool if argument == "true or false" else types[argument]
            convert(kind, ours)
            assert theirs.split()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("--gradient_checkpointing true", "no such argument; here it is --activation_checkpointing full"),
        ("--per-device-train-batch-size 4", "no such argument; here it is --micro_batch_size"),
        (
            "--deepspeed ds.json",
            "no such argument; DeepSpeed is not supported; shard the model with --parallelism fsdp or fsdp2",
        ),
        ("--optimizer.lr 1", "no such argument; here it is --lr"),
        ("--max_epochs -1", "here it is --number_epochs; for -1 (evaluation only), --eval_only true"),
        ("--prompt Once", "during training; afterwards, fabric-train generate --prompt"),
        ("--dropout 0.1", "attention_dropout: 0.1"),
        ("--model.lora_rank 8", "no such argument; here it is --lora_rank"),
        ("--model.quantize_base true", "no such argument; here it is --base_weights nf4_double"),
        ("--double_quantization true", "no such argument; here it is --base_weights nf4_double"),
        ("--checkpointer.model_type LLAMA3", "no such argument; here it is --from_scratch FAMILY"),
        ("--checkpointer.checkpoint_dir x", "no such argument; here it is --model_name"),
        ("--checkpointer.recipe_checkpoint x", "no such argument; checkpoints are always safetensors"),
        ("--no_lr_decay", "no such argument; write --lr_decay false"),
        (
            "--qlora_something_new 8",
            "no such argument; the supported adapters are LoRA and DoRA: --adapter, --lora_rank",
        ),
        ("--top_p 0.9", "training on completions samples the full distribution, or it would be biased"),
        ("--top_k 50", "training on completions samples the full distribution, or it would be biased"),
        ("--min_p 0.1", "training on completions samples the full distribution, or it would be biased"),
        ("--precision bf16", "got 'bf16'; here it is bf16-true"),
        ("--precision float32", "got 'float32'; here it is 32-true"),
        ("--sharding_strategy full-shard", "got 'full-shard'; here it is FULL_SHARD"),
        ("--sharding_strategy hybrid-full-shard", "got 'hybrid-full-shard'; here it is HYBRID_SHARD"),
        ("--sharding_strategy hybrid-grad-shard", "got 'hybrid-grad-shard'; here it is _HYBRID_SHARD_ZERO2"),
        ("--resume yes", "expected true or false, got 'yes'; here it is true"),
        ("--activation_checkpointing", "got nothing; here it is full"),
        ("--activation_checkpointing false", "got 'false'; here it is none"),
        ("--loggers csv TensorBoard", "got ['csv', 'TensorBoard']; here it is tensorboard"),
        ("--lr_schedule sideways", "expected one of cosine, linear, constant, step, exponential, wsd, got 'sideways'"),
    ],
)
def test_a_name_or_value_of_another_program_gets_ours(given: str, said: str) -> None:
    (fault,) = faults(TrainArguments, "--train_data_dir", "tokens", *given.split())
    assert said in fault
    assert fault.endswith("'sideways'") or "sideways" not in fault


def test_a_name_of_training_says_so_in_another_program() -> None:
    assert "--learning_rate: no such argument; in training it is --lr" in faults(GenerateArguments, "--learning_rate=1")
    assert "--max_new_tokens: no such argument; here it is --num_tokens" in faults(
        GenerateArguments, "--max_new_tokens=1"
    )


def test_keys_of_a_yaml_file_get_our_names_too(tmp_path: Path) -> None:
    config = tmp_path / "theirs.yaml"
    config.write_text(
        "per_device_train_batch_size: 1\nbf16: true\noptimizer: {lr: 1, _component_: torch.optim.AdamW}\n"
        "adapter: qlora\nresume: off\n"
    )
    assert faults(TrainArguments, "--train_data_dir", "tokens", "--config", str(config)) == [
        f"{config}: per_device_train_batch_size: no such argument; here it is --micro_batch_size",
        f"{config}: bf16: no such argument; here it is --precision bf16-mixed, with weights in fp32, or bf16-true",
        f"{config}: optimizer.lr: no such argument; here it is --lr",
        f"{config}: optimizer._component_: no such argument; here it is --optimizer",
        f"{config}: adapter: expected one of lora, dora or null, got 'qlora'; here it is lora",
        f"{config}: resume: expected true or false, got 'off'; here it is false",
    ]
