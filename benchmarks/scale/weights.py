"""Open the weights of models up to 405B, read one rank's part of them, and export: seconds, memory and files opened.

The files are sparse: their headers are real, their weights a hole, which reads as zeros. The export of a large model is
written in full, and :func:`holes_for_zeros` gives its zeros back to the file system meanwhile.
"""

import ctypes
import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.large_checkpoint import write_checkpoint
from benchmarks.measure import ROOT, Command, Measurement, run
from benchmarks.scale.series import Point, Series
from fabric_train.sample_data import real_data

RANKS = 512
SHARD_SIZE = "5GB"
# billions of weights
OPENED = (8, 70, 405)
EXPORTED = (1, 3)
EXPORTED_HOLES = (8, 70, 405)
_SAVING_RANKS = 64  # of the checkpoints that are exported as holes
_KEPT_BYTES = 8 << 20  # at the beginning of each file, where its header is
_PUNCH_HOLE = 3  # FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE of fallocate(2)


@dataclass(frozen=True)
class Shape:
    """The sizes of a Llama: hidden and feed-forward width, layers, and heads."""

    hidden: int
    inner: int
    layers: int
    heads: int


SHAPES = {  # by billions of weights, from the published config.json files
    1: Shape(2048, 8192, 16, 32),
    3: Shape(3072, 8192, 28, 24),
    8: Shape(4096, 14336, 32, 32),
    70: Shape(8192, 28672, 80, 64),
    405: Shape(16384, 53248, 126, 128),
}


def measure(work: Path) -> list[Series]:
    """Measure opening, one rank's part and the index of an export for each size, and exports of the smallest.

    Args:
        work: folder for the files, relative to the project's root.

    Raises:
        ChildProcessError: a measured process failed.
    """
    found: dict[int, dict[str, float]] = {}
    for billions in OPENED:
        folder = work / f"weights-{billions}"
        write_sparse(ROOT / folder, billions)
        command = Command(("python", "-m", "benchmarks.scale.weights", str(folder)))
        measured = run(command)
        found[billions] = json.loads(measured.output.splitlines()[-1])
        found[billions]["memory"] = measured.peak_rss_bytes / 1e6
        found[billions]["part"] /= 1e6
        shutil.rmtree(ROOT / folder)
    real = "the program's reader of weights, model on the meta device, shard names of an export"
    simulated = "sparse files, whose weights are holes; one process in place of a rank, without devices"
    quantities = {
        "open": ("opening the weights and the model's shape", "s", 10.0),
        "read": (f"reading a rank's part, one of {RANKS}", "s", None),
        "part": (f"weights that a rank reads, one of {RANKS}", "MB", None),
        "opens": ("files opened by a rank to read its part", "files", None),
        "index": ("shard names and index of an export", "s", 10.0),
        "memory": (f"memory of a process that holds its part, one of {RANKS}", "MB", None),
    }
    series = [
        _series(
            quantity,
            unit,
            {billions: values[key] for billions, values in found.items()},
            simulated,
            real,
            limit,
        )
        for key, (quantity, unit, limit) in quantities.items()
    ]
    exports = {billions: _export(work, billions) for billions in EXPORTED}
    real = "convert_to_hf.py's writing, of files on disk"
    series.append(_series("memory of an export without pages of files", "MB", exports, "random weights", real))
    return [*series, *_export_holes(work, EXPORTED_HOLES)]


def _series(
    quantity: str, unit: str, values: dict[int, float], simulated: str, real: str, limit: float | None = None
) -> Series:
    points = tuple(Point(size, value) for size, value in values.items())
    return Series("weights", quantity, unit, "billions of weights", points, simulated, real, limit)


def config_of(billions: int) -> Any:
    """Return the configuration of a Llama 3 with so many billions of weights."""
    from transformers import LlamaConfig

    shape = SHAPES[billions]
    return LlamaConfig(
        vocab_size=128256,
        hidden_size=shape.hidden,
        intermediate_size=shape.inner,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=8,
        max_position_embeddings=8192,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
        dtype="bfloat16",
        architectures=["LlamaForCausalLM"],
    )


def write_sparse(folder: Path, billions: int) -> None:
    """Write a Hugging Face folder whose weights are holes in files of at most ``SHARD_SIZE``."""
    import torch
    from huggingface_hub import split_torch_state_dict_into_shards
    from transformers import AutoModelForCausalLM

    from fabric_train.checkpoint.tensors import safetensors_header

    folder.mkdir(parents=True)
    config_of(billions).save_pretrained(folder)
    with torch.device("meta"):
        tensors = AutoModelForCausalLM.from_config(config_of(billions), dtype=torch.bfloat16).state_dict()
    split = split_torch_state_dict_into_shards(tensors, max_shard_size=SHARD_SIZE)
    for file, names in split.filename_to_tensors.items():
        entries = [(name, torch.bfloat16, tensors[name].shape) for name in names]
        header, _ = safetensors_header(entries, {"format": "pt"})
        with (folder / file).open("wb") as opened:
            opened.write(header)
            opened.truncate(len(header) + sum(tensors[name].nbytes for name in names))
    index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def open_and_read(folder: Path) -> dict[str, float]:
    """Open the weights, read the rows of one rank, and plan an export; return seconds, opened files and bytes read."""
    import torch
    from huggingface_hub import split_torch_state_dict_into_shards

    from fabric_train.model.hf_model import read_shape
    from fabric_train.model.load_weights import open_in_parts

    opens = set[str]()

    def note(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and str(arguments[0]).endswith(".safetensors"):
            opens.add(str(arguments[0]))

    sys.addaudithook(note)
    started = time.perf_counter()
    opened = open_in_parts(read_shape(str(folder)), torch.bfloat16)
    if opened is None or opened.weights is None:
        raise ChildProcessError(f"{folder}: its weights cannot be read in parts")
    seconds = {"open": time.perf_counter() - started}
    opens.clear()  # of opening, which reads the header of each file
    started = time.perf_counter()
    part = []
    for name, parameter in opened.model.named_parameters():
        rows = -(-len(parameter) // RANKS)
        begin = min(rows * (RANKS // 2), len(parameter))
        shape = (min(rows, len(parameter) - begin), *parameter.shape[1:])
        part.append(opened.weights.read_block(name, (begin, *[0] * (parameter.dim() - 1)), shape))
    seconds["read"] = time.perf_counter() - started
    started = time.perf_counter()
    split_torch_state_dict_into_shards(opened.model.state_dict(), max_shard_size=SHARD_SIZE)
    seconds["index"] = time.perf_counter() - started
    return seconds | {"opens": len(opens), "part": sum(block.nbytes for block in part)}


def _export(work: Path, billions: int) -> float:
    """Export a checkpoint of random weights and return the peak memory in MB, without pages of files."""
    checkpoint = work / f"checkpoint-{billions}"
    target = work / f"export-{billions}"
    write_checkpoint(ROOT / checkpoint, config_of(billions), real_data.smollm2(), sharded=True)
    words = ("python", "-m", "benchmarks.peers.export_step", "ours", str(checkpoint), str(target))
    measured = run(Command(words))
    for folder in (checkpoint, target):
        shutil.rmtree(ROOT / folder)
    return _anonymous_megabytes(measured)


def _anonymous_megabytes(measured: Measurement) -> float:
    if measured.peak_anonymous_bytes is None:
        raise ChildProcessError("this system does not tell the memory of a process without pages of files")
    return measured.peak_anonymous_bytes / 1e6


def _export_holes(work: Path, sizes: tuple[int, ...]) -> list[Series]:
    """Export checkpoints that ``_SAVING_RANKS`` ranks saved, with all weights 0, index and model card."""
    found: dict[tuple[str, str], dict[int, float]] = {}
    for billions in sizes:
        checkpoint = work / f"checkpoint-{billions}"
        target = work / f"export-{billions}"
        _write_sparse_checkpoint(ROOT / checkpoint, billions)
        words = ("python", "-m", "benchmarks.peers.export_step", "ours", str(checkpoint), str(target))
        with holes_for_zeros(ROOT / work):
            measured = run(Command(words))
        index = json.loads((ROOT / target / "model.safetensors.index.json").read_text(encoding="utf-8"))
        sizes_of_files = [file.stat().st_size for file in (ROOT / target).glob("*.safetensors")]
        values = {
            ("export of zeros: memory without pages of files", "MB"): _anonymous_megabytes(measured),
            ("export of zeros: CPU", "s"): measured.cpu_seconds,
            ("export of zeros: written", "GB"): sum(sizes_of_files) / 1e9,
            ("export of zeros: files of weights", "files"): len(set(index["weight_map"].values())),
            ("export of zeros: model card", "kB"): (ROOT / target / "README.md").stat().st_size / 1e3,
        }
        for name, value in values.items():
            found.setdefault(name, {})[billions] = value
        for folder in (checkpoint, target):
            shutil.rmtree(ROOT / folder)
    simulated = "the checkpoint's weights are holes, read as zeros; written zeros are given back to the file system"
    real = "convert_to_hf.py's writing of all bytes, index and model card, without verification"
    return [_series(quantity, unit, values, simulated, real) for (quantity, unit), values in found.items()]


def _write_sparse_checkpoint(folder: Path, billions: int) -> None:
    """Write a sharded checkpoint without content."""
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    from fabric_train.checkpoint.rank_writer import join_rank_hashes
    from tests.support.sparse_checkpoints import entries, write_parts

    config = config_of(billions)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    write_parts(folder, shapes, _SAVING_RANKS, step=1)
    join_rank_hashes(folder, entries(shapes))
    config.save_pretrained(folder)
    GenerationConfig.from_model_config(config).save_pretrained(folder)
    shutil.copytree(real_data.smollm2(), folder / "tokenizer", ignore=shutil.ignore_patterns("*.safetensors"))


@contextmanager
def holes_for_zeros(folder: Path) -> Iterator[None]:
    """Give the space of zeros in growing exports below a folder back to the file system, in a thread.

    Pages of the checkpoints there leave memory, too: to use pages again costs less than new ones. Use it only where
    everything after the first ``_KEPT_BYTES`` of each file is 0: a hole reads as zeros (fallocate(2)).

    Raises:
        OSError: the file system has no holes.
    """
    probe = folder / "probe"
    ended = threading.Event()
    probe.write_bytes(bytes(2 * _KEPT_BYTES))
    _punch(probe)  # before an export fills the disk
    with ThreadPoolExecutor(1) as thread:
        punching = thread.submit(_punch_until, ended, folder)
        try:
            yield
        finally:
            ended.set()
        punching.result()


def _punch_until(ended: threading.Event, folder: Path) -> None:
    while not ended.wait(0.05):
        for file in folder.glob("checkpoint-*/model/*.safetensors"):
            with file.open("rb") as opened:
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        for file in folder.glob(".export-*/*.safetensors"):  # the folder has its name when it is complete
            with suppress(FileNotFoundError):
                _punch(file)


def _punch(file: Path) -> None:
    """Make a hole of everything after the first ``_KEPT_BYTES`` of a file."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    with file.open("r+b") as opened:
        size = os.fstat(opened.fileno()).st_size - _KEPT_BYTES
        if size > 0 and libc.fallocate(opened.fileno(), _PUNCH_HOLE, _KEPT_BYTES, size):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(file))


if __name__ == "__main__":
    print(json.dumps(open_and_read(Path(sys.argv[1]))))
