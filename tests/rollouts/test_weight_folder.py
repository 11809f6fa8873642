"""The folder with the weights of the model in training has all of them, merged once, whichever rank holds what."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning import Fabric
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from fabric_train.cli.errors import RunError
from fabric_train.model.hf_model import read_shape
from fabric_train.rollouts import weight_folder
from fabric_train.rollouts.weight_folder import WeightFolder
from tests.support.exports import convert_run
from tests.support.forked_runs import ForkedRuns
from tests.support.short_runs import argv

SAVE_FOLDER = """
import shutil
import torch
from fabric_train.checkpoint.manager import CheckpointManager
from fabric_train.model.hf_model import read_shape
from fabric_train.rollouts.weight_folder import WeightFolder

def save(self, *arguments, original=CheckpointManager.save, **options):
    folder = WeightFolder(self._fabric, read_shape({model!r}), torch.float32, None)
    written = folder.write(self._model, 2)
    if rank == 0:
        shutil.copytree(written, {target!r})
    self._fabric.barrier()
    folder.remove()
    return original(self, *arguments, **options)

CheckpointManager.save = save
"""


@pytest.fixture
def tiny_model(tiny_model_dir: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(tiny_model_dir)


@pytest.fixture
def fabric() -> Fabric:
    return Fabric(accelerator="cpu", devices=1)


@pytest.mark.parametrize(
    ("parallelism", "num_ranks", "adapter"),
    [
        ("fsdp", 2, {}),
        ("fsdp", 2, {"lora_rank": 4, "adapter": "dora"}),
        ("fsdp2", 2, {"lora_rank": 4}),
    ],
)
def test_the_folder_has_what_the_export_of_the_same_step_has(
    parallelism: str,
    num_ranks: int,
    adapter: dict[str, object],
    tiny_model_dir: Path,
    tiny_tokens_dir: Path,
    tmp_path: Path,
    forked_runs: ForkedRuns,
) -> None:
    """The export merges an adapter that was read from a checkpoint, on one rank."""
    source = SAVE_FOLDER.format(model=str(tiny_model_dir), target=str(tmp_path / "folder"))
    options: dict[str, object] = {"max_step": 2, "lr": 0.05, **adapter}
    words = argv(tiny_model_dir, tiny_tokens_dir, tmp_path / "run", parallelism=parallelism, **options)
    forked_runs.start(words, num_ranks, before=source).finish()
    merge = ["--merge", "true"] if adapter else []
    export = convert_run(
        forked_runs, tmp_path / "export", "--checkpoint", tmp_path / "run", "--dtype", "float32", *merge
    )

    expected = load_file(export / "model.safetensors")
    written = load_file(tmp_path / "folder" / "model.safetensors")
    assert torch.equal(written.pop("lm_head.weight"), written["model.embed_tokens.weight"])
    assert written.keys() == expected.keys()
    for name, tensor in expected.items():
        # both merge in fp32, but with other numbers of rows: products of 4 terms may be summed in another order
        torch.testing.assert_close(written[name], tensor, rtol=2e-6 if adapter else 0, atol=2e-6 if adapter else 0)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "folder")
    assert not loaded.config.tie_word_embeddings


def test_the_folder_is_in_the_dtype_that_the_engine_computes_in(
    fabric: Fabric, tiny_model: Any, tiny_model_dir: Path
) -> None:
    folder = WeightFolder(fabric, read_shape(str(tiny_model_dir)), torch.bfloat16, None)
    written = load_file(folder.write(fabric.setup_module(tiny_model), 0) / "model.safetensors")
    folder.remove()
    for name, parameter in tiny_model.named_parameters():
        assert torch.equal(written[name], parameter.bfloat16()), name


def test_a_tensor_that_the_configuration_does_not_have_is_refused(
    fabric: Fabric, tiny_model: Any, tiny_model_dir: Path
) -> None:
    folder = WeightFolder(fabric, read_shape(str(tiny_model_dir)), torch.float32, None)
    del tiny_model.model.layers[1]
    message = r"the model in training has no model\.layers\.1\.input_layernorm\.weight, .*; leave out --sampler"
    with pytest.raises(RunError, match=message):
        folder.write(fabric.setup_module(tiny_model), 0)


def test_a_folder_that_cannot_be_completed_is_an_error_of_the_run(
    fabric: Fabric, tiny_model: Any, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process puts a file in its place."""

    def take_place(folder: Path, **arguments: Any) -> str | None:
        fault = original(folder, **arguments)
        (folder.parent / "step-00000000").touch()
        return fault

    original = weight_folder.find_wrong_content
    monkeypatch.setattr(weight_folder, "find_wrong_content", take_place)
    folder = WeightFolder(fabric, read_shape(str(tiny_model_dir)), torch.float32, None)
    with pytest.raises(RunError, match=r"could not be written to .*step-00000000"):
        folder.write(fabric.setup_module(tiny_model), 0)


def test_bytes_that_changed_after_they_were_written_are_found(
    fabric: Fabric, tiny_model: Any, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def damage(folder: Path) -> None:
        original(folder)
        with (folder / "model.safetensors").open("r+b") as file:
            file.seek(-4, 2)
            file.write(b"\1\2\3\4")

    original = weight_folder.join_rank_hashes
    monkeypatch.setattr(weight_folder, "join_rank_hashes", damage)
    folder = WeightFolder(fabric, read_shape(str(tiny_model_dir)), torch.float32, None)
    with pytest.raises(RunError, match=r"of model\.safetensors have changed since they were written"):
        folder.write(fabric.setup_module(tiny_model), 0)


def test_weights_that_the_memory_has_no_room_for_are_temporary_files(
    fabric: Fabric, tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit of a folder in memory says nothing about memory that processes use."""
    (tmp_path / "memory").mkdir()
    monkeypatch.setattr(weight_folder, "_MEMORY", tmp_path / "memory")
    monkeypatch.setattr(weight_folder, "available_memory", lambda: 1000)
    monkeypatch.setattr(weight_folder, "tempfile", SimpleNamespace(gettempdir=lambda: str(tmp_path)))
    folder = WeightFolder(fabric, read_shape(str(tiny_model_dir)), torch.float32, None)
    assert folder.root.parent == tmp_path


def test_without_memory_the_folder_is_among_the_temporary_files(
    fabric: Fabric, tiny_model: Any, tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder of a process that has ended is removed there."""
    monkeypatch.setattr(weight_folder, "_MEMORY", tmp_path / "missing")
    monkeypatch.setattr(weight_folder, "tempfile", SimpleNamespace(gettempdir=lambda: str(tmp_path)))
    leftover = tmp_path / f"fabric-train-weights-{weight_folder.socket.gethostname()}-{2**22 + 1}"
    leftover.mkdir()
    folder = WeightFolder(fabric, read_shape(str(tiny_model_dir)), torch.float32, None)
    assert not leftover.exists()
    written = folder.write(fabric.setup_module(tiny_model), 3)
    assert written.is_relative_to(tmp_path)
    assert written.parent.stat().st_mode & 0o777 == 0o700
    folder.remove()
    assert not list(tmp_path.iterdir())
