"""Training on PyTorch/XLA, on XLA's CPU device: the losses and checkpoints of the ordinary run on a CPU.

``make install-xla`` makes the environment, ``.cache/xla``. Programs that are not said to run there run in this one.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file

from fabric_train.distributed.xla import NOTE
from fabric_train.sample_data import real_data
from tests.support.programs import ROOT, RunProgram
from tests.support.short_runs import argv, metrics, saved_steps

pytestmark = [pytest.mark.slow, pytest.mark.xla]

PYTHON = real_data.CACHE / "xla" / "bin" / "python"
TPU = {"accelerator": "tpu"}
TOLERANCE = 1e-5


def start(python: Path, folder: Path, name: str, *words: str, device: str | None = "CPU") -> "subprocess.Popen[str]":
    """Start ``python -m fabric_train``; its output goes to ``folder/name.log``."""
    if python == PYTHON and not PYTHON.exists():
        pytest.fail(f"there is no {PYTHON.relative_to(ROOT)}: make install-xla", pytrace=False)
    others = {key: value for key, value in os.environ.items() if key != "PJRT_DEVICE"}
    env = {**others, "PYTHONPATH": str(ROOT), **({"PJRT_DEVICE": device} if device else {})}
    command = [str(python), "-m", "fabric_train", *words]
    with (folder / f"{name}.log").open("w") as output:
        return subprocess.Popen(command, cwd=folder, env=env, stdout=output, stderr=subprocess.STDOUT, text=True)


def train(python: Path, folder: Path, name: str, *words: str) -> str:
    """Run to the end; return the output."""
    ended = start(python, folder, name, *words).wait(900)
    printed = (folder / f"{name}.log").read_text()
    assert ended == 0, printed
    return printed


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path, tiny_tokens_dir: Path) -> Path:
    """Two runs of eight steps: ``plain`` on a CPU, ``xla`` on XLA."""
    folder = tmp_path_factory.mktemp("xla")
    train(Path(sys.executable), folder, "plain", *argv(tiny_model_dir, tiny_tokens_dir, folder / "plain"))
    train(PYTHON, folder, "xla", *argv(tiny_model_dir, tiny_tokens_dir, folder / "xla", **TPU))
    return folder


def assert_close(run: Path, expected: Path) -> None:
    """Check that all figures in two runs' metrics.csv differ by less than the tolerance."""
    rows = metrics(run)
    others = metrics(expected)
    assert len(rows) == len(others) == 8
    for row, other in zip(rows, others, strict=True):
        figures, wanted = ([float(cell or 0) for cell in cells] for cells in (row, other))
        assert figures == pytest.approx(wanted, rel=TOLERANCE, abs=TOLERANCE)


def test_losses_and_gradient_norms_are_the_plain_runs(folder: Path) -> None:
    """Validation too; rows hold several documents, so the isolation of documents is compared as well."""
    assert_close(folder / "xla", folder / "plain")


def test_run_says_what_is_different_on_xla(folder: Path) -> None:
    printed = (folder / "xla.log").read_text()
    assert "1 × xla" in printed
    assert f"note: {NOTE}" in printed


@pytest.mark.parametrize("file", ["model.safetensors", "optimizer/optimizer.safetensors"])
def test_checkpoint_has_the_tensors_of_the_plain_runs(folder: Path, file: str) -> None:
    plain, xla = (load_file(folder / run / "checkpoints" / "step-00000008" / file) for run in ("plain", "xla"))
    assert plain.keys() == xla.keys()
    for name, tensor in plain.items():
        assert tensor.shape == xla[name].shape, name
        assert tensor.dtype == xla[name].dtype, name
        assert (tensor - xla[name]).abs().max() < TOLERANCE, name


def test_stopped_run_resumes_with_the_same_losses(folder: Path, tiny_model_dir: Path, tiny_tokens_dir: Path) -> None:
    run = folder / "stopped"
    words = argv(tiny_model_dir, tiny_tokens_dir, run, **TPU)
    process = start(PYTHON, folder, "stopped", *words)
    deadline = time.monotonic() + 400
    while not metrics(run) and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGUSR1)
    assert process.wait(300) == 75, (folder / "stopped.log").read_text()
    assert 0 < saved_steps(run)[-1] < 8
    train(PYTHON, folder, "resumed", *words, "--resume", "true")
    assert metrics(run) == metrics(folder / "xla")


def test_ordinary_ranks_continue_a_run_of_xla(folder: Path, tiny_model_dir: Path, tiny_tokens_dir: Path) -> None:
    run = folder / "continued"
    shutil.copytree(folder / "xla", run)
    for step in (6, 8):
        shutil.rmtree(run / "checkpoints" / f"step-0000000{step}")
    words = argv(tiny_model_dir, tiny_tokens_dir, run, devices=2, resume="true")
    printed = train(Path(sys.executable), folder, "continued", *words)
    assert "2 × fsdp" in printed
    assert_close(run, folder / "plain")


def test_export_is_verified(folder: Path, run_program: RunProgram) -> None:
    export = folder / "export"
    ended = run_program("convert_to_hf.py", "--checkpoint", folder / "xla", "--output_dir", export)
    assert ended.returncode == 0, ended.stderr
    assert (export / "model.safetensors").exists()


def test_default_precision_computes_in_bf16(folder: Path, tiny_model_dir: Path, tiny_tokens_dir: Path) -> None:
    """Its losses differ from those in fp32, by what bf16 rounds; sharded checkpoints are written as well."""
    options = {"precision": None, "state_dict_type": "sharded", "max_step": 2, "save_step_interval": 2}
    words = argv(tiny_model_dir, tiny_tokens_dir, folder / "bf16", **TPU, **options)
    assert "1 × xla, bf16-mixed" in train(PYTHON, folder, "bf16", *words)
    loss, of_fp32 = (float(metrics(folder / run)[0][2]) for run in ("bf16", "plain"))
    assert 1e-6 < abs(loss - of_fp32) < 0.01
    checkpoint = folder / "bf16" / "checkpoints" / "step-00000002"
    (file,) = (checkpoint / "model").glob("*.safetensors")
    assert {str(tensor.dtype) for tensor in load_file(file).values()} == {"torch.float32"}


@pytest.mark.parametrize(
    ("options", "device", "fault"),
    [
        ({"precision": "bf16-true"}, "CPU", "--precision bf16-true: torch-xla's FSDP keeps weights in fp32; use "),
        ({"devices": 2}, "CPU", "--accelerator tpu only works with one device, not 2; give --devices 1 --num_nodes 1"),
        ({"compile": "true"}, "CPU", "--compile does not work with --accelerator tpu; leave out --compile"),
        ({}, None, "--accelerator tpu: no TPU found; set PJRT_DEVICE=CPU to try it on XLA's CPU device"),
    ],
)
def test_what_xla_does_not_do_is_refused_in_one_line(
    tmp_path: Path,
    tiny_model_dir: Path,
    tiny_tokens_dir: Path,
    options: dict[str, object],
    device: str | None,
    fault: str,
) -> None:
    words = argv(tiny_model_dir, tiny_tokens_dir, tmp_path / "run", **{**TPU, **options})
    assert start(PYTHON, tmp_path, "refused", *words, device=device).wait(300) == 2
    printed = (tmp_path / "refused.log").read_text().splitlines()
    assert [line for line in printed if line.startswith("error: ")] == [printed[-1]]
    assert printed[-1].startswith(f"error: {fault}")
    assert not (tmp_path / "run").exists()
