"""Print text as it is generated, without a stop string or a character that is not complete yet."""

from collections.abc import Sequence
from typing import Any

from transformers.generation.streamers import BaseStreamer

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"  # some bytes of a character; the next token has the others


class TextPrinter(BaseStreamer):
    """Print the text of a single prompt on standard output while ``generate`` runs, and a line break at its end.

    On a terminal, ``cli.output`` makes its control characters visible.

    Args:
        tokenizer: the model's tokenizer.
        stop: texts at which generation ends; they are not printed.
        shows_prompt: print the prompt, too.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str] = (), shows_prompt: bool = False) -> None:
        self._tokenizer, self._stop, self._shows_prompt = tokenizer, stop, shows_prompt
        self._prompt_ids: list[int] | None = None
        self._new_ids: list[int] = []
        self._num_printed = 0

    def put(self, value: Any) -> None:
        """Take the prompt's ids [1, T] first, and then each new id [1]."""
        if self._prompt_ids is not None:
            self._new_ids += value.tolist()
            self._print_up_to_what_may_change()
            return
        self._prompt_ids = value[0].tolist()
        if self._shows_prompt:
            print(self._tokenizer.decode(self._prompt_ids, skip_special_tokens=True), end="", flush=True)

    def end(self) -> None:
        """Print what was held back, and a line break."""
        text = self._text()
        print(text[self._num_printed : find_stop(text, self._stop)], flush=True)

    def _text(self) -> str:
        return continuation(self._tokenizer, self._prompt_ids or [], self._new_ids)

    def _print_up_to_what_may_change(self) -> None:
        text = self._text()
        end = find_stop(text, self._stop)
        if end is None:
            end = len(text.rstrip(_INCOMPLETE)) - _begun_stop(text, self._stop)
        if end > self._num_printed:
            print(text[self._num_printed : end], end="", flush=True)
            self._num_printed = end


def continuation(tokenizer: Any, prompt_ids: list[int], new_ids: list[int]) -> str:
    """Return the text of new ids after a prompt.

    Of the new ids alone, some tokenizers would drop a space at the beginning.
    """
    prompt = tokenizer.decode(prompt_ids, skip_special_tokens=True)
    whole: str = tokenizer.decode([*prompt_ids, *new_ids], skip_special_tokens=True)
    return whole.removeprefix(prompt)


def find_stop(text: str, stop: Sequence[str]) -> int | None:
    """Return where the first stop string of a text begins; None without one."""
    return min((place for place in (text.find(one) for one in stop) if place >= 0), default=None)


def _begun_stop(text: str, stop: Sequence[str]) -> int:
    """Return the number of characters at the end of a text with which a stop string begins."""
    begun = (size for one in stop for size in range(1, len(one)) if text.endswith(one[:size]))
    return max(begun, default=0)
