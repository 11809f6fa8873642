"""Ranks on this machine that take themselves for ranks on several."""


def on_nodes(num_ranks_each: int) -> str:
    """Return what a forked rank is to run before its program, see ``ForkedRuns.start``."""
    variables = (
        f"LOCAL_RANK=str(rank % {num_ranks_each}), GROUP_RANK=str(rank // {num_ranks_each}), "
        f"LOCAL_WORLD_SIZE='{num_ranks_each}'"
    )
    return f"import os; os.environ.update({variables})"
