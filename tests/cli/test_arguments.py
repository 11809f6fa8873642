"""The command line, a --config file and the launcher become typed arguments, or all faults are reported at once."""

import os
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fabric_train.arguments import (
    DataArguments,
    DecayForm,
    DeviceArguments,
    FSDPArguments,
    LoggingArguments,
    ModelArguments,
    Parallelism,
    Precision,
    SaveArguments,
    Schedule,
    TrainArguments,
    TrainingArguments,
    parse,
)
from fabric_train.cli.errors import InputError
from fabric_train.cli.parser import flatten, parse_arguments, to_yaml
from fabric_train.cli.tables import LOGGERS
from fabric_train.inference.arguments import GenerateArguments
from fabric_train.inspection.__main__ import InspectArguments
from fabric_train.programs.convert_to_hf import ConvertArguments
from fabric_train.tokenization.arguments import TokenizeArguments
from fabric_train.tokenization.merge import MergeArguments
from fabric_train.trace.__main__ import main as trace
from tests.support.former_command_line import FORMER_COMMAND_LINE

REQUIRED = ["--train_data_dir", "tokens", "--output_dir", "run"]
GROUPS: dict[str, Any] = get_type_hints(TrainArguments)

LOGGERS_EXPECTED = (
    "a list, each one of csv, tensorboard, jsonl, wandb, trackio, mlflow (--extensions adds names) or null"
)


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("LT_") or name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
            monkeypatch.delenv(name)


@pytest.fixture
def fabric_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """The variables that ``fabric run fabric_train`` sets without options."""
    for name, value in {"LT_CLI_USED": "1", "LT_DEVICES": "1", "LT_NUM_NODES": "1"}.items():
        monkeypatch.setenv(name, value)


def train(*line: str) -> dict[str, Any]:
    return flatten(parse(TrainArguments, [*REQUIRED, *line]))


def faults(*line: str, of: type = TrainArguments, required: list[str] = REQUIRED) -> list[str]:
    with pytest.raises(InputError) as refusal:
        parse(of, [*required, *line])
    assert all("\n" not in fault for fault in refusal.value.faults)
    return list(refusal.value.faults)


def write(path: Path, text: str) -> str:
    path.write_text(text, encoding="utf-8")
    return str(path)


# ------------------------------------------------------------------------------------------------- defaults and types


@pytest.mark.parametrize(
    "name, value",
    [
        ("devices", "auto"),
        ("tpu", False),
        ("model_name", "meta-llama/Meta-Llama-3-8B"),
        ("precision", "bf16-true"),
        ("auto_wrap_policy", "LlamaDecoderLayer"),
        ("sharding_strategy", "FULL_SHARD"),
        ("state_dict_type", "full"),
        ("limit_all_gathers", True),
        ("cpu_offload", False),
        ("resume", False),
        ("checkpoint", None),
        ("number_epochs", 2),
        ("micro_batch_size", 1),
        ("gradient_accumulation_steps", 64),
        ("grad_clip", 1.0),
        ("max_step", None),
        ("lr", 2e-5),
        ("min_lr", 0.0),
        ("lr_decay", True),
        ("warmup_steps", 0),
        ("weight_decay", 0.01),
        ("beta1", 0.9),
        ("beta2", 0.95),
        ("eval_batch_size", 1),
        ("eval_iters", None),
        ("eval_step_interval", 500),
        ("save_step_interval", 1000),
        ("entity", None),
        ("project", "fabric_llama"),
    ],
)
def test_defaults_are_those_of_the_system_it_continues(name: str, value: Any) -> None:
    assert train()[name] == value
    assert type(train()[name]) is type(value)


def test_precision_auto_is_what_the_accelerator_takes() -> None:
    """torch-xla's FSDP keeps weights in fp32; a precision that is given stays."""
    assert train("--tpu", "true")["precision"] == train("--accelerator", "tpu")["precision"] == "bf16-mixed"
    assert train("--tpu", "true", "--precision", "32-true")["precision"] == "32-true"
    assert train("--precision", "auto")["precision"] == "bf16-true"


def test_default_loggers_need_no_account_and_no_network() -> None:
    logging = parse(TrainArguments, ["--train_data_dir", "tokens"]).logging
    assert (logging.opened_loggers, logging.log_model, logging.note) == (["csv", "tensorboard"], "none", None)


@pytest.mark.parametrize(
    ("line", "opened", "note"),
    [
        (
            "--project valencian",
            ["csv", "tensorboard", "wandb"],
            "--project valencian: metrics are also logged to Weights & Biases, as with --loggers csv tensorboard wandb",
        ),
        (
            "--entity gplsi --project valencian",
            ["csv", "tensorboard", "wandb"],
            "--entity gplsi --project valencian: metrics are also logged to Weights & Biases, as with --loggers csv "
            "tensorboard wandb",
        ),
        (
            "--entity gplsi --loggers csv",
            ["csv"],
            "--entity: no logger uses this; add wandb to --loggers",
        ),
        (
            "--run_name first --tags a b --project ours --loggers csv",
            ["csv"],
            "--project, --run_name, --tags: no logger uses this; add wandb to --loggers",
        ),
        ("--run_name first", ["csv", "tensorboard"], "--run_name: no logger uses this; add wandb to --loggers"),
        (
            "--entity gplsi --group g --notes n --loggers mlflow",
            ["mlflow"],
            "--entity: no logger uses this; add wandb to --loggers",
        ),
        ("--project ours --run_name first --log_model all --loggers trackio", ["trackio"], None),
        ("--entity gplsi --loggers wandb", ["wandb"], None),
        ("--entity gplsi --loggers csv --log_model last", ["csv", "wandb"], None),
    ],
)
def test_an_entity_or_project_alone_turns_wandb_on_with_a_note(line: str, opened: list[str], note: str | None) -> None:
    logging = parse(TrainArguments, ["--train_data_dir", "tokens", *line.split()]).logging
    assert (logging.opened_loggers, logging.note) == (opened, note)


@pytest.mark.parametrize("word, value", [("False", False), ("false", False), ("True", True), ("true", True)])
def test_resume_false_is_false(word: str, value: bool) -> None:
    assert train("--resume", word)["resume"] is value


def test_a_flag_alone_is_true() -> None:
    assert train("--resume", "--micro_batch_size", "2", "--eval_only") == train() | {
        "resume": True,
        "micro_batch_size": 2,
        "eval_only": True,
    }


def test_only_a_switch_needs_no_value() -> None:
    assert faults("--project", "--lr", "--loggers", "--micro_batch_size") == [
        "--project: expected text, got nothing",
        "--lr: expected a number above 0, got nothing",
        f"--loggers: expected {LOGGERS_EXPECTED}, got nothing",
        "--micro_batch_size: expected a whole number above 0, got nothing",
    ]


def test_numbers_have_the_type_of_their_argument() -> None:
    values = train("--lr", "1e-4", "--weight_decay", "0", "--grad_clip=2", "--micro_batch_size", "8", "--devices", "2")
    assert values["lr"] == 1e-4
    for name, kind in (("lr", float), ("weight_decay", float), ("grad_clip", float), ("micro_batch_size", int)):
        assert type(values[name]) is kind
    assert values["grad_clip"] == 2.0
    assert values["devices"] == 2


def test_text_that_looks_like_yaml_stays_text() -> None:
    for text in ("123", "true", "null", "[a]", "a: b", "1e-3", "é", "a=b", "-", "# no comment"):
        assert train("--output_dir", text)["output_dir"] == text
        assert train(f"--output_dir={text}")["output_dir"] == text
    for text in ("123", "~", "#1", "[a]"):
        assert train("--entity", text)["entity"] == text


@pytest.mark.parametrize(
    "name, value, expected",
    [
        ("resume", "maybe", "true or false"),
        ("lr", "fast", "a number above 0"),
        ("lr", "0", "a number above 0"),
        ("lr", "-1e-5", "a number above 0"),
        ("lr", "nan", "a number above 0"),
        ("lr", "inf", "a number above 0"),
        ("min_lr", "-1", "a number, 0 or more"),
        ("micro_batch_size", "0", "a whole number above 0"),
        ("micro_batch_size", "1.5", "a whole number above 0"),
        ("max_step", "1.5", "a whole number above 0 or null"),
        ("num_workers", "-1", "a whole number, 0 or more"),
        ("beta1", "1.5", "a number from 0 to 1"),
        ("precision", "fp8", "one of auto, bf16-true, bf16-mixed, 32-true, 16-mixed"),
        (
            "loggers",
            "paper",
            "a list, each one of csv, tensorboard, jsonl, wandb, trackio, mlflow (--extensions adds names) or null",
        ),
    ],
)
def test_a_wrong_value_is_refused_with_what_is_expected(name: str, value: str, expected: str) -> None:
    assert faults(f"--{name}", value) == [f"--{name}: expected {expected}, got {value!r}"]


def test_two_values_for_one_argument_are_refused() -> None:
    assert faults("--lr", "1", "2") == ["--lr: expected a number above 0, got '1 2'; put a value with spaces in quotes"]


def test_of_an_argument_given_twice_the_last_value_counts(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    values = train("--lr", "1", "--loggers", "csv", "wandb", "--lr=2", "--loggers", "csv", "--resume")
    assert (values["lr"], values["loggers"], values["resume"]) == (2.0, ["csv"], True)
    assert capsys.readouterr().err.splitlines() == [
        "note: --lr is given twice: 1, then 2; the last value is used",
        "note: --loggers is given twice: csv wandb, then csv; the last value is used",
    ]
    assert faults("--min-lr", "0", "--min_lr", "x") == ["--min_lr: expected a number, 0 or more, got 'x'"]
    config = write(tmp_path / "run.yaml", "lr: 3\n")
    assert train("--config", "missing.yaml", "--config", config)["lr"] == 3.0
    merged = parse_arguments(
        MergeArguments, ["a", "b", "--output_dir", "o", "--dataset_dirs", "c", "d", "--output_dir", "p"]
    )
    assert (merged.dataset_dirs, merged.output_dir) == (["c", "d"], "p")
    assert parse_arguments(InspectArguments, ["DIR", "--dataset_dir", "OTHER"]).dataset_dir == "OTHER"
    assert parse_arguments(InspectArguments, ["--dataset_dir", "OTHER", "DIR"]).dataset_dir == "DIR"


def test_only_rank_0_notes_what_is_given_twice(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "1")
    assert parse_arguments(GenerateArguments, ["--model_name", "m", "--prompt", "p", "--prompt", "q"]).prompt == "q"
    assert capsys.readouterr().err == ""


def test_a_word_without_an_argument_is_refused() -> None:
    for stray in ("stray", "--", "--=3"):
        refused = faults(stray, required=[])
        assert refused[0] == f"{stray!r} does not belong to an argument; write --argument value"
        assert refused[1:] == ["--train_data_dir, --streaming_dataset or --prompts is required"]


def test_hyphens_and_underscores_are_the_same(tmp_path: Path) -> None:
    assert train("--micro-batch-size", "4", "--lr-decay=false") == train("--micro_batch_size", "4", "--lr_decay=false")
    config = write(tmp_path / "run.yaml", "micro-batch-size: 4\nlr-decay: false\n")
    assert train("--config", config) == train("--micro_batch_size", "4", "--lr_decay=false")


def test_a_list_needs_no_brackets() -> None:
    for line in (["csv", "wandb"], ["[csv, wandb]"], ["[csv,wandb]"]):
        assert train("--loggers", *line)["loggers"] == ["csv", "wandb"]
    assert train("--loggers", "wandb")["loggers"] == ["wandb"]
    assert train("--loggers=wandb")["loggers"] == ["wandb"]


# --------------------------------------------------------------------------------------------------- --config files


def test_the_command_line_overrides_the_config_file(tmp_path: Path) -> None:
    config = write(tmp_path / "run.yaml", "lr: 1e-4\nmin_lr: 1e-6\nloggers: [csv]\ntrain_data_dir: elsewhere\n")
    values = train("--config", config, "--lr", "3e-4", "--loggers", "wandb", "csv")
    assert (values["lr"], values["min_lr"], values["loggers"]) == (3e-4, 1e-6, ["wandb", "csv"])
    assert values["train_data_dir"] == "tokens"


def test_required_arguments_may_be_in_the_file(tmp_path: Path) -> None:
    config = write(tmp_path / "run.yaml", "train_data_dir: there\noutput_dir: here\n")
    assert parse(TrainArguments, ["--config", config]).data.train_data_dir == "there"
    assert parse(TrainArguments, [f"--config={config}"]).save.output_dir == "here"
    tokenization = write(tmp_path / "tokens.yaml", "dataset: [a]\ntokenizer_name: t\noutput_dir: o\n")
    assert parse_arguments(TokenizeArguments, ["--config", tokenization]).dataset == ["a"]


def test_an_empty_file_changes_nothing(tmp_path: Path) -> None:
    assert train("--config", write(tmp_path / "empty.yaml", "# nothing yet\n")) == train()


def test_a_misspelt_name_gets_the_nearest_one(tmp_path: Path) -> None:
    assert faults("--micro-batch-sise", "1") == [
        "--micro_batch_sise: no such argument; did you mean --micro_batch_size?"
    ]
    assert faults("--learning_rate", "1") == ["--learning_rate: no such argument; here it is --lr"]
    config = write(tmp_path / "run.yaml", "epochs: 1\nsharding_stratgy: FULL_SHARD\nqqq: 1\n2: 3\n")
    assert faults("--config", config) == [
        f"{config}: epochs: no such argument; here it is --number_epochs",
        f"{config}: sharding_stratgy: no such argument; did you mean --sharding_strategy?",
        f"{config}: qqq: no such argument; --help lists them",
        f"{config}: 2: no such argument; --help lists them",
    ]


def test_all_faults_of_command_line_and_file_are_reported_at_once(tmp_path: Path) -> None:
    config = write(tmp_path / "run.yaml", "lr: fast\nbeta_1: 0.9\nwarmup_steps: 9\n")
    line = [
        "--config",
        config,
        "--mirco_batch_size",
        "2",
        "--max_step",
        "5",
        "--eval_iters",
        "0",
        "--output_dir",
        "run",
    ]
    assert faults(*line, "--cpu_offload", "true", "--parallelism", "ddp", required=[]) == [
        f"{config}: lr: expected a number above 0, got 'fast'",
        f"{config}: beta_1: no such argument; did you mean --beta1?",
        "--mirco_batch_size: no such argument; did you mean --micro_batch_size?",
        "--eval_iters: expected a whole number above 0 or null, got '0'",
        "--train_data_dir, --streaming_dataset or --prompts is required",
        "--cpu_offload true needs --parallelism fsdp or fsdp2, not ddp",
        "--warmup_steps 9 is more than --max_step 5",
    ]


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("--shares 1 2", "--shares has 2 numbers for 3 folders of --train_data_dir; give one number for each"),
        (
            "--token_shares 1",
            "--token_shares has 1 numbers for 3 folders of --train_data_dir; give one number for each",
        ),
        (
            "--shares 1 1 1 --token_shares 1 1 1",
            "--shares and --token_shares contradict each other; give only one of them",
        ),
        (
            "--shares 1 1 1 --streaming_dataset texts",
            "--shares has 3 numbers for 1 sources of --streaming_dataset; give one number for each",
        ),
        (
            "--phases phases.yaml --streaming_dataset texts",
            "--phases does not work with --streaming_dataset, whose shares are the same in all steps; tokenize the "
            "texts and give --train_data_dir",
        ),
        (
            "--token_shares 1 --streaming_dataset texts",
            "--token_shares does not work with --streaming_dataset, whose token counts are unknown before it is "
            "read; give --shares",
        ),
        (
            "--shares 1 0 1",
            "--shares: expected numbers above 0, one for each folder, or NAME=NUMBER such as data/va=0.5; "
            "got ['1', '0', '1']",
        ),
    ],
)
def test_shares_that_fit_no_token_datasets_are_refused(line: str, fault: str) -> None:
    given = f"--train_data_dir a b c --output_dir run {line}".split()
    assert faults(*given, required=[]) == [fault]


@pytest.mark.parametrize("again, also", [("a", ""), ("./a", ", also as ./a")])
def test_a_token_dataset_that_is_given_twice_is_refused(again: str, also: str) -> None:
    advice = "or use --shares a=2 to read its rows twice per epoch"
    given = ["--train_data_dir", "a", "b", again, "--output_dir", "run"]
    assert faults(*given, required=[]) == [f"--train_data_dir: a is given twice{also}; give it once, {advice}"]


def test_a_config_of_a_run_that_began_with_a_checkpoint_is_accepted(tmp_path: Path) -> None:
    config = write(tmp_path / "config.yaml", "train_data_dir: a\noutput_dir: b\nresume: false\ncheckpoint: c\n")
    assert parse(TrainArguments, ["--config", config]).checkpoint.checkpoint == "c"


def test_several_token_datasets_and_their_shares_can_be_in_yaml(tmp_path: Path) -> None:
    config = write(tmp_path / "run.yaml", "train_data_dir: [a, b]\nshares: [1, 0.15]\noutput_dir: run\n")
    data = parse(TrainArguments, ["--config", config]).data
    assert (data.data_dirs, data.shares, data.mixes) == (["a", "b"], [1.0, 0.15], True)
    named = write(tmp_path / "named.yaml", 'train_data_dir: a\nshares: [{a: 1.0}, {"a:x=y": 0.15}]\noutput_dir: run\n')
    by_name = parse(TrainArguments, ["--config", named]).data.shares_of_epochs.by_name()
    assert by_name == {"a": 1.0, "a:x=y": 0.15}
    assert (
        parse(TrainArguments, ["--config", named, "--shares", "a=1", "a:x=y=.15"]).data.shares_of_epochs.by_name()
        == by_name
    )
    one = parse(TrainArguments, ["--config", config, "--train_data_dir", "a", "--shares", "null"]).data
    assert (one.data_dirs, one.shares, one.mixes) == (["a"], None, False)


def test_the_default_of_a_wrong_value_makes_no_fault() -> None:
    assert faults("--lr", "1e-3x", "--min_lr", "1e-3") == ["--lr: expected a number above 0, got '1e-3x'"]


@pytest.mark.parametrize(
    "line, fault",
    [
        ("model_name: null", "model_name: expected text, got None"),
        ("micro_batch_size: null", "micro_batch_size: expected a whole number above 0, got None"),
        ("micro_batch_size: true", "micro_batch_size: expected a whole number above 0, got True"),
        ("lr: .inf", "lr: expected a number above 0, got inf"),
        ("resume: 1", "resume: expected true or false, got 1; here it is true"),
        ("project: 5", "project: expected text, got 5; put it in quotes"),
        ("resume: yes", "resume: expected true or false, got 'yes'; here it is true"),
        ("micro_batch_size: 1:30", "micro_batch_size: expected a whole number above 0, got '1:30'"),
        ("project: ''", "project: expected text, got ''"),
        (
            "loggers: [paper]",
            f"loggers: expected {LOGGERS_EXPECTED}, got ['paper']",
        ),
        ("training: {lr: 1}", "training.lr: no such argument; here it is --lr"),
        ("config: other.yaml", "config: no such argument; --help lists them"),
        ("min-lr: 0\nmin_lr: 0", "min_lr is given twice"),
    ],
)
def test_a_wrong_line_of_a_file_is_refused_with_file_and_name(tmp_path: Path, line: str, fault: str) -> None:
    config = write(tmp_path / "run.yaml", line)
    assert faults("--config", config) == [f"{config}: {fault}"]


def test_null_and_none_are_accepted_for_an_optional_argument(tmp_path: Path) -> None:
    config = write(tmp_path / "run.yaml", "max_step: null\nentity: ~\ncheckpoint: None\n")
    assert train("--config", config) == train()
    for word in ("null", "None"):
        assert train("--max_step", word, "--checkpoint", word, "--streaming_dataset", word) == train()
        assert train("--project", word)["project"] == word
    assert faults("--lr", "None") == ["--lr: expected a number above 0, got 'None'"]


def test_files_follow_yaml_1_2_and_so_do_values_of_the_command_line(tmp_path: Path) -> None:
    config = write(tmp_path / "run.yaml", "max_step: 010\nseed: 0o10\nlr: 1e-4\nproject: on\nentity: 2024-01-01\n")
    values = train("--config", config)
    assert [values[name] for name in ("max_step", "seed", "lr", "project", "entity")] == [
        10,
        8,
        1e-4,
        "on",
        "2024-01-01",
    ]
    values = train("--max_step", "010", "--seed", "0x10")
    assert (values["max_step"], values["seed"]) == (10, 16)
    sizes = "--hidden_width 8 --num_layers 1 --num_heads 1 --intermediate_size 8 --max_context_width 1k --vocab_size 9"
    values = train(*sizes.split(), "--architecture", "{rope_theta: 1e4, sizes: [010, 1:30]}")
    assert values["architecture"] == {"rope_theta": 1e4, "sizes": [10, "1:30"]}


def test_lengths_may_be_given_in_units_of_1024_tokens(tmp_path: Path) -> None:
    required = ["--dataset=d", "--tokenizer_name=t", "--output_dir=o"]
    for text, number in (("8k", 8192), ("128K", 131072), ("8192", 8192)):
        assert parse_arguments(TokenizeArguments, [*required, "--max_length", text]).max_length == number
        assert train("--config", write(tmp_path / "run.yaml", f"max_length: {text}\n"))["max_length"] == number
    words = "a whole number above 0, such as 8192 or 8k"
    assert faults("--max_length", "8t") == [f"--max_length: expected {words}, got '8t'"]
    assert faults("--max_length", "99999k") == ["--max_length: expected at most 16,777,216, got '99999k'"]
    assert faults("--micro_batch_size", "8k") == ["--micro_batch_size: expected a whole number above 0, got '8k'"]


def test_counts_of_tokens_may_be_given_in_thousands_millions_and_billions(tmp_path: Path) -> None:
    required = ["--dataset=d", "--tokenizer_name=t", "--output_dir=o"]
    for text, number in (("200k", 200_000), ("5M", 5_000_000), ("1.5b", 1_500_000_000), ("0.0029k", None), ("7", 7)):
        given = write(tmp_path / "tokens.yaml", f"max_tokens: {text}\n")
        for argv in (["--max_tokens", text], ["--config", str(given)]):
            if number:
                assert parse_arguments(TokenizeArguments, [*required, *argv]).max_tokens == number
            else:
                with pytest.raises(InputError, match=r"such as 200k, 5m or 1\.5b or null, got '0.0029k'"):
                    parse_arguments(TokenizeArguments, [*required, *argv])


@pytest.mark.parametrize(
    "name, value, highest",
    [
        ("rank_timeout", "1e300", "100,000,000"),
        ("max_step", "3000000000", "2,147,483,647"),
        ("seed", str(2**64), "9,223,372,036,854,775,807"),
        ("num_workers", "100000", "1,024"),
        ("lr", "1e300", "1,000,000,000"),
    ],
)
def test_a_number_beyond_its_limit_is_refused_with_the_limit(name: str, value: str, highest: str) -> None:
    null = " or null" if name == "max_step" else ""
    assert faults(f"--{name}", value) == [f"--{name}: expected at most {highest}{null}, got {value!r}"]


def test_a_long_value_is_shortened_in_the_message() -> None:
    assert faults("--lr", "9" * 5000) == [f"--lr: expected a number above 0, got '{'9' * 99}…"]


def test_the_command_line_of_the_former_system_is_accepted() -> None:
    values = flatten(parse(TrainArguments, FORMER_COMMAND_LINE.split()))
    assert values["resume"] is values["tpu"] is values["cpu_offload"] is False
    assert values["limit_all_gathers"] is values["lr_decay"] is True
    assert values["checkpoint"] is None
    assert values["log_model"] == "all"
    assert "wandb" in parse(TrainArguments, FORMER_COMMAND_LINE.split()).logging.opened_loggers
    assert (values["devices"], values["max_step"], values["min_lr"]) == (4, 6145, 2e-5)


def test_a_config_that_is_not_yaml_of_arguments_is_refused(tmp_path: Path) -> None:
    missing = str(tmp_path / "missing.yaml")
    assert faults("--config", missing) == [f"--config {missing}: No such file or directory"]
    assert faults("--config", str(tmp_path)) == [f"--config {tmp_path}: a folder, not a YAML file"]
    assert faults("--config") == ["--config: expected one YAML file"]
    assert faults("--config", missing, missing) == ["--config: expected one YAML file"]
    a_list = write(tmp_path / "list.yaml", "- lr\n")
    assert faults("--config", a_list) == [f"--config {a_list}: expected lines of the form 'argument: value'"]
    broken = write(tmp_path / "broken.yaml", "lr: [1\n")
    assert faults("--config", broken)[0].startswith(f"--config {broken}: not a YAML file: ")
    code = write(tmp_path / "code.yaml", "project: !!python/object/apply:os.getcwd []\n")
    assert faults("--config", code)[0].startswith(f"--config {code}: line 1: the tag ")
    twice = write(tmp_path / "twice.yaml", "lr: 1\nlr: 2\n")
    assert faults("--config", twice) == [f"--config {twice}: line 2: lr is given twice"]
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"\xff\xfe\x00")
    assert faults("--config", str(binary)) == [f"--config {binary}: byte 0 is not UTF-8 (0xff); save the file as UTF-8"]


POSITIVE = st.integers(1, 10**9)
CHARACTERS = st.characters(exclude_categories=["Cs"], exclude_characters="\0")
WORDS = st.text(CHARACTERS, min_size=1, max_size=12).filter(lambda word: word not in ("null", "None"))
FLOATS = st.floats(0, 1, allow_subnormal=False)


@settings(deadline=None)
@given(
    device=st.builds(
        DeviceArguments, devices=st.integers(1, 10**5) | st.sampled_from(["auto", "0,1"]), num_nodes=POSITIVE
    ),
    data=st.builds(DataArguments, train_data_dir=WORDS, seed=st.integers(0, 2**63 - 1)),
    model=st.builds(ModelArguments, model_name=WORDS, precision=st.sampled_from(get_args(Precision))),
    fsdp=st.builds(FSDPArguments, parallelism=st.sampled_from(get_args(Parallelism)), limit_all_gathers=st.booleans()),
    training=st.builds(
        TrainingArguments,
        lr=st.floats(1, 1e9),
        min_lr=st.floats(1e-300, 1),
        lr_schedule=st.sampled_from([schedule for schedule in get_args(Schedule) if schedule != "wsd"]),
        max_step=st.none() | POSITIVE,
        total_batch_size=st.none() | POSITIVE,
        lr_decay=st.booleans(),
        weight_decay=FLOATS,
        beta1=st.floats(0, 0.999),
    )
    | st.builds(
        TrainingArguments,
        lr_schedule=st.just("wsd"),
        decay_share=st.floats(0, 1, exclude_min=True),
        decay_form=st.none() | st.sampled_from(get_args(DecayForm)),
    ),
    save=st.builds(SaveArguments, output_dir=WORDS, keep_checkpoints=st.none() | POSITIVE),
    logging=st.builds(
        LoggingArguments,
        loggers=st.lists(st.sampled_from(list(LOGGERS))),
        entity=st.none() | WORDS,
        notes=st.none() | WORDS,
    ),
)
def test_a_saved_configuration_can_be_read_again(tmp_path_factory: pytest.TempPathFactory, **groups: Any) -> None:
    rest = {name: group() for name, group in GROUPS.items() if name not in groups}
    arguments = TrainArguments(**groups, **rest)
    config = write(tmp_path_factory.getbasetemp() / "config.yaml", to_yaml(arguments))
    assert parse_arguments(TrainArguments, ["--config", config]) == arguments


def test_a_saved_configuration_is_ordered_by_group() -> None:
    text = to_yaml(parse(TrainArguments, REQUIRED))
    assert [line[2:] for line in text.splitlines() if line.startswith("# ")] == [g.__doc__ for g in GROUPS.values()]


# ----------------------------------------------------------------------------------------------------- the launcher


@pytest.mark.usefixtures("fabric_run")
def test_options_that_fabric_run_takes_from_the_line_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "DEVICES": "2",
        "NUM_NODES": "3",
        "ACCELERATOR": "cpu",
        "PRECISION": "32",
        "STRATEGY": "ddp",
    }.items():
        monkeypatch.setenv(f"LT_{name}", value)
    values = train()
    assert (values["devices"], values["num_nodes"], values["accelerator"]) == (2, 3, "cpu")
    assert (values["precision"], values["parallelism"]) == ("32-true", "ddp")


@pytest.mark.usefixtures("fabric_run")
def test_options_of_fabric_run_override_the_config_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LT_DEVICES", "2")
    monkeypatch.setenv("LT_PRECISION", "bf16-mixed")
    config = write(tmp_path / "run.yaml", "devices: 4\nprecision: 32-true\n")
    assert (train("--config", config)["devices"], train("--config", config)["precision"]) == (2, "bf16-mixed")


@pytest.mark.usefixtures("fabric_run")
def test_a_default_of_fabric_run_never_overrides_the_config_file(tmp_path: Path) -> None:
    config = write(tmp_path / "run.yaml", "devices: 4\nnum_nodes: 2\n")
    assert faults("--config", config) == [
        f"{config}: devices 4 contradicts fabric run --devices 1 (its default); give the launcher --devices 4, or "
        "leave devices out",
        f"{config}: num_nodes 2 contradicts fabric run --num-nodes 1 (its default); give the launcher --num-nodes 2, "
        "or leave num_nodes out",
    ]
    agreeing = write(tmp_path / "same.yaml", "devices: 1\nnum_nodes: 1\n")
    assert train("--config", agreeing)["devices"] == 1
    automatic = write(tmp_path / "auto.yaml", "devices: auto\n")
    assert train("--config", automatic)["devices"] == 1


@pytest.mark.usefixtures("fabric_run")
def test_an_option_of_fabric_run_that_contradicts_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LT_STRATEGY", "ddp")
    assert faults("--parallelism", "fsdp2") == [
        "--parallelism fsdp2 contradicts fabric run --strategy ddp; leave one of them out"
    ]
    assert train("--parallelism", "ddp")["parallelism"] == "ddp"


@pytest.mark.usefixtures("fabric_run")
def test_unknown_options_of_fabric_run_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LT_PRECISION", "64-true")
    monkeypatch.setenv("LT_ACCELERATOR", "mps")
    assert faults() == [
        "fabric run --accelerator: expected one of auto, cpu, cuda, gpu, tpu, got 'mps'",
        "fabric run --precision: expected one of auto, bf16-true, bf16-mixed, 32-true, 16-mixed, got '64-true'",
    ]
    monkeypatch.setenv("LT_STRATEGY", "deepspeed")
    assert faults() == [
        "fabric run --strategy deepspeed is not supported; leave out --strategy and give --parallelism auto, fsdp, "
        "fsdp2, ddp or single"
    ]


def test_variables_of_fabric_run_without_fabric_run_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LT_DEVICES", "2")
    monkeypatch.setenv("LT_PRECISION", "32-true")
    assert faults() == [
        "the environment sets LT_DEVICES, LT_PRECISION, but fabric run did not start this process; unset "
        "LT_DEVICES, LT_PRECISION"
    ]


def test_processes_that_torchrun_started_are_the_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "3", "WORLD_SIZE": "6", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert (train()["devices"], train()["num_nodes"]) == (2, 3)
    assert train("--devices", "2", "--num_nodes", "3") == train()
    assert faults("--devices", "4") == ["--devices 4 contradicts torchrun --nproc-per-node 2; leave one of them out"]


def test_only_the_training_program_reads_the_launchers_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LT_DEVICES", "2")
    with pytest.raises(InputError, match="no such folder"):
        trace(["no_run", "--step", "1"])
    with pytest.raises(InputError, match="the environment sets LT_DEVICES, but fabric run did not start this process"):
        parse(TrainArguments, REQUIRED)


# -------------------------------------------------------------------------------------------- impossible combinations


@pytest.mark.parametrize(
    "line, fault",
    [
        (
            "--tpu true --accelerator cpu",
            "--tpu true and --accelerator cpu contradict each other; give only one of them",
        ),
        ("--devices 0", "--devices: expected auto, a number above 0, or indices such as 0,2,3; got 0"),
        ("--devices many", "--devices: expected auto, a number above 0, or indices such as 0,2,3; got 'many'"),
        ("--devices 0,", "--devices: expected auto, a number above 0, or indices such as 0,2,3; got '0,'"),
        (
            "--parallelism single --cpu_offload true",
            "--cpu_offload true needs --parallelism fsdp or fsdp2, not single",
        ),
        (
            "--parallelism fsdp2 --sharding_strategy NO_SHARD",
            "--sharding_strategy NO_SHARD needs --parallelism fsdp, not fsdp2",
        ),
        ("--tensor_parallel_size 2", "--tensor_parallel_size 2 needs --parallelism fsdp2, not auto"),
        ("--context_parallel_size 2", "--context_parallel_size 2 needs --parallelism fsdp2, not auto"),
        (
            "--weights_only true",
            "--weights_only true needs --checkpoint; give the checkpoint to load the weights from",
        ),
        (
            "--weights_only true --checkpoint c --resume true",
            "--weights_only true starts a new run and --resume true continues one; give only one of them",
        ),
        (
            "--checkpoint c --resume False",
            "--resume false contradicts --checkpoint c; leave --resume out to continue from the checkpoint; to start "
            "a new run, add --weights_only true to start from its weights, or leave --checkpoint out to start from "
            "--model_name",
        ),
        ("--branch a@5 --checkpoint c", "--branch a@5 and --checkpoint c contradict each other; give only one of them"),
        ("--project a/b", "--project 'a/b': a project name cannot contain /; remove it"),
        (
            f"--run_name {'n' * 129}",
            f"--run_name: expected a name of 1 to 128 characters on one line, got '{'n' * 129}'",
        ),
        ("--tags fine a\x07b", "--tags: expected a name of 1 to 64 characters on one line, got 'a\\x07b'"),
        ("--lr 1e-4 --min_lr 1e-3", "--min_lr 0.001 is above --lr 0.0001"),
        ("--lr_schedule exponential", "--lr_schedule exponential never reaches 0; give a --min_lr above 0"),
        ("--warmup_steps 6 --max_step 5", "--warmup_steps 6 is more than --max_step 5"),
        (
            "--lr_schedule wsd",
            "--lr_schedule wsd needs --decay_steps, or --decay_share such as 0.1",
        ),
        (
            "--lr_schedule wsd --decay_steps 4 --decay_share 0.1",
            "--decay_steps 4 and --decay_share 0.1 contradict each other; give only one of them",
        ),
        ("--decay_steps 4", "--decay_steps needs --lr_schedule wsd, not cosine"),
        ("--lr_schedule linear --decay_form linear", "--decay_form needs --lr_schedule wsd, not linear"),
        (
            "--lr_schedule wsd --decay_share 0",
            "--decay_share: expected a number above 0 and at most 1 or null, got '0'",
        ),
        ("--beta2 1", "--beta2 must be below 1"),
    ],
)
def test_impossible_training_arguments_are_refused(line: str, fault: str) -> None:
    assert faults(*line.split()) == [fault]


@pytest.mark.parametrize(
    "line",
    [
        "--devices 0,2,3",
        "--parallelism fsdp --cpu_offload true --sharding_strategy HYBRID_SHARD",
        "--weights_only true --checkpoint c",
        "--min_lr 2e-5",
        "--lr_schedule exponential --lr_decay false",
        "--lr_schedule exponential --min_lr 1e-6",
        "--lr_schedule wsd --decay_share 1",
        "--lr_schedule wsd --lr_decay false",
        "--warmup_steps 5 --max_step 5",
        "--log_model last --loggers csv wandb",
        "--log_model all",
    ],
)
def test_possible_training_arguments_are_accepted(line: str) -> None:
    train(*line.split())


@pytest.mark.parametrize(
    "program, line, fault",
    [
        (TokenizeArguments, "--validation_split 1", "--validation_split 1 leaves nothing to train on"),
        (
            TokenizeArguments,
            "--redact email,passport",
            "--redact: expected email, phone, iban, dni, ip or several separated",
        ),
        (TokenizeArguments, "--decontaminate []", "--decontaminate is empty; give the files with the tasks' items"),
        (
            TokenizeArguments,
            "--contaminated mark",
            "--contaminated needs --decontaminate; give the files with the tasks' items",
        ),
        (TokenizeArguments, "--max_length 1", "--max_length 1 leaves no token to predict"),
        (ConvertArguments, "--max_shard_size big", "--max_shard_size: expected a size such as 5GB or 500MB, got 'big'"),
        (ConvertArguments, "--push_to_hub name", "--push_to_hub: expected OWNER/NAME, got 'name'"),
        (ConvertArguments, "--push_to_hub a/b --create_pr true --checkpoint x y", "--revision and --create_pr need"),
        (ConvertArguments, "--push_to_hub a/b --create_pr true --revision x", "--create_pr true opens a pull request"),
        (ConvertArguments, "--push_to_hub a/b --revision a..b", "--revision: expected a branch such as step-500"),
        (ConvertArguments, "--commit_message x", "--commit_message needs --push_to_hub OWNER/NAME"),
        (TokenizeArguments, "--license mit", "--license needs --push_to_hub OWNER/NAME"),
        (TokenizeArguments, "--dataset []", "--dataset is empty"),
        (ConvertArguments, "--checkpoint []", "--checkpoint is empty"),
        (GenerateArguments, "--prompt=", "--prompt: expected text or null, got nothing"),
        (GenerateArguments, "--prompt null", "--prompt, --prompts FILE or --chat true is required"),
        (
            GenerateArguments,
            "--prompts a.txt --output b.jsonl --prompt p",
            "--prompt and --prompts contradict each other; give only one of them",
        ),
        (GenerateArguments, "--prompts a.txt --prompt null", "--prompts and --output need each other"),
        (GenerateArguments, "--system s", "--system only applies to a chat; add --chat true"),
        (GenerateArguments, "--device_memory 20", "--device_memory: expected a size such as 20GB, got '20'"),
        (GenerateArguments, "--temperature 1e-300", "--temperature 1e-300 is too low"),
        (GenerateArguments, "--top_p 0", "--top_p 0 leaves no token to choose from"),
    ],
)
def test_impossible_arguments_of_other_programs_are_refused(program: Any, line: str, fault: str) -> None:
    needed = {
        TokenizeArguments: ["--dataset=d", "--tokenizer_name=t", "--output_dir=o"],
        ConvertArguments: ["--checkpoint=c", "--output_dir=o"],
        GenerateArguments: ["--model_name=m", "--prompt=p"],
    }[program]
    given = [argument for argument in needed if argument.partition("=")[0] not in line]
    refused = faults(*line.split(), of=program, required=given)
    assert len(refused) == 1
    assert refused[0].startswith(fault)


def test_an_empty_stop_string_is_refused() -> None:
    (fault,) = GenerateArguments("m", prompt="p", stop=[".", " ", ""]).faults()
    assert fault == "--stop has an empty string, which would end every text immediately; remove the empty string"


def test_missing_configuration_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(InputError) as error:
        parse(TrainArguments, ["--config", str(tmp_path / "nope.yaml")])
    (line,) = error.value.faults
    assert line.startswith(f"--config {tmp_path / 'nope.yaml'}: ")
