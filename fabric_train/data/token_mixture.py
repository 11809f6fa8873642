"""Open several token datasets, or one with shares of its sources, as the training data of a run."""

import functools
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from fabric_train.cli.shares import Shares
from fabric_train.data.joined_rows import JoinedRows
from fabric_train.data.mixture_sources import ListedSource, list_sources, rows_per_epoch
from fabric_train.data.token_dataset import TokenDataset, open_dataset
from fabric_train.files.regular_file import check_no_link
from fabric_train.token_dataset.manifest import FILE_NAME, Manifest, write_manifest
from fabric_train.tokenization.merge import merge_manifests, open_inputs


@dataclass(frozen=True)
class TokenMixture:
    """Several token datasets with the same tokenizer and row length, or a single one whose sources have shares."""

    parts: tuple[TokenDataset, ...]
    """The token datasets."""
    sources: tuple[ListedSource, ...]
    rows_per_epoch: tuple[int, ...]
    """The number of rows of each source that an epoch takes, unless a phase takes others."""
    train: JoinedRows
    """The rows of the ``sources``, one source after the other."""
    validation: JoinedRows | None
    manifest: Manifest
    """The manifest that describes all token datasets together."""
    manifest_folder: Path
    """The folder in which the run stores ``manifest``."""

    def rows_of(self, shares: Shares) -> tuple[int, ...]:
        """Return the rows of each source that an epoch with other shares takes."""
        folders = list(dict.fromkeys(source.folder for source in self.sources))
        return rows_per_epoch(shares, self.sources, folders)

    @property
    def isolates(self) -> bool:
        return self.train.isolates

    @property
    def has_pairs(self) -> bool:
        """Whether the documents are preference pairs, in all parts or in none."""
        return self.parts[0].has_pairs

    @property
    def has_unpaired(self) -> bool:
        """Whether the documents are unpaired answers, in all parts or in none."""
        return self.parts[0].has_unpaired

    @property
    def source_names(self) -> tuple[str, ...]:
        """The sources of the documents, see ``TokenDataset.source_names``; a name in several parts is one source."""
        return self.train.source_names

    def tokens_of(self, listed: ListedSource) -> dict[str, int]:
        """Return how many tokens each source of documents has in the rows of ``listed``, one of ``sources``."""
        names = listed.remaining_sources
        if listed.source is not None:
            names = (listed.source,)
        is_whole_dataset = not names
        tokens_by_source: dict[str, int] = {}
        for dataset_index in dict.fromkeys(split_range.split for split_range in listed.ranges):
            manifest = self.parts[dataset_index].manifest
            if manifest is None:
                continue
            for name, counted in manifest.ledger.splits["train"].sources.items():
                if is_whole_dataset or name in names:
                    tokens_by_source[name] = tokens_by_source.get(name, 0) + counted.tokens_in_rows
        return tokens_by_source

    @property
    def name(self) -> str:
        return ", ".join(str(dataset.folder) for dataset in self.parts)

    @functools.cached_property
    def fingerprint(self) -> str:
        """The SHA-256 of the fingerprints of the token datasets, in their order."""
        fingerprints = "\n".join(dataset.fingerprint for dataset in self.parts)
        return hashlib.sha256(fingerprints.encode()).hexdigest()

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        return self.manifest.tokenizer.stop_token_ids

    @property
    def attachments(self) -> tuple[Path, ...]:
        """The files and folders that are copied to each checkpoint, so that it can be exported and used on its own."""
        return self.manifest_folder / FILE_NAME, self.parts[0].folder / "tokenizer"

    def write_manifest(self) -> None:
        check_no_link(self.manifest_folder / FILE_NAME)
        write_manifest(self.manifest_folder, self.manifest)

    def row_name(self, row: int) -> str:
        """Return a row's token dataset and its number there, for messages."""
        dataset_index, row_of_dataset = self.train.locate(row)
        return f"{self.parts[dataset_index].folder / 'train'}:{row_of_dataset}"


def open_mixture(
    folders: Sequence[str],
    shares: Shares,
    isolate_documents: bool,
    manifest_folder: Path,
    phase_shares: Sequence[Shares] = (),
) -> TokenMixture:
    """Open the token datasets of ``--train_data_dir``.

    Args:
        folders: The token datasets.
        shares: The shares of the command line.
        isolate_documents: Whether batches keep the documents of a row apart.
        manifest_folder: Where the run stores the manifest of all token datasets together.
        phase_shares: The shares of the phases of the run.

    Raises:
        InputError: a token dataset is damaged, they do not fit together, or a share cannot be taken.
    """
    datasets = tuple(open_dataset(folder, isolate_documents) for folder in folders)
    # their manifests are read already
    manifests = {dataset.folder: dataset.manifest for dataset in datasets}
    inputs = open_inputs(list(manifests), manifest_of=lambda folder: manifests[folder])
    manifest = merge_manifests(inputs)
    sources = tuple(list_sources(datasets, folders, [shares, *phase_shares]))
    ranges = list(chain.from_iterable(source.ranges for source in sources))
    held_out = [dataset.validation for dataset in datasets if dataset.validation]
    return TokenMixture(
        parts=datasets,
        sources=sources,
        rows_per_epoch=rows_per_epoch(shares, sources, folders),
        train=JoinedRows([dataset.train for dataset in datasets], ranges),
        validation=JoinedRows(held_out) if held_out else None,
        manifest=manifest,
        manifest_folder=manifest_folder,
    )


def unpredicted_tokens(datasets: Sequence[TokenDataset], num_predicted: int) -> str:
    """Return why an evaluation predicts fewer tokens than the manifests count; "" if it does not, or is not known."""
    num_supervised = 0
    for dataset in datasets:
        if not dataset.validation:
            continue
        ledger = dataset.manifest.ledger.splits.get("validation") if dataset.manifest else None
        if ledger is None:
            return ""
        num_supervised += ledger.tokens_supervised
    if num_supervised <= num_predicted:
        return ""
    return (
        f"{num_supervised:,} validation tokens are supervised; {num_supervised - num_predicted:,} of these are the "
        "first in a row or document, so there is nothing to predict them from"
    )
