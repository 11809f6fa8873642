"""Do one step of an export, and print its seconds without imports: copy files, our writing, or transformers' own."""

import json
import os
import shutil
import sys
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from fabric_train.export.convert import write_export
from fabric_train.export.model_card import CardFacts
from fabric_train.export.source import ExportSource
from fabric_train.files.atomic_folder import complete_folder
from fabric_train.model.hf_model import quiet_transformers

MAX_SHARD_SIZE = "5GB"


def copy(checkpoint: Path, target: Path) -> None:
    """Copy the files with weights."""
    with complete_folder(target) as folder:
        for file in checkpoint.rglob("*.safetensors"):
            shutil.copyfile(file, folder / file.name)


def ours(checkpoint: Path, target: Path) -> None:
    """Write an export without verification."""
    with complete_folder(target) as folder:
        write_export(ExportSource(checkpoint), folder, torch.bfloat16, MAX_SHARD_SIZE, CardFacts("random"))


def transformers(checkpoint: Path, target: Path) -> None:
    """Load the checkpoint and save the model."""
    with complete_folder(target) as folder:
        model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16)
        model.save_pretrained(folder, max_shard_size=MAX_SHARD_SIZE)


def main() -> None:
    """Do ``STEP CHECKPOINT TARGET``; at the end, everything is synced to the disk."""
    step = sys.argv[1]
    checkpoint = Path(sys.argv[2])
    target = Path(sys.argv[3])
    quiet_transformers()
    for file in checkpoint.rglob("*.safetensors"):  # so that every step reads from the disk
        with file.open("rb") as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    started = time.perf_counter()
    {"copy": copy, "ours": ours, "transformers": transformers}[step](checkpoint, target)
    print(json.dumps({"seconds": time.perf_counter() - started}))


if __name__ == "__main__":
    main()
