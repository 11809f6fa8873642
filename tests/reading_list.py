"""List the files on the way of one step, one document and one checkpoint: ``python -m tests.reading_list``.

The calls are followed while they happen. A small text is tokenized, a small Llama trains on it for one step and saves a
checkpoint, and a second run resumes from that, all on one CPU device, with small batches, no validation and otherwise
the programs' defaults. A trace notes each statement of ``fabric_train/`` that runs. So it also follows what a reader of
the source cannot see: a hook of PyTorch, a head that was replaced, a worker process, a thread. It does not follow what
a plain run leaves out, such as cleaning, chats, mixtures, XLA, the kernels of a GPU, several ranks, and the report of
an error.

A way begins in some functions and has all that they call, directly or through others, except functions that a
subpackage above has handed down, such as the one that prints a line after a save. What happens once in a run, before
the way, is not on it: the programs' start, the opening of the corpus, the set-up of the model.

A file is on the list if at least ``MIN_STATEMENTS`` of its statements run: one that only gives a constant, a dataclass
or a short lookup need not be opened to understand the way. ``LIBRARIES`` are not on it either: they know nothing of
steps, documents and checkpoints, and are used like a library.

``--write`` puts the lists into docs/architecture.md, ``--all`` also prints the files with fewer statements.
"""

import argparse
import ast
import contextlib
import inspect
import json
import os
import sys
import tempfile
import threading
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

from tests.test_architecture import FROM_THE_TOP

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "fabric_train"
DOCUMENT = ROOT / "docs" / "architecture.md"
BEGIN, END = "<!-- reading list: python -m tests.reading_list --write -->\n", "<!-- end of the reading list -->\n"
MIN_STATEMENTS = 10
LIBRARIES = ("cli/", "files/")
TEXTS = [f"Document {number} says twice: {number} and {number}.\n\nThe end." for number in range(200)]


@dataclass(frozen=True)
class Way:
    """A way through the code: what runs while a function of ``begins_in`` runs.

    ``begins_in`` are functions, as ``file:function``, or all functions of a file or folder.

    ``until_update``: only up to the end of the optimizer's first update. ``program`` is the one that is traced, and
    ``limit`` the number of files that the way may have.
    """

    title: str
    begins_in: tuple[str, ...]
    programs: tuple[str, ...]
    limit: int
    until_update: bool = False

    def leads_through(self, callers: list[tuple[str, str]]) -> bool:
        """Return whether a call is on the way, by the files and functions of its callers, itself first."""
        for number, (module, function) in enumerate(callers):
            if module.startswith(self.begins_in) or f"{module}:{function}" in self.begins_in:
                return not any(_floor(between) < _floor(module) for between, _ in callers[:number])
        return False


WAYS = {
    "step": Way("One step, from the loop to the optimizer's update", ("training/loop.py",), ("train",), 12, True),
    "document": Way(
        "One document, from its file to the token dataset",
        ("tokenization/encoding.py:encode_sources", "tokenization/build.py:write_token_dataset"),
        ("tokenize",),
        15,
    ),
    "checkpoint": Way(
        "One checkpoint, from the save to the weights and the state of a resumed run",
        ("checkpoint/", "model/load_weights.py:read_weights"),
        ("train", "resume"),
        8,
    ),
}


def _floor(module: str) -> int:
    """Return the place of a file's subpackage in the order of imports, 0 at the top."""
    return FROM_THE_TOP.index(module.split("/")[0]) if "/" in module else 0


class Trace:
    """A note of every statement that runs on the ways, in the order in which they first run.

    Each line of ``notes`` is [way, file, line number]. Processes that are forked go on writing to the same file.
    """

    def __init__(self, notes: Path) -> None:
        self._file = os.open(notes, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        self._seen: set[tuple[str, str, int]] = set()
        self._ways: dict[str, Way] = {}

    @contextlib.contextmanager
    def of(self, program: str) -> Iterator[None]:
        """Follow what the block calls, on the ways that lead through a program."""
        from torch.optim.optimizer import register_optimizer_step_post_hook

        self._ways = {name: way for name, way in WAYS.items() if program in way.programs}
        hook = register_optimizer_step_post_hook(self._updated)
        threading.settrace(self._called)
        sys.settrace(self._called)
        try:
            yield
        finally:
            sys.settrace(None)
            threading.settrace(None)
            hook.remove()

    def _updated(self, *_: Any) -> None:
        self._ways = {name: way for name, way in self._ways.items() if not way.until_update}

    def _called(self, frame: FrameType, _event: str, _argument: object) -> Any:
        if _module(frame) is None:
            return None
        callers: list[tuple[str, str]] = []
        caller: FrameType | None = frame
        while caller is not None:
            module = _module(caller)
            if module and not caller.f_code.co_flags & inspect.CO_OPTIMIZED:
                return None  # a module or the body of a class, which an import runs
            if module:
                callers.append((module, caller.f_code.co_name))
            caller = caller.f_back
        ways = [name for name, way in self._ways.items() if way.leads_through(callers)]
        return (lambda *event: self._ran(ways, *event)) if ways else None

    def _ran(self, ways: list[str], frame: FrameType, event: str, _argument: object) -> Any:
        if event == "line":
            for way in ways:
                note = (way, str(_module(frame)), frame.f_lineno)
                if note not in self._seen and way in self._ways:
                    self._seen.add(note)
                    os.write(self._file, (json.dumps(note) + "\n").encode())
        return lambda *later: self._ran(ways, *later)


@cache
def _module_of(path: str) -> str | None:
    return Path(path).relative_to(PACKAGE).as_posix() if path.startswith(f"{PACKAGE}{os.sep}") else None


def _module(frame: FrameType) -> str | None:
    """Return the file of a frame relative to ``fabric_train/``; None for other code."""
    return _module_of(frame.f_code.co_filename)


@cache
def _statements(module: str) -> dict[int, int]:
    """Return the first line of the innermost statement that each line of a file belongs to."""
    tree = ast.parse((PACKAGE / module).read_text(encoding="utf-8"))
    statements = [node for node in ast.walk(tree) if isinstance(node, ast.stmt)]
    return {
        line: node.lineno
        for node in sorted(statements, key=lambda node: node.lineno)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }


def trace_programs(folder: Path) -> list[tuple[str, str, int]]:
    """Tokenize, train one step and resume in a folder, in this process; return the notes of the trace."""
    import tokenize_dataset
    from fabric_train.__main__ import main as train
    from tests.support.tiny_model import write_tiny_model

    write_tiny_model(folder / "model", TEXTS)
    texts = folder / "texts.jsonl"
    texts.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS), encoding="utf-8")
    tokens, run, notes = folder / "tokens", folder / "run", folder / "notes"
    trace = Trace(notes)
    tokenize = ["--dataset", texts, "--tokenizer_name", folder / "model", "--output_dir", tokens]
    tokenize += ["--max_length", 32, "--validation_split", 0, "--num_proc", 1]
    training = ["--train_data_dir", tokens, "--model_name", folder / "model", "--output_dir", run, "--devices", 1]
    training += ["--accelerator", "cpu", "--num_workers", 0, "--loggers", "csv", "--lr_schedule", "constant"]
    training += ["--total_batch_size", 4, "--report", "false"]
    with trace.of("tokenize"):
        tokenize_dataset.main([str(part) for part in tokenize])
    with trace.of("train"):
        train([str(part) for part in [*training, "--max_step", 1]])
    with trace.of("resume"):
        train([str(part) for part in [*training, "--max_step", 2, "--resume", "true"]])
    return [tuple(json.loads(line)) for line in notes.read_text(encoding="utf-8").splitlines()]


def read_ways() -> dict[str, dict[str, int]]:
    """Return for each way its files, in the order in which they are first entered, and how many statements run."""
    with tempfile.TemporaryDirectory() as folder:
        notes = trace_programs(Path(folder))
    ran: dict[str, dict[str, set[int]]] = {name: defaultdict(set) for name in WAYS}
    for way, module, line in notes:
        ran[way][module].add(_statements(module).get(line, line))
    return {way: {module: len(lines) for module, lines in files.items()} for way, files in ran.items()}


def files_to_read(files: dict[str, int]) -> list[str]:
    """Return those files of a way that a reader has to open."""
    enough = [module for module, statements in files.items() if statements >= MIN_STATEMENTS]
    return [module for module in enough if not module.startswith(LIBRARIES)]


def as_markdown(ways: dict[str, dict[str, int]]) -> str:
    """Return the reading list, with the first line of each file's docstring."""
    parts = []
    for name, files in ways.items():
        listed = files_to_read(files)
        parts.append(f"\n**{WAYS[name].title}**: {len(listed)} files.\n\n")
        for number, module in enumerate(listed, 1):
            text = ast.get_docstring(ast.parse((PACKAGE / module).read_text(encoding="utf-8"))) or ""
            first = " ".join(text.split("\n\n")[0].split()).replace("``", "`")
            parts.append(f"{number}. `{module}`: {first}\n")
    return "".join(parts) + "\n"


def written_list(document: str) -> str:
    """Return the reading list that a document has between its two markers."""
    return document.split(BEGIN)[1].split(END)[0]


def main() -> None:
    """Print the lists, or write them into the document."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the lists into docs/architecture.md")
    parser.add_argument("--all", action="store_true", help="print all files, with the statements that run in each")
    given = parser.parse_args()
    # what the traced programs print; a forked run of this program has streams of our own, which would be on the list
    with contextlib.redirect_stdout(sys.__stderr__), contextlib.redirect_stderr(sys.__stderr__):
        ways = read_ways()
    if given.write:
        text = DOCUMENT.read_text(encoding="utf-8")
        before, after = text.split(BEGIN)[0], text.split(END)[1]
        DOCUMENT.write_text(before + BEGIN + as_markdown(ways) + END + after, encoding="utf-8")
    elif given.all:
        for name, files in ways.items():
            print(f"{name}: {len(files_to_read(files))} files to read of {len(files)}")
            for module, statements in files.items():
                print(f"  {statements:4d}  {module}")
    else:
        print(as_markdown(ways).strip())


if __name__ == "__main__":
    main()
