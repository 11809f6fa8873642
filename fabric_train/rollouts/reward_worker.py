"""The process of a reward:  python -m fabric_train.rollouts.reward_worker DESCRIPTOR

It loads a function, and calls it whenever the run sends completions, until the run closes the socket DESCRIPTOR. It
does not import torch, and is not forked from the run, so it starts fast and has none of the run's memory.

This is no sandbox: the function has all rights of the user who started the run, and can use the network. The process
only keeps errors, endless loops and memory of the function away from the run.
"""

import importlib
import inspect
import json
import math
import os
import resource
import socket
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from types import ModuleType
from typing import Any

from fabric_train.cli.parent_process import end_with_parent
from fabric_train.rollouts.builtin_rewards import BUILTIN_REWARDS
from fabric_train.rollouts.reward_messages import (
    CALL_ARGUMENTS,
    CallAnswer,
    LoadAnswer,
    LoadRequest,
    MessageChannel,
    RewardCall,
)

_MODULE = "fabric_train_reward_file"
"""The name of the module of a user's file; the file's own name could hide a module, such as math.py."""
_MAX_ERROR_CHARACTERS = 300
_LARGEST_REWARD = 1e30
"""The largest absolute value of a reward. The loss is computed in fp32, which ends at 3e38."""


class _WrongRewardError(ValueError):
    """A function or a setting that cannot be used; the message is for the user."""


@dataclass(frozen=True)
class _LoadedReward:
    """A function, and how to call it."""

    function: Callable[..., Any]
    file: str
    settings: dict[str, Any]
    parameter_names: list[str]
    required_columns: list[str]
    """The columns among the parameters that have no default."""
    takes_any_column: bool
    """Whether the function has ``**columns``."""

    def accepts(self, name: str) -> bool:
        return self.takes_any_column or name in self.parameter_names


def main() -> None:
    """Answer the messages of the run: first load a function, then call it."""
    end_with_parent()  # the socket of a killed run closes, but a function in an endless loop does not notice
    descriptor = int(sys.argv[1])
    os.set_inheritable(descriptor, False)  # programs that the function starts do not get it
    channel = MessageChannel(socket.socket(fileno=descriptor))
    try:
        request = LoadRequest(**json.loads(channel.receive()))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a crash writes no file
        resource.setrlimit(resource.RLIMIT_AS, (request.memory_bytes, request.memory_bytes))

        # load the function
        try:
            reward = _load(request)
        except BaseException as error:  # noqa: BLE001 - the code of a user may raise anything, SystemExit too
            channel.send(LoadAnswer(failure=_describe(error, request.file), required_columns=[]))
            return
        channel.send(LoadAnswer(failure=None, required_columns=reward.required_columns))

        # call it
        while True:
            call = RewardCall(**json.loads(channel.receive()))
            channel.send(_call(reward, call))
    except ConnectionError:  # the run has closed the socket, or has ended
        return


def _load(request: LoadRequest) -> _LoadedReward:
    """Return the function of a request; raise a ValueError if it or a setting is wrong."""
    if request.file:
        function = _load_from_file(request)
    else:
        builtin = BUILTIN_REWARDS[request.function]
        function = builtin.compute
        for package in builtin.packages:
            importlib.import_module(package)  # now, so that it does not count as time of the first call
        for name, value in request.settings.items():
            check = builtin.setting_checks.get(name)
            if check is not None:
                check(value)
    parameter_names = []
    required_columns = []
    takes_any_column = False
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind == inspect.Parameter.VAR_KEYWORD:
            takes_any_column = True
            continue
        if parameter.kind in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.VAR_POSITIONAL):
            continue  # arguments are passed by name
        parameter_names.append(parameter.name)
        if parameter.default is inspect.Parameter.empty and parameter.name not in CALL_ARGUMENTS:
            required_columns.append(parameter.name)
    loaded = _LoadedReward(
        function, request.file, request.settings, parameter_names, required_columns, takes_any_column
    )
    if not loaded.accepts("completions"):
        raise _WrongRewardError(
            "it has no parameter completions; define it as def reward(completions, prompts, **columns)"
        )
    unknown = [name for name in request.settings if name in CALL_ARGUMENTS or not loaded.accepts(name)]
    if unknown:
        settings = [name for name in parameter_names if name not in CALL_ARGUMENTS]
        known = f"it has {', '.join(settings)}" if settings else "it has none"
        raise _WrongRewardError(f"no setting {', '.join(unknown)}; {known}")
    return loaded


def _load_from_file(request: LoadRequest) -> Callable[..., Any]:
    """Execute the text of a user's file and return its function."""
    sys.path.insert(0, str(Path(request.file).parent))  # as for python FILE.py: modules beside it can be imported
    module = ModuleType(_MODULE)
    module.__file__ = request.file
    sys.modules[_MODULE] = module  # dataclasses look their module up
    exec(compile(request.source, request.file, "exec"), module.__dict__)
    function = getattr(module, request.function, None)
    if function is None:
        names = [name for name, value in vars(module).items() if inspect.isfunction(value) and name[0] != "_"]
        defined = f"it defines {', '.join(names)}" if names else "it defines no function"
        raise _WrongRewardError(f"no function {request.function}; {defined}")
    if not callable(function):
        raise _WrongRewardError(f"{request.function} is {_type_name(function)}, not a function")
    loaded: Callable[..., Any] = function
    return loaded


def _call(reward: _LoadedReward, call: RewardCall) -> CallAnswer:
    """Call the function and check what it returns."""
    num_completions = len(call.completions)
    arguments = {"completions": call.completions, "prompts": call.prompts, **call.columns}
    for name, value in reward.settings.items():
        arguments[name] = [value] * num_completions
    accepted_arguments = {name: value for name, value in arguments.items() if reward.accepts(name)}
    try:
        returned = reward.function(**accepted_arguments)
        if isinstance(returned, str | bytes | dict) or not hasattr(returned, "__iter__"):
            error = f"it returned {_type_name(returned)}, not a list with a number for each completion"
            return _all_failed(num_completions, error)
        return _check_values(list(returned), num_completions)
    except BaseException as error:  # noqa: BLE001 - the code of a user may raise anything, SystemExit too
        return CallAnswer(failure=_describe(error, reward.file), values=[], errors=[])


def _check_values(returned: Sequence[Any], num_completions: int) -> CallAnswer:
    """Return the values that are numbers a loss can be computed of, and the errors of the others."""
    if len(returned) != num_completions:
        error = f"it returned {len(returned)} values for {num_completions} completions"
        return _all_failed(num_completions, error)
    values = []
    errors: list[str | None] = []
    for value in returned:
        if not _is_number(value):
            values.append(0.0)
            errors.append(f"it returned {_type_name(value)}, not a number")
            continue
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if abs(number) <= _LARGEST_REWARD:
            values.append(number)
            errors.append(None)
        else:
            values.append(0.0)
            too_large = ", which is too large" if math.isfinite(number) else ""
            errors.append(f"it returned {number}{too_large}")
    return CallAnswer(failure=None, values=values, errors=errors)


def _is_number(value: Any) -> bool:
    """Return whether a value is a real number or a truth value, of Python or numpy."""
    if isinstance(value, Real):  # Python's bool, and numpy's numbers, but not numpy's bool
        return True
    numpy = sys.modules.get("numpy")  # not imported here: only a function that has imported it can return its values
    return numpy is not None and isinstance(value, numpy.bool_)


def _all_failed(num_completions: int, error: str) -> CallAnswer:
    """Return the answer for a mistake that does not depend on the completions."""
    return CallAnswer(failure=None, values=[0.0] * num_completions, errors=[error] * num_completions)


def _describe(error: BaseException, file: str) -> str:
    """Return one line with an error and, if it is in the user's file, the number of the line."""
    if isinstance(error, MemoryError):
        return "out of memory"
    try:
        message = str(error)
    except Exception:  # noqa: BLE001 - the code of a user may raise anything here too
        message = ""
    lines = message.strip().splitlines()
    is_for_users = isinstance(error, _WrongRewardError) or (not file and isinstance(error, ValueError))
    if lines and is_for_users:
        description = lines[0]
    elif lines:
        description = f"{type(error).__name__}: {lines[0]}"
    else:
        description = type(error).__name__
    description = description[:_MAX_ERROR_CHARACTERS]
    description = description.encode("utf-8", "backslashreplace").decode("utf-8")  # a text may be half a surrogate pair
    line_numbers = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    if line_numbers:
        return f"{description} (line {line_numbers[-1]})"
    return description


def _type_name(value: Any) -> str:
    return type(value).__name__


if __name__ == "__main__":
    main()
