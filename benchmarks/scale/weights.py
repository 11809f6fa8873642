"""Open the weights of models up to 405B, read one rank's part of them, and export: seconds, memory and files opened.

The files are sparse: their headers are real, their weights a hole, which reads as zeros.
"""

import json
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.large_checkpoint import write_checkpoint
from benchmarks.measure import ROOT, Command, run
from benchmarks.scale.series import Point, Series
from sample_data import real_data

RANKS = 512
SHARD_SIZE = "5GB"
OPENED, EXPORTED = (8, 70, 405), (1, 3)  # billions of weights; exports are written in full


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
    return [*series, _series("memory of an export without pages of files", "MB", exports, "random weights", real)]


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
    started, part = time.perf_counter(), []
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
    checkpoint, target = work / f"checkpoint-{billions}", work / f"export-{billions}"
    write_checkpoint(ROOT / checkpoint, config_of(billions), real_data.smollm2(), sharded=True)
    words = ("python", "-m", "benchmarks.peers.export_step", "ours", str(checkpoint), str(target))
    measured = run(Command(words))
    for folder in (checkpoint, target):
        shutil.rmtree(ROOT / folder)
    if measured.peak_anonymous_bytes is None:
        raise ChildProcessError("this system does not tell the memory of a process without pages of files")
    return measured.peak_anonymous_bytes / 1e6


if __name__ == "__main__":
    print(json.dumps(open_and_read(Path(sys.argv[1]))))
