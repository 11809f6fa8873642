"""What an export is made from: a checkpoint, or the average of several."""

from dataclasses import dataclass
from pathlib import Path

import xxhash

from fabric_train.checkpoint import read_trainer_json
from fabric_train.checkpoint.checksums import CHECKSUMS
from fabric_train.export.average import AveragedTensors, AveragePart, PlainAverage
from fabric_train.model.weight_files import StoredTensors, open_weights


@dataclass(frozen=True)
class ExportSource:
    """A complete checkpoint, full or sharded, whose weights are exported with its configuration and its tokenizer.

    With ``parts``, the weights are their average instead; ``checkpoint`` is the last of them.
    """

    checkpoint: Path
    parts: tuple[AveragePart, ...] = ()

    def open_tensors(self) -> StoredTensors:
        """Open the tensors to export; each is read on request.

        Raises:
            InputError: A file of the weights is damaged or missing.
        """
        return AveragedTensors(self.parts) if self.parts else open_weights(self.checkpoint)

    def open_reference(self) -> StoredTensors:
        """Open the tensors to verify an export with: an average is computed in another way than for the export.

        Raises:
            InputError: A file of the weights is damaged or missing.
        """
        return PlainAverage(self.parts) if self.parts else open_weights(self.checkpoint)

    def identity(self) -> str:
        """Return a hash of the content that is exported, from the checksums of the checkpoints and their weights.

        Raises:
            OSError: A checkpoint has no checksums.
        """
        digest = xxhash.xxh3_128()
        for part in self.parts or (AveragePart(self.checkpoint),):
            digest.update((part.checkpoint / CHECKSUMS).read_bytes() + repr(part.weight).encode())
        return digest.hexdigest()

    def describe(self) -> str:
        """Return the step, or the number of parts, in words."""
        step = f"step {read_trainer_json(self.checkpoint).state.step}"
        return f"average of {len(self.parts)} checkpoints up to {step}" if self.parts else step
