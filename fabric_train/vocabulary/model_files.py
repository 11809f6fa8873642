"""The tokenizer and the tensors of a model with more tokens.

The tokenizer learns tokens in the way of its kind, and its files are written. Two kinds can learn: a byte-level BPE
(Llama-3's, SmolLM2's), and a SentencePiece BPE (Llama-2's), whose tokenizer.model gets the same new pieces as its
tokenizer.json. Any other can get tokens that are given.

The tensors are the stored ones, and an embedding and a head with new rows. Rows are read and computed a block at a
time. Of a 70B's matrix [128,256, 8,192], the mean takes one pass over it.
"""

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fabric_train.cli.errors import InputError
from fabric_train.cli.progress import progress_of
from fabric_train.export.hub_format import blocks
from fabric_train.files.regular_file import read_json
from fabric_train.model.weight_files import StoredTensors
from fabric_train.tokenization.tokenizers.fast_tokenizer import load_fast
from fabric_train.tokenization.tokenizers.tokenizer_folder import CONFIG, CorpusTokenizer
from fabric_train.vocabulary.words import Learned, learn_merges

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
_SPACE = "▁"
_WORD = re.compile(f"{_SPACE}+[^{_SPACE}\\s]*|[^{_SPACE}\\s]+")
_COVERAGE = 5e-5
"""A letter without a piece gets one if it makes up this share of all letters; sentencepiece's own default is 5e-4."""
_PLAIN = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
_ADVICE = "fetch the model again"


@dataclass(frozen=True)
class NewTokens:
    """The tokens to add: ``learned`` ones first, and then given ones, ``special`` or not."""

    first_id: int
    learned: Learned = field(default_factory=Learned)
    given: tuple[str, ...] = ()
    special: tuple[str, ...] = ()

    @property
    def texts(self) -> list[str]:
        """The new tokens in the order of their ids, as the vocabulary has them."""
        return [*self.learned.tokens, *self.given, *self.special]


class ExtendableTokenizer:
    """A tokenizer that was saved into ``folder``, with ``tokenizer.model`` if the model has one of SentencePiece."""

    def __init__(self, tokenizer: CorpusTokenizer, folder: Path, sentencepiece: Path | None) -> None:
        tokenizer.save(folder)
        self.folder = folder
        self._sentencepiece = sentencepiece
        self.first_id = tokenizer.vocab_size
        self._content = read_json(folder / "tokenizer.json", dict, _ADVICE)
        self.fast: Tokenizer = load_fast(folder / "tokenizer.json", special_text_is_plain=False)
        self._model: dict[str, Any] = self._content["model"]
        is_bpe = self._model.get("type") == "BPE"
        self._is_sentencepiece = is_bpe and bool(self._model.get("byte_fallback"))
        self._is_byte_level = is_bpe and '"ByteLevel"' in json.dumps(self._content.get("pre_tokenizer"))

    def learn(self, documents: Sequence[str], num_tokens: int, given: Sequence[str] = ()) -> Learned:
        """Learn ``num_tokens`` tokens, none of the ``given`` ones among them.

        InputError if the tokenizer is of another kind, or the texts are too short.
        """
        if self._is_byte_level:
            return learn_merges(
                self.fast,
                self._count_words(documents),
                num_tokens,
                self.first_id,
                kept=self._words_in("".join(KEPT_TEXTS)),
                takes_whole_words=bool(self._model.get("ignore_merges")),
                fits=lambda token: token not in given,
            )
        if not self._is_sentencepiece:
            raise InputError(
                f"--num_tokens: the tokenizer is neither a byte-level BPE nor a SentencePiece BPE, but "
                f"{self._model.get('type')}; only --tokens and --special_tokens can extend it"
            )
        words = self._count_words(documents)
        letters = self._missing_letters(words)[:num_tokens]
        with_letters = self._with_letters(letters)
        later = learn_merges(
            with_letters,
            words,
            num_tokens - len(letters),
            self.first_id + len(letters),
            # as sentencepiece's trainer makes pieces: of letters only, perhaps after a space
            fits=lambda token: token.removeprefix(_SPACE).isalpha() and token not in given,
        )
        old = [tuple(token.id for token in self.fast.model.tokenize(letter)) for letter in letters]
        own = {self.first_id + place: ids for place, ids in enumerate(old)}
        pieces = [tuple(one for piece in ids for one in own.get(piece, (piece,))) for ids in later.pieces]
        return Learned([*letters, *later.tokens], later.merges, [*old, *pieces], later.segments)

    def pieces_of(self, text: str) -> tuple[int, ...]:
        """Return the old ids of a given token's text."""
        return tuple(self.fast.encode(text, add_special_tokens=False).ids)

    def check_given(self, tokens: Sequence[str], option: str) -> None:
        """Raise an InputError if one of the given tokens is a token already, or is given twice."""
        known = self.fast.get_vocab(with_added_tokens=True)
        faults = [f"{option}: {token!r} is a token already; leave it out" for token in tokens if token in known]
        faults += [f"{option}: {token!r} is given twice" for token, times in Counter(tokens).items() if times > 1]
        if faults:
            raise InputError(*faults)

    def write(self, new: NewTokens) -> None:
        """Add the tokens to the files in the folder."""
        vocabulary = self._model["vocab"]
        added = self._content.setdefault("added_tokens", [])
        ids = {token: new.first_id + place for place, token in enumerate(new.texts)}
        if isinstance(vocabulary, dict):  # Unigram's is a list
            for token in added:  # libraries give tokens that are missing here other ids, by the vocabulary size
                vocabulary.setdefault(token["content"], token["id"])
            vocabulary |= ids
        pairs = self._sentencepiece_merges(new.learned) if self._is_sentencepiece else new.learned.merges
        as_text = bool(self._model.get("merges")) and isinstance(self._model["merges"][0], str)
        if pairs:
            self._model["merges"] += [" ".join(pair) if as_text else list(pair) for pair in pairs]
        entries = [
            {"id": ids[token], "content": token, **_PLAIN, "special": token in new.special}
            for token in (*new.given, *new.special)
        ]
        added += entries
        _write_json(self.folder / "tokenizer.json", self._content)
        config = read_json(self.folder / CONFIG, dict, _ADVICE)
        # llama.cpp's converter takes the kinds of tokens beside tokenizer.model from there
        if entries and (self._sentencepiece is not None or "added_tokens_decoder" in config):
            config["added_tokens_decoder"] = {str(entry.pop("id")): entry for entry in map(dict, added)}
            _write_json(self.folder / CONFIG, config)
        if self._sentencepiece is not None:
            self._write_sentencepiece(new)

    def _count_words(self, documents: Sequence[str]) -> Counter[str]:
        words: Counter[str] = Counter()
        with progress_of("counting words") as show:
            for number, document in enumerate(documents):
                words.update(self._words_in(document))
                show(number / len(documents))
        return words

    def _words_in(self, text: str) -> list[str]:
        """Return the words of a text as the model gets them; SentencePiece's gets all at once, so cut at spaces."""
        normalizer = self.fast.normalizer
        pre_tokenizer = self.fast.pre_tokenizer
        normalized = text if normalizer is None else normalizer.normalize_str(text)
        if self._is_sentencepiece:
            return _WORD.findall(normalized.replace(" ", _SPACE))
        return [word for word, _ in pre_tokenizer.pre_tokenize_str(normalized)]

    def _missing_letters(self, words: Counter[str]) -> list[str]:
        """Return the letters of the texts that have no piece of their own, the most frequent first."""
        letters: Counter[str] = Counter()
        for word, number in words.items():
            for letter in word:
                letters[letter] += number
        fewest = _COVERAGE * letters.total()
        known = self._model["vocab"]
        return [one for one, number in letters.most_common() if number >= fewest and one not in known and one.isalpha()]

    def _with_letters(self, letters: Sequence[str]) -> "Tokenizer":
        from tokenizers import Tokenizer

        more = {letter: self.first_id + place for place, letter in enumerate(letters)}
        model = {**self._model, "vocab": self._model["vocab"] | more}
        return Tokenizer.from_str(json.dumps({**self._content, "model": model}))

    def _sentencepiece_merges(self, learned: Learned) -> list[tuple[str, str]]:
        """Return each split of each new piece into two pieces, as sentencepiece makes it of any two."""
        known = self._model["vocab"]
        return [
            (token[:place], token[place:])
            for token in learned.tokens
            for place in range(len(token) - 1, 0, -1)
            if token[:place] in known and token[place:] in known
        ]

    def _write_sentencepiece(self, new: NewTokens) -> None:
        """Write tokenizer.model with the new pieces at their ids, and with tokens that only tokenizer.json had."""
        from sentencepiece import sentencepiece_model_pb2

        assert self._sentencepiece is not None
        model = sentencepiece_model_pb2.ModelProto()  # type: ignore[attr-defined]  # protobuf creates it at import
        model.ParseFromString(self._sentencepiece.read_bytes())
        lowest = min(piece.score for piece in model.pieces if piece.type == 1 and len(piece.piece) > 1)
        by_id = {token["id"]: token for token in self._content["added_tokens"]}
        learned = {new.first_id + place: token for place, token in enumerate(new.learned.tokens)}
        kinds = type(model).SentencePiece
        for index in range(len(model.pieces), new.first_id + len(new.texts)):
            piece = model.pieces.add()
            if index in learned:
                piece.piece = learned[index]
                piece.type = kinds.NORMAL
                lowest -= max(1.0, abs(lowest) * 2**-22)  # scores are fp32
                piece.score = lowest
            elif index in by_id:
                piece.piece = by_id[index]["content"].replace(" ", _SPACE)
                piece.score = 0.0
                piece.type = kinds.CONTROL if by_id[index]["special"] else kinds.USER_DEFINED
            else:
                piece.piece = f"<unused_{index}>"
                piece.score = 0.0
                piece.type = kinds.UNUSED
        model.trainer_spec.vocab_size = len(model.pieces)
        (self.folder / "tokenizer.model").write_bytes(model.SerializeToString())


def _write_json(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


@dataclass(frozen=True)
class Norms:
    """The mean Euclidean norm of a matrix's old rows and of its new ones, without padding."""

    old: float
    new: float


class ExtendedMatrix:
    """A matrix [V, d] with a new row for each of ``pieces``, from ``first_id`` on; all other stored rows stay.

    Many models have more rows than tokens, so a new row may take the place of a stored one without a token. Rows after
    the stored and the new ones are padding.

    A new row is the mean of the rows of its pieces, the old ids that the token replaces. With a ``seed``, it is drawn
    from the normal distribution with the mean and the covariance of all old rows (Mundra et al. 2024, arXiv:2407.05841,
    who find it as good as elaborate ways); transformers' own ``resize_token_embeddings`` takes a billionth of this
    covariance. A row of padding is the mean of all old rows, so that no token is rare or frequent by chance.
    """

    def __init__(
        self,
        tensors: StoredTensors,
        name: str,
        first_id: int,
        pieces: Sequence[tuple[int, ...]],
        num_rows: int,
        seed: Sequence[int] | None,
    ) -> None:
        self._tensors = tensors
        self._name = name
        self.first_id = first_id
        self._pieces = pieces
        self._seed = seed
        self._new_norms: dict[int, float] = {}
        self.num_stored, self.width = tensors.shape(name)
        self.shape = torch.Size((num_rows, self.width))

    def read_block(self, offsets: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
        """Return the block of ``shape`` that begins at ``offsets``, in the stored dtype."""
        begin = offsets[0]
        end = offsets[0] + shape[0]
        columns = slice(offsets[1], offsets[1] + shape[1])
        block = torch.empty(tuple(shape), dtype=self._tensors.dtype(self._name))
        for kept in self.kept_rows():
            first = max(begin, kept.start)
            last = min(end, kept.stop)
            if first < last:
                stored = self._tensors.read_block(self._name, (first, offsets[1]), (last - first, shape[1]))
                block[first - begin : last - begin] = stored
        for row in range(max(begin, self.first_id), end):
            if self.end_of_new <= row < self.num_stored:
                continue
            new = self._new_row(row).to(block.dtype)
            self._new_norms[row] = new.float().norm().item()
            block[row - begin] = new[columns]
        return block

    @property
    def end_of_new(self) -> int:
        """The first row after the new tokens'."""
        return self.first_id + len(self._pieces)

    def kept_rows(self) -> tuple[range, range]:
        """Return the stored rows that stay as they are: those of the old tokens, and those without a token."""
        return range(self.first_id), range(self.end_of_new, self.num_stored)

    def norms(self) -> Norms:
        """Return the mean norms of the old and the new rows; the new ones must have been read."""
        new = [self._new_norms[self.first_id + place] for place in range(len(self._pieces))]
        return Norms(self._statistics[1], float(np.mean(new)))

    def _new_row(self, row: int) -> torch.Tensor:
        """Return row ``row``, fp32 [d]."""
        place = row - self.first_id
        if place >= len(self._pieces):
            return self._mean
        if self._seed is not None:
            drawn = np.random.default_rng((*self._seed, row)).standard_normal(self.width)
            return self._mean + (self._factor @ torch.from_numpy(drawn)).float()
        pieces = self._pieces[place]
        if not pieces:  # of bytes that the old tokenizer leaves out
            return self._mean
        rows = [self._tensors.read_block(self._name, (piece, 0), (1, self.width)).double() for piece in pieces]
        return torch.cat(rows).mean(dim=0).float()

    @property
    def _mean(self) -> torch.Tensor:
        return self._statistics[0]

    @cached_property
    def _statistics(self) -> tuple[torch.Tensor, float]:
        """The mean of the old rows, fp32 [d], and their mean norm."""
        total = torch.zeros(self.width, dtype=torch.float64)
        norms = 0.0
        for block in self._old_blocks():
            total += block.sum(dim=0, dtype=torch.float64)
            norms += float(block.norm(dim=1).sum(dtype=torch.float64))
        return (total / self.first_id).float(), norms / self.first_id

    @cached_property
    def _factor(self) -> torch.Tensor:
        """A matrix, fp64 [d, d], whose product with its transpose is the covariance of the old rows."""
        covariance = torch.zeros(self.width, self.width, dtype=torch.float64)
        for block in self._old_blocks():
            centred = (block - self._mean).double()
            covariance += centred.T @ centred / self.first_id
        values, vectors = torch.linalg.eigh(covariance)  # also where rows do not span all directions
        return vectors * values.clamp(min=0).sqrt()

    def _old_blocks(self) -> Iterator[torch.Tensor]:
        old = torch.Size((self.first_id, self.width))
        return (block.float() for block in blocks(self._tensors, self._name, old))


class ExtendedTensors(StoredTensors):
    """The tensors of a model, with some matrices extended; each is read on request."""

    def __init__(self, tensors: StoredTensors, matrices: Mapping[str, ExtendedMatrix]) -> None:
        self._tensors = tensors
        self.matrices = matrices

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def shape(self, name: str) -> torch.Size:
        matrix = self.matrices.get(name)
        return self._tensors.shape(name) if matrix is None else matrix.shape

    def dtype(self, name: str) -> torch.dtype:
        return self._tensors.dtype(name)

    def read_block(self, name: str, offsets: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
        matrix = self.matrices.get(name)
        return self._tensors.read_block(name, offsets, shape) if matrix is None else matrix.read_block(offsets, shape)
