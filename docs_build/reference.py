"""The pages of docs/reference/ that are written from the code, and docs/llms.txt."""

import ast
import dataclasses
import inspect
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fabric_train
from docs_build.site import DOCS, documents, pages_of, read_settings, slug
from fabric_train import checkpoint
from fabric_train.cli import errors
from fabric_train.cli.argument_types import describe, is_required, positional_of, shown_name, title_of, types_of
from fabric_train.cli.help import PROGRAM, examples_of, fields_by_section, shown_default, texts_of
from fabric_train.cli.tables import Table
from fabric_train.report import health
from fabric_train.training.metrics import COLUMNS, Metrics, grouped_name
from tests.support.program_arguments import PROGRAM_ARGUMENTS

FOLDER = "reference"
LLMS = "llms.txt"
_WRITTEN = "<!-- written by python -m docs_build; edit {source} instead -->\n\n"
_FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


@dataclasses.dataclass(frozen=True)
class Program:
    """A program: how it is called, and the pages that explain its arguments, the most helpful one first."""

    called: str
    pages: tuple[str, ...]


PROGRAMS = {
    "train": Program(
        "-m fabric_train",
        (
            *("training", "adapters", "preference", "distill", "mixture", "rl", "performance", "reliability", "launch"),
            *("report", "generate"),
        ),
    ),
    "tokenize": Program(
        "tokenize_dataset.py", ("tokenization", "cleaning", "mixture", "how-to/tokenize_on_many_machines", "publish")
    ),
    "inspect": Program("-m fabric_train.inspection", ("tokenization", "cleaning")),
    "merge": Program("-m fabric_train.tokenization.merge", ("tokenization", "how-to/tokenize_on_many_machines")),
    "publish": Program("-m fabric_train.export.publish", ("publish", "tokenization")),
    "vocabulary report": Program("-m fabric_train.vocabulary report", ("language",)),
    "vocabulary extend": Program("-m fabric_train.vocabulary extend", ("language",)),
    "teach": Program("-m fabric_train.teacher_states", ("distill",)),
    "convert": Program("convert_to_hf.py", ("publish", "adapters", "performance")),
    "merge_models": Program("-m fabric_train.merge_models", ("language",)),
    "generate": Program("generate.py", ("generate",)),
    "evaluate": Program("evaluate.py", ("evaluate",)),
    "report": Program("-m fabric_train.report", ("report",)),
    "rollouts": Program("-m fabric_train.rollouts", ("report",)),
    "runs": Program("-m fabric_train.runs", ("programs",)),
    "trace": Program("-m fabric_train.trace", ("how-to/replay_and_trace", "mixture")),
    "replay": Program("-m fabric_train.replay", ("how-to/replay_and_trace",)),
    "download": Program("download_model.py", ("launch", "publish")),
    "doctor": Program("-m fabric_train.doctor", ("launch",)),
    "sample_data": Program("-m fabric_train.sample_data", ("tutorials/first_run",)),
    "launch_files": Program("-m fabric_train.launch_files", ("launch",)),
    "translate": Program("-m fabric_train.translate", ("how-to/from_axolotl",)),
}
"""By the names of ``fabric-train NAME``."""

_EXPLAINED_IN = {
    "accelerator": "how-to/tpu#What is different",
    "activation_checkpointing": "performance#Memory",
    "decay_steps": "training#Steps and learning rate",
    "device_memory": "performance#The plan",
    "float8": "performance#Speed",
    "gradient_reduction": "performance#Memory",
    "isolate_documents": "tokenization#Rows",
    "max_length": "training#Without a token dataset",
    "micro_batch_size": "explanation/memory#What takes memory",
    "mlp_tile_size": "performance#Memory",
    "network": "performance#The plan",
    "num_nodes": "launch#One run, one launcher",
    "profile": "performance#Metrics",
    "seed": "",
    "shares": "mixture#Several token datasets",
    "temperature": "rl#The loss",
    "train_data_dir": "training#From documents to a model on the hub",
    "weight_decay": "",
}
"""The section that explains an argument of training, where another one names it first; "" if none does."""


def pages() -> dict[str, str]:
    """Return the text of each written file by its path in ``docs/``."""
    written = {f"{FOLDER}/{name}.md": page() for name, page in _PAGES.items()}
    return written | {f"{FOLDER}/arguments/{name.replace(' ', '_')}.md": _page_of_program(name) for name in PROGRAMS}


def llms_txt() -> str:
    """Return the list of all pages for coding agents (llmstxt.org), with the first sentence of each."""
    parts: list[str] = []
    part_before = ""
    for part, title, page in pages_of(read_settings()["nav"]):
        if part != part_before:
            parts.append(f"\n## {part}\n")
            part_before = part
        path = documents()[page]
        where = os.path.relpath(path, DOCS) if path.is_relative_to(DOCS) else page
        parts.append(f"- [{title}]({where}): {_first_sentence(path)}")
    first, *others = parts
    return (
        "# Fabric Train\n\n> Teach a Llama-3 your language, domain or task, on one multi-GPU machine or on many.\n\n"
        "Wrong arguments are refused before anything is written, with exit code 2 and a line for each fault that says "
        "how to fix it. `--plan check` checks a training run without its devices, `--help WORD` finds arguments.\n\n"
        + "\n".join([first, *others])
        + "\n"
    )


def _first_sentence(path: Path) -> str:
    """Return the first sentence of a document's text, without links."""
    text = _FENCE.sub("", path.read_text(encoding="utf-8"))
    blocks = [" ".join(block.split()) for block in text.split("\n\n")]
    paragraph = next((block for block in blocks if block and not re.match(r"#|<|!\[|\||- |\*", block)), "")
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", paragraph)
    return re.split(r"(?<=[.:]) ", plain)[0].rstrip(":.") + "."


def _table(head: tuple[str, ...], rows: Iterator[tuple[str, ...]]) -> str:
    """Return a Markdown table; a cell may have any text."""
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", r"\|") for cell in line) + " |" for line in lines) + "\n"


def _page_of_program(name: str) -> str:
    program = PROGRAMS[name]
    arguments = PROGRAM_ARGUMENTS[program.called]
    words = "fabric run fabric_train" if name == "train" else f"fabric-train {name}"
    also = "`fabric run fabric_train`" if name == "train" else f"`python {program.called}` in a checkout"
    examples = "\n".join(example.replace(PROGRAM, words) for example in examples_of(arguments))
    positional = positional_of(arguments)
    types = types_of(arguments)
    parts = [
        f"# fabric-train {name}\n\n{_WRITTEN.format(source='the dataclass of the arguments')}"
        f"{title_of(arguments)}. Also called as {also}. "
        f"[How arguments are read](../../programs.md#arguments).\n\n```text\n{examples}\n```\n"
    ]
    for title, fields in fields_by_section(arguments).items():
        rows = (
            (
                f"`{argument.upper() if argument == positional else f'--{shown_name(argument)}'}`",
                describe(types[argument]).removesuffix(" or null") + _default_in_words(field),
                f"{text} {_explained(name, argument, program.pages)}".strip(),
            )
            for argument, (field, text) in fields.items()
        )
        parts.append(f"## {title}\n\n{_table(('argument', 'value', 'meaning'), rows)}")
    return "\n".join(parts)


def _default_in_words(field: dataclasses.Field) -> str:
    if is_required(field):
        return "; required"
    return f"; default `{shown_default(field)}`" if shown_default(field) else ""


def _explained(program: str, argument: str, names: tuple[str, ...]) -> str:
    """Return a link to the section that explains an argument: the first that names it, in the first page that does."""
    if program == "train" and argument in _EXPLAINED_IN:
        page, _, title = _EXPLAINED_IN[argument].partition("#")
        if not page:
            return ""
        return f"→ [{title}](../../{page}.md#{slug(title)})"
    for name in names:
        text = (DOCS / f"{name}.md").read_text(encoding="utf-8")
        without_commands = _FENCE.sub(lambda found: "\n" * found[0].count("\n"), text)
        heading = name
        in_command = ""
        for line, with_command in zip(without_commands.splitlines(), text.splitlines(), strict=True):
            heading = line.lstrip("# ") if re.match("##+ ", line) else heading
            link = f"→ [{heading}](../../{name}.md{f'#{slug(heading)}' if heading != name else ''})"
            if re.search(rf"--{argument}\b", line):
                return link
            if re.search(rf"--{argument}\b", with_command):
                in_command = in_command or link
        if in_command:
            return in_command
    return ""


def _metrics() -> str:
    texts = texts_of(Metrics)

    def rows() -> Iterator[tuple[str, ...]]:
        for name in COLUMNS:
            unit, _, meaning = texts[name].partition(": ")
            yield f"`{name}`", unit.lower(), meaning, "" if name in ("step", "rows_hash") else f"`{grouped_name(name)}`"
        unit, _, meaning = texts["extra"].partition(": ")
        yield "`train_NAME`, `val_NAME`", unit.lower(), meaning, "`train/NAME`, `val/NAME`"
        unit, _, meaning = texts["by_source"].partition(": ")
        yield "`val_loss/SOURCE` and others", unit.lower(), meaning, "`val/SOURCE/loss`"

    return (
        f"# Metrics\n\n{_WRITTEN.format(source='fabric_train/training/metrics.py')}"
        "`RUN/metrics.csv` has a row for every logged step and every evaluation, sorted by step. An empty cell means "
        "that the value was not measured at that step. Read the file with a CSV reader, because names of sources may "
        "contain commas.\n\n"
        f"{_table(('column', 'unit', 'meaning', 'name in loggers'), rows())}\n"
        "[Performance](../performance.md#metrics) explains how `mfu` is computed.\n"
    )


def _exit_codes() -> str:
    tree = ast.parse(inspect.getsource(errors))
    texts = {
        target.id: " ".join(below.value.value.split())
        for one, below in zip(tree.body, tree.body[1:], strict=False)
        if isinstance(one, ast.Assign) and isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
        for target in one.targets
        if isinstance(target, ast.Name) and isinstance(below.value.value, str)
    }
    names = ("DONE", "FAILURE", "INPUT_ERROR", "STOPPED", "INTERRUPTED")
    rows = ((f"`{getattr(errors, name)}`", texts[name]) for name in names)
    return (
        f"# Exit codes\n\n{_WRITTEN.format(source='fabric_train/cli/errors.py')}"
        f"{_table(('exit code', 'meaning'), rows)}\n"
        "torchrun turns exit codes 2 and 75 into 1. So does Lightning's own `fabric` command, which `make install` "
        "replaces with one that passes on signals and exit codes.\n"
    )


def _healthy_ranges() -> str:
    rows: list[tuple[str, str, str, str]] = [
        ("data_wait", f"mean at most {health._MAX_WAIT:.0%}", "Steps wait for data", "docs/how-to/slow.md"),
        (
            "rank_lag",
            f"one rank is slowest in at most half of the steps, or by at most {health._MAX_LAG:.0%} of a step",
            "The other ranks wait for rank",
            "docs/how-to/slow.md",
        ),
        (
            "grad_norm",
            f"at most {health._SPIKE_FACTOR:g} times the median of the {health._SPIKE_BLOCK} logged steps around it",
            "The gradient norm has",
            "docs/how-to/loss_nan_or_flat.md",
        ),
        (
            "val_loss/SOURCE",
            f"the last at most {health._RISE:.0%} above the lowest, or fewer than two evaluations between",
            "The validation loss of",
            "docs/mixture.md",
        ),
        ("val_loss/SOURCE", "the last at most the one before training", "The model forgets", "docs/mixture.md"),
        (
            "val_reward",
            f"the last at most {health._STANDARD_ERRORS:g} standard errors of a difference below the first",
            "The validation reward has fallen from",
            "docs/rl.md#validation",
        ),
        (
            "tokens_per_second",
            f"median of the last quarter at least {health._MIN_SPEED:.0%} of the first quarter's",
            "The run became slower",
            "docs/how-to/slow.md",
        ),
        (
            "train_loss",
            f"from step {health._LEARNING_STEPS} on at most {health._NEAR_UNIFORM:.0%} of ln V, where V is the size of "
            "the vocabulary",
            "The training loss is",
            "docs/how-to/loss_nan_or_flat.md",
        ),
        ("skipped_steps", "0", "steps were skipped", "docs/how-to/loss_nan_or_flat.md"),
        (
            "val_loss",
            f"known, in a run of {health._LEARNING_STEPS} steps or more",
            "The run has no evaluation",
            "docs/training.md#evaluation",
        ),
        (
            "times.jsonl",
            f"saving, restarting and repeated steps at most {health._MAX_LOST_TIME:.0%}, in a run of "
            f"{health._MIN_JUDGED_SECONDS / 60:g} minutes or more",
            "Saves and failures cost",
            "docs/reliability.md#goodput",
        ),
    ]
    lines = (
        (f"`{column}`", usual, f"{sentence} …", f"[{page.removeprefix('docs/')}](../{page.removeprefix('docs/')})")
        for column, usual, sentence, page in rows
    )
    return (
        f"# Healthy ranges\n\n{_WRITTEN.format(source='fabric_train/report/health.py')}"
        f"The report of a run judges these columns of `metrics.csv`, from {health._MIN_ROWS} logged steps on, and "
        "`times.jsonl`. It says in a sentence which one is unusual.\n\n"
        f"{_table(('column', 'usual', 'sentence in the report', 'what to do'), lines)}"
    )


def _files() -> str:
    """Return files.md, which is written by hand, with the list of a checkpoint's files as the code has it."""
    text = (DOCS / FOLDER / "files.md").read_text(encoding="utf-8")
    listed = (inspect.getdoc(checkpoint) or "").partition("The files are:\n\n")[2]
    return re.sub(r"(?<=^```text\n).*?(?=^```$)", lambda _: f"{listed}\n", text, flags=re.MULTILINE | re.DOTALL)


def _python() -> str:
    names = [name for name in fabric_train.__all__ if not name.startswith("_")]
    parts = []
    for name in names:
        thing = getattr(fabric_train, name)
        if isinstance(thing, Table):
            parts.append(_described_table(name, thing))
            continue
        link = f"\nTakes the arguments of [fabric-train {name}](arguments/{name}.md).\n" if name in PROGRAMS else ""
        text = inspect.getdoc(thing) or ""
        parts.append(f"## {name}\n{link}\n```python\n{_signature(name, thing)}\n```\n\n```text\n{text}\n```\n")
    return (
        f"# Python\n\n{_WRITTEN.format(source='the docstrings')}"
        "`import fabric_train` has these names; [api.md](../api.md) shows how they are used.\n\n" + "\n".join(parts)
    )


def _described_table(name: str, table: Table[Any]) -> str:
    """Return the section of a table of parts that modules register."""
    names = ", ".join(f"`{part}`" for part in table) or "none of this project"
    return f"## {name}\n\nThe table of `--{table.kind}`: {names}. [How to extend](../how-to/extend.md)\n"


def _signature(name: str, thing: Any) -> str:
    """Return how a function is called, or the fields of a class, as the source has them."""
    if name in PROGRAMS:
        return f"{name}(*, config=None, **arguments)"
    (definition,) = ast.parse(inspect.getsource(thing)).body
    if isinstance(definition, ast.ClassDef):
        bases = f"({', '.join(map(ast.unparse, definition.bases))})" if definition.bases else ""
        fields = [f"    {ast.unparse(line)}" for line in definition.body if isinstance(line, ast.AnnAssign)]
        return "\n".join([f"class {name}{bases}:", *(fields or ["    ..."])])
    assert isinstance(definition, ast.FunctionDef)
    returns = f" -> {ast.unparse(definition.returns)}" if definition.returns else ""
    return f"{name}({ast.unparse(definition.args)}){returns}"


_PAGES: dict[str, Callable[[], str]] = {
    "files": _files,
    "metrics": _metrics,
    "exit_codes": _exit_codes,
    "healthy_ranges": _healthy_ranges,
    "python": _python,
}


def stale_files() -> dict[str, str]:
    """Return what the code gives now of each written file in ``docs/`` that has another text or is missing, by path.

    A page of a program that is no more has the text ''.
    """
    now = pages() | {LLMS: llms_txt()}
    there = {path.relative_to(DOCS).as_posix() for path in (DOCS / FOLDER / "arguments").glob("*.md")}
    now |= dict.fromkeys(there - set(now), "")
    return {
        page: text
        for page, text in now.items()
        if not (DOCS / page).is_file() or (DOCS / page).read_text(encoding="utf-8") != text
    }


def write() -> None:
    """Write the files that are not as the code gives them now, and remove pages of programs that are no more."""
    while stale := stale_files():  # twice: the list of all pages has sentences of the pages that are written
        for page, text in stale.items():
            path = DOCS / page
            path.parent.mkdir(parents=True, exist_ok=True)
            if text:
                path.write_text(text, encoding="utf-8")
            else:
                path.unlink()
            print(f"wrote {path}")
