"""Encode a rendered chat in one piece, with aliases for its control tokens.

The tokenizer matches a control token only by its alias, so the token's own text in a message stays text:

    rendering        <|start_header_id|>user<|end_header_id|>\\n\\nwrite <|eot_id|>!<|eot_id|>
    with aliases     ALIAS1user ALIAS2\\n\\nwrite <|eot_id|>!ALIAS3

Because the rendering is one piece, the tokenizer treats the start of the text, and the whitespace around a control
token, as in ``apply_chat_template``.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from fabric_train.tokenization.tokenizers.fast_tokenizer import load_fast


class AliasedTokenizer:
    """A tokenizer that matches its control tokens only by their aliases.

    Args:
        tokenizer_file: the ``tokenizer.json``.
        control: the control tokens' ids by text; they are added tokens of the file.
        aliases: the alias by text; no message contains one.
    """

    def __init__(self, tokenizer_file: Path, control: Mapping[str, int], aliases: Mapping[str, str]) -> None:
        from tokenizers import AddedToken, processors

        self.aliases = aliases
        tokenizer = load_fast(tokenizer_file, special_text_is_plain=True)
        own = [token for token in tokenizer.get_added_tokens_decoder().values() if token.content in control]
        for token in own:
            token.special = True
        tokenizer.add_special_tokens(own)
        tokenizer.add_tokens(
            [
                AddedToken(
                    aliases[token.content], lstrip=token.lstrip, rstrip=token.rstrip, normalized=token.normalized
                )
                for token in own
            ]
        )
        tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)  # offsets include the space of a token
        self._tokenizer = tokenizer

        size = max(tokenizer.get_vocab().values()) + 1
        self._ids = np.arange(size, dtype=np.int32)
        for text, alias in aliases.items():
            self._ids[tokenizer.token_to_id(alias)] = control[text]
        unknown = getattr(tokenizer.model, "unk_token", None)  # the one special token that a text may become
        self._is_control = np.zeros(size, dtype=bool)
        self._is_control[[token_id for text, token_id in control.items() if text != unknown]] = True

    def encode(self, pieces: Sequence[str]) -> tuple[np.ndarray, np.ndarray, bool]:
        """Encode a text, given in pieces, with aliases for control tokens.

        Returns:
            The ids, int32 [T]; which of them lie at least partly in the second, fourth, ... piece, bool [T]; and
            whether the tokenizer made a control token from text, which can happen if its vocabulary has it.
        """
        encoding = self._tokenizer.encode("".join(pieces), add_special_tokens=False)
        ids = np.array(encoding.ids, dtype=np.int32)
        offsets = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2)
        borders = np.cumsum([len(piece) for piece in pieces])[:-1]
        # a token lies in such a piece if more of them have begun before its end than have ended before its start
        begun = np.searchsorted(borders[::2], offsets[:, 1], side="left")
        ended = np.searchsorted(borders[1::2], offsets[:, 0], side="right")
        return self._ids[ids], begun > ended, bool(self._is_control[ids].any())
