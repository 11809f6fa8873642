"""The copy that a background save writes takes the memory that it needs, and holds the copied values."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fabric_train.checkpoint.rank_writer import _assign_blocks, pinned_sizes
from fabric_train.checkpoint.tensors import Write

MIB = 2**20


@given(st.integers(0, 2**45))
def test_pinned_buffers_take_what_is_needed(num_bytes: int) -> None:
    """torch gives a power of two as it is, and would give 8 GiB for 5."""
    sizes = pinned_sizes(num_bytes)
    assert all(size.bit_count() == 1 for size in sizes)
    assert num_bytes <= sum(sizes) < num_bytes + MIB


def test_five_gibibytes_are_not_eight() -> None:
    assert pinned_sizes(5 * 2**30 + 1) == [2**32, 2**30, MIB]


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(1, 40), st.sampled_from([torch.uint8, torch.bfloat16, torch.float64]))))
def test_tensors_are_copied_across_the_ends_of_buffers(tensors: list[tuple[int, torch.dtype]]) -> None:
    writes = []
    offset = 7
    for length, dtype in tensors:
        writes.append(Write("file", offset, torch.arange(length).to(dtype)))
        offset += writes[-1].data.nbytes
    needed = sum(-(-write.data.nbytes // 16) * 16 for write in writes)
    buffers = [torch.full((size,), 255, dtype=torch.uint8) for size in (64, *[32] * (needed // 32 + 1))]
    written = bytearray(offset)
    for part, place in _assign_blocks(writes, buffers):
        place.copy_(part.data)
        written[part.offset : part.offset + part.data.nbytes] = bytes(place.view(torch.uint8).tolist())
    expected = b"".join(bytes(write.data.view(torch.uint8).tolist()) for write in writes)
    assert written[7:] == expected
