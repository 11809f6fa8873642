# PYTHON_ARGCOMPLETE_OK
"""Show which documents a step read, or which steps read a document: ``python -m fabric_train.trace RUN --step N``."""

import dataclasses
import json
import re
from dataclasses import dataclass, field
from pathlib import Path

from fabric_train.cli.argument_types import POSITIONAL, NonNegativeInt, PositiveInt64
from fabric_train.cli.errors import run_program
from fabric_train.cli.parser import parse_arguments


@dataclass(frozen=True)
class TraceArguments:
    """Show which documents a step read, or which steps and checkpoints read a document

    PROGRAM runs/1 --step 5000
    PROGRAM runs/1 --step 5000 --rank 3
    PROGRAM runs/1 --document corpus/es/news.jsonl:17
    """

    run: str = field(metadata=POSITIONAL)
    """Run or checkpoint: RUN (its newest checkpoint), RUN/best, RUN/latest, RUN/step-500, or a checkpoint's folder."""
    step: PositiveInt64 | None = None
    """Print the documents of this step."""
    rank: NonNegativeInt | None = None
    """With --step: only those that this rank read."""
    document: str | None = None
    """Print the steps and checkpoints that read this document, as FILE:LINE: the file's name in manifest.json, or the
    end of that name, and the line or row in it, starting at 1.
    """
    train_data_dir: list[str] | None = None
    """The run's token datasets, in the same order, if they have moved since the run read them."""
    json: bool = False
    """Print the results as JSON."""

    def faults(self) -> list[str]:
        """Return a line for each question that is missing or incomplete."""
        if (self.step is None) == (self.document is None):
            return ["give either --step or --document"]
        if self.rank is not None and self.step is None:
            return ["--rank needs --step"]
        if self.document is not None and not re.fullmatch(r".+:[1-9][0-9]{0,9}", self.document):
            return [f"--document: expected FILE:LINE such as corpus/es/news.jsonl:17, got {self.document!r}"]
        return []


def main(argv: list[str] | None = None) -> None:
    """Print the documents of a step, or the steps and checkpoints that read a document, or both as JSON."""
    arguments = parse_arguments(TraceArguments, argv)
    from fabric_train.checkpoint import check_exists

    run = Path(arguments.run).expanduser()
    check_exists(run)  # before torch is imported, which takes seconds

    from fabric_train.trace import documents, print_results
    from fabric_train.trace.run_history import RunHistory  # slow

    history = RunHistory(run, arguments.train_data_dir)
    result: documents.DocumentSteps | documents.StepDocuments
    if arguments.document is not None:
        result = documents.find_steps(history, arguments.document)
    else:
        assert arguments.step is not None  # TraceArguments.faults
        result = documents.list_documents(history, arguments.step, arguments.rank)
    if arguments.json:
        print(json.dumps(dataclasses.asdict(result), indent=2, ensure_ascii=False))
    elif isinstance(result, documents.DocumentSteps):
        print_results.print_document(result)
    else:
        print_results.print_step(result)


if __name__ == "__main__":
    run_program(main)
