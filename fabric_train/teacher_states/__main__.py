# PYTHON_ARGCOMPLETE_OK
"""Store a teacher's values for the rows of a token dataset:  fabric-train teach --teacher MODEL --train_data_dir DIR"""

import re
from dataclasses import dataclass
from typing import Literal

from fabric_train.cli.argument_types import PositiveInt, RowLength, TeacherWeights, Temperature
from fabric_train.cli.errors import run_program
from fabric_train.cli.parser import parse_arguments

_DEFAULT_TOP_K = 64


@dataclass(frozen=True)
class TeachArguments:
    """Store a teacher's distributions for the rows of a token dataset, for --teacher_states in training

    PROGRAM --teacher models/llama-3-8b --train_data_dir data/tokens --output_dir data/states
    PROGRAM --teacher runs/large/best --train_data_dir data/tokens --output_dir data/states --hidden true --plan true
    PROGRAM --teacher models/llama-3-70b --train_data_dir data/tokens --output_dir data/states --shard 3/64
    """

    teacher: str
    """The teacher (a hub name, a folder, a checkpoint, RUN, RUN/best or an adapter), with the tokenizer of the rows."""
    train_data_dir: str
    """Token dataset. The values are stored for its train and validation splits."""
    output_dir: str
    """Folder to write. Use the same command again to continue after an interruption."""
    top_k: PositiveInt | None = None
    """Store the log-probabilities of this number of the likeliest tokens, and of all others together; default: 64."""
    hidden: bool = False
    """Store the teacher's last hidden states in bfloat16 and its head instead, which give the full distributions."""
    distill_temperature: Temperature = 1.0
    """Temperature of the stored distributions, which must be that of the training. Not with --hidden true, which fits
    any temperature.
    """
    distill_on: Literal["supervised", "all"] = "supervised"
    """Which tokens get values: the supervised ones, or all, including prompts; as in the training."""
    isolate_documents: bool = True
    """Keep the documents of a row apart; as in the training."""
    precision: Literal["bf16-true", "32-true"] = "bf16-true"
    """Data type in which the teacher computes: bfloat16 or float32; as in the training."""
    teacher_weights: TeacherWeights = "16bit"
    """Hold the teacher's decoder layers in the dtype of --precision, or in 4 bits with bitsandbytes; as in the
    training.
    """
    attention: Literal["sdpa", "flash_attention_2", "flex_attention", "eager"] = "sdpa"
    """Attention implementation; as in the training."""
    batch_tokens: RowLength = 8192
    """Tokens per forward pass, at least a row; a lower number takes less memory."""
    shard: str | None = None
    """Compute only a part, such as 3/64. All tasks get the same --output_dir, and training reads it when all parts are
    there.
    """
    plan: bool = False
    """Print the size of the values, and on a known GPU the time, without loading the teacher or writing anything."""

    @property
    def stored_top_k(self) -> int | None:
        """The number of likeliest tokens to store; None for hidden states."""
        if self.hidden:
            return None
        return self.top_k or _DEFAULT_TOP_K

    @property
    def shard_numbers(self) -> tuple[int, int]:
        """The two numbers of --shard; 1 of 1 without it."""
        number, _, count = (self.shard or "1/1").partition("/")
        return int(number), int(count)

    def faults(self) -> list[str]:
        """Return arguments that exclude each other, and a shard that is not one."""
        faults = []
        if self.hidden and self.top_k is not None:
            faults.append("--top_k and --hidden true exclude each other; leave out one of them")
        if self.hidden and self.distill_temperature != 1:
            faults.append(
                "--distill_temperature does not apply to --hidden true, whose values fit any temperature; leave it out"
            )
        if self.shard is not None:
            match = re.fullmatch(r"([1-9][0-9]{0,3})/([1-9][0-9]{0,3})", self.shard)
            if match is None or int(match[1]) > int(match[2]):
                faults.append(f"--shard: expected I/N such as 3/64, from 1/64 to 64/64, got {self.shard!r}")
        return faults


def main(argv: list[str] | None = None) -> None:
    """Store the values, and print a summary."""
    arguments = parse_arguments(TeachArguments, argv)

    from fabric_train.teacher_states.teach import teach  # slow

    teach(arguments)


if __name__ == "__main__":
    run_program(main)
