"""The commands in the shell blocks of the documents, what a page shows of their output, and stand-ins to run them."""

import json
import re
import shlex
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from tests.support.programs import ROOT

_BLOCK = re.compile(
    r"^( *)```bash\n(?P<commands>.*?)^\1```$(?:\s*^\1```(?:text)?\n(?P<shown>.*?)^\1```$)?", re.M | re.S
)
_SAVED = re.compile(r"(Save this as `(?P<name>[\w.]+)`.*\n\n)```python\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Command:
    """A command line of a page, and the lines that the page shows of its output; none if it shows nothing."""

    line: str
    shown: tuple[str, ...] = ()


def commands_in(text: str) -> Iterator[Command]:
    """Yield the whole command lines of a document's shell blocks; the output of a block belongs to its last one.

    A script that the reader is to save is a command that writes it.
    """
    text = _SAVED.sub(lambda found: f"```bash\ncat > {found['name']} <<'END'\n{found['text']}END\n```", text)
    for block in _BLOCK.finditer(text):
        # a text between <<'END' and END belongs to its command
        found = re.finditer(r"^.*<<'(\w+)'\n(?:.*\n)*?\1$|^.+$", block["commands"].replace("\\\n", " "), re.MULTILINE)
        lines = [line[0].strip() for line in found if line[0].strip() and not line[0].strip().startswith("#")]
        shown = tuple(line for line in (block["shown"] or "").splitlines() if line.strip())
        yield from (Command(line) for line in lines[:-1])
        yield Command(lines[-1], shown)


def words_of(line: str) -> list[str]:
    """Return the words of a command line, without comments."""
    return shlex.split(line, comments=True)


def plain(output: str) -> str:
    """Return an output in one line without the borders of its tables, which a file and a terminal have differently."""
    return " ".join(re.sub("[\u2500-\u257f]+", " ", output).split())


def pattern_of(shown: str) -> str:
    """Return a pattern of a line of output: any number for a number, any text for …, any blanks for blanks."""
    numbers = re.compile(r"\d[\d.,]*(?:e[+-]\d+)?")
    parts = []
    for part in plain(shown).split("…"):
        quoted = [r"\s+".join(map(re.escape, text.split(" "))) for text in numbers.split(re.sub(r"\s+", " ", part))]
        parts.append(r"\d[\d.,]*(?:e[+-]\d+)?".join(quoted))
    return ".*".join(parts)


def write_stand_ins(folder: Path, model: Path, plays: list[str]) -> None:
    """Write into ``folder`` what the documents' commands read, as small as can be, under the names that they have.

    A name of a model on the hub is a folder here, which the programs prefer. ``plays`` are the first lines of the
    Shakespeare of the demo.
    """
    (folder / "configs").symlink_to(ROOT / "configs")
    names = "meta-llama/Meta-Llama-3-8B MODEL MODELO_ANTIGUO NAME TOKENIZER "
    names += "HuggingFaceTB/SmolLM2-135M models/llama-3-8b models/smollm2-135m models/smollm2-ca "
    names += "models/salamandra-7b models/extended .cache/smollm2-135m"
    for name in names.split():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).symlink_to(model)
    shutil.copytree(model, folder / "meta-llama/Meta-Llama-3-8B-Instruct")  # merged with what it began with
    verse = "In the beginning was the word, and many more words came after it. "
    texts = [json.dumps({"text": f"{number}. {verse * 9}"}) for number in range(40)]
    turns = [[("user", f"{number} + {number}?"), ("assistant", str(2 * number))] for number in range(40)]
    chats = [json.dumps({"messages": [{"role": role, "content": said} for role, said in chat]}) for chat in turns]
    pairs = [json.dumps({"prompt": f"{n} + {n}?", "chosen": f"{2 * n}", "rejected": f"{n}, no"}) for n in range(40)]
    files = {
        **dict.fromkeys(
            (
                "corpus/a.jsonl",
                "corpus/ca/b.jsonl",
                "corpus/va/c.jsonl",
                "more/c.jsonl.zst",
                "more.jsonl.zst",
                "eval/es.jsonl",
            ),
            texts,
        ),
        **dict.fromkeys(
            ("eval/ca/a.jsonl", "eval/ca.jsonl", "eval/en.jsonl", "textos/va.jsonl", "textos/es.jsonl"), texts
        ),
        **dict.fromkeys((".cache/shakespeare.jsonl", ".cache/bible-es.jsonl"), plays),
        **dict.fromkeys(("chats.jsonl", ".cache/chats.jsonl"), chats),
        **dict.fromkeys(("pairs.jsonl", ".cache/pairs.jsonl"), pairs),
        "prompts.jsonl": [json.dumps({"prompt": "La llengua"})],
        "questions.txt": ["What is a word?"],
        "eval/en.txt": [verse * 9],
    }
    for name, lines in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        with (
            pa.CompressedOutputStream(folder / name, "zstd")
            if name.endswith(".zst")
            else open(folder / name, "wb") as file
        ):
            file.write("".join(f"{line}\n" for line in lines).encode())
