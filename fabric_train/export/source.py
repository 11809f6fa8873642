"""What an export is made from."""

from dataclasses import dataclass
from pathlib import Path

from fabric_train.model.weight_files import StoredTensors, open_weights


@dataclass(frozen=True)
class ExportSource:
    """A complete checkpoint, full or sharded, whose weights are exported with its configuration and its tokenizer."""

    checkpoint: Path

    def open_tensors(self) -> StoredTensors:
        """Open the tensors to export; each is read on request.

        Raises:
            InputError: A file of the weights is damaged or missing.
        """
        return open_weights(self.checkpoint)
