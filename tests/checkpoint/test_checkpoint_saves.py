"""Checkpoints are complete or absent, and hold the state at their step: on real ranks and disks."""

import json
import os
import shutil
import stat
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import indent

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import HuggingFaceStorageReader
from transformers import AutoConfig, AutoModelForCausalLM

from fabric_train.checkpoint import newest_checkpoint
from fabric_train.checkpoint.files import find_damage, find_wrong_content
from fabric_train.model.weight_files import CheckpointTensors, open_weights
from tests.support.forked_runs import ForkedRun, ForkedRuns
from tests.support.programs import option_words
from tests.support.rounding import assert_same_checkpoint, num_sums_of_gradient, rounding_tolerance
from tests.support.two_nodes import on_nodes

pytestmark = pytest.mark.slow

ROW_LENGTH = 64
ROWS_PER_WINDOW = 12
LR = 1e-3
SETTINGS = {
    "total_batch_size": ROWS_PER_WINDOW,
    "micro_batch_size": 6,
    "max_step": 6,
    "lr": LR,
    "precision": "32-true",
    "eval_step_interval": 2,  # an evaluation leaves some weights gathered, and a save comes right after it
    "eval_iters": 2,
    "save_step_interval": 2,
    "num_workers": 0,
    "eval_at_start": "false",
    "loggers": "csv",
    "accelerator": "cpu",
}
SLOW_DISK = "import os, time; pwrite = os.pwrite; os.pwrite = lambda *write: (time.sleep(0.05), pwrite(*write))[1]"
"""Makes a save take as long as several steps: it has dozens of writes."""
ONE_STEP = {"max_step": 1, "eval_step_interval": 1}
IN_TWO_MACHINES = {"sharding_strategy": "HYBRID_SHARD", "num_nodes": 2, "devices": 2}
Start = Callable[..., ForkedRun]


@pytest.fixture(scope="module")
def start(forked_runs: ForkedRuns, tiny_model_dir: Path, tiny_tokens_dir: Path) -> Start:
    """Return ``start(run, num_ranks, before, **options)``: a run of the tiny model that saves at steps 2, 4 and 6."""

    def begin(run: Path, num_ranks: int = 1, before: str = "", **options: object) -> ForkedRun:
        arguments = {
            "train_data_dir": tiny_tokens_dir,
            "model_name": tiny_model_dir,
            **SETTINGS,
            "output_dir": run,
            **options,
        }
        return forked_runs.start(option_words(arguments), num_ranks, before=before)

    return begin


def checkpoints(run: Path) -> list[str]:
    """Return all names in a run's folder of checkpoints, also hidden ones."""
    return sorted(os.listdir(run / "checkpoints"))


def named(*steps: int) -> list[str]:
    return [f"step-{step:08d}" for step in steps]


def read(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Return all tensors of a checkpoint, weights and optimizer."""
    weights = open_weights(checkpoint)
    states = CheckpointTensors(sorted((checkpoint / "optimizer").glob("*.safe*")))
    return {name: weights.read(name) for name in weights} | {name: states.read(name) for name in states}


def assert_same(tensors: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert tensors.keys() == expected.keys()
    assert [name for name in tensors if not torch.equal(tensors[name], expected[name])] == []


@pytest.fixture(scope="module")
def of_one_device(tmp_path_factory: pytest.TempPathFactory, start: Start) -> Path:
    """A checkpoint of one device, which has nothing to join, and waits while it saves."""
    run = tmp_path_factory.mktemp("one") / "run"
    start(run, async_save="false", **ONE_STEP).finish()
    return run / "checkpoints" / "step-00000001"


@pytest.mark.parametrize(
    ("parallelism", "num_ranks", "kinds", "options"),
    [
        ("fsdp", 3, ("full", "sharded"), {"micro_batch_size": 4}),  # splits within rows
        ("fsdp", 2, ("full",), {"sharding_strategy": "SHARD_GRAD_OP"}),
        ("fsdp", 2, ("sharded",), {"sharding_strategy": "NO_SHARD"}),
        ("fsdp2", 3, ("full", "sharded"), {"micro_batch_size": 4}),
        pytest.param("fsdp2", 2, ("full",), {"sharding_strategy": "SHARD_GRAD_OP"}, marks=pytest.mark.launchers),
        pytest.param("fsdp2", 4, ("sharded",), {**IN_TWO_MACHINES, "micro_batch_size": 3}, marks=pytest.mark.launchers),
        ("fsdp2", 4, ("full",), {"tensor_parallel_size": 2}),
        ("fsdp2", 4, ("sharded",), {**IN_TWO_MACHINES, "tensor_parallel_size": 2}),
        ("ddp", 2, ("sharded",), {}),
    ],
)
def test_shards_of_all_ranks_are_what_one_device_saves(
    tmp_path: Path,
    of_one_device: Path,
    start: Start,
    parallelism: str,
    num_ranks: int,
    kinds: tuple[str, ...],
    options: dict[str, object],
) -> None:
    # given a checkpoint of each kind, which are written at the same time
    before = on_nodes(2) if "num_nodes" in options else ""
    settings = {"parallelism": parallelism, **ONE_STEP, **options}
    runs = [start(tmp_path / kind, num_ranks, before, state_dict_type=kind, **settings) for kind in kinds]
    for run in runs:
        run.finish()
    checkpoint_by_kind = {kind: tmp_path / kind / "checkpoints" / "step-00000001" for kind in kinds}

    # then all kinds have the same tensors, and those of one device to rounding
    tensors_by_kind = {kind: read(checkpoint) for kind, checkpoint in checkpoint_by_kind.items()}
    tensors = tensors_by_kind[kinds[0]]
    for kind in kinds[1:]:
        assert_same(tensors_by_kind[kind], tensors)
    expected = read(of_one_device)
    assert tensors.keys() == expected.keys()
    num_sums = num_sums_of_gradient(AutoConfig.from_pretrained(of_one_device), ROW_LENGTH, ROWS_PER_WINDOW * ROW_LENGTH)
    assert_same_checkpoint(tensors, expected, LR, 1, rounding_tolerance(num_sums))

    # and transformers or torch reads the weights from it
    for kind, checkpoint in checkpoint_by_kind.items():
        assert find_damage(checkpoint) is None
        assert find_wrong_content(checkpoint) is None
        stored = open_weights(checkpoint)
        weights = {name: stored.read(name) for name in stored}
        if kind == "full":
            by_transformers = AutoModelForCausalLM.from_pretrained(checkpoint).state_dict()
            for name, weight in weights.items():
                assert torch.equal(by_transformers[name], weight), name
        else:
            assert len(list((checkpoint / "model").glob("*.safetensors"))) == num_ranks
            by_torch = {name: torch.zeros_like(weight) for name, weight in weights.items()}
            dcp.load(by_torch, storage_reader=HuggingFaceStorageReader(str(checkpoint / "model")), no_dist=True)
            assert_same(by_torch, weights)


def test_tensors_of_several_types_lie_in_one_file(tmp_path: Path, start: Start) -> None:
    full_run = start(tmp_path / "full", 2, precision="bf16-true", state_dict_type="full", **ONE_STEP)
    sharded_run = start(tmp_path / "sharded", 2, precision="bf16-true", state_dict_type="sharded", **ONE_STEP)
    full_run.finish()
    sharded_run.finish()
    full = read(tmp_path / "full" / "checkpoints" / "step-00000001")
    sharded = read(tmp_path / "sharded" / "checkpoints" / "step-00000001")
    assert_same(full, sharded)
    assert {tensor.dtype for tensor in full.values()} == {torch.bfloat16, torch.float32}  # counts of steps in fp32


WAITING_DISK = """
import os, threading, time
pwrite, deadline = os.pwrite, time.monotonic() + 60
def wait_and_write(*write):
    in_background = threading.current_thread() is not threading.main_thread()
    while in_background and not os.path.exists("go on") and time.monotonic() < deadline:
        time.sleep(0.01)
    return pwrite(*write)
os.pwrite = wait_and_write
"""


@pytest.fixture(scope="module")
def waiting(tmp_path_factory: pytest.TempPathFactory, start: Start) -> Path:
    """A run whose loop waits until a checkpoint is saved."""
    run = tmp_path_factory.mktemp("waiting") / "run"
    start(run, 2, async_save="false", state_dict_type="sharded", max_step=4).finish()
    return run


@pytest.mark.parametrize(("kind", "slow_ranks"), [("full", (1,)), ("sharded", (0, 1))])
def test_background_save_holds_the_state_at_its_step(
    tmp_path: Path, waiting: Path, start: Start, kind: str, slow_ranks: tuple[int, ...]
) -> None:
    """And a checkpoint gets its name when the slowest rank has written, however long rank 0 is done with its part."""
    slow = f"if rank in {slow_ranks}:\n" + indent(WAITING_DISK.replace("go on", str(tmp_path / "go on")), "    ")
    run = tmp_path / "running"
    running = start(run, 2, slow, state_dict_type=kind, max_step=4)
    metrics_csv = run / "metrics.csv"
    # step 3 is done, and the state at step 2 is still being written
    assert running.wait_until(lambda: metrics_csv.exists() and len(metrics_csv.read_text().splitlines()) > 3)
    assert not (run / "checkpoints" / "step-00000002").exists()
    (tmp_path / "go on").touch()
    running.finish()
    assert checkpoints(run) == named(2, 4)
    for name in named(2, 4):
        checkpoint = run / "checkpoints" / name
        assert_same(read(checkpoint), read(waiting / "checkpoints" / name))
        assert find_damage(checkpoint) is None
        assert find_wrong_content(checkpoint) is None


def test_files_have_the_modes_of_the_umask(tmp_path: Path, start: Start) -> None:
    start(tmp_path / "run", 2, "import os; os.umask(0o027)", state_dict_type="sharded", **ONE_STEP).finish()
    checkpoint = tmp_path / "run" / "checkpoints" / "step-00000001"
    paths = [checkpoint, *checkpoint.rglob("*")]
    modes_of_folders = {oct(stat.S_IMODE(path.stat().st_mode)) for path in paths if path.is_dir()}
    modes_of_files = {oct(stat.S_IMODE(path.stat().st_mode)) for path in paths if not path.is_dir()}
    assert modes_of_folders == {"0o750"}
    assert modes_of_files == {"0o640"}


# --------------------------------------------------------------------------------------------------- disks and deaths


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 4.6 MB, where the user may mount one; a checkpoint of the tiny model takes 1.7."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4600k", "tmpfs", disk], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"mounting a small disk needs root: {mounted.stderr.decode().strip()}")
    yield disk
    subprocess.run(["umount", "--lazy", disk], check=True)


LYING_DISK = "from fabric_train.checkpoint import manager; manager.free_bytes = lambda folder: 10**9"
"""Says that there is room, as a disk with a quota does: then the writes themselves fail."""


SAVES_EACH_STEP = {"save_step_interval": 1, "eval_step_interval": 10, "max_step": 3}


@pytest.mark.parametrize(
    ("async_save", "before"),
    [("true", ""), ("true", LYING_DISK), ("false", LYING_DISK)],
    ids=["before a write", "in a write", "in a write that the loop waits for"],
)
def test_full_disk_ends_the_run_and_keeps_older_checkpoints(
    tmp_path: Path, small_disk: Path, start: Start, async_save: str, before: str
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "checkpoints").symlink_to(small_disk)
    ended = start(run, 2, before, async_save=async_save, **SAVES_EACH_STEP)
    assert ended.wait() == [1, 1]
    (line,) = ended.stderr(0).splitlines()
    assert "step-00000003 could not be saved: " in line
    assert ("No space left on device" if before else "too full") in line
    assert "the checkpoint needs 0.00166 GB, " in line
    assert "GB left; earlier checkpoints" in line
    assert checkpoints(run) == named(1, 2)
    assert find_wrong_content(run / "checkpoints" / "step-00000002") is None
    if not before:
        shutil.rmtree(run / "checkpoints" / "step-00000001")
        start(run, 2, resume="true", **SAVES_EACH_STEP).finish()
        assert checkpoints(run) == named(2, 3)


@pytest.mark.parametrize("async_save", ["true", "false"])
def test_failed_save_of_one_rank_ends_all_ranks_with_its_error(tmp_path: Path, start: Start, async_save: str) -> None:
    too_small = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (400_000, 400_000))"
    run = tmp_path / "run"
    ended = start(run, 2, f"if rank == 1: {too_small}", async_save=async_save, **ONE_STEP)
    assert ended.wait() == [1, 1]
    (line,) = ended.stderr(0).splitlines()
    assert "step-00000001 could not be saved: File too large: " in line
    assert checkpoints(run) == []


def test_killed_save_leaves_nothing_and_keeps_the_checkpoint_before(tmp_path: Path, start: Start) -> None:
    # given a checkpoint of step 1, and a kill while step 2 is saved
    run = tmp_path / "run"
    resumed = {**ONE_STEP, "max_step": 2, "keep_checkpoints": 1, "resume": "true"}
    start(run, 2, keep_checkpoints=1, **ONE_STEP).finish()
    killed = start(run, 2, SLOW_DISK, **resumed)
    assert killed.wait_until(lambda: len(checkpoints(run)) > 1)
    killed.kill()
    assert -9 in killed.wait()
    unfinished = [name for name in checkpoints(run) if name.startswith(".")]
    assert len(unfinished) == 1
    # then step 1 is the newest one, and whole
    kept = run / "checkpoints" / "step-00000001"
    assert newest_checkpoint(run) == kept
    assert find_wrong_content(kept) is None
    # and a resumed run replaces it and leaves nothing else
    start(run, 2, **resumed).finish()
    trainer_json = json.loads((run / "checkpoints" / "step-00000002" / "trainer.json").read_text())
    assert trainer_json["val_loss"] is not None
    assert checkpoints(run) == ["step-00000002"]  # the newest, and the best too
