"""Tokenize with litdata: ``optimize`` with a ``TokensLoader``, one task a file."""

import argparse
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
from litdata import TokensLoader, optimize
from tokenizers import Tokenizer

BOS = 128_000
EOS = 128_001
BATCH_DOCUMENTS = 1_000
CHUNK_BYTES = "64MB"


def tokenize(path: str, tokenizer_file: str) -> Iterator["np.ndarray"]:
    """Yield the ids of each document of a jsonl file, with BOS and EOS."""
    tokenizer = Tokenizer.from_file(tokenizer_file)
    with open(path, encoding="utf-8") as lines:
        texts = [json.loads(line)["text"] for line in lines]
    for start in range(0, len(texts), BATCH_DOCUMENTS):
        for encoding in tokenizer.encode_batch_fast(texts[start : start + BATCH_DOCUMENTS], add_special_tokens=False):
            yield np.array([BOS, *encoding.ids, EOS], dtype=np.int32)


def main() -> None:
    """Tokenize the documents given on the command line."""
    parser = argparse.ArgumentParser()
    for name in ("--dataset", "--tokenizer_name", "--output_dir"):
        parser.add_argument(name, required=True)
    for name in ("--max_length", "--num_proc"):
        parser.add_argument(name, type=int, required=True)
    arguments = parser.parse_args()

    optimize(
        fn=partial(tokenize, tokenizer_file=str(Path(arguments.tokenizer_name, "tokenizer.json"))),
        inputs=[str(path) for path in sorted(Path(arguments.dataset).glob("*.jsonl"))],
        output_dir=arguments.output_dir,
        chunk_bytes=CHUNK_BYTES,
        item_loader=TokensLoader(block_size=arguments.max_length),
        num_workers=arguments.num_proc,
        keep_data_ordered=True,
    )


if __name__ == "__main__":
    main()
