"""Open the source of an export: a checkpoint, its adapter alone or merged into its base, or an average of several."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import xxhash
from transformers import AutoConfig, PretrainedConfig

from fabric_train.checkpoint import TrainerJson, read_trainer_json
from fabric_train.checkpoint.adapter_base import find_base
from fabric_train.checkpoint.adapter_folder import is_adapter
from fabric_train.checkpoint.files import CHECKSUMS
from fabric_train.export.average import AveragedTensors, PlainAverage, WeightedCheckpoint
from fabric_train.export.merged_adapter import MergeInto, is_in_4_bits, open_whole
from fabric_train.files.regular_file import check_links
from fabric_train.files.requirements import check_package
from fabric_train.model.computed_settings import leave_code_out
from fabric_train.model.hf_model import ModelShape, read_shape
from fabric_train.model.nf4 import check_installed
from fabric_train.model.weight_files import StoredTensors


@dataclass(frozen=True)
class ExportSource:
    """A complete checkpoint, full or sharded, whose weights are exported, or an average that ends with it."""

    checkpoint: Path
    averaged: tuple[WeightedCheckpoint, ...] = ()
    """The checkpoints whose average is exported, ``checkpoint`` last; empty means ``checkpoint`` alone."""
    merges: MergeInto | None = None
    """The base's weights that an adapter is merged into; None exports an adapter as an adapter."""

    @cached_property
    def saved(self) -> TrainerJson:
        """The trainer.json of ``checkpoint``; an InputError if it is damaged."""
        return read_trainer_json(self.checkpoint)

    @property
    def is_adapter(self) -> bool:
        """Whether an adapter is exported as an adapter."""
        return is_adapter(self.checkpoint) and not self.merges

    def read_shape(self) -> ModelShape:
        """Read the shape of the model that is exported."""
        return read_shape(str(self.checkpoint))

    def read_config(self) -> PretrainedConfig:
        """Read the configuration that is exported, which may be changed."""
        config: PretrainedConfig = AutoConfig.from_pretrained(self.checkpoint, trust_remote_code=False)
        leave_code_out(config)
        return config

    def check_needs(self) -> None:
        """Raise an InputError if the base of an adapter, or a package that its export needs, is missing."""
        for checkpoint in (self.checkpoint, *(averaged.checkpoint for averaged in self.averaged)):
            if is_adapter(checkpoint):
                find_base(None, checkpoint)
                if self.is_adapter:
                    check_package("peft", f"{checkpoint}: the export of an adapter, which is compared in peft,")
                elif is_in_4_bits(checkpoint):
                    check_installed()

    @property
    def tokenizer(self) -> Path:
        """The folder from which transformers loads the tokenizer; it may be absent."""
        return self.checkpoint / "tokenizer"

    def tokenizer_files(self) -> dict[str, Path]:
        """Return the tokenizer's files by their paths in the export; InputError if a link leads out of the folder."""
        check_links(self.tokenizer)
        files = sorted(path for path in self.tokenizer.rglob("*") if path.is_file())
        return {path.relative_to(self.tokenizer).as_posix(): path for path in files}

    def verification_command(self) -> list[str]:
        """Return the module that verifies an export of this source, and the command-line words for this source."""
        words = ["fabric_train.export.verification", str(self.checkpoint)]
        if self.merges:
            words += ["--merged", self.merges]
        words += [f"{averaged.checkpoint}={averaged.weight!r}" for averaged in self.averaged]
        return words

    def open_tensors(self) -> StoredTensors:
        """Open the tensors to export."""
        if self.averaged:
            return AveragedTensors(self.averaged, self.merges)
        return open_whole(self.checkpoint, self.merges)

    def open_reference(self) -> StoredTensors:
        """Open the tensors for verifying an export; an average is computed in a different way than for the export."""
        if self.averaged:
            return PlainAverage(self.averaged, self.merges)
        return open_whole(self.checkpoint, self.merges)

    def identity(self) -> str:
        """Return a hash of the content that is exported, from the checksums of the checkpoints and their weights."""
        digest = xxhash.xxh3_128()
        for weighted in self.averaged or (WeightedCheckpoint(self.checkpoint),):
            checksums = (weighted.checkpoint / CHECKSUMS).read_bytes()
            digest.update(checksums + repr(weighted.weight).encode())
        if self.merges:
            digest.update(b"merged" if self.merges == "original" else b"merged, dequantized")
        return digest.hexdigest()

    def describe(self) -> str:
        """Return the step, the number of averaged checkpoints and the merge, in words."""
        description = f"step {self.saved.state.step}"
        if self.averaged:
            description = f"average of {len(self.averaged)} checkpoints up to {description}"
        if self.merges:
            description += ", its adapter merged"
        if self.merges == "dequantized":
            description += " into the dequantized weights"
        return description
