"""Tokenize with datatrove: ``JsonlReader`` and ``DocumentTokenizer``, one task a file.

Documents keep their order (``shuffle_documents=False``), which is fastest, and get BOS and EOS as in all systems.
"""

import argparse
from pathlib import Path

from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline.readers import JsonlReader
from datatrove.pipeline.tokens import DocumentTokenizer
from tokenizers.processors import TemplateProcessing

BOS = ("<|begin_of_text|>", 128_000)
EOS = ("<|end_of_text|>", 128_001)


def main() -> None:
    """Tokenize the documents given on the command line."""
    parser = argparse.ArgumentParser()
    for name in ("--dataset", "--tokenizer_name", "--output_dir"):
        parser.add_argument(name, required=True)
    parser.add_argument("--num_proc", type=int, required=True)
    arguments = parser.parse_args()

    tokenizer_file = str(Path(arguments.tokenizer_name, "tokenizer.json"))
    tokenize = DocumentTokenizer(arguments.output_dir, tokenizer_file, shuffle_documents=False)
    tokenize.post_processor = TemplateProcessing(single=f"{BOS[0]} $A {EOS[0]}", special_tokens=[BOS, EOS])
    executor = LocalPipelineExecutor(
        [JsonlReader(arguments.dataset), tokenize],
        tasks=arguments.num_proc,
        workers=arguments.num_proc,
        logging_dir=f"{arguments.output_dir}/logs",
    )
    executor.run()


if __name__ == "__main__":
    main()
