"""Write the weights of the model in training into a folder that an engine for inference loads, complete or absent.

All ranks write into one safetensors file. It is in memory (/dev/shm), or in the folder for temporary files if the
memory has no room, or in a folder that the machines share if there are several. Nothing is gathered; adapters are
merged. The folder has the form that ``save_pretrained`` writes, except that a head that is tied to the embedding is
written a second time. vLLM on a CPU computes with a packed copy of the head, and on a reload (0.32) it packs only those
tensors again that are in the file.
"""

import copy
import os
import re
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import torch
from lightning import Fabric
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from fabric_train.checkpoint.files import find_wrong_content, hash_file
from fabric_train.checkpoint.merged_weights import MergedWeights
from fabric_train.checkpoint.rank_writer import Write, join_rank_hashes, write_rank_hashes, write_tensors
from fabric_train.checkpoint.tensors import safetensors_header, select_owned
from fabric_train.cli.errors import InputError, RunError
from fabric_train.distributed.memory import available_memory
from fabric_train.distributed.ranks import first_text, run_together
from fabric_train.files.atomic_folder import this_process
from fabric_train.files.requirements import free_bytes
from fabric_train.model.hf_model import ModelShape
from fabric_train.model.load_weights import build_on_meta, tied_weight_names

_MEMORY = Path("/dev/shm")
_PREFIX = "fabric-train-weights-"
_SHARED_NAME = ".weights"
_WEIGHTS = "model.safetensors"
_CONFIG = "config.json"


class WeightFolder:
    """Writes one version of the weights after the other. All ranks call its methods together."""

    def __init__(self, fabric: Fabric, shape: ModelShape, dtype: torch.dtype, shared_dir: Path | None) -> None:
        """Find out which tensors the folder must have, and remove folders that runs have left.

        ``vllm_supervisor`` removes that of a killed run, unless it was killed as well.

        Args:
            fabric: The run's Fabric.
            shape: The model in training.
            dtype: The dtype of the weights in the folder.
            shared_dir: A folder that all machines of the run share; None if it has one machine.

        Raises:
            InputError: the weights cannot be written in the form that other software reads, or have no room.
        """
        self._fabric = fabric
        self._dtype = dtype
        meta_model = build_on_meta(shape, dtype)
        self._tied_names = tied_weight_names(meta_model)
        self._shapes = _published_shapes(meta_model, shape.source)
        self._config = copy.deepcopy(shape.config)
        self._config.tie_word_embeddings = False
        self.is_shared = shared_dir is not None
        """Whether the machines of the run share the folder; otherwise, it belongs to this run's process."""
        self.root: Path
        """Has one version of the weights at a time, and is there only while they are handed over."""
        if shared_dir is not None:
            self.root = shared_dir.absolute() / _SHARED_NAME  # absolute, since the engine runs in another folder
        else:
            self.root = self._choose_root()

    def path(self, step: int) -> Path:
        """Return the folder of the weights of a step, which is there only while they are handed over."""
        return self.root / f"step-{step:08d}"

    def write(self, model: Any, step: int) -> Path:
        """Write the weights of the model, and check what was written.

        Args:
            model: The model that ``setup_model`` returned.
            step: The step that the weights are from.

        Returns:
            The folder, which is complete on all ranks.

        Raises:
            RunError: some rank could not write its part, or a tensor is missing; raised on all ranks.
        """
        weights = MergedWeights(model, self._dtype, self._fabric.device)
        difference = first_text(self._fabric, self._find_difference(weights))
        if difference is not None:
            raise RunError(f"--sampler vllm: {difference}; leave out --sampler to sample in the processes that train")
        target = self.path(step)
        temporary = self.root / f".step-{step:08d}"
        is_first = self._fabric.is_global_zero
        try:
            run_together(self._fabric, lambda: self._create(temporary), runs=is_first)
            # each rank writes its part of the tensors
            run_together(self._fabric, lambda: self._write_part(temporary, weights))
            # rank 0 joins the hashes, which finds bytes that no rank has written; then each rank reads a share
            run_together(self._fabric, lambda: join_rank_hashes(temporary), runs=is_first)
            run_together(self._fabric, lambda: self._check_share(temporary))
            run_together(self._fabric, lambda: temporary.rename(target), runs=is_first)
        except RunError as error:
            self.remove()
            raise RunError(f"the weights for the sampler could not be written to {self.root}: {error}") from error
        return target

    def remove(self) -> None:
        """Remove everything that was written. One rank may call this alone."""
        if self._fabric.is_global_zero:
            shutil.rmtree(self.root, ignore_errors=True)

    def _choose_root(self) -> Path:
        """Return a folder in memory or among the temporary files that has room for the weights; the same on all ranks.

        Raises:
            InputError: neither has room.
        """
        parent = None
        if self._fabric.is_global_zero:
            _remove_leftovers(_MEMORY)
            _remove_leftovers(Path(tempfile.gettempdir()))
            num_elements = sum(size.numel() for size in self._shapes.values())
            parent = _choose_parent(num_elements * self._dtype.itemsize)
        # all ranks write into a folder with the name of rank 0's process in it
        parent, process_name = self._fabric.broadcast((parent, this_process()))
        if parent is None:
            raise InputError(
                f"--sampler vllm writes the weights to {_MEMORY} or {tempfile.gettempdir()}, and neither has room for "
                "them; free some space, or set TMPDIR to a folder on another disk"
            )
        assert isinstance(parent, Path)
        return parent / f"{_PREFIX}{process_name}"

    def _create(self, temporary: Path) -> None:
        shutil.rmtree(self.root, ignore_errors=True)
        self.root.mkdir(mode=0o700, parents=True)
        temporary.mkdir()

    def _write_part(self, folder: Path, weights: MergedWeights) -> None:
        """Write this rank's part of the tensors, and on rank 0 also the configuration; an OSError if that fails."""
        # a tied weight a second time, under its second name
        tensors = list(weights.tensors)
        tensor_by_name = {tensor.name: tensor for tensor in tensors}
        for second_name, first_name in self._tied_names.items():
            tensors.append(replace(tensor_by_name[first_name], name=second_name))
        entries = [(tensor.name, weights.dtype(tensor), tensor.shape) for tensor in tensors]
        header, offsets = safetensors_header(entries, {"format": "pt"})

        def convert() -> Iterator[Write]:
            if self._fabric.is_global_zero:
                yield Write(_WEIGHTS, 0, torch.frombuffer(bytearray(header), dtype=torch.uint8))
            for tensor in sorted(select_owned(tensors), key=lambda tensor: offsets[tensor.name]):
                offset = offsets[tensor.name] + tensor.begin * weights.dtype(tensor).itemsize
                yield Write(_WEIGHTS, offset, weights.read(tensor))

        hashes = {_WEIGHTS: write_tensors(folder / _WEIGHTS, convert(), lambda: False)}
        if self._fabric.is_global_zero:
            self._config.save_pretrained(folder)
            hashes[_CONFIG] = hash_file(folder / _CONFIG)
        write_rank_hashes(folder, self._fabric.global_rank, hashes)

    def _check_share(self, folder: Path) -> None:
        """Raise a RunError if this rank's share of the files is not what was written."""
        fault = find_wrong_content(folder, rank=self._fabric.global_rank, num_ranks=self._fabric.world_size)
        if fault is not None:
            raise RunError(fault)

    def _find_difference(self, weights: MergedWeights) -> str | None:
        """Return how the tensors of the model differ from those that its configuration describes, or None."""
        trained_shapes = {tensor.name: tensor.shape for tensor in weights.tensors}
        expected_shapes = {name: shape for name, shape in self._shapes.items() if name not in self._tied_names}
        for name in sorted(trained_shapes.keys() | expected_shapes.keys()):
            trained_shape = trained_shapes.get(name)
            expected_shape = expected_shapes.get(name)
            if trained_shape is None:
                return f"the model in training has no {name}, which its configuration describes"
            if expected_shape is None:
                return f"the model in training has {name}, which its configuration does not describe"
            if trained_shape != expected_shape:
                return (
                    f"{name} has the shape {list(trained_shape)} in the model in training, and {list(expected_shape)} "
                    "by its configuration"
                )
        return None


def _published_shapes(meta_model: PreTrainedModel, source: str) -> dict[str, torch.Size]:
    """Return the shapes of the tensors of a model on the meta device by their names in files, also of tied weights.

    Raises:
        InputError: transformers has other names in memory than in files; ``source`` names the model.
    """
    shapes = {}
    for name, tensor in meta_model.state_dict().items():
        meta_tensor = torch.empty(tensor.shape, device="meta")
        if list(revert_weight_conversion(meta_model, {name: meta_tensor})) != [name]:
            raise InputError(
                f"--sampler vllm: transformers has {name} of {source} under another name in files, which is not "
                "supported; leave out --sampler to sample in the processes that train"
            )
        shapes[name] = tensor.shape
    return shapes


def _choose_parent(num_bytes: int) -> Path | None:
    """Return the folder in memory, or the one for temporary files; None if neither has room for the weights."""
    for folder in (_MEMORY, Path(tempfile.gettempdir())):
        if not folder.is_dir() or not os.access(folder, os.W_OK):
            continue
        num_free = free_bytes(folder)
        if folder == _MEMORY:  # its limit is often half of the memory, whether or not this half is in use
            num_free = min(num_free, available_memory())
        if num_free > num_bytes:
            return folder
    return None


def _remove_leftovers(parent: Path) -> None:
    """Remove the folders of processes of this machine that have ended without it."""
    if not parent.is_dir():
        return
    pattern = re.compile(re.escape(f"{_PREFIX}{socket.gethostname()}-") + "([1-9][0-9]{0,8})")
    for folder in parent.iterdir():
        match = pattern.fullmatch(folder.name)
        if match is not None and not psutil.pid_exists(int(match[1])):
            with suppress(OSError):  # another user's
                shutil.rmtree(folder)
