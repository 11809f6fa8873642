# PYTHON_ARGCOMPLETE_OK
"""The command ``fabric``: Lightning's own, except when ``fabric run`` starts this project.

Lightning's ``fabric run`` is torchrun with other options. After a signal, torchrun kills the ranks within 30 s, whether
they have saved or not. It ends with a traceback and exit code 1, however the ranks have ended, and ``--help`` after the
script shows its own help. Here a signal is only passed on to the ranks, and the exit code is theirs.
"""

import logging
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import psutil  # here, because a second signal may come while the handler of the first one imports it

from fabric_train.cli.errors import FAILURE, INPUT_ERROR, print_errors
from fabric_train.cli.launcher import as_launcher
from fabric_train.cli.output import keep_streams_writable

_PROGRAM = Path(__file__).resolve().parents[1]
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)


def main() -> None:
    """Run Lightning's ``fabric``, with the changes above if the script is this project.

    Raises:
        SystemExit: with the exit code of the rank that has failed first, or of Lightning's command.
    """
    if "_ARGCOMPLETE" in os.environ:  # the shell asks what may follow
        from arguments import TrainArguments, parse

        parse(TrainArguments)
    words = sys.argv[1:]
    places = [place for place, word in enumerate(words) if place and Path(word).resolve() == _PROGRAM]
    if words[:1] == ["run"] and places:
        _run(words, places[0])
    from lightning.fabric.cli import _main

    _main()


def _run(words: list[str], place: int) -> NoReturn:
    """Run ``fabric run`` on the script at ``words[place]``, or show the script's help."""
    script, arguments = words[place], words[place + 1 :]
    if "--help" in arguments or "-h" in arguments:
        os.execv(sys.executable, [sys.executable, script, *arguments])
    keep_streams_writable()
    if "--accelerator=tpu" in words or "--accelerator tpu" in " ".join(words):  # Lightning's shows a traceback
        print_errors(
            "error: fabric run --accelerator tpu: one process uses a TPU; start python -m fabric_train --tpu true"
        )
        raise SystemExit(INPUT_ERROR)
    os.environ["PET_SIGNALS_TO_HANDLE"] = "SIGQUIT"  # torchrun leaves the others to the handler below
    for number in _SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:  # under nohup
            signal.signal(number, _pass_on)
    logging.disable(logging.ERROR)  # torchrun's own report of ranks that have reported themselves

    from lightning.fabric.cli import _main
    from torch.distributed import DistNetworkError
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    try:
        with as_launcher():
            _main()
    except ChildFailedError as failed:
        raise SystemExit(_code_of(failed)) from None
    except DistNetworkError as error:
        print_errors(f"error: {str(error).splitlines()[0]}; give a free port with --main-port")
        raise SystemExit(INPUT_ERROR) from None
    raise SystemExit(0)


def _pass_on(number: int, _: FrameType | None) -> None:
    """Send a signal to the ranks. They save and end by themselves, and the launcher waits for them."""
    ranks = psutil.Process().children()
    for rank in ranks:
        with suppress(ProcessLookupError):
            os.kill(rank.pid, number)
    if not ranks:
        os._exit(128 + number)


def _code_of(failed: Any) -> int:
    """Return the exit code of the rank that has failed first; report a rank that a signal has killed."""
    rank, failure = failed.get_first_failure()
    if failure.exitcode < 0:
        print_errors(f"error: rank {rank} was killed by {failure.signal_name()}; continue with --resume true")
        return FAILURE
    return int(failure.exitcode)


if __name__ == "__main__":
    main()
