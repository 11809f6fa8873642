"""Build the tokenizer from a SentencePiece BPE model (Llama-2's ``tokenizer.model``).

transformers' own conversion orders merges by id and so gives other ids for some words. Here merges have the order in
which sentencepiece applies them, and the result is compared with the library before use.
"""

from pathlib import Path
from typing import Any

import sentencepiece
from sentencepiece import sentencepiece_model_pb2
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, processors
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from fabric_train.cli.errors import InputError

# values of sentencepiece_model.proto: a type of model, and the types of pieces
BPE_MODEL = 2
NORMAL = 1
UNKNOWN = 2
CONTROL = 3
USER_DEFINED = 4
UNUSED = 5
BYTE = 6
SPACE = "▁"
# Where conversions go wrong: spaces, control characters, bytes, combining marks, the text of control pieces. Easier
# than ``HARD_STRINGS``: on some of those the libraries' normalizers differ, which is no reason to reject a model.
CONVERSION_TEXTS = (
    *("", " ", "     ", "a", " a", "  a", "a ", "a  b   c    d     e"),
    *("one\ntwo\n\nthree\n\n\n four\r\n\tfive\t\t six", "\n", "\n a", "<s>", "</s>", "<s>a</s> <s> b </s>"),
    *("<unk><pad><0x0A><0x41>", "▁", "▁▁a▁ b", "é e\u0301 ﬁ ﬀ ① Å Ω ½ 한글 ｆｕｌｌ"),
    *("日本語のテキスト、中文文本。العربية עברית ไทย हिन्दी", "😀😃 👩‍👩‍👧 🇫🇷 \U0001f9ff\U000e0041"),
    *("\x00\x01\x02 \x7f\x1b[0m \u200b\u200d\ufeff\u00a0\u3000\u2028x", "\U0010ffff\ue000\ufffd"),
    "erere anana texttext ababababa papapapa 1234567890 1,000.00 aaaaaaaaaaaaaaaa ----------- ======",
    "def f(x):\n    return {'a': [x ** 2 for _ in range(10)]}  # note\n",
)


def load_sentencepiece_bpe(path: Path, chat_template: str | None = None) -> PreTrainedTokenizerFast:
    """Build the tokenizer of a SentencePiece model, which adds its BOS; InputError if no fast one can have its ids."""
    content = path.read_bytes()
    try:
        library = sentencepiece.SentencePieceProcessor()
        library.LoadFromSerializedProto(content)
    except RuntimeError:
        raise InputError(
            f"{path} is neither a SentencePiece model nor Llama-3's list of ranks; download the file again"
        ) from None
    model = sentencepiece_model_pb2.ModelProto()  # type: ignore[attr-defined]  # protobuf creates it at import
    model.ParseFromString(content)
    _check_supported(path, model)
    tokenizer = _build_tokenizer(model)
    _check_ids(path, model, tokenizer, library)
    special_tokens = {role: piece for role, piece in _special_pieces(model).items() if piece is not None}
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, chat_template=chat_template, **special_tokens
    )


def _check_supported(path: Path, model: Any) -> None:
    """Raise an InputError if a ``ModelProto`` needs something that a fast tokenizer cannot do."""
    faults = []
    if model.trainer_spec.model_type != BPE_MODEL:
        faults.append("is not a BPE model")
    if model.trainer_spec.treat_whitespace_as_suffix:
        faults.append("keeps spaces as suffixes")
    if not model.normalizer_spec.escape_whitespaces:
        faults.append("does not escape spaces")
    if any(piece.type == UNUSED for piece in model.pieces):
        faults.append("has unused pieces")
    # merges build a piece from its characters
    letters = {piece.piece for piece in model.pieces if len(piece.piece) == 1}
    normal_pieces = [piece.piece for piece in model.pieces if piece.type == NORMAL]
    if not all(letters.issuperset(piece) for piece in normal_pieces):
        faults.append("has pieces with characters that are not pieces themselves")
    if faults:
        raise InputError(
            f"{path} {' and '.join(faults)}, so no fast tokenizer can produce its ids; give a folder with "
            "tokenizer.json"
        )


def _build_tokenizer(model: Any) -> Tokenizer:
    """Build the ``tokenizers`` tokenizer of a SentencePiece ``ModelProto``."""
    # the model: pieces, and merges in sentencepiece's order
    spec = model.normalizer_spec
    special_pieces = _special_pieces(model)
    vocabulary = {piece.piece: token_id for token_id, piece in enumerate(model.pieces)}
    bpe = BPE(
        vocabulary,
        _order_merges(model),
        unk_token=special_pieces["unk_token"],
        fuse_unk=True,
        byte_fallback=model.trainer_spec.byte_fallback,
    )
    tokenizer = Tokenizer(bpe)

    # what happens to a text before: sentencepiece's normalization, and spaces as "▁"
    normalization: list[normalizers.Normalizer] = []
    if spec.precompiled_charsmap:
        normalization.append(normalizers.Precompiled(spec.precompiled_charsmap))
    if spec.remove_extra_whitespaces:
        normalization.append(normalizers.Replace(Regex("^ +| +$"), ""))
        normalization.append(normalizers.Replace(Regex(" {2,}"), " "))
    if spec.add_dummy_prefix:
        normalization.append(normalizers.Prepend(SPACE))
    normalization.append(normalizers.Replace(" ", SPACE))
    tokenizer.normalizer = normalizers.Sequence(normalization)

    # and the way back
    decoding = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if spec.add_dummy_prefix:
        decoding.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(decoding)

    # special tokens, and BOS before each text
    control_pieces = [piece.piece for piece in model.pieces if piece.type in (UNKNOWN, CONTROL)]
    tokenizer.add_special_tokens([AddedToken(piece, normalized=False, special=True) for piece in control_pieces])
    bos = special_pieces["bos_token"]
    if bos is not None:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos}:0 $A:0 {bos}:1 $B:1", special_tokens=[(bos, vocabulary[bos])]
        )
    return tokenizer


def _order_merges(model: Any) -> list[tuple[str, str]]:
    """Return the merges in order: the piece with the best score first, and for one piece the longer left half first.

    sentencepiece merges the pair with the best score and, among equal ones, the leftmost. A list of merges cannot say
    "leftmost". But two pairs of one piece compete only where they overlap: in ``er|e|re``, the piece ``ere`` is ``er +
    e`` on the left and ``e + re`` on the right. There the left pair has the longer left half, unless it repeats itself.
    """
    scores = {piece.piece: piece.score for piece in model.pieces if piece.type in (NORMAL, USER_DEFINED)}
    merges = []
    for piece in sorted(scores, key=lambda piece: -scores[piece]):
        for cut in range(len(piece) - 1, 0, -1):
            left = piece[:cut]
            right = piece[cut:]
            if left in scores and right in scores:
                merges.append((left, right))
    return merges


def _special_pieces(model: Any) -> dict[str, str | None]:
    """Return the pieces of BOS, EOS, unknown and padding by role; None if the model has no such piece."""
    spec = model.trainer_spec
    ids = {"bos_token": spec.bos_id, "eos_token": spec.eos_id, "unk_token": spec.unk_id, "pad_token": spec.pad_id}
    special_pieces: dict[str, str | None] = {}
    for role, token_id in ids.items():
        has_piece = 0 <= token_id < len(model.pieces)  # -1 stands for none
        special_pieces[role] = model.pieces[token_id].piece if has_piece else None
    return special_pieces


def _check_ids(path: Path, model: Any, tokenizer: Tokenizer, library: sentencepiece.SentencePieceProcessor) -> None:
    """Raise an InputError unless both give the same ids for difficult texts, all pieces, and pairs of pieces."""
    pieces = [piece.piece.replace(SPACE, " ") for piece in model.pieces]
    pairs = [left + right for left, right in zip(pieces, reversed(pieces), strict=True)]
    texts = [*CONVERSION_TEXTS, *pieces, *pairs]
    tokenizer.encode_special_tokens = True  # as in the library, where "<s>" in a text is never the control piece
    encodings = tokenizer.encode_batch(texts, add_special_tokens=False)
    for text, encoding in zip(texts, encodings, strict=True):
        if encoding.ids != library.encode(text):
            raise InputError(
                f"{path}: no fast tokenizer can produce its ids ({text!r} gets different ones); give a folder with "
                "tokenizer.json"
            )
    tokenizer.encode_special_tokens = False
