"""Print what a push looks like to the user and to the hub: ``python -m tests.support.push_transcript``.

The programs are run as a user runs them, with a tiny model, against the stand-in for the hub. docs/publish.md shows
parts of the output.
"""

import os
import re
import shlex
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path
from tempfile import TemporaryDirectory

from fabric_train.tokenization import merge
from tests.support.checkpoint_examples import trained_weights, write_full
from tests.support.programs import ROOT
from tests.support.stand_in_hub import TOKEN, Fault, StandInHub
from tests.support.stand_in_hub_accounts import account
from tests.support.tiny_model import write_tiny_model
from tests.support.token_datasets import TEXTS, tokenize, write_jsonl

_REGISTRY = "/api/agent-harnesses"
"""huggingface_hub asks for it once a day, whatever it is used for."""

CONVERT = (
    "python convert_to_hf.py --checkpoint runs/1 --output_dir exports/1 --max_shard_size 100KB "
    "--push_to_hub alice/model --language ca"
)
TOKENIZE = (
    "python tokenize_dataset.py --dataset ca=corpus/ca.jsonl --tokenizer_name model --max_length 64 "
    "--validation_split 0.2 --output_dir data/tokens --push_to_hub alice/tokens --license cc-by-4.0"
)

PUBLISH = "python -m fabric_train.export.publish data/whole --push_to_hub alice/whole --license cc-by-4.0"


def main() -> None:
    """Print the transcript as Markdown."""
    with TemporaryDirectory() as temporary_dir, StandInHub(part_bytes=1 << 16) as hub:
        folder = Path(temporary_dir)
        write_tiny_model(folder / "model", TEXTS)
        weights = trained_weights(folder / "model")
        write_full(folder / "runs" / "1" / "checkpoints" / "step-00000500", folder / "model", weights, step=500)
        (folder / "corpus").mkdir()
        write_jsonl(folder / "corpus" / "ca.jsonl")

        hub.accounts[TOKEN] = account("alice", "read")
        show("A token that can only read", run(CONVERT, folder, hub))
        hub.accounts[TOKEN] = account("alice")
        hub.faults.append(Fault("PUT /lfs/.*/2$", after=1))
        show("The connection is cut, each time, after the first file of the weights", run(CONVERT, folder, hub))
        hub.faults.clear()
        show("The same command again", run(CONVERT, folder, hub))
        show("A pull request with another card", run(f"{CONVERT} --license mit --create_pr true", folder, hub))
        show("A token dataset", run(TOKENIZE, folder, hub))
        write_parts(folder)
        show("A token dataset of parts, and one is missing", run(PUBLISH, folder, hub))
        (folder / "data" / "moved").rename(folder / "data" / "more")
        show("The same with all parts", run(PUBLISH, folder, hub))


def write_parts(folder: Path) -> None:
    """Write ``data/whole`` of the parts ``data/tokens`` and ``data/more``; then the second is called ``data/moved``."""
    write_jsonl(folder / "corpus" / "es.jsonl", [f"Otro documento, {text}" for text in TEXTS])
    data = folder / "data"
    tokenize(data / "more", folder / "model", f"es={folder}/corpus/es.jsonl", max_length=64, validation_split=0.2)
    with redirect_stdout(None):
        merge.main([f"{data}/tokens", f"{data}/more", "--parts", "true", "--output_dir", f"{data}/whole"])
    (data / "more").rename(data / "moved")


def run(command: str, folder: Path, hub: StandInHub) -> str:
    """Run a command in a folder and return what it prints, its exit code, and the calls that the hub received."""
    _python, *words = shlex.split(command)
    if words[0] != "-m":
        words[0] = str(ROOT / words[0])
    environment = {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "HOME": str(folder / "home"),
        "PYTHONPATH": str(ROOT),
        "HF_TOKEN": TOKEN,
        "HF_ENDPOINT": hub.address,
        "HF_HUB_DISABLE_XET": "1",  # with hf_xet, uploads go to a storage of their own, and the hub does not see them
        "COLUMNS": "100",
    }
    hub.calls.clear()
    completed = subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    lines = [f"$ {command}"]
    lines += [line.rstrip() for line in completed.stdout.splitlines() if line.strip()]
    lines.append(f"exit code {completed.returncode}")
    printed = "\n".join(lines)
    assert TOKEN not in printed
    calls = "\n".join(call for call in hub.calls if _REGISTRY not in call) or "nothing"
    text = f"```\n{printed}\n```\n\nThe hub sees:\n\n```\n{calls}\n```"
    # the first 8 digits of a hash are enough for a reader
    text = re.sub(r"([0-9a-f]{8})[0-9a-f]{56}", r"\1…", text)
    return text.replace(hub.address, "https://HUB")


def show(title: str, text: str) -> None:
    """Print a section."""
    print(f"### {title}\n\n{text}\n", flush=True)


if __name__ == "__main__":
    main()
