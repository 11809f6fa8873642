"""Measure a token dataset of parts: its merge, and a rank's start, memory, opens and reads at up to 10⁸ rows.

``python -m benchmarks.scale.dataset FOLDER STEP`` is the rank: it opens the dataset, reads the first batch after a
step, and prints what that took. The parts are hard links to one real token dataset with other names of sources.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.measure import ROOT, Command, Measurement, run
from benchmarks.scale.series import Point, Series
from fabric_train.data.data_order import DataOrder
from fabric_train.data.step_sampler import TrainBatches, WindowOrder
from fabric_train.data.token_dataset import open_dataset

# of each part
ROWS = 134_336
NUM_DOCUMENTS = 1_000_000
LENGTH = 64
NUM_PARTS = (10, 100, 1_000)
NUM_SOURCES = 100
FULL_MERGES = (2, 8, 16)
LATER_STEP = 1_000_000
ROWS_PER_STEP = 1_024
ROWS_PER_RANK = 4
NUM_RANKS = 256
_STEPS = 50
_UNITS = {"CPU": "s", "wall": "s", "memory": "MB", "size": "MB", "bytes": "MB"}  # by what a quantity's name has
_MARKER = "/the-first-batch-is-here"
_CALLS = "openat,newfstatat,stat,fstat,statx,read,pread64,mmap"


@dataclass(frozen=True)
class Start:
    """A rank's way to its first batch, and ``_STEPS`` further ones.

    ``cpu_seconds`` are from before the dataset is opened to the batch, and do not include imports. Megabytes are peaks
    of the resident memory, with shared libraries and mapped pages of files.
    """

    seconds: float
    cpu_seconds: float
    megabytes_of_imports: float
    megabytes: float
    megabytes_after_steps: float
    milliseconds_per_step: float


def measure(work: Path) -> list[Series]:
    """Measure merges and starts at growing numbers of parts.

    Raises:
        ChildProcessError: a program failed.
    """
    folder = ROOT / work
    part = folder / "part"
    _tokenize(folder, part)
    points: dict[str, list[Point]] = {}

    def add(name: str, size: int, value: float) -> None:
        points.setdefault(name, []).append(Point(size, value))

    for count in FULL_MERGES:
        megabytes = count * sum(file.stat().st_size for file in part.rglob("*.*")) // 10**6
        merged = _merge(_linked(folder / f"full-{count}", part, count), folder / "merged")
        add("full merge, wall", megabytes, merged.seconds)
        add("full merge, CPU", megabytes, merged.cpu_seconds)
        shutil.rmtree(folder / "merged")
    for count in NUM_PARTS:
        joined = folder / f"joined-{count}"
        merged = _merge(_linked(folder / f"parts-{count}", part, count), joined, "--parts", "true")
        add("merge --parts, wall", count, merged.seconds)
        add("merge --parts, CPU", count, merged.cpu_seconds)
        add("size of the folder", count, sum(file.stat().st_size for file in joined.rglob("*.*")) / 1e6)
        for name, step in (("start", 0), (f"resume at step {LATER_STEP:,}", LATER_STEP)):
            started = _start(joined, step)
            add(f"{name}: to the first batch, CPU", count, started.cpu_seconds)
            add(f"{name}: to the first batch, wall", count, started.seconds)
            add(f"{name}: memory of the rank", count, started.megabytes)
            add(f"{name}: memory of its imports alone", count, started.megabytes_of_imports)
            add(f"{name}: memory of the rank after {_STEPS} further steps", count, started.megabytes_after_steps)
            add(f"{name}: a further step, CPU", count, started.milliseconds_per_step / 1000)
        for what, number in _count(joined).items():
            add(what, count, number)
    return [_series(name, tuple(of_name)) for name, of_name in points.items()]


def _series(name: str, points: tuple[Point, ...]) -> Series:
    limits = {"first batch, CPU": 10.0, "memory of the rank": 500.0}
    return Series(
        part="dataset",
        quantity=name,
        unit=next((unit for part, unit in _UNITS.items() if part in name), "calls"),
        sizes_of="MB of token datasets" if name.startswith("full merge") else f"parts of {ROWS:,} rows",
        points=points,
        simulated="parts are hard links to one token dataset, with other names of sources; one rank of "
        f"{NUM_RANKS} runs, without a model; the files are in the page cache",
        real="tokenize_dataset.py, merge, opening, order, data loader and batches of the trainer",
        limit=next((value for end, value in limits.items() if name.endswith(end)), None),
    )


def _tokenize(folder: Path, part: Path) -> None:
    """Make a token dataset of ``ROWS`` rows with ``NUM_DOCUMENTS`` documents."""
    from fabric_train.sample_data.real_data import smollm2

    documents = folder / "documents.jsonl"
    with documents.open("w", encoding="utf-8") as file:
        for number in range(NUM_DOCUMENTS):
            file.write(json.dumps({"text": f"the word {number % 7919}"[: 12 + number % 5]}) + "\n")
    words = ["tokenize_dataset.py", "--dataset", f"source={documents}", "--tokenizer_name", str(smollm2())]
    words += ["--output_dir", str(part), "--max_length", str(LENGTH), "--validation_split", "0.01"]
    run(Command(("python", *words)))


def _linked(folder: Path, part: Path, count: int) -> list[Path]:
    """Make ``count`` token datasets of hard links to ``part``, of ``NUM_SOURCES`` sources in turn."""
    manifest = (part / "manifest.json").read_text(encoding="utf-8")
    folders = [folder / f"{number:05d}" for number in range(count)]
    for number, one in enumerate(folders):
        shutil.copytree(part, one, copy_function=os.link)
        (one / "manifest.json").unlink()
        (one / "manifest.json").write_text(manifest.replace('"source"', f'"source-{number * NUM_SOURCES // count}"'))
    return folders


def _merge(folders: list[Path], target: Path, *flags: str) -> Measurement:
    words = ("python", "-m", "fabric_train.tokenization.merge", *map(str, folders), "--output_dir", str(target), *flags)
    return run(Command(words))


def _rank(folder: Path, step: int) -> Command:
    words = ("python", "-m", "benchmarks.scale.dataset", str(folder), str(step))
    return Command(words, {"RANK": "7", "WORLD_SIZE": str(NUM_RANKS), "OMP_NUM_THREADS": "1"})


def _start(folder: Path, step: int) -> Start:
    return Start(**json.loads(run(_rank(folder, step)).output))


def _count(folder: Path) -> dict[str, float]:
    """Count with strace the calls on files of the dataset until the first batch of a rank, and in its further steps."""
    command = _rank(folder, 0)
    counts = {"start": Counter[str](), "steps": Counter[str]()}
    with tempfile.NamedTemporaryFile() as file:
        traced = ("strace", "--seccomp-bpf", "-f", "-y", "-e", f"trace={_CALLS}", "-o", file.name, sys.executable)
        environment = {**os.environ, **command.environment}
        words = (*traced, *command.words[1:], "traced")
        subprocess.run(words, env=environment, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        lines = Path(file.name).read_text(errors="replace").splitlines()
    own = counts["start"]
    for line in lines:
        own = counts["steps"] if _MARKER in line else own
        called = re.match(r"\d+ +(\w+)\(", line)
        if called and str(folder.parent) in line:
            own["stat" if "stat" in called[1] else called[1]] += 1
            if called[1] in ("read", "pread64") and (size := re.search(r"= (\d+)$", line)):
                own["bytes"] += int(size[1])
    return {
        "opens of a rank to its first batch": counts["start"]["openat"],
        "stats of a rank to its first batch": counts["start"]["stat"],
        "bytes that a rank reads to its first batch": counts["start"]["bytes"] / 1e6,
        "opens of a rank in a further step": counts["steps"]["openat"] / _STEPS,
        "stats of a rank in a further step": counts["steps"]["stat"] / _STEPS,
    }


def start(folder: str, step: int, *, imports_all: bool) -> None:
    """Open a dataset as a rank does, read its first batch after a step and more, and print what that took."""
    if imports_all:  # what a rank imports; it opens no file of the dataset
        import fabric_train.preflight.prepare  # noqa: F401

    before = _megabytes()
    seconds = time.monotonic()
    cpu = time.process_time()
    dataset = open_dataset(folder)
    order = DataOrder.for_dataset(dataset.fingerprint, len(dataset.train), ROWS_PER_STEP, seed=0)
    rank = int(os.environ.get("RANK", "0"))
    windows = WindowOrder(
        order.num_rows, ROWS_PER_STEP, ROWS_PER_RANK, NUM_RANKS, rank, order.seed, version=order.version
    )
    dataset.train.pieces([0])
    train_batches = TrainBatches(dataset.train, windows, 0, False, known_step=step, known_hash="00" * 16)
    batches = train_batches.windows(step, step + 1 + _STEPS)
    next(batches)
    seconds = time.monotonic() - seconds
    cpu = time.process_time() - cpu
    peak = _megabytes()
    os.path.exists(_MARKER)  # for strace
    of_steps = time.process_time()
    for _ in batches:
        pass
    of_steps = (time.process_time() - of_steps) / _STEPS
    print(json.dumps(asdict(Start(seconds, cpu, before, peak, _megabytes(), 1000 * of_steps))))


def _megabytes() -> float:
    """Return the largest resident memory of this process so far."""
    (line,) = (one for one in Path("/proc/self/status").read_text().splitlines() if one.startswith("VmHWM"))
    return int(line.split()[1]) * 1024 / 1e6


if __name__ == "__main__":
    start(sys.argv[1], int(sys.argv[2]), imports_all="traced" not in sys.argv)
