"""Wrong input: exit code 2, one clear line for each fault on standard error, no traceback, and nothing written."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import datasets
import pytest
import torch
from conftest import ROOT

ENVIRONMENT = {
    name: value
    for name, value in os.environ.items()
    if not name.startswith("LT_") and name not in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
} | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}

# ``python -m fabric_train`` on many command lines: imports once, with a good one, then forks a process for each
RUN_EACH = """
import json, os, sys
from arguments import TrainArguments, parse
from fabric_train.__main__ import main, prepare
from fabric_train.errors import run_program

good, *lines = json.load(sys.stdin)
prepare(parse(TrainArguments, good))
codes = []
for number, line in enumerate(lines):
    process = os.fork()
    if process == 0:
        for stream in (1, 2):
            os.dup2(os.open(f"{sys.argv[1]}/{number}.{stream}", os.O_CREAT | os.O_WRONLY), stream)
        sys.argv = ["fabric_train", *line]
        run_program(main)
    codes.append(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]))
print(json.dumps(codes))
"""


@dataclass(frozen=True)
class Finished:
    """How a process ended."""

    code: int
    stdout: str
    stderr: str

    def faults(self) -> list[str]:
        """The faults it told, which must be all that it said, and its exit code 2."""
        assert self.code == 2, self.stderr
        assert self.stdout == ""
        lines = self.stderr.splitlines()
        assert all(line.startswith("error: ") for line in lines), self.stderr
        return [line.removeprefix("error: ") for line in lines]


def run_each(lines: list[list[str]], folder: Path) -> list[Finished]:
    """Run every command line in ``folder``."""
    said = folder.with_name(f"{folder.name}-said")
    said.mkdir()
    finished = subprocess.run(
        [sys.executable, "-c", RUN_EACH, said],
        input=json.dumps([command_line(), *lines]),
        cwd=folder,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    return [
        Finished(code, (said / f"{number}.1").read_text(), (said / f"{number}.2").read_text())
        for number, code in enumerate(json.loads(finished.stdout))
    ]


def snapshot(folder: Path) -> dict[str, tuple[int, int]]:
    """Every path below a folder, with its size and the time of its last change."""
    return {
        str(path.relative_to(folder)): (path.stat().st_size if path.is_file() else 0, path.stat().st_mtime_ns)
        for path in folder.rglob("*")
    }


def write_tokens(folder: Path, **rows: list[list[int]]) -> None:
    splits = {name: datasets.Dataset.from_dict({"input_ids": ids}) for name, ids in rows.items()}
    datasets.DatasetDict(splits).save_to_disk(str(folder))


def write_checkpoint(folder: Path) -> None:
    (folder / "optimizer").mkdir(parents=True)
    (folder / "trainer.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"")


@pytest.fixture(scope="module")
def there(tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path) -> Path:
    """A folder with a model, token datasets good and bad, and runs."""
    folder = tmp_path_factory.mktemp("errors") / "there"
    shutil.copytree(tiny_model_dir, folder / "model")
    write_tokens(folder / "tokens", train=[[1, 2, 3]] * 8, validation=[[1, 2, 3]])
    write_tokens(folder / "unsplit", train=[[1, 2, 3]] * 8)
    write_tokens(folder / "other-vocabulary", train=[[1, 5000, 3]], validation=[[1, 2, 1000]])
    write_tokens(folder / "negative", train=[[1, 2], [3, -100]])
    write_tokens(folder / "long", train=[[1] * 300], validation=[[1] * 256])
    (folder / "no-config").mkdir()
    for name, config in {
        "broken-config": "{",
        "vision": '{"model_type": "vit"}',
        "unknown": '{"model_type": "x"}',
    }.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(config)
    write_checkpoint(folder / "run" / "checkpoints" / "step-00000007")
    (folder / "run-without-checkpoint").mkdir()
    (folder / "run-without-checkpoint" / "metrics.csv").write_text("step\n1\n")
    write_checkpoint(folder / "incomplete" / "checkpoints" / "step-00000007")
    (folder / "incomplete" / "checkpoints" / "step-00000007" / "trainer.json").unlink()
    return folder


GOOD = {"train_data_dir": "tokens", "model_name": "model", "output_dir": "out", "accelerator": "cpu"}
WRONG: dict[str, tuple[dict[str, str], list[str]]] = {
    "no token dataset": (
        {"train_data_dir": "nowhere"},
        ["--train_data_dir nowhere: no such folder; make one with tokenize_dataset.py --output_dir nowhere"],
    ),
    "a folder that is no token dataset": (
        {"train_data_dir": "model"},
        [
            "--train_data_dir model: the folder holds no dataset_dict.json; "
            "make one with tokenize_dataset.py --output_dir model"
        ],
    ),
    "a model folder without config.json": (
        {"model_name": "no-config"},
        ["--model_name no-config: the folder has no config.json; give a Hugging Face model folder"],
    ),
    "a batch that does not divide": (
        {"micro_batch_size": "2", "total_batch_size": "3"},
        ["--total_batch_size 3 is no multiple of 2, --micro_batch_size 2 on 1 devices; nearest: 2 or 4"],
    ),
    "a batch too small for the devices": (
        {"micro_batch_size": "4", "total_batch_size": "3"},
        ["--total_batch_size 3 is no multiple of 4, --micro_batch_size 4 on 1 devices; nearest: 4"],
    ),
    "ids beyond the vocabulary": (
        {"train_data_dir": "other-vocabulary"},
        [
            "other-vocabulary: train holds token id 5000, model has 1000 tokens; "
            "tokenize with the model's own tokenizer",
            "other-vocabulary: validation holds token id 1000, model has 1000 tokens; "
            "tokenize with the model's own tokenizer",
        ],
    ),
    "padding that is no token": (
        {"train_data_dir": "negative"},
        ["negative: train holds token id -100; pad with a token of the model and mask it in labels"],
    ),
    "rows beyond the positions": (
        {"train_data_dir": "long", "total_batch_size": "3", "micro_batch_size": "2"},
        [
            "long: rows of train have 300 tokens, model takes 256; tokenize with --max_length 256 or less",
            "--total_batch_size 3 is no multiple of 2, --micro_batch_size 2 on 1 devices; nearest: 2 or 4",
        ],
    ),
    "a run in output_dir": (
        {"output_dir": "run"},
        [
            "--output_dir run holds a run up to step-00000007: --resume true goes on from there; "
            "else give another --output_dir"
        ],
    ),
    "a run without checkpoint in output_dir": (
        {"output_dir": "run-without-checkpoint"},
        [
            "--output_dir run-without-checkpoint holds a run that has saved nothing yet: "
            "--resume true begins it again; else give another --output_dir"
        ],
    ),
    "no checkpoint": (
        {"checkpoint": "nowhere"},
        ["nowhere: no such folder; checkpoints are RUN/checkpoints/step-..."],
    ),
    "an incomplete checkpoint": (
        {"checkpoint": "incomplete"},
        [
            "incomplete: neither a complete checkpoint nor a run folder with one; "
            "checkpoints are RUN/checkpoints/step-..."
        ],
    ),
    "evaluation without validation split": (
        {"eval_only": "true", "train_data_dir": "unsplit"},
        ["--eval_only true: unsplit has no validation split; tokenize with --validation_split above 0"],
    ),
    "a layer that the model does not have": (
        {"auto_wrap_policy": "LamaDecoderLayer"},
        ["--auto_wrap_policy LamaDecoderLayer: model has no such layer; its decoder layers: LlamaDecoderLayer"],
    ),
    "one device and several": (
        {"parallelism": "single", "devices": "2"},
        ["--parallelism single takes one device, not 2: use fsdp, fsdp2 or ddp"],
    ),
    "fp16 on CPU": ({"precision": "16-mixed"}, ["--precision 16-mixed does not work on CPU: use bf16-mixed"]),
    "flash-attention on CPU": (
        {"attention": "flash_attention_2"},
        ["--attention flash_attention_2 needs a GPU; use --attention sdpa on CPU"],
    ),
    "training with flex attention on CPU": (
        {"attention": "flex_attention"},
        [
            "--attention flex_attention cannot train on CPU: torch has no backward pass for it there; "
            "use --attention sdpa"
        ],
    ),
    "offloading from CPU": (
        {"cpu_offload": "true"},
        ["--cpu_offload true: there is nothing to offload from on CPU; leave it out"],
    ),
    "a model that is not a language model": (
        {"model_name": "vision"},
        ["--model_name vision: a vit is not a causal language model: give one that is"],
    ),
}


def command_line(**changed: str) -> list[str]:
    return [word for name, value in (GOOD | changed).items() for word in (f"--{name}", value)]


@pytest.mark.slow
def test_what_cannot_be_trained_is_told_in_a_line_and_nothing_is_written(there: Path) -> None:
    before = snapshot(there)
    refused_by_transformers = {
        "broken-config": "--model_name broken-config: It looks like the config file",
        "unknown": "--model_name unknown: The checkpoint you are trying to load has model type `x`",
        "nobody/nothing": "--model_name nobody/nothing: no such folder, and the hub does not give it: ",
    }
    lines = [command_line(**changed) for changed, _ in WRONG.values()]
    lines += [command_line(model_name=name) for name in refused_by_transformers]
    ends = run_each(lines, there)
    for case, finished in zip(WRONG, ends, strict=False):
        assert finished.faults() == WRONG[case][1], case
    for beginning, finished in zip(refused_by_transformers.values(), ends[len(WRONG) :], strict=True):
        (fault,) = finished.faults()
        assert fault.startswith(beginning)
    assert snapshot(there) == before


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.slow
def test_the_module_refuses_a_gpu_that_is_not_there(there: Path) -> None:
    before = snapshot(there)
    finished = subprocess.run(
        [sys.executable, "-m", "fabric_train", *command_line(accelerator="cuda", devices="8")],
        cwd=there,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert Finished(finished.returncode, finished.stdout, finished.stderr).faults() == [
        "--accelerator cuda: torch finds no GPU here; use --accelerator cpu, or check the driver"
    ]
    assert snapshot(there) == before


@pytest.mark.slow
def test_under_fabric_run_our_line_comes_first_and_once(there: Path, free_port: Callable[[], int]) -> None:
    before = snapshot(there)
    absolute = {name: str(there / GOOD[name]) for name in ("model_name", "output_dir")}
    finished = subprocess.run(
        [
            *(Path(sys.executable).with_name("fabric"), "run", "fabric_train", "--devices", "2"),
            *(f"--main-port={free_port()}", *command_line(**absolute, train_data_dir="nowhere")),
        ],
        cwd=ROOT,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    ours = "error: --train_data_dir nowhere: no such folder; make one with tokenize_dataset.py --output_dir nowhere"
    assert finished.returncode != 0
    said = finished.stderr.splitlines()
    assert said[0] == ours
    assert finished.stderr.count("--train_data_dir nowhere: no such folder") == 1
    assert "InputError" not in finished.stderr  # the traceback is the launcher's own
    assert finished.stdout == ""
    assert snapshot(there) == before
