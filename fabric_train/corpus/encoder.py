"""Documents to token ids in several processes, in order and with bounded memory.

The processes import ``tokenizers`` and numpy alone, so that they start in a moment.
"""

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# Long enough that handing a batch over costs nothing, short enough that a few batches in flight are a few megabytes.
BATCH_CHARACTERS = 1_000_000


@dataclass(frozen=True)
class Encoding:
    """How documents become ids: the tokenizer's file and the ids that every document begins and ends with."""

    tokenizer_file: Path
    bos_token_id: int | None
    eos_token_id: int
    special_text_is_plain: bool


@dataclass(frozen=True)
class Document:
    """A document to encode and its number among all that were read, from 1."""

    text: str
    number: int


@dataclass(frozen=True)
class EncodedDocument:
    """A document's ids, int32 [number of tokens], BOS and EOS included; its number and its length in characters."""

    input_ids: np.ndarray
    number: int
    num_characters: int


def available_cores() -> int:
    """Return the number of cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@contextmanager
def encoding_processes(encoding: Encoding, num_proc: int) -> Iterator[ProcessPoolExecutor]:
    """Yield ``num_proc`` processes once they are ready; each has its share of the cores as threads.

    Raises:
        ChildProcessError: a process was killed, as the system does when memory runs out.
    """
    threads = max(1, available_cores() // num_proc)
    context = multiprocessing.get_context("spawn")
    executor = ProcessPoolExecutor(num_proc, context, initializer=_start, initargs=(encoding, threads))
    try:
        executor.submit(_encode, []).result()
        yield executor
    except BrokenProcessPool:
        raise ChildProcessError(
            "a tokenizing process was killed; if memory ran out, use fewer with --num_proc"
        ) from None
    finally:
        executor.shutdown(cancel_futures=True)


def encode_documents(
    documents: Iterable[Document], executor: ProcessPoolExecutor, num_proc: int
) -> Iterator[list[EncodedDocument]]:
    """Yield the documents' ids in order, by batches, the same for any ``num_proc``; two a process are under way."""
    under_way: deque[tuple[list[Document], Future[list[np.ndarray]]]] = deque()
    for batch in _batches(documents):
        under_way.append((batch, executor.submit(_encode, [document.text for document in batch])))
        if len(under_way) >= 2 * num_proc:
            yield _finished(*under_way.popleft())
    while under_way:
        yield _finished(*under_way.popleft())


def _batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    batch: list[Document] = []
    characters = 0
    for document in documents:
        batch.append(document)
        characters += len(document.text)
        if characters >= BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _finished(batch: list[Document], future: "Future[list[np.ndarray]]") -> list[EncodedDocument]:
    return [
        EncodedDocument(input_ids, document.number, len(document.text))
        for document, input_ids in zip(batch, future.result(), strict=True)
    ]


_tokenizer: "Tokenizer"
_encoding: Encoding


def _start(encoding: Encoding, threads: int) -> None:
    """Prepare this process: threads, the tokenizer, and an end together with the parent, whatever ends that."""
    global _tokenizer, _encoding
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process; the parent ends this one
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ["RAYON_NUM_THREADS"] = str(threads)
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    _encoding = encoding
    _tokenizer = load_fast(encoding)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def load_fast(encoding: Encoding) -> "Tokenizer":
    """Load the tokenizer for whole documents: what it may be set to cut off or fill up is left alone."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(encoding.tokenizer_file))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = encoding.special_text_is_plain
    return tokenizer


def _encode(texts: list[str]) -> list[np.ndarray]:
    """Return each text's ids, int32."""
    encoded = _tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    return [
        np.array(with_borders(item.ids, _encoding.bos_token_id, _encoding.eos_token_id), dtype=np.int32)
        for item in encoded
    ]


def with_borders(ids: list[int], bos_token_id: int | None, eos_token_id: int) -> list[int]:
    """Return ``ids`` between BOS (where there is one) and EOS, each exactly once, even where the text has its own."""
    begin, end = 0, len(ids)
    while begin < end and ids[begin] == bos_token_id:
        begin += 1
    while end > begin and ids[end - 1] == eos_token_id:
        end -= 1
    bos = [] if bos_token_id is None else [bos_token_id]
    return [*bos, *ids[begin:end], eos_token_id]
