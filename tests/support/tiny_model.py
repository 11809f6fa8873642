"""Write a seeded random Llama of two small layers with a byte-level BPE tokenizer; it trains in milliseconds.

torch, transformers and tokenizers are imported where they are used: not every process that imports this module needs
them, and their import takes seconds.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import LlamaConfig, LlamaForCausalLM

VOCABULARY = 1000
BOS = "<|begin_of_text|>"
EOS = "<|end_of_text|>"


def write_tiny_model(folder: Path, texts: Iterable[str]) -> None:
    """Write a ``LlamaForCausalLM`` (hidden 64, tied, fp32, 256 positions) and a tokenizer trained on the texts."""
    vocabulary_size = write_tokenizer(folder, texts)
    write_tiny_llama(folder, vocabulary_size)


def write_tiny_llama(folder: Path, vocabulary_size: int) -> None:
    """Write such a model without a tokenizer."""
    from transformers import LlamaConfig

    config = LlamaConfig(
        vocab_size=vocabulary_size,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=1,
        dtype="float32",
    )
    random_llama(config).save_pretrained(folder)


def random_llama(config: "LlamaConfig") -> "LlamaForCausalLM":
    """Return a Llama with random weights, the same for the same configuration, on the CPU.

    The random generator of this process stays as it was, so a test does not depend on whether it makes the model.
    """
    import torch
    from transformers import LlamaForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return LlamaForCausalLM(config)


def write_tokenizer(folder: Path, texts: Iterable[str]) -> int:
    """Train a byte-level BPE tokenizer on texts and write it.

    Returns:
        The number of its ids.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    _add_bos(tokenizer, BOS)
    fast_tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=BOS, eos_token=EOS, model_max_length=256
    )
    fast_tokenizer.save_pretrained(folder)
    return len(fast_tokenizer)


def write_llama3_like_tokenizer(folder: Path, small_tokenizer_dir: Path) -> None:
    """Write a small byte-level tokenizer with Llama-3's special tokens, split pattern and added BOS.

    Args:
        folder: of the new tokenizer.
        small_tokenizer_dir: has the tokenizer whose vocabulary it gets. Its special tokens, which have the first ids,
            become those of Llama-3 in their order.
    """
    from tokenizers import Regex, Tokenizer, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from fabric_train.tokenization.tokenizers.llama3_ranks import BOS, EOS, SPECIAL_TOKENS, SPLIT_PATTERN

    content = json.loads((small_tokenizer_dir / "tokenizer.json").read_text(encoding="utf-8"))
    # a special token is in the vocabulary and in the list of added tokens
    new_names = {}
    for token in content["added_tokens"]:
        new_names[token["content"]] = SPECIAL_TOKENS[token["id"]]
        token["content"] = SPECIAL_TOKENS[token["id"]]
    vocabulary = content["model"]["vocab"]
    content["model"]["vocab"] = {new_names.get(token, token): index for token, index in vocabulary.items()}

    tokenizer = Tokenizer.from_str(json.dumps(content))
    split = pre_tokenizers.Split(Regex(SPLIT_PATTERN), behavior="isolated")
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, bytes_only])
    _add_bos(tokenizer, BOS)
    fast_tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=BOS, eos_token=EOS, pad_token="<|finetune_right_pad_id|>"
    )
    fast_tokenizer.save_pretrained(folder)


def write_sentencepiece_tokenizer(folder: Path, text: str) -> None:
    """Train a SentencePiece model with Llama-2's settings on the text, and write its tokenizer."""
    import sentencepiece

    from fabric_train.tokenization.tokenizers.tokenizer import load_tokenizer

    with (folder / "tokenizer.model").open("wb") as model:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(text.splitlines()),
            model_writer=model,
            vocab_size=VOCABULARY,
            model_type="bpe",
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            byte_fallback=True,
            minloglevel=2,
        )
    load_tokenizer(str(folder / "tokenizer.model")).save(folder)


def _add_bos(tokenizer: "Tokenizer", bos: str) -> None:
    """Let a tokenizer add BOS but no EOS, as Llama-3's does."""
    from tokenizers import processors

    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, tokenizer.token_to_id(bos))]
    )
