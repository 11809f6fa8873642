"""The moments at which a rank can kill itself: Python source that a rank executes before the program's ``main``.

The source replaces a function that the program calls at that moment by one that kills the rank, with SIGKILL: no
handler, ``finally`` or ``atexit`` of the rank runs.
"""

import textwrap
from collections.abc import Mapping
from dataclasses import dataclass

# ``wrap(place, make)`` replaces the function at ``MODULE:NAME.NAME`` by ``make(function)``;
# ``die_in(place, nth)`` kills the rank in the nth call of the function whose arguments contain the text ``about``
_DEFINITIONS = """
import functools, importlib, os, pathlib, shutil, signal

def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)

def wrap(place, make):
    module_name, _, attribute_path = place.partition(":")
    owner = importlib.import_module(module_name)
    *owner_names, name = attribute_path.split(".")
    for owner_name in owner_names:
        owner = getattr(owner, owner_name)
    original = getattr(owner, name)
    setattr(owner, name, functools.wraps(original)(make(original)))

def die_in(place, nth=1, about="", after=False):
    def make(original):
        num_calls = 0
        def dying(*args, **options):
            nonlocal num_calls
            is_counted = about in str(args)
            num_calls += is_counted
            dies = is_counted and num_calls == nth
            if dies and not after:
                die()
            result = original(*args, **options)
            if dies:
                die()
            return result
        return dying
    wrap(place, make)
"""
# the hook of the loss runs when its backward pass begins
_IN_BACKWARD = """
def make(original):
    num_calls = 0
    def dying(self, tensor, *args, **options):
        nonlocal num_calls
        num_calls += 1
        if num_calls == {nth}:
            tensor.register_hook(die)
        return original(self, tensor, *args, **options)
    return dying
wrap("lightning:Fabric.backward", make)
"""
# the row on disk ends in the middle of a number
_IN_A_ROW = """
def make(original):
    num_calls = 0
    def dying(self, metrics):
        nonlocal num_calls
        num_calls += 1
        if num_calls == {nth}:
            self._file.write(f"{{metrics.step}},{{metrics.epoch}},2.71")
            self._file.flush()
            die()
        return original(self, metrics)
    return dying
wrap("fabric_train.training.loggers:CSVLogger.log", make)
"""
# the checkpoint that is being removed lacks one file
_IN_PRUNING = """
def make(original):
    def dying(path, *args, **options):
        if ".removed" in str(path):
            next(file for file in pathlib.Path(path).rglob("*") if file.is_file()).unlink()
            die()
        return original(path, *args, **options)
    return dying
wrap("shutil:rmtree", make)
"""


@dataclass(frozen=True)
class Moment:
    """A moment of a run.

    Attributes:
        source: makes a rank die there the ``{nth}`` time.
        only_rank_0: whether only rank 0 gets there.
    """

    source: str
    only_rank_0: bool = False


MOMENTS: Mapping[str, Moment] = {
    "forward pass": Moment('die_in("transformers.models.llama.modeling_llama:LlamaMLP.forward", {nth})'),
    "backward pass": Moment(_IN_BACKWARD),
    # the optimizer calls it once for the parameters that decay, and once for the others
    "optimizer step, half the parameters changed": Moment('die_in("torch:_fused_adamw_", 2 * {nth})'),
    "validation": Moment('die_in("fabric_train.training.evaluation:hash_supervised", {nth})'),
    "between two steps": Moment('die_in("fabric_train.data.step_sampler:WindowOrder.rows_hash_after", {nth})'),
    "row of metrics.csv": Moment(_IN_A_ROW, only_rank_0=True),
    "start, metrics.csv cut to the checkpoint": Moment(
        'die_in("pathlib:Path.replace", 1, "metrics")', only_rank_0=True
    ),
    "before a checkpoint gets its name": Moment('die_in("pathlib:Path.rename", 1, "incomplete")', only_rank_0=True),
    "after a checkpoint got its name": Moment(
        'die_in("pathlib:Path.rename", 1, "incomplete", after=True)', only_rank_0=True
    ),
    "removal of an old checkpoint": Moment(_IN_PRUNING, only_rank_0=True),
}


def source_of_death(moment: str, rank: int, nth: int) -> str:
    """Return source for ``ForkedRuns.start(before=)`` with which a rank kills itself at a moment.

    Args:
        moment: one of ``MOMENTS``.
        rank: that dies; the others run as usual.
        nth: it dies when it gets there the nth time.
    """
    source = _DEFINITIONS + MOMENTS[moment].source.format(nth=nth)
    return f"if rank == {rank}:\n" + textwrap.indent(source, "    ")
