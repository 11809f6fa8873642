"""Build the tokenizer from a list of BPE ranks (Llama-3's ``tokenizer.model``)."""

import base64
import binascii
import re
from pathlib import Path

from tokenizers import processors
from transformers import PreTrainedTokenizerFast

from fabric_train.cli.errors import InputError

NUM_RANKS = 128_000
NUM_SPECIAL_TOKENS = 256
BOS = "<|begin_of_text|>"
EOS = "<|end_of_text|>"
# as in Meta's llama-models, llama3/tokenizer.py; the file itself has neither the names nor the split pattern
SPLIT_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_NAMED_SPECIAL_TOKENS = (
    *(BOS, EOS, "<|reserved_special_token_0|>", "<|reserved_special_token_1|>", "<|finetune_right_pad_id|>"),
    *("<|reserved_special_token_2|>", "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", "<|eot_id|>"),
    "<|python_tag|>",
)
_NUM_RESERVED_TOKENS = NUM_SPECIAL_TOKENS - len(_NAMED_SPECIAL_TOKENS)
# the names of reserved tokens continue at 3
SPECIAL_TOKENS = _NAMED_SPECIAL_TOKENS + tuple(
    f"<|reserved_special_token_{3 + index}|>" for index in range(_NUM_RESERVED_TOKENS)
)


def is_rank_file(path: Path) -> bool:
    """Return whether the first line of ``path`` is base64 text, a space and a number."""
    with path.open("rb") as file:
        first_line = file.readline(4096)
    return re.fullmatch(rb"[A-Za-z0-9+/]+=* \d+\s*", first_line) is not None


def read_ranks(path: Path) -> dict[bytes, int]:
    """Return each token's rank, from 0 to 127,999; InputError if a line or the ranks are not Llama-3's."""
    ranks = {}
    for line_number, line in enumerate(path.read_bytes().splitlines(), start=1):
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error):
            fault = "not a base64 token and its rank; download the file again"
            raise InputError(f"{path}, line {line_number}: {fault}") from None
    has_all_ranks = sorted(ranks.values()) == list(range(NUM_RANKS))
    has_all_bytes = all(bytes([byte]) in ranks for byte in range(256))
    if not has_all_ranks or not has_all_bytes:
        raise InputError(
            f"{path} has {len(ranks):,} ranks, but in this format only Llama-3's {NUM_RANKS:,} are supported, since "
            "the file has no split pattern and no special tokens; give a folder with tokenizer.json"
        )
    return ranks


def load_llama3_ranks(path: Path, chat_template: str | None = None) -> PreTrainedTokenizerFast:
    """Build the tokenizer: the ranks, then Llama-3's 256 special tokens. Like Meta's, it adds BOS to each text."""
    from transformers.convert_slow_tokenizer import TikTokenConverter

    class Converter(TikTokenConverter):  # the parent class reads with tiktoken, which copies the file into a cache
        @staticmethod
        def load_tiktoken_bpe(tiktoken_url: str) -> dict[bytes, int]:
            return read_ranks(Path(tiktoken_url))

    tokenizer = Converter(str(path), pattern=SPLIT_PATTERN, extra_special_tokens=list(SPECIAL_TOKENS)).converted()
    tokenizer.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(
                single=f"{BOS} $A",
                pair=f"{BOS}:0 $A:0 {BOS}:1 $B:1",
                special_tokens=[(BOS, tokenizer.token_to_id(BOS))],
            ),
        ]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        pad_token="<|finetune_right_pad_id|>",
        model_input_names=["input_ids", "attention_mask"],
        clean_up_tokenization_spaces=False,
        chat_template=chat_template,
    )
