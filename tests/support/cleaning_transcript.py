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
    with TemporaryDirectory() as place:
        folder = Path(place)
        (folder / "models").mkdir()
        (folder / "models" / "tokenizer.model").symlink_to(llama3_tokenizer_model())
        for program in ("tokenize_dataset.py", "fabric_train"):
            (folder / program).symlink_to(ROOT / program)
        corpus = DirtyCorpus()
        corpus.write(folder / "clean")
        corpus.plant()
        corpus.write(folder / "corpus")
        items = (json.dumps({"task": "riddles", **item}, ensure_ascii=False) + "\n" for item in TASKS)
        (folder / "TASKS.jsonl").write_text("".join(items), encoding="utf-8")

        shown = {title: "\n\n".join(run(one, folder) for one in commands) for title, commands in SECTIONS.items()}
        tables = {
            "Found and missed": found_and_missed(corpus.planted, folder / "data" / "all"),
            "The same switches on the corpus without dirt": control(folder),
        }
    for title, text in (tables | shown).items():
        print(f"## {title}\n\n{text}\n")


def run(command: str, folder: Path) -> str:
    """Run a command in a folder and return what it prints, without progress, and its exit code."""
    environment = {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "HOME": str(folder / "home"),
        "PYTHONPATH": str(folder),
        "COLUMNS": "120",
    }
    finished = subprocess.run(
        command,
        shell=True,
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    lines = [line.rstrip() for line in finished.stdout.splitlines()]
    shown = [line for line in lines if line and not _PROGRESS.fullmatch(line.strip())]
    return "```\n" + "\n".join([f"$ {command}", *shown, f"exit code {finished.returncode}"]) + "\n```"


def found_and_missed(planted: Sequence[Planted], folder: Path) -> str:
    """Return a table: what became of each kind of dirt in a token dataset."""
    texts = texts_of(folder)
    outcomes: dict[str, Counter[str]] = defaultdict(Counter)
    for one in planted:
        text = texts.get((one.source, one.row))
        if text is None:
            outcome = "dropped with its document" if one.text else "found"
        else:
            outcome = "missed" if one.text in text else "found"
        outcomes[one.kind][outcome] += 1
    columns = ("found", "missed", "dropped with its document")
    rows = [(kind, counts.total(), *(counts[column] for column in columns)) for kind, counts in outcomes.items()]
    return _table(("kind", "planted", *columns), rows)


def texts_of(folder: Path) -> dict[tuple[str, int], str]:
    """Return the text of each document of a token dataset by its source and row there.

    A document in the last row, which is left over because it is incomplete, has less text or none.
    """
    manifest = _manifest(folder)
    index = open_index(folder, manifest, "train")
    assert index is not None
    rows = np.array(datasets.load_from_disk(folder)["train"].with_format("numpy")["input_ids"][:])
    pieces = index.pieces(np.arange(len(rows)))
    ids: list[list[int]] = [[] for _ in index.documents]
    for piece in np.lexsort([pieces.starts, pieces.documents]):
        position = int(pieces.positions[piece])
        length = int(pieces.lengths[piece])
        ids[int(pieces.documents[piece])] += rows[pieces.rows[piece]][position : position + length].tolist()
    tokenizer = load_fast(folder / "tokenizer" / "tokenizer.json", special_text_is_plain=False)
    origins = [index.origin(document) for document in range(len(ids))]
    return {
        (origin.source, origin.row): text for origin, text in zip(origins, tokenizer.decode_batch(ids), strict=True)
    }


def control(folder: Path) -> str:
    """Return a table of what the same switches drop and change in the corpus before the dirt, by source."""
    counts: dict[str, dict[str, int]] = {}
    for source in ("es", "en", "chats"):
        switches = FOR_CHATS if source == "chats" else f"{SWITCHES} --boilerplate 10"
        command = f"python tokenize_dataset.py --dataset clean/{source}.jsonl {COMMON} {switches}"
        run(f"{command} --output_dir data/control-{source}", folder)
        ledger = _manifest(folder / "data" / f"control-{source}").ledger
        left_out = {f"left out: {reason}": count for reason, count in ledger.documents_skipped.items()}
        changed = {f"changed: {edit}": count for edit, count in ledger.edits.items()}
        counts[source] = {"documents read": ledger.documents_read, **left_out, **changed}
    names = sorted({name for source in counts.values() for name in source}, key=lambda name: (":" in name, name))
    return _table(("", *counts), [(name, *(source.get(name, 0) for source in counts.values())) for name in names])


def _manifest(folder: Path) -> Manifest:
    manifest = load_manifest(folder)
    assert manifest is not None
    return manifest


def _table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


if __name__ == "__main__":
    main()
