"""Load a tokenizer with transformers: a folder, a SentencePiece BPE model (Llama-2's) or a list of ranks (Llama-3's).

For a ``tokenizer.model``, transformers' own conversion orders merges by id and so gives other ids for some words. Here
merges have the order in which sentencepiece applies them, and the result is compared with the library before use.
"""

import base64
import binascii
import re
from pathlib import Path
from typing import Any

import sentencepiece
from sentencepiece import sentencepiece_model_pb2
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, processors
from tokenizers.models import BPE
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.utils import logging

from fabric_train.cli.errors import InputError, first_line
from fabric_train.files.regular_file import check_not_pointer
from fabric_train.tokenization.tokenizers.text_encoder import load_fast, panics_as_errors
from fabric_train.tokenization.tokenizers.tokenizer import CorpusTokenizer, chat_template_in, no_eos, read_object

BPE_MODEL = 2
NORMAL = 1
UNKNOWN = 2
CONTROL = 3
USER_DEFINED = 4
UNUSED = 5
BYTE = 6
SPACE = "▁"
# Where conversions go wrong: spaces, control characters, bytes, combining marks, the text of control pieces. Easier
# than ``hard_strings``: on some of those the libraries' normalizers differ, which is no reason to reject a model.
HARD_STRINGS = (
    *("", " ", "     ", "a", " a", "  a", "a ", "a  b   c    d     e"),
    *("one\ntwo\n\nthree\n\n\n four\r\n\tfive\t\t six", "\n", "\n a", "<s>", "</s>", "<s>a</s> <s> b </s>"),
    *("<unk><pad><0x0A><0x41>", "▁", "▁▁a▁ b", "é e\u0301 ﬁ ﬀ ① Å Ω ½ 한글 ｆｕｌｌ"),
    *("日本語のテキスト、中文文本。العربية עברית ไทย हिन्दी", "😀😃 👩‍👩‍👧 🇫🇷 \U0001f9ff\U000e0041"),
    *("\x00\x01\x02 \x7f\x1b[0m \u200b\u200d\ufeff\u00a0\u3000\u2028x", "\U0010ffff\ue000\ufffd"),
    "erere anana texttext ababababa papapapa 1234567890 1,000.00 aaaaaaaaaaaaaaaa ----------- ======",
    "def f(x):\n    return {'a': [x ** 2 for _ in range(10)]}  # note\n",
)
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
SPECIAL_TOKENS = _NAMED_SPECIAL_TOKENS + tuple(
    f"<|reserved_special_token_{3 + i}|>" for i in range(NUM_SPECIAL_TOKENS - len(_NAMED_SPECIAL_TOKENS))
)


def load_with_transformers(name: str, folder: Path, model_file: Path | None) -> CorpusTokenizer:
    """Load the tokenizer called ``name`` from its folder or its tokenizer.model; errors as for ``load_tokenizer``."""
    logging.set_verbosity(logging.CRITICAL)
    special_text_is_plain = False
    if model_file is None:
        fast = _load_folder(folder)
    else:
        fast, special_text_is_plain = _load_model_file(model_file)
    if fast.eos_token_id is None:
        raise no_eos(name, has_bos=fast.bos_token_id is not None)
    templates = fast.chat_template
    return CorpusTokenizer(
        name=name,
        bos_token=fast.bos_token,
        eos_token=fast.eos_token,
        bos_token_id=fast.bos_token_id,
        eos_token_id=fast.eos_token_id,
        pad_token_id=fast.pad_token_id,
        vocab_size=max(fast.get_vocab().values()) + 1,
        special_text_is_plain=special_text_is_plain,
        chat_template=templates.get("default") if isinstance(templates, dict) else templates,
        source=fast,
    )


def _load_folder(folder: Path) -> PreTrainedTokenizerFast:
    file = folder / "tokenizer.json"
    for name in ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"):
        read_object(folder / name)  # for a clearer error than transformers gives
    chat_template_in(folder)
    try:
        if file.is_file():
            check_not_pointer(file)
            with panics_as_errors():
                fast = PreTrainedTokenizerFast.from_pretrained(folder)
        else:
            fast = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except InputError:
        raise
    except Exception as error:  # noqa: BLE001 - tokenizers raises no narrower type
        if file.is_file():
            load_fast(file, special_text_is_plain=False)  # raises if the file itself is damaged
        reason = first_line(error).rstrip(".")
        raise InputError(
            f"--tokenizer_name {folder}: transformers cannot load it: {reason}; fetch it again or give another"
        ) from None
    if not getattr(fast, "is_fast", False):
        raise InputError(f"--tokenizer_name {folder}: it has no fast version; give a folder with tokenizer.json")
    if file.is_file():
        _check_named_tokens(folder, fast)
    return fast


def _check_named_tokens(folder: Path, fast: PreTrainedTokenizerFast) -> None:
    """Raise an InputError if BOS, EOS or padding is not in the tokenizer's files: no model has an embedding for it."""
    known = load_fast(folder / "tokenizer.json", special_text_is_plain=False)
    config = read_object(folder / "tokenizer_config.json")
    listed = [token["content"] for token in config.get("added_tokens_decoder", {}).values()]
    listed += read_object(folder / "added_tokens.json")
    for role in ("bos_token", "eos_token", "pad_token"):
        token = getattr(fast, role)
        if token is not None and token not in listed and known.token_to_id(token) is None:
            raise InputError(
                f"--tokenizer_name {folder}: its {role} {token!r} is not in its vocabulary; name one of its tokens in "
                "tokenizer_config.json"
            )


def _load_model_file(file: Path) -> tuple[PreTrainedTokenizerFast, bool]:
    """Return the tokenizer of a ``tokenizer.model``, and whether the text of special tokens is plain text to it."""
    chat_template = chat_template_in(file.parent)
    if is_rank_file(file):
        return load_llama3_ranks(file, chat_template), False
    fast = load_sentencepiece_bpe(file, chat_template)
    extra = _added_tokens(file.parent, fast.vocab_size)
    if extra:
        raise InputError(
            f"--tokenizer_name {file.parent}: its configuration adds {', '.join(extra)} to tokenizer.model; "
            "give a folder with tokenizer.json, which has both"
        )
    return fast, True


def _added_tokens(folder: Path, num_pieces: int) -> list[str]:
    """Return the tokens that the folder's configuration adds after the ``num_pieces`` of its tokenizer.model."""
    added = read_object(folder / "added_tokens.json")
    listed = read_object(folder / "tokenizer_config.json").get("added_tokens_decoder", {})
    try:
        added |= {token["content"]: int(index) for index, token in listed.items()}
    except (AttributeError, KeyError, TypeError, ValueError):
        file = folder / "tokenizer_config.json"
        raise InputError(f"{file}: damaged (added_tokens_decoder); fetch the file again") from None
    return sorted(token for token, index in added.items() if index >= num_pieces)


def load_sentencepiece_bpe(path: Path, chat_template: str | None = None) -> PreTrainedTokenizerFast:
    """Build the tokenizer of a SentencePiece model, which adds its BOS; InputError if no fast one can have its ids."""
    content = path.read_bytes()
    try:
        library = sentencepiece.SentencePieceProcessor()
        library.LoadFromSerializedProto(content)
    except RuntimeError:
        raise InputError(
            f"{path} is neither a SentencePiece model nor Llama-3's list of ranks; fetch the file again"
        ) from None
    model = sentencepiece_model_pb2.ModelProto()  # type: ignore[attr-defined]  # protobuf creates it at import
    model.ParseFromString(content)
    _check_supported(path, model)
    tokenizer = _build(model)
    _check_ids(path, model, tokenizer, library)
    names = {name: piece for name, piece in _special_pieces(model).items() if piece is not None}
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, chat_template=chat_template, **names
    )


def _check_supported(path: Path, model: Any) -> None:
    letters = {piece.piece for piece in model.pieces if len(piece.piece) == 1}
    faults = {
        "is not a BPE model": model.trainer_spec.model_type != BPE_MODEL,
        "keeps spaces as suffixes": model.trainer_spec.treat_whitespace_as_suffix,
        "does not escape spaces": not model.normalizer_spec.escape_whitespaces,
        "has unused pieces": any(piece.type == UNUSED for piece in model.pieces),
        "has pieces with characters that are no pieces": any(
            not letters.issuperset(piece.piece) for piece in model.pieces if piece.type == NORMAL
        ),
    }
    found = [fault for fault, present in faults.items() if present]
    if found:
        raise InputError(
            f"{path} {' and '.join(found)}, so no fast tokenizer can give its ids; give a folder with tokenizer.json"
        )


def _build(model: Any) -> Tokenizer:
    spec = model.normalizer_spec
    steps: list[normalizers.Normalizer] = []
    if spec.precompiled_charsmap:
        steps.append(normalizers.Precompiled(spec.precompiled_charsmap))
    if spec.remove_extra_whitespaces:
        steps += [normalizers.Replace(Regex("^ +| +$"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    if spec.add_dummy_prefix:
        steps.append(normalizers.Prepend(SPACE))
    steps.append(normalizers.Replace(" ", SPACE))

    vocabulary = {piece.piece: index for index, piece in enumerate(model.pieces)}
    special = _special_pieces(model)
    tokenizer = Tokenizer(
        BPE(
            vocabulary,
            _merges(model),
            unk_token=special["unk_token"],
            fuse_unk=True,
            byte_fallback=model.trainer_spec.byte_fallback,
        )
    )
    tokenizer.normalizer = normalizers.Sequence(steps)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
        + ([decoders.Strip(" ", 1, 0)] if spec.add_dummy_prefix else [])
    )
    tokenizer.add_special_tokens(
        [AddedToken(p.piece, normalized=False, special=True) for p in model.pieces if p.type in (UNKNOWN, CONTROL)]
    )
    bos = special["bos_token"]
    if bos is not None:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos}:0 $A:0 {bos}:1 $B:1", special_tokens=[(bos, vocabulary[bos])]
        )
    return tokenizer


def _merges(model: Any) -> list[tuple[str, str]]:
    """Return the merges in order: the piece with the best score first, and for one piece the longer left half first.

    sentencepiece merges the pair with the best score and, among equal ones, the leftmost. A list of merges cannot say
    "leftmost". But two pairs of one piece compete only where they overlap: in ``er|e|re``, the piece ``ere`` is ``er +
    e`` on the left and ``e + re`` on the right. There the left pair has the longer left half, unless it repeats itself.
    """
    pieces = {piece.piece: piece.score for piece in model.pieces if piece.type in (NORMAL, USER_DEFINED)}
    return [
        (piece[:cut], piece[cut:])
        for piece in sorted(pieces, key=lambda piece: -pieces[piece])
        for cut in range(len(piece) - 1, 0, -1)
        if piece[:cut] in pieces and piece[cut:] in pieces
    ]


def _special_pieces(model: Any) -> dict[str, str | None]:
    spec = model.trainer_spec
    ids = {"bos_token": spec.bos_id, "eos_token": spec.eos_id, "unk_token": spec.unk_id, "pad_token": spec.pad_id}
    return {name: model.pieces[id].piece if 0 <= id < len(model.pieces) else None for name, id in ids.items()}


def _check_ids(path: Path, model: Any, tokenizer: Tokenizer, library: sentencepiece.SentencePieceProcessor) -> None:
    """Raise InputError unless both give the same ids for hard strings, each piece's text, and pairs of pieces."""
    own = [piece.piece.replace(SPACE, " ") for piece in model.pieces]
    texts = [*HARD_STRINGS, *own, *(first + second for first, second in zip(own, reversed(own), strict=True))]
    tokenizer.encode_special_tokens = True  # as in the library, where "<s>" in a text is never the control piece
    for text, encoding in zip(texts, tokenizer.encode_batch(texts, add_special_tokens=False), strict=True):
        if encoding.ids != library.encode(text):
            raise InputError(
                f"{path}: no fast tokenizer can give its ids ({text!r} gets others); give a folder with tokenizer.json"
            )
    tokenizer.encode_special_tokens = False


def is_rank_file(path: Path) -> bool:
    """Return whether the first line of ``path`` is base64 text, a space and a number."""
    with path.open("rb") as file:
        return re.fullmatch(rb"[A-Za-z0-9+/]+=* \d+\s*", file.readline(4096)) is not None


def read_ranks(path: Path) -> dict[bytes, int]:
    """Return each token's rank, from 0 to 127,999; InputError if a line or the ranks are not Llama-3's."""
    ranks = {}
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error):
            raise InputError(f"{path}, line {number}: not a base64 token and its rank; fetch the file again") from None
    if sorted(ranks.values()) != list(range(NUM_RANKS)) or not all(bytes([byte]) in ranks for byte in range(256)):
        raise InputError(
            f"{path} has {len(ranks):,} ranks, but in this format only Llama-3's {NUM_RANKS:,} are supported "
            "(the file has no split pattern and no special tokens); give a folder with tokenizer.json"
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
