"""The environment variables of a rank: those of this process without any launcher's, and those that torchrun sets."""

import os

CONSOLE_VARIABLES = ("CI", "NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "COLUMNS", "LINES")
"""Variables that overrule what a program finds out about its terminal."""
_LAUNCHER_PREFIXES = ("LT_", "TORCHELASTIC_", "SLURM_", "OMPI_", "PMI_", "MASTER_")
_RANK_VARIABLES = ("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")


def environment_without_launcher() -> dict[str, str]:
    """Return this process's environment without a launcher's variables, offline and with one thread per process."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(_LAUNCHER_PREFIXES)}
    for name in _RANK_VARIABLES:
        environment.pop(name, None)
    environment["OMP_NUM_THREADS"] = "1"
    environment["HF_HUB_OFFLINE"] = "1"
    return environment


def torchrun_variables(num_ranks: int, port: int) -> list[dict[str, str]]:
    """Return the variables that torchrun on one machine sets for each rank.

    A single rank gets none: it runs as under ``python -m``, without a launcher.
    """
    if num_ranks == 1:
        return [{}]
    variables_by_rank = []
    for rank in range(num_ranks):
        variables_by_rank.append(
            {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "GROUP_RANK": "0",
                "WORLD_SIZE": str(num_ranks),
                "LOCAL_WORLD_SIZE": str(num_ranks),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "TORCHELASTIC_RUN_ID": "none",
                "TORCHELASTIC_RESTART_COUNT": "0",
                "TORCHELASTIC_MAX_RESTARTS": "0",
                "TORCHELASTIC_USE_AGENT_STORE": "False",
            }
        )
    return variables_by_rank
