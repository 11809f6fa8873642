"""Store a teacher's values for the rows of a token dataset: check, plan, compute block after block, and summarize.

Finished blocks are kept in ``.NAME.unfinished`` next to the folder to write. The same command continues after them. A
block has the same bytes in every run: its rows and its forward passes depend only on what ``StatesContent`` has.
"""

import shlex
import shutil
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from fabric_train.cli.argument_types import counted, show_size
from fabric_train.cli.commands import command_from_here
from fabric_train.cli.errors import InputError
from fabric_train.cli.progress import progress_of
from fabric_train.data.batch import find_targets, hash_row
from fabric_train.data.teacher_states import join_states
from fabric_train.data.token_dataset import Rows, TokenDataset, open_dataset
from fabric_train.distributed.precision import compute_dtype
from fabric_train.files.atomic_folder import (
    check_not_inside,
    check_not_taken,
    hold_lock,
    nearest_existing,
    sync_and_rename,
)
from fabric_train.files.regular_file import check_no_links_in
from fabric_train.files.requirements import check_room, free_bytes
from fabric_train.model.flops import ModelFlops, peak_flops
from fabric_train.model.hf_model import quiet_transformers
from fabric_train.model.nf4 import check_installed
from fabric_train.teacher_states.blocks import BlockContent, write_block
from fabric_train.teacher_states.record import (
    FILE_NAME,
    HEAD,
    Block,
    StatesContent,
    StatesRecord,
    StatesShard,
    StatesSplit,
    blocks_of_shard,
    find_difference,
    list_blocks,
    read_record,
    write_record,
)
from fabric_train.teacher_states.stored import write_head
from fabric_train.teacher_states.teacher import DescribedTeacher, LoadedTeacher, compute_states, describe_teacher
from fabric_train.teacher_states.vocabulary import (
    check_rows_of_head,
    compare_vocabularies,
    hash_tokens,
    open_tokenizer,
)

if TYPE_CHECKING:
    from fabric_train.teacher_states.__main__ import TeachArguments

BLOCK_BYTES = 64 << 20
"""The most bytes of a block, which is what an interruption can cost; at least the rows of a forward pass."""
_UNFINISHED_RECORD = "unfinished.json"
_BYTES_PER_ROW = 24  # an offset, a hash and a checksum
_BYTES_PER_BLOCK = 1000  # the header of its file
_ROWS_PER_READ = 64
_ASSUMED_SHARE_OF_PEAK = 0.4
"""The share of a GPU's peak that the time of a plan assumes for forward passes."""


@dataclass(frozen=True)
class CountedSplit:
    """A split with what is to be computed for it."""

    size: StatesSplit
    num_tokens: int
    flops: float
    """The FLOPs of the forward passes."""


@dataclass(frozen=True)
class TeachPlan:
    """What a command is to compute, before anything is loaded."""

    dataset: TokenDataset
    teacher: DescribedTeacher
    content: StatesContent
    """Without the teacher's hash, which takes long to compute."""
    splits: dict[str, CountedSplit]
    shard: StatesShard
    target: Path
    """The folder to write."""

    @property
    def sizes(self) -> dict[str, StatesSplit]:
        return {name: split.size for name, split in self.splits.items()}

    @property
    def blocks(self) -> list[Block]:
        """The blocks of the shard."""
        return blocks_of_shard(list_blocks(self.sizes, self.content.rows_per_block), self.shard)

    @property
    def share(self) -> float:
        """The share of all rows that the shard has."""
        num_rows = sum(size.num_rows for size in self.sizes.values())
        return sum(len(block.rows) for block in self.blocks) / num_rows

    @property
    def num_bytes(self) -> int:
        """The size of the shard's files; exact for all blocks together, else by the share of rows."""
        total = 0
        for size in self.sizes.values():
            total += size.num_targets * self.content.bytes_per_target + size.num_rows * _BYTES_PER_ROW
        num_bytes = round(total * self.share) + len(self.blocks) * _BYTES_PER_BLOCK
        if self.content.top_k is None and self.shard.number == 1:
            num_bytes += self.teacher.shape.vocab_size * self.content.hidden_size * self.teacher.model.dtype.itemsize
        return num_bytes


def teach(arguments: "TeachArguments", block_bytes: int = BLOCK_BYTES) -> None:
    """Store the values that ``arguments`` describe, or with ``plan`` print their size.

    Args:
        arguments: The arguments of the command line.
        block_bytes: See ``BLOCK_BYTES``.

    Raises:
        InputError: The teacher cannot read the rows, the disk is too small, or the folder has other values; nothing is
            written.
    """
    quiet_transformers()
    target = _target_folder(arguments)
    plan = _prepare(arguments, target, block_bytes)
    if arguments.plan:
        print("\n".join(_describe_plan(plan)))
        return

    if arguments.teacher_weights != "16bit":
        check_installed("--teacher_weights")

    # what decides the values: compared with what the folder has already
    unfinished = target.parent / f".{target.name}.unfinished"
    check_no_links_in(unfinished)
    check_room(target, plan.num_bytes - _bytes_in(unfinished), "the teacher's values")
    print("hashing the teacher's weights", flush=True)
    teacher = plan.teacher.identify()
    content = replace(plan.content, teacher=teacher.fingerprint)
    record = StatesRecord(content, teacher, plan.sizes, plan.shard, files={})
    if (target / FILE_NAME).is_file():
        _check_same(target, read_record(target).content, content)
        print(f"{target} is complete")
        return
    check_not_taken(target)
    if (unfinished / _UNFINISHED_RECORD).is_file():
        _check_same(unfinished, read_record(unfinished, _UNFINISHED_RECORD).content, content)

    # the blocks, and at last the record: the folder is complete or absent
    lock = target.parent / f".{target.name}.lock"
    with hold_lock(lock, f"{target}: another process is writing to it", "wait for it or stop it"):
        unfinished.mkdir(exist_ok=True)
        write_record(unfinished, record, _UNFINISHED_RECORD)
        try:
            seconds = _write_blocks(plan, unfinished)
        except BaseException:
            _remove_if_empty(unfinished)
            raise
        (unfinished / _UNFINISHED_RECORD).unlink()
        write_record(unfinished, replace(record, files=_sizes_of_files(unfinished)))
        sync_and_rename(unfinished, target)
    print("\n".join(_summarize(plan, seconds)))


def _target_folder(arguments: "TeachArguments") -> Path:
    """Return the folder to write: ``--output_dir``, or a folder in it for a shard.

    Raises:
        InputError: The folder has something else, or cannot be written.
    """
    folder = Path(arguments.output_dir).expanduser().absolute()
    target = folder
    if arguments.shard is not None:
        number, count = arguments.shard_numbers
        target = folder / StatesShard(number, count).folder_name
        if (folder / FILE_NAME).is_file():
            check_not_inside(target, folder)
    check_not_inside(target, Path(arguments.train_data_dir))
    if not (target / FILE_NAME).is_file():
        check_not_taken(target)
    return target


def _prepare(arguments: "TeachArguments", target: Path, block_bytes: int) -> TeachPlan:
    """Check the teacher and the token dataset against each other, and count the targets."""
    # the rows
    dataset = open_dataset(arguments.train_data_dir, arguments.isolate_documents)
    if dataset.has_pairs or dataset.has_unpaired:
        raise InputError(
            f"--train_data_dir {dataset.name}: it has answers to compare, but --objective distill trains on documents "
            "and chats; give another token dataset"
        )
    splits = {"train": dataset.train}
    if dataset.validation is not None:
        splits["validation"] = dataset.validation
    for rows in splits.values():
        rows.predicts_all = arguments.distill_on == "all"
    longest_row = max(rows.longest() for rows in splits.values())

    # the teacher
    teacher = describe_teacher(
        arguments.teacher,
        dtype=compute_dtype(arguments.precision),
        attention=arguments.attention,
        longest_row=longest_row,
        isolates=dataset.isolates,
        weights=arguments.teacher_weights,
    )
    teacher_tokenizer = open_tokenizer(teacher.tokenizer)
    tokenizer = teacher_tokenizer  # of a token dataset that has none
    if (dataset.folder / "tokenizer").is_dir():
        tokenizer = open_tokenizer(dataset.folder)
    named_ids = compare_vocabularies(tokenizer, teacher_tokenizer, arguments.teacher)
    check_rows_of_head(teacher.shape.vocab_size, named_ids, f"--teacher {arguments.teacher}")
    top_k = arguments.stored_top_k
    if top_k is not None and top_k > named_ids.num_ids:
        raise InputError(
            f"--top_k {top_k:,}: the tokenizer has only {named_ids.num_ids:,} tokens; give a smaller number"
        )

    # what is stored of them
    content = StatesContent(
        token_dataset=dataset.fingerprint,
        isolate_documents=dataset.isolates,
        distill_on=arguments.distill_on,
        teacher="",
        tokenizer=hash_tokens(tokenizer),
        named_ids=named_ids,
        dtype=str(teacher.model.dtype).removeprefix("torch."),
        attention=arguments.attention,
        top_k=top_k,
        temperature=arguments.distill_temperature,
        hidden_size=teacher.shape.config.get_text_config().hidden_size,
        rows_per_batch=max(1, arguments.batch_tokens // longest_row),
        rows_per_block=0,
        teacher_weights=arguments.teacher_weights,
    )
    content = replace(content, rows_per_block=_rows_per_block(content, longest_row, block_bytes))
    number, count = arguments.shard_numbers
    plan = TeachPlan(
        dataset=dataset,
        teacher=teacher,
        content=content,
        splits=_count_splits(splits, teacher.shape.flops),
        shard=StatesShard(number, count),
        target=target,
    )
    num_blocks = len(list_blocks(plan.sizes, content.rows_per_block))
    if count > num_blocks:
        raise InputError(
            f"--shard {arguments.shard}: the rows make only {counted(num_blocks, 'block')}; give --shard I/{num_blocks}"
        )
    return plan


def _rows_per_block(content: StatesContent, longest_row: int, block_bytes: int) -> int:
    """Return the rows of a block: as many forward passes as its size allows, and at least one."""
    bytes_per_batch = content.rows_per_batch * longest_row * content.bytes_per_target
    return content.rows_per_batch * max(1, block_bytes // bytes_per_batch)


def _count_splits(splits: dict[str, Rows], flops: ModelFlops) -> dict[str, CountedSplit]:
    """Read all rows to count their targets, tokens and forward FLOPs, by split."""
    counted_splits = {}
    for name, rows in splits.items():
        num_targets = 0
        num_tokens = 0
        flops_of_split = 0.0
        with progress_of(f"counting the targets of {name}") as show:
            for begin in range(0, len(rows), _ROWS_PER_READ):
                end = min(begin + _ROWS_PER_READ, len(rows))
                batch = rows.__getitems__(range(begin, end))
                num_targets += len(find_targets(batch.labels).ids)
                num_tokens += sum(batch.lengths)
                flops_of_split += flops.count_forward(batch.lengths)
                show(end / len(rows))
        size = StatesSplit(len(rows), num_targets)
        counted_splits[name] = CountedSplit(size, num_tokens, flops_of_split)
    return counted_splits


def _check_same(folder: Path, existing: StatesContent, content: StatesContent) -> None:
    """Raise an InputError that names the first difference between what a folder has and what is asked for."""
    difference = find_difference(existing, content)
    if difference is not None:
        raise InputError(
            f"{folder}: its {difference.name} is {difference.first_value}, but this command has "
            f"{difference.second_value}; choose another --output_dir, or remove it"
        )


def _write_blocks(plan: TeachPlan, folder: Path) -> float:
    """Compute and write the blocks that a folder lacks; return the seconds for this, without loading the teacher."""
    missing = [block for block in plan.blocks if not (folder / block.file_name).is_file()]
    needs_head = plan.content.top_k is None and plan.shard.number == 1
    if not missing and not (needs_head and not (folder / HEAD).is_file()):
        return 0.0
    named_ids = plan.content.named_ids
    teacher = LoadedTeacher(plan.teacher, named_ids.on_device(torch.device("cpu")))
    if plan.content.isolate_documents:
        longest_row = plan.teacher.shape.longest_row or 0
        teacher.check_isolation(longest_row, plan.teacher.location)
    if needs_head:
        write_head(folder, teacher.head)
    num_rows = sum(len(block.rows) for block in missing)
    num_done = 0
    started = time.monotonic()
    with progress_of("teaching") as show:
        show(0, "the first block")
        for block in missing:
            write_block(folder / block.file_name, _compute_block(plan, teacher, block))
            num_done += len(block.rows)
            show(num_done / num_rows, f"{num_done:,} of {num_rows:,} rows")
    return time.monotonic() - started


def _compute_block(plan: TeachPlan, teacher: LoadedTeacher, block: Block) -> BlockContent:
    """Compute the values of the rows of a block."""
    dataset = plan.dataset
    rows = dataset.train if block.split == "train" else dataset.validation
    assert rows is not None
    content = plan.content
    row_hashes: list[int] = []
    num_targets: list[int] = []
    states_of_batches = []
    for begin in range(block.rows.start, block.rows.stop, content.rows_per_batch):
        batch = rows.__getitems__(range(begin, min(begin + content.rows_per_batch, block.rows.stop)))
        for row_ids, row_labels in zip(batch.input_ids.numpy(), batch.labels.numpy(), strict=True):
            row_hashes.append(hash_row(row_ids, row_labels))
        row_length = batch.labels.shape[1]
        rows_of_targets = find_targets(batch.labels).positions // row_length
        num_targets += torch.bincount(rows_of_targets, minlength=len(batch.labels)).tolist()
        states_of_batches.append(compute_states(teacher, batch, content.top_k, content.temperature))
    return BlockContent(row_hashes, num_targets, join_states(states_of_batches))


def _bytes_in(folder: Path) -> int:
    """Return the size of the finished blocks in a folder, which need not exist."""
    return sum(file.stat().st_size for file in folder.glob("*/*.safetensors"))


def _sizes_of_files(folder: Path) -> dict[str, int]:
    sizes = {}
    for file in sorted(folder.rglob("*.safetensors")):
        sizes[file.relative_to(folder).as_posix()] = file.stat().st_size
    return sizes


def _remove_if_empty(folder: Path) -> None:
    """Remove the unfinished folder if no block is finished, and otherwise say that it is kept."""
    num_finished = len(list(folder.glob("*/*.safetensors")))
    if num_finished:
        finished = counted(num_finished, "finished block")
        print(f"{finished} in {folder}; run the same command again to continue", file=sys.stderr)
    else:
        shutil.rmtree(folder, ignore_errors=True)


def _describe_plan(plan: TeachPlan) -> list[str]:
    """Return the lines of ``--plan true``."""
    lines = _describe_content(plan)
    free = free_bytes(nearest_existing(plan.target))
    num_blocks = counted(len(plan.blocks), "block")
    lines.append(f"size       {show_size(plan.num_bytes)} in {num_blocks}; the disk has {show_size(free)} left")
    flops = sum(split.flops for split in plan.splits.values()) * plan.share
    time_line = f"time       {flops:.2g} FLOPs in forward passes"
    if torch.cuda.is_available():
        device = torch.cuda.get_device_name()
        peak = peak_flops(device, plan.teacher.model.dtype)
        if peak is not None:
            seconds = flops / (_ASSUMED_SHARE_OF_PEAK * peak)
            time_line += f": about {seconds / 60:,.0f} min at {_ASSUMED_SHARE_OF_PEAK:.0%} of the peak of one {device}"
    lines.append(time_line)
    return lines


def _describe_content(plan: TeachPlan) -> list[str]:
    """Return lines on the teacher, the form of the values, and the rows."""
    content = plan.content
    shard = plan.shard
    weights = "" if content.teacher_weights == "16bit" else f", {content.teacher_weights}"
    lines = [
        f"teacher    {plan.teacher.location}, {content.dtype}{weights}, {content.attention}",
        f"values     {content.describe()}; {content.bytes_per_target:,} bytes per target",
    ]
    for name, split in plan.splits.items():
        size = split.size
        lines.append(
            f"{name:<10} {counted(size.num_rows, 'row')}, {split.num_tokens:,} tokens, {size.num_targets:,} targets"
        )
    if shard.count > 1:
        num_rows = sum(len(block.rows) for block in plan.blocks)
        lines.append(f"shard      {shard.number} of {shard.count}: {counted(num_rows, 'row')}")
    return lines


def _summarize(plan: TeachPlan, seconds: float) -> list[str]:
    """Return the lines at the end."""
    lines = _describe_content(plan)
    num_bytes = sum(_sizes_of_files(plan.target).values())
    lines.append(f"size       {show_size(num_bytes)} in {counted(len(plan.blocks), 'block')}")
    lines.append(f"time       {seconds:,.1f} s, without loading the teacher")
    lines.append(f"written to {plan.target}")
    folder = plan.target
    if plan.shard.count > 1:
        folder = folder.parent
        lines.append(f"next       the other shards of {plan.shard.count}; then, as below:")
    command = f"{command_from_here('train')} --train_data_dir {shlex.quote(str(plan.dataset.folder))}"
    command += f" --objective distill --teacher_states {shlex.quote(str(folder))}"
    for option, value in _options_of_training(plan.content).items():
        command += f" --{option} {value}"
    lines.append(f"next       {command}")
    return lines


def _options_of_training(content: StatesContent) -> dict[str, object]:
    """Return the arguments that a training on these values needs besides its defaults."""
    options: dict[str, object] = {}
    if content.temperature != 1:
        options["distill_temperature"] = content.temperature
    if content.distill_on != "supervised":
        options["distill_on"] = content.distill_on
    if not content.isolate_documents:
        options["isolate_documents"] = "false"
    if content.dtype == "float32":
        options["precision"] = "32-true"
    if content.attention != "sdpa":
        options["attention"] = content.attention
    if content.teacher_weights != "16bit":
        options["teacher_weights"] = content.teacher_weights
    return options
