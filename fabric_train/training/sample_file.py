"""Read and write RUN/samples.jsonl, which has the model's continuations of ``--sample_prompts`` at some steps."""

import json
import math
import os
from collections.abc import Sequence
from dataclasses import asdict
from itertools import takewhile
from pathlib import Path

from fabric_train.files.regular_file import check_no_link, open_to_write, write_atomically
from fabric_train.files.typed_json import read_json_lines
from fabric_train.training.logger import Logger, Sample


def read_samples(path: Path, last_step: float = math.inf) -> list[Sample]:
    """Return the samples in a samples.jsonl up to a step; none without the file, an InputError if it is damaged."""
    samples = read_json_lines(path, Sample, "move the file away")
    return list(takewhile(lambda sample: sample.step <= last_step, samples))


class SampleFile(Logger):
    """RUN/samples.jsonl, with a line for each step and prompt."""

    def __init__(self, path: Path, last_step: int) -> None:
        """Continue after ``last_step``; remove the samples of later steps."""
        check_no_link(path)
        self._path = path
        content = _to_lines(read_samples(path, last_step))
        if path.exists() and content.encode() != path.read_bytes():
            write_atomically(path, content)

    def log_samples(self, samples: Sequence[Sample]) -> None:
        """Append samples, and wait until they are on the disk."""
        with open_to_write(self._path, "a", newline="") as file:
            file.write(_to_lines(samples))
            file.flush()
            os.fsync(file.fileno())


def _to_lines(samples: Sequence[Sample]) -> str:
    lines = [json.dumps(asdict(sample), ensure_ascii=False) + "\n" for sample in samples]
    return "".join(lines)
