"""Run actions that fail on one of several ranks; each rank prints the errors that it gets, as JSON."""

import json
from functools import partial

from lightning import Fabric

from fabric_train.cli.errors import InputError, RunError
from fabric_train.distributed.ranks import run_together
from fabric_train.rollouts.vllm_client import ServerFailedError


def main() -> None:
    """Print for each action the class and the lines of the error, or None."""
    fabric = Fabric(accelerator="cpu", strategy="ddp", devices=2)
    fabric.launch()
    errors = (OSError("no room"), InputError("a fault", "another one"), ServerFailedError("it ended"))

    def fail(error: Exception, failing_rank: int) -> None:
        if fabric.global_rank == failing_rank:
            raise error

    printed: list[list[str] | None] = []
    for error in errors:
        try:
            run_together(fabric, partial(fail, error, failing_rank=1))
        except InputError as raised:
            printed.append([type(raised).__name__, *raised.faults])
        except RunError as raised:
            printed.append([type(raised).__name__, str(raised)])
    # the action of a rank that does not run it cannot fail
    run_together(fabric, lambda: fail(errors[0], failing_rank=1), runs=fabric.is_global_zero)
    printed.append(None)
    print(json.dumps(printed))
