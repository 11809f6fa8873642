"""Encode text as Llama-3 tokens with gigatoken's ``encode_batch``, and write int32; one process, no BOS, EOS or rows.

Print the number of tokens and the seconds spent encoding as JSON.
"""

import argparse
import json
import time
from itertools import islice
from pathlib import Path

import numpy as np
import orjson
from gigatoken import Tokenizer

BATCH_DOCUMENTS = 2_000


def main() -> None:
    """Encode the documents given on the command line."""
    parser = argparse.ArgumentParser()
    for name in ("--dataset", "--tokenizer_name", "--output_dir"):
        parser.add_argument(name, required=True)
    parser.add_argument("--num_proc", type=int, required=True, help="1: encode in one thread; more: in gigatoken's own")
    arguments = parser.parse_args()

    tokenizer = Tokenizer(f"{arguments.tokenizer_name}/tokenizer.json")
    target = Path(arguments.output_dir)
    target.mkdir()
    num_tokens = 0
    seconds = 0.0
    with open(arguments.dataset, "rb") as lines, (target / "tokens").open("wb") as file:
        while batch := [orjson.loads(line)["text"] for line in islice(lines, BATCH_DOCUMENTS)]:
            started = time.perf_counter()
            encoded = tokenizer.encode_batch(batch, parallel=arguments.num_proc > 1)
            seconds += time.perf_counter() - started
            ids = np.asarray(encoded.layout.content.data).astype(np.int32)
            file.write(ids.data)
            num_tokens += len(ids)
    print(json.dumps({"tokens": num_tokens, "encoding_seconds": seconds}))


if __name__ == "__main__":
    main()
