"""Print how a corpus with planted dirt is cleaned, and what stays: ``python -m tests.support.cleaning_transcript``.

The programs are run as a user runs them, with Llama-3's tokenizer. benchmarks/results/ has the output.
"""

import json
import os
import re
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import datasets
import numpy as np

from fabric_train.sample_data.real_data import llama3_tokenizer_model
from fabric_train.token_dataset.document_index import open_index
from fabric_train.token_dataset.manifest import Manifest, load_manifest
from fabric_train.tokenization.tokenizers.fast_tokenizer import load_fast
from tests.support.dirty_corpus import DirtyCorpus, Planted
from tests.support.dirty_texts import TASKS
from tests.support.programs import ROOT

_DROPPED = "dropped with its document"
_PROGRESS = re.compile(r"(tokenizing|counting lines|comparing|reading|merging|checking|hashing)\b.*")

FOR_TEXTS = (
    "--dataset es=corpus/es.jsonl en=corpus/en.jsonl web=corpus/web.jsonl "
    "--chat_template data/chats/tokenizer/chat_template.jinja"
)
COMMON = "--tokenizer_name models/tokenizer.model --max_length 8k --validation_split 0"
FOR_CHATS = "--redact email,phone,iban,dni,ip --decontaminate TASKS.jsonl"
SWITCHES = f"--language es,en --quality gopher,fineweb --near_duplicates 0.8 --deduplicate true \\\n    {FOR_CHATS}"
TOKENIZE = f"python tokenize_dataset.py {COMMON} \\\n    {FOR_TEXTS} \\\n   "
INSPECT = "python -m fabric_train.inspection"
MERGE = "python -m fabric_train.tokenization.merge"
CHATS = f"python tokenize_dataset.py {COMMON} \\\n    --dataset chats=corpus/chats.jsonl {FOR_CHATS} \\\n   "
SECTIONS = {
    "Chats": [f"{CHATS} --output_dir data/chats"],
    "Texts without cleaning": [f"{TOKENIZE} --output_dir data/raw"],
    "Texts with all switches": [f"{TOKENIZE} {SWITCHES} --boilerplate 10 --output_dir data/clean"],
    "Both together": [f"{MERGE} data/clean data/chats --output_dir data/all"],
    "Some dropped documents": [
        "grep -m 1 near_duplicate data/clean/dropped.jsonl | cut -c 1-300",
        "grep -m 1 gopher_duplicate_lines data/clean/dropped.jsonl | cut -c 1-300",
        "grep -m 1 contaminated data/clean/dropped.jsonl | cut -c 1-300",
        "grep -A 10 most_frequent data/clean/manifest.json",
    ],
    "The inspector": [f"{INSPECT} data/all --rows 0 | head -n 62"],
    "Before and after": [f"{INSPECT} --compare data/raw data/clean"],
    "In two slices": [
        f"{TOKENIZE} {SWITCHES} --output_dir data/one",
        f"for I in 1 2; do {TOKENIZE} {SWITCHES} --shard $I/2 --output_dir slices/$I; done",
        f"{MERGE} slices/1 slices/2 --output_dir data/merged",
        "diff -r data/one data/merged && echo the same files",
    ],
}


def main() -> None:
    """Print the transcript as Markdown: first the dirt that was found and missed, then the commands."""
    with TemporaryDirectory() as temporary_dir:
        folder = Path(temporary_dir)
        planted = write_inputs(folder)
        transcripts = {}
        for title, commands in SECTIONS.items():
            transcripts[title] = "\n\n".join(run(command, folder) for command in commands)
        tables = {
            "Found and missed": found_and_missed(planted, folder / "data" / "all"),
            "The same switches on the corpus without dirt": control(folder),
        }
    for title, text in (tables | transcripts).items():
        print(f"## {title}\n\n{text}\n")


def write_inputs(folder: Path) -> list[Planted]:
    """Write what the commands read, and return the dirt in it.

    These are the programs, a tokenizer, the items of a task, and the corpus without and with dirt.
    """
    (folder / "models").mkdir()
    (folder / "models" / "tokenizer.model").symlink_to(llama3_tokenizer_model())
    for program in ("tokenize_dataset.py", "fabric_train"):
        (folder / program).symlink_to(ROOT / program)
    with (folder / "TASKS.jsonl").open("w", encoding="utf-8") as file:
        for item in TASKS:
            file.write(json.dumps({"task": "riddles", **item}, ensure_ascii=False) + "\n")
    corpus = DirtyCorpus()
    corpus.write(folder / "clean")
    corpus.plant()
    corpus.write(folder / "corpus")
    return corpus.planted


def run(command: str, folder: Path) -> str:
    """Run a command in a folder and return what it prints, without progress, and its exit code."""
    environment = {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "HOME": str(folder / "home"),
        "PYTHONPATH": str(folder),
        "COLUMNS": "120",
    }
    completed = subprocess.run(
        command,
        shell=True,
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    lines = [f"$ {command}"]
    for line in completed.stdout.splitlines():
        if line.rstrip() and not _PROGRESS.fullmatch(line.strip()):
            lines.append(line.rstrip())
    lines.append(f"exit code {completed.returncode}")
    return "```\n" + "\n".join(lines) + "\n```"


def found_and_missed(planted: Sequence[Planted], folder: Path) -> str:
    """Return a table: what became of each kind of dirt in a token dataset."""
    texts = document_texts(folder)
    outcomes_by_kind: dict[str, Counter[str]] = defaultdict(Counter)
    for dirt in planted:
        text = texts.get((dirt.source, dirt.row))
        outcomes_by_kind[dirt.kind][_outcome(dirt, text)] += 1
    rows = []
    for kind, outcomes in outcomes_by_kind.items():
        rows.append((kind, outcomes.total(), outcomes["found"], outcomes["missed"], outcomes[_DROPPED]))
    return _table(("kind", "planted", "found", "missed", _DROPPED), rows)


def _outcome(dirt: Planted, text: str | None) -> str:
    """Return what became of a piece of dirt; ``text`` is of its document, None if that was dropped."""
    if text is None:
        return _DROPPED if dirt.text else "found"
    return "missed" if dirt.text in text else "found"


def document_texts(folder: Path) -> dict[tuple[str, int], str]:
    """Return the text of each document of a token dataset by its source and row there.

    A document in the last row, which is left over because it is incomplete, has less text or none.
    """
    manifest = _load_manifest(folder)
    index = open_index(folder, manifest, "train")
    assert index is not None
    rows = np.array(datasets.load_from_disk(folder)["train"].with_format("numpy")["input_ids"][:])
    pieces = index.pieces(np.arange(len(rows)))
    ids_by_document: list[list[int]] = [[] for _ in index.documents]
    # the pieces of each document in their order
    for piece in np.lexsort([pieces.starts, pieces.documents]):
        position = int(pieces.positions[piece])
        length = int(pieces.lengths[piece])
        piece_ids = rows[pieces.rows[piece]][position : position + length]
        ids_by_document[int(pieces.documents[piece])] += piece_ids.tolist()
    tokenizer = load_fast(folder / "tokenizer" / "tokenizer.json", special_text_is_plain=False)
    texts = {}
    for document, text in enumerate(tokenizer.decode_batch(ids_by_document)):
        origin = index.origin(document)
        texts[origin.source, origin.row] = text
    return texts


def control(folder: Path) -> str:
    """Return a table of what the same switches drop and change in the corpus before the dirt, by source."""
    counts_by_source: dict[str, dict[str, int]] = {}
    for source in ("es", "en", "chats"):
        switches = FOR_CHATS if source == "chats" else f"{SWITCHES} --boilerplate 10"
        command = f"python tokenize_dataset.py --dataset clean/{source}.jsonl {COMMON} {switches}"
        run(f"{command} --output_dir data/control-{source}", folder)
        ledger = _load_manifest(folder / "data" / f"control-{source}").ledger
        counts = {"documents read": ledger.documents_read}
        for reason, count in ledger.documents_skipped.items():
            counts[f"left out: {reason}"] = count
        for edit, count in ledger.edits.items():
            counts[f"changed: {edit}"] = count
        counts_by_source[source] = counts

    names: set[str] = set()
    for counts in counts_by_source.values():
        names.update(counts)
    rows = []
    # the documents read come first, as the only name without a colon
    for name in sorted(names, key=lambda name: (":" in name, name)):
        rows.append((name, *(counts.get(name, 0) for counts in counts_by_source.values())))
    return _table(("", *counts_by_source), rows)


def _load_manifest(folder: Path) -> Manifest:
    manifest = load_manifest(folder)
    assert manifest is not None
    return manifest


def _table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table in Markdown."""
    lines = []
    for cells in [head, ["---"] * len(head), *rows]:
        lines.append("| " + " | ".join(str(cell) for cell in cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
