"""Learn tokens for a tokenizer with the algorithm of its kind, and write its files with them.

Two kinds can learn: a byte-level BPE (Llama-3's, SmolLM2's), and a SentencePiece BPE (Llama-2's), whose tokenizer.model
gets the same new pieces as its tokenizer.json. Any other kind can only get tokens that the user lists.
"""

import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fabric_train.cli.errors import InputError
from fabric_train.cli.progress import progress_of
from fabric_train.files.typed_json import read_json
from fabric_train.tokenization.tokenizers.fast_tokenizer import load_fast
from fabric_train.tokenization.tokenizers.tokenizer_folder import CONFIG, CorpusTokenizer
from fabric_train.vocabulary.merges import Learned, learn_merges

if TYPE_CHECKING:
    from tokenizers import Tokenizer

KEPT_TEXTS = (
    "\n \n\n \n\n\n \t \t\t \t\n  \n   \n    \n     \n🚀 (normal)",
    " 😶\u200d🌫️ (multiple emojis concatenated) ✅ 🦙🦙",
    " 3 33 333 3333 33333 333333 3333333 33333333 3.3 3..3 3...3 កាន់តែពិសេសអាច😁 ?我想在apple工作1314151天～",
    " ------======= нещо на Български ''''''```````\"\"\"\"......!!!!!!??????",
    " I've been 'told he's there, 'RE you sure? 'M not sure I'll make it, 'D you like some tea? We'Ve a'lL",
)
"""Texts that keep their ids in any case, joined the text by which llama.cpp's converter knows a pre-tokenizer.

It compares a hash of this text's ids (``get_vocab_base_pre`` in llama.cpp), and refuses a model with other ones.
"""
_SPACE = "▁"  # SentencePiece's sign for a space
_WORD = re.compile(f"{_SPACE}+[^{_SPACE}\\s]*|[^{_SPACE}\\s]+")
_MIN_LETTER_SHARE = 5e-5
"""A letter without a piece gets one if it makes up this share of all letters; sentencepiece's default is 5e-4."""
_PLAIN = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
_ADVICE = "download the model again"


@dataclass(frozen=True)
class NewTokens:
    """The tokens to add: first ``learned`` ones, and then those that the user lists, ``listed`` and ``special``."""

    first_id: int
    learned: Learned = field(default_factory=Learned)
    listed: tuple[str, ...] = ()
    special: tuple[str, ...] = ()

    @property
    def texts(self) -> list[str]:
        """The new tokens in the order of their ids, as written in the vocabulary."""
        return [*self.learned.tokens, *self.listed, *self.special]


class ExtendableTokenizer:
    """A tokenizer that was saved in ``folder``, with ``tokenizer.model`` if the model has SentencePiece's."""

    def __init__(self, tokenizer: CorpusTokenizer, folder: Path, sentencepiece: Path | None) -> None:
        tokenizer.save(folder)
        self.folder = folder
        self._sentencepiece = sentencepiece
        self.first_id = tokenizer.vocab_size
        # the file as JSON, to change it, and the tokenizer as it was, to encode with
        self._content = read_json(folder / "tokenizer.json", dict, _ADVICE)
        self.fast: Tokenizer = load_fast(folder / "tokenizer.json", special_text_is_plain=False)
        self._model: dict[str, Any] = self._content["model"]
        is_bpe = self._model.get("type") == "BPE"
        self._is_sentencepiece = is_bpe and bool(self._model.get("byte_fallback"))
        self._is_byte_level = is_bpe and '"ByteLevel"' in json.dumps(self._content.get("pre_tokenizer"))

    def learn(self, documents: Sequence[str], num_tokens: int, excluded: Sequence[str] = ()) -> Learned:
        """Learn ``num_tokens`` tokens, without the ``excluded`` ones.

        Raises an InputError if the tokenizer is of another kind, or if the texts are too short.
        """
        if self._is_byte_level:
            return learn_merges(
                self.fast,
                self._count_words(documents),
                num_tokens,
                self.first_id,
                kept_words=self._split_words("".join(KEPT_TEXTS)),
                takes_whole_words=bool(self._model.get("ignore_merges")),
                fits=lambda token: token not in excluded,
            )
        if self._is_sentencepiece:
            return self._learn_sentencepiece(documents, num_tokens, excluded)
        raise InputError(
            f"--num_tokens does not work with a {self._model.get('type')} tokenizer, only with byte-level BPE and "
            "SentencePiece BPE; use --tokens or --special_tokens"
        )

    def _learn_sentencepiece(self, documents: Sequence[str], num_tokens: int, excluded: Sequence[str]) -> Learned:
        """Learn letters that have no piece yet, and then merges of pieces, including the new letters."""
        words = self._count_words(documents)
        letters = self._missing_letters(words)[:num_tokens]
        merged = learn_merges(
            self._with_letters(letters),
            words,
            num_tokens - len(letters),
            self.first_id + len(letters),
            # as sentencepiece's trainer makes pieces: of letters only, perhaps after a space
            fits=lambda token: token.removeprefix(_SPACE).isalpha() and token not in excluded,
        )

        # The pieces of merged tokens may be new letters. These replace the old ids of their bytes.
        letter_pieces = [tuple(token.id for token in self.fast.model.tokenize(letter)) for letter in letters]
        pieces_by_letter_id = {self.first_id + index: pieces for index, pieces in enumerate(letter_pieces)}
        merged_pieces: list[tuple[int, ...]] = []
        for token_ids in merged.pieces:
            old_ids: list[int] = []
            for token_id in token_ids:
                old_ids += pieces_by_letter_id.get(token_id, (token_id,))
            merged_pieces.append(tuple(old_ids))
        return Learned(
            tokens=[*letters, *merged.tokens],
            merges=merged.merges,
            pieces=[*letter_pieces, *merged_pieces],
            segments=merged.segments,
        )

    def pieces_of(self, text: str) -> tuple[int, ...]:
        """Return the old ids of the text of a listed token."""
        return tuple(self.fast.encode(text, add_special_tokens=False).ids)

    def check_listed(self, tokens: Sequence[str], option: str) -> None:
        """Raise an InputError if one of the listed tokens is already a token, or is given twice."""
        vocabulary = self.fast.get_vocab(with_added_tokens=True)
        faults = [f"{option}: {token!r} is already a token; leave it out" for token in tokens if token in vocabulary]
        faults += [f"{option}: {token!r} is given twice" for token, times in Counter(tokens).items() if times > 1]
        if faults:
            raise InputError(*faults)

    def write(self, new: NewTokens) -> None:
        """Add the tokens to the files in the folder."""
        ids = {token: new.first_id + index for index, token in enumerate(new.texts)}
        added_tokens = self._content.setdefault("added_tokens", [])

        # The vocabulary and the merges of the model.
        vocabulary = self._model["vocab"]
        if isinstance(vocabulary, dict):  # Unigram's is a list
            for token in added_tokens:  # libraries give tokens that are missing here other ids, by the vocabulary size
                vocabulary.setdefault(token["content"], token["id"])
            vocabulary |= ids
        pairs = self._sentencepiece_merges(new.learned) if self._is_sentencepiece else new.learned.merges
        if pairs:
            merges = self._model["merges"]
            are_texts = bool(merges) and isinstance(merges[0], str)  # "a b" in older files, ["a", "b"] in newer ones
            merges += [" ".join(pair) if are_texts else list(pair) for pair in pairs]

        # The tokens that the user lists, which are matched before the model sees a text.
        entries: list[dict[str, Any]] = []
        for token in (*new.listed, *new.special):
            entries.append({"id": ids[token], "content": token, **_PLAIN, "special": token in new.special})
        added_tokens += entries
        _write_json(self.folder / "tokenizer.json", self._content)
        config = read_json(self.folder / CONFIG, dict, _ADVICE)
        # llama.cpp's converter takes the kinds of tokens beside tokenizer.model from there
        if entries and (self._sentencepiece is not None or "added_tokens_decoder" in config):
            decoder: dict[str, dict[str, Any]] = {}
            for token in added_tokens:
                decoder[str(token["id"])] = {name: value for name, value in token.items() if name != "id"}
            config["added_tokens_decoder"] = decoder
            _write_json(self.folder / CONFIG, config)
        if self._sentencepiece is not None:
            self._write_sentencepiece(new)

    def _count_words(self, documents: Sequence[str]) -> Counter[str]:
        word_counts: Counter[str] = Counter()
        with progress_of("counting words") as show:
            for index, document in enumerate(documents):
                word_counts.update(self._split_words(document))
                show(index / len(documents))
        return word_counts

    def _split_words(self, text: str) -> list[str]:
        """Return the words of a text as the model gets them; SentencePiece gets the full text, cut here at spaces."""
        normalizer = self.fast.normalizer
        normalized = text if normalizer is None else normalizer.normalize_str(text)
        if self._is_sentencepiece:
            return _WORD.findall(normalized.replace(" ", _SPACE))
        return [word for word, _ in self.fast.pre_tokenizer.pre_tokenize_str(normalized)]

    def _missing_letters(self, word_counts: Counter[str]) -> list[str]:
        """Return the letters of the texts that have no piece, the most frequent first."""
        letter_counts: Counter[str] = Counter()
        for word, word_count in word_counts.items():
            for letter in word:
                letter_counts[letter] += word_count
        min_count = _MIN_LETTER_SHARE * letter_counts.total()
        vocabulary = self._model["vocab"]
        missing = []
        for letter, count in letter_counts.most_common():
            if count >= min_count and letter not in vocabulary and letter.isalpha():
                missing.append(letter)
        return missing

    def _with_letters(self, letters: Sequence[str]) -> "Tokenizer":
        """Return the tokenizer with a piece for each of the letters."""
        from tokenizers import Tokenizer

        letter_ids = {letter: self.first_id + index for index, letter in enumerate(letters)}
        model = {**self._model, "vocab": self._model["vocab"] | letter_ids}
        return Tokenizer.from_str(json.dumps({**self._content, "model": model}))

    def _sentencepiece_merges(self, learned: Learned) -> list[tuple[str, str]]:
        """Return each split of each new piece into two pieces: sentencepiece joins any two that give a piece."""
        vocabulary = self._model["vocab"]
        merges = []
        for token in learned.tokens:
            for split in range(len(token) - 1, 0, -1):
                left = token[:split]
                right = token[split:]
                if left in vocabulary and right in vocabulary:
                    merges.append((left, right))
        return merges

    def _write_sentencepiece(self, new: NewTokens) -> None:
        """Write tokenizer.model with the new pieces at their ids, and with tokens that were only in tokenizer.json."""
        from sentencepiece import sentencepiece_model_pb2

        assert self._sentencepiece is not None
        model = sentencepiece_model_pb2.ModelProto()  # type: ignore[attr-defined]  # protobuf creates it at import
        model.ParseFromString(self._sentencepiece.read_bytes())
        piece_type = type(model).SentencePiece
        merged_scores = [
            piece.score for piece in model.pieces if piece.type == piece_type.NORMAL and len(piece.piece) > 1
        ]
        score = min(merged_scores)
        added_tokens = {token["id"]: token for token in self._content["added_tokens"]}
        learned = {new.first_id + index: token for index, token in enumerate(new.learned.tokens)}
        for token_id in range(len(model.pieces), new.first_id + len(new.texts)):
            piece = model.pieces.add()
            if token_id in learned:
                # the best score is joined first, so each new piece comes after all earlier ones
                score -= max(1.0, abs(score) * 2**-22)  # scores are fp32, which cannot hold a smaller step
                piece.piece = learned[token_id]
                piece.type = piece_type.NORMAL
                piece.score = score
            elif token_id in added_tokens:
                token = added_tokens[token_id]
                piece.piece = token["content"].replace(" ", _SPACE)
                piece.type = piece_type.CONTROL if token["special"] else piece_type.USER_DEFINED
                piece.score = 0.0
            else:
                piece.piece = f"<unused_{token_id}>"
                piece.type = piece_type.UNUSED
                piece.score = 0.0
        model.trainer_spec.vocab_size = len(model.pieces)
        (self.folder / "tokenizer.model").write_bytes(model.SerializeToString())


def _write_json(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
