"""The systems that tokenize: each one's command, the packages it needs, and how to read its output."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks.corpora import Corpus
from benchmarks.measure import ROOT, Command, run
from benchmarks.packages import install_packages
from benchmarks.token_rows import TokenRows, read_dataset, read_datatrove, read_litdata, read_token_dataset
from fabric_train.sample_data import real_data

NUM_PROC = 2
MAX_LENGTH = 2048
OURS = "fabric_train"
GIGATOKEN = "bare_gigatoken"
BARE = "bare_tiktoken"
RECIPE = "datasets_map"
DATATROVE = "datatrove"
TRL = "trl"
LITDATA = "litdata"


@dataclass(frozen=True)
class Peer:
    """A script in peers/, a function that reads its output, if any, and whether its workers take whole files."""

    script: str
    read: Callable[[Path, int], TokenRows] | None
    has_packages: bool = False
    by_file: bool = False


PEERS: Mapping[str, Peer] = {
    GIGATOKEN: Peer("bare_gigatoken.py", None),
    BARE: Peer("bare_tiktoken.py", None),
    RECIPE: Peer("datasets_map.py", read_dataset),
    DATATROVE: Peer("datatrove_tokens.py", read_datatrove, has_packages=True, by_file=True),
    TRL: Peer("trl_packing.py", read_dataset, has_packages=True),
    LITDATA: Peer("litdata_optimize.py", read_litdata, has_packages=True, by_file=True),
}


def prepare_peers() -> tuple[dict[str, Path], dict[str, str]]:
    """Install the peers' packages; return their folders, and the peers that cannot run here with the reason."""
    packages: dict[str, Path] = {}
    left_out: dict[str, str] = {}
    for name, peer in PEERS.items():
        if not peer.has_packages:
            continue
        try:
            packages[name] = install_packages(name)
            run(Command(("python", _script(name), "--help"), _environment(name, packages)))
        except ChildProcessError as error:
            left_out[name] = str(error)
            print(f"left out: {error}", flush=True)
    return packages, left_out


def our_command(dataset: Path, tokenizer: Path, target: Path) -> Command:
    """Return the command of ``tokenize_dataset.py``."""
    options = {"dataset": dataset, "tokenizer_name": tokenizer, "output_dir": target, "max_length": MAX_LENGTH}
    words = _line({**options, "num_proc": NUM_PROC, "validation_split": 0})
    return Command(("python", "tokenize_dataset.py", *words))


def bare_gigatoken_command(dataset: Path, tokenizer: Path, target: Path) -> Command:
    """Return the command of the bare loop with gigatoken, which encodes with as many threads as there are processes."""
    options = {"dataset": dataset, "tokenizer_name": tokenizer, "output_dir": target, "num_proc": NUM_PROC}
    return Command(("python", _script(GIGATOKEN), *_line(options)))


def peer_command(name: str, corpus: Corpus, tokenizer: Path, work: Path, packages: Mapping[str, Path]) -> Command:
    """Return the command of a peer that writes into ``work/NAME``, with the cache of ``datasets`` in ``work/cache``."""
    peer = PEERS[name]
    if name == GIGATOKEN:
        return bare_gigatoken_command(corpus.file.relative_to(ROOT), tokenizer, work / name)
    dataset = corpus.parts if peer.by_file else corpus.file
    options: dict[str, object] = {"dataset": dataset.relative_to(ROOT), "num_proc": NUM_PROC}
    if name == BARE:
        options["tokenizer_model"] = real_data.llama3_tokenizer_model().relative_to(ROOT)
    else:
        options |= {"tokenizer_name": tokenizer, "output_dir": work / name}
    if name not in (GIGATOKEN, BARE, DATATROVE):  # these write no rows
        options["max_length"] = MAX_LENGTH
    environment = _environment(name, packages)
    if name in (RECIPE, TRL):
        environment["HF_DATASETS_CACHE"] = str(work / "cache")
    return Command(("python", _script(name), *_line(options)), environment)


def read_rows(name: str, folder: Path) -> TokenRows:
    """Read the rows that a system has written into ``folder``."""
    read = read_token_dataset if name == OURS else PEERS[name].read
    assert read is not None, f"{name} writes nothing"
    return read(folder, MAX_LENGTH)


def _environment(name: str, packages: Mapping[str, Path]) -> dict[str, str]:
    return {"PYTHONPATH": str(packages[name].relative_to(ROOT))} if name in packages else {}


def _script(name: str) -> str:
    return f"benchmarks/peers/{PEERS[name].script}"


def _line(options: Mapping[str, object]) -> list[str]:
    return [word for name, value in options.items() for word in (f"--{name}", str(value))]
