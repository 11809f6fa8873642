"""The backend of ``torch.compile`` in tests that need no C++; to import it takes no time."""

NO_CODE = "aot_eager_decomp_partition"
"""A backend that traces graphs and cuts them into forward and backward as ever, but writes no C++.

The compiler of C++ takes a minute.
"""

RANKS_WITHOUT_CODE = f"""
import functools, torch
torch.compile = functools.partial(torch.compile, backend="{NO_CODE}")
"""
"""What a rank runs before the program, so that it compiles with this backend."""
