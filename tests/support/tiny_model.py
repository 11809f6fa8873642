"""Write a seeded random Llama of two small layers with a byte-level BPE tokenizer; it trains in milliseconds."""

import json
from collections.abc import Iterable
from pathlib import Path

VOCABULARY = 1000
BOS = "<|begin_of_text|>"
EOS = "<|end_of_text|>"


def write_tiny_model(folder: Path, texts: Iterable[str]) -> None:
    """Write a ``LlamaForCausalLM`` (hidden 64, tied, fp32, 256 positions) and a tokenizer trained on the texts."""
    write_tiny_llama(folder, write_tokenizer(folder, texts))


def write_tiny_llama(folder: Path, size: int) -> None:
    """Write such a model with a vocabulary of ``size`` tokens."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=size,
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
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        LlamaForCausalLM(config).save_pretrained(folder)


def write_tokenizer(folder: Path, texts: Iterable[str]) -> int:
    """Train and write the tokenizer; return its number of ids."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=[BOS, EOS], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    # like Llama-3's tokenizer, it adds BOS but no EOS
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=BOS, eos_token=EOS, model_max_length=256)
    fast.save_pretrained(folder)
    return len(fast)


def write_llama3_like_tokenizer(folder: Path, small: Path) -> None:
    """Write the byte-level tokenizer in ``small`` with Llama-3's special tokens, split pattern and added BOS.

    Its first ids belong to Llama-3's special tokens in their order.
    """
    from tokenizers import Regex, Tokenizer, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    from fabric_train.tokenization.tokenizers.llama3_ranks import BOS, EOS, SPECIAL_TOKENS, SPLIT_PATTERN

    content = json.loads((small / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary = content["model"]["vocab"]
    names = {}
    for token in content["added_tokens"]:
        names[token["content"]] = token["content"] = SPECIAL_TOKENS[token["id"]]
    content["model"]["vocab"] = {names.get(token, token): index for token, index in vocabulary.items()}
    tokenizer = Tokenizer.from_str(json.dumps(content))
    split = pre_tokenizers.Split(Regex(SPLIT_PATTERN), behavior="isolated")
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, bytes_only])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=BOS, eos_token=EOS, pad_token="<|finetune_right_pad_id|>"
    )
    fast.save_pretrained(folder)


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
