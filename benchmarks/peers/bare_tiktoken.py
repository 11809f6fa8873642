"""Encode text as Llama-3 tokens with tiktoken's ``encode_ordinary_batch``; pack and write nothing.

Print the number of tokens and the seconds spent encoding as JSON.
"""

import argparse
import base64
import json
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from tiktoken import Encoding

# from llama_models/llama3/tokenizer.py
PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
BATCH_DOCUMENTS = 2_000


def read_texts(path: str) -> Iterator[str]:
    """Yield the documents of a jsonl file."""
    with open(path, encoding="utf-8") as lines:
        for line in lines:
            yield json.loads(line)["text"]


def main() -> None:
    """Encode the documents given on the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--dataset", required=True)
    parser.add_argument("--tokenizer_model", required=True, help="Meta's tokenizer.model")
    parser.add_argument("--num_proc", type=int, required=True, help="threads")
    arguments = parser.parse_args()

    lines = Path(arguments.tokenizer_model).read_bytes().splitlines()
    ranks = {base64.b64decode(token): int(rank) for token, rank in (line.split() for line in lines)}
    encoding = Encoding("llama-3", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={})
    texts = read_texts(arguments.dataset)
    num_tokens = 0
    seconds = 0.0
    while batch := list(islice(texts, BATCH_DOCUMENTS)):
        started = time.perf_counter()
        num_tokens += sum(map(len, encoding.encode_ordinary_batch(batch, num_threads=arguments.num_proc)))
        seconds += time.perf_counter() - started
    print(json.dumps({"tokens": num_tokens, "encoding_seconds": seconds}))


if __name__ == "__main__":
    main()
