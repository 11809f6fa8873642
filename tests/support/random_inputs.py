"""Write a random Llama of a chosen size, and random rows: for measurements that do not depend on what is learned.

torch, transformers and datasets are imported where they are used: benchmarks import this module before they start
processes of their own.
"""

from pathlib import Path
from typing import Any

import numpy as np

LAYERS = 8
WIDTH = 512
VOCABULARY = 8192
LENGTH = 256


def write_model(folder: Path, **sizes: int) -> Path:
    """Write a seeded random Llama in fp32 with tied embeddings; return its folder.

    Args:
        folder: of the model.
        sizes: fields of ``LlamaConfig``; by default the model has about 30 million parameters.
    """
    from transformers import LlamaConfig

    from tests.support.tiny_model import random_llama

    all_sizes: dict[str, Any] = {
        "num_hidden_layers": LAYERS,
        "hidden_size": WIDTH,
        "vocab_size": VOCABULARY,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        **sizes,
    }
    config = LlamaConfig(
        **all_sizes,
        intermediate_size=11 * all_sizes["hidden_size"] // 4,
        tie_word_embeddings=True,
        dtype="float32",
    )
    random_llama(config).save_pretrained(folder)
    return folder


def write_rows(folder: Path, num_rows: int = 64, length: int = LENGTH) -> Path:
    """Write a token dataset of random rows of ``length`` tokens, each of one document; return its folder."""
    import datasets

    rows = np.random.default_rng(0).integers(3, 100, (num_rows, length)).tolist()
    datasets.DatasetDict({"train": datasets.Dataset.from_dict({"input_ids": rows})}).save_to_disk(str(folder))
    return folder
