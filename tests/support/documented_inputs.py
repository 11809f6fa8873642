"""Stand-ins for what the documents' commands read: the models, texts, chats and pairs, as small as can be."""

import json
import shutil
from pathlib import Path

import pyarrow as pa

from tests.support.programs import ROOT

_MODELS = (
    "meta-llama/Meta-Llama-3-8B",
    "MODEL",
    "MODELO_ANTIGUO",
    "NAME",
    "TOKENIZER",
    "HuggingFaceTB/SmolLM2-135M",
    "models/llama-3-8b",
    "models/llama-3-1b",
    "models/llama-3-70b",
    "models/half",
    "models/pruned",
    "models/smollm2-135m",
    "models/smollm2-ca",
    "models/salamandra-7b",
    "models/extended",
    ".cache/smollm2-135m",
)
_TEXTS = (
    "corpus/a.jsonl",
    "corpus/ca/b.jsonl",
    "corpus/va/c.jsonl",
    "more/c.jsonl.zst",
    "more.jsonl.zst",
    "eval/es.jsonl",
    "eval/ca/a.jsonl",
    "eval/ca.jsonl",
    "eval/en.jsonl",
    "textos/va.jsonl",
    "textos/es.jsonl",
)
_PLAYS = (".cache/shakespeare.jsonl", ".cache/bible-es.jsonl")
_CHATS = ("chats.jsonl", ".cache/chats.jsonl")
_PAIRS = ("pairs.jsonl", ".cache/pairs.jsonl")
_VERSE = "In the beginning was the word, and many more words came after it. "
_NUM_DOCUMENTS = 40


def write_stand_ins(folder: Path, model: Path, plays: list[str]) -> None:
    """Write into ``folder`` what the documents' commands read, under the names that they have.

    Args:
        folder: in which the commands run.
        model: stands for all models. A name of a model on the hub is a folder here, which the programs prefer.
        plays: the first lines of the Shakespeare of the demo.
    """
    (folder / "configs").symlink_to(ROOT / "configs")
    for name in _MODELS:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).symlink_to(model)
    # a folder of its own, because it is merged with the model that it began with
    shutil.copytree(model, folder / "meta-llama/Meta-Llama-3-8B-Instruct")

    texts = []
    chats = []
    pairs = []
    unpaired_answers = []
    for addend in range(_NUM_DOCUMENTS):
        question = f"{addend} + {addend}?"
        answer = str(2 * addend)
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        texts.append(json.dumps({"text": f"{addend}. {_VERSE * 9}"}))
        chats.append(json.dumps({"messages": messages}))
        pairs.append(json.dumps({"prompt": question, "chosen": answer, "rejected": f"{addend}, no"}))
        unpaired_answers.append(json.dumps({"prompt": question, "completion": answer, "label": addend % 3 > 0}))
    lines_by_name = {
        **dict.fromkeys(_TEXTS, texts),
        **dict.fromkeys(_PLAYS, plays),
        **dict.fromkeys(_CHATS, chats),
        **dict.fromkeys(_PAIRS, pairs),
        "answers.jsonl": unpaired_answers,
        "prompts.jsonl": [json.dumps({"prompt": "La llengua"})],
        "questions.txt": ["What is a word?"],
        "eval/en.txt": [_VERSE * 9],
    }
    for name, lines in lines_by_name.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        content = "".join(f"{line}\n" for line in lines).encode()
        if name.endswith(".zst"):
            with pa.CompressedOutputStream(folder / name, "zstd") as compressed:
                compressed.write(content)
        else:
            (folder / name).write_bytes(content)
