"""Save the checkpoints of a run."""

import contextlib
import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from lightning import Fabric
from safetensors.torch import save_file
from torch.distributed.checkpoint import HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.tensor import DTensor

from fabric_train.checkpoint.finding import prune
from fabric_train.checkpoint.state import FORMAT, Description, TrainerState
from fabric_train.complete_folder import complete_folder


class Checkpoints:
    """Writes the checkpoints of one run. All ranks call it together."""

    def __init__(
        self,
        folder: Path,
        fabric: Fabric,
        model: Any,
        optimizer: Any,
        tied: set[str],
        description: Description,
        keep: int | None,
    ) -> None:
        """``tied`` names the weights that are another one under a second name, which are not written twice."""
        self.folder, self._tied, self._keep = folder, tied, keep
        self._fabric, self._model, self._optimizer = fabric, model, optimizer
        self._description = description

    def path(self, state: TrainerState) -> Path:
        """Return where the checkpoint of this state lies, or will."""
        return self.folder / f"step-{state.step:08d}"

    def save(self, state: TrainerState, cursors: np.ndarray | None = None) -> Path:
        """Write a checkpoint, then prune: the newest stay, and the best by validation loss.

        ``cursors`` are those of the last window, see ``stream.StreamBatch``.
        """
        target = self.path(state)
        with contextlib.ExitStack() as stack:
            temporary = stack.enter_context(complete_folder(target)) if self._fabric.is_global_zero else None
            folder = Path(self._fabric.broadcast(str(temporary)))
            self._write_tensors(folder)
            if cursors is not None:
                self._write_cursors(folder, cursors)
            if self._fabric.is_global_zero:
                self._write_description(folder, state)
            self._fabric.barrier()  # every rank's shard is written before the folder gets its name
            if self._fabric.is_global_zero:
                for file in folder.rglob("*.safetensors"):  # safetensors lets nobody but the owner read what it writes
                    shutil.copymode(folder / "trainer.json", file)
        if self._fabric.is_global_zero and self._keep is not None:
            prune(self.folder, self._keep)
        self._fabric.barrier()
        return target

    def _write_tensors(self, folder: Path) -> None:
        weights = get_model_state_dict(self._model._forward_module)
        weights = {name: tensor for name, tensor in weights.items() if name not in self._tied}
        states = get_optimizer_state_dict(self._model._forward_module, self._optimizer.optimizer)["state"]
        moments = {f"{name}.{key}": value for name, state in states.items() for key, value in state.items()}  # type: ignore[union-attr]
        if self._description.state_dict_type == "sharded":
            for name, tensors in (("model", weights), ("optimizer", moments)):
                writer = HuggingFaceStorageWriter(str(folder / name), save_distributed=True)
                dcp.save(tensors, storage_writer=writer, no_dist=self._fabric.world_size == 1)
            return
        for path, tensors in ((folder / "model", weights), (folder / "optimizer" / "optimizer", moments)):
            whole = _gather(tensors, keep=self._fabric.is_global_zero)
            if self._fabric.is_global_zero:
                path.parent.mkdir(exist_ok=True)
                save_file(whole, path.with_suffix(".safetensors"), metadata={"format": "pt"})

    def _write_cursors(self, folder: Path, cursors: np.ndarray) -> None:
        gathered: Any = self._fabric.all_gather(torch.from_numpy(cursors).to(self._fabric.device))
        if self._fabric.is_global_zero:
            in_order = sorted(gathered.reshape(-1, cursors.shape[1]).tolist())
            content = {"cursors": [cursor for _, *cursor in in_order]}
            (folder / "stream.json").write_text(json.dumps(content) + "\n", encoding="utf-8")

    def _write_description(self, folder: Path, state: TrainerState) -> None:
        model = self._model.module
        model.config.save_pretrained(folder)
        if model.generation_config is not None:
            model.generation_config.save_pretrained(folder)
        for path in self._description.attachments:
            if path.is_dir():
                shutil.copytree(path, folder / path.name)
            elif path.is_file():
                shutil.copy2(path, folder / path.name)
        description = asdict(self._description)
        del description["attachments"]
        scaler = self._fabric.strategy.precision.state_dict()
        content = {"format": FORMAT, **asdict(state), **description, "grad_scaler": scaler}
        (folder / "trainer.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _gather(tensors: dict[str, Any], keep: bool) -> dict[str, torch.Tensor]:
    """Join sharded tensors, one at a time, on all ranks; those that ``keep`` hold them on the CPU."""
    whole = {}
    for name, tensor in tensors.items():
        if isinstance(tensor, DTensor):
            joined: Any = tensor.to(tensor.device_mesh.device_type)  # offloaded shards travel by way of the device
            tensor = joined.full_tensor()
        if keep:
            whole[name] = tensor.detach().cpu().contiguous()
    return whole
