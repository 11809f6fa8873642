"""Make ranks on this machine behave like ranks on several machines."""


def on_nodes(num_ranks_each: int) -> str:
    """Return code for ``ForkedRuns.start(before=)`` that sets a rank's variables as on nodes of ``num_ranks_each``."""
    variables = (
        f"LOCAL_RANK=str(rank % {num_ranks_each}), GROUP_RANK=str(rank // {num_ranks_each}), "
        f"LOCAL_WORLD_SIZE='{num_ranks_each}'"
    )
    return f"import os; os.environ.update({variables})"
