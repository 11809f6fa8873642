"""The rewards of a run: which functions, their weights, and their values for the completions of a step.

A reward is a function ``def reward(completions, prompts, **columns)``, which returns a list with a number for each
completion. ``completions`` are the texts, ``prompts`` their prompts as in the file (texts, or lists of messages), and
every other column of the prompts file is a further argument; all are lists of the same length. Arguments are passed by
name, and a function without ``**columns`` gets only those that it names.

An item of ``--rewards`` is the name of a built-in reward (``builtin_rewards.py``), ``FILE.py:NAME``, or ``FILE.py`` for
its function ``reward``. The name of a reward is that of the built-in, or of the function.
"""

import hashlib
import math
import re
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from fabric_train.cli.argument_types import nearest_name
from fabric_train.cli.errors import InputError
from fabric_train.cli.tables import Component
from fabric_train.files.requirements import check_package
from fabric_train.rollouts.builtin_rewards import BUILTIN_REWARDS
from fabric_train.rollouts.reward_messages import (
    CALL_ARGUMENTS,
    CallAnswer,
    LoadAnswer,
    LoadRequest,
    RewardCall,
    RewardInterruptedError,
    never,
)
from fabric_train.rollouts.reward_processes import RewardFailedError, RewardLimits, RewardProcess, one_line

_DEFAULT_FUNCTION = "reward"
_FUNCTION_IN_FILE = re.compile(r"(?P<file>.+\.py)(:(?P<function>.*))?", re.DOTALL)
_RESERVED_NAMES = ("error",)  # reward_error is a column of the stored rollouts
_SINGLE_CALL_DIVISOR = 10
"""The time of a call with all completions divided by that of a call with one, see :meth:`Rewards.compute`.

A completion alone takes far less time than all together. If each had the whole time, a few that hang would use up
``RewardLimits.retry_seconds``; with a tenth and four times the time, up to 40 may hang.
"""


@dataclass(frozen=True)
class RewardSpec:
    """An item of ``--rewards``."""

    name: str
    """The name of the built-in or of the function; empty in ``FILE.py:``, which ``open_rewards`` refuses."""
    file: str | None
    """The file of the function as it was given; None for a built-in."""


@dataclass(frozen=True)
class RewardTable:
    """The rewards of the completions of a call."""

    values: np.ndarray
    """The value of each reward for each completion, fp64 [rewards, completions]; 0 where it failed."""
    total: np.ndarray
    """The weighted sum of a completion's values, fp64 [completions]."""
    errors: list[str | None]
    """Which rewards of a completion failed, and why, in one line; None if none did."""
    first_errors: list[str | None]
    """For each reward the item of ``--rewards``, how many completions it failed for, and why it failed for the first of
    them, in one line without control characters; None if it did not fail. A reward that failed for completions together
    but for none alone has an entry here only."""
    is_interrupted: bool = False
    """Whether the call was interrupted, so that there are no rewards: all values are 0."""

    @property
    def num_errors(self) -> int:
        """The number of completions of which a reward failed."""
        return sum(error is not None for error in self.errors)


@dataclass(frozen=True)
class _Reward:
    """A reward of the run, with its process."""

    name: str
    spec: str
    """The item of ``--rewards``."""
    weight: float
    source_sha256: str | None
    """The SHA-256 of its file; None for a built-in."""
    process: RewardProcess
    required_columns: list[str]
    """The columns that it needs and that no setting replaces."""


@dataclass(frozen=True)
class _Candidate:
    """An item of ``--rewards`` whose function is not loaded yet."""

    spec: str
    request: LoadRequest
    process: RewardProcess


class Rewards:
    """The rewards of a run; :func:`open_rewards` opens them."""

    def __init__(self, rewards: Sequence[_Reward], on_error: Literal["zero", "stop"], limits: RewardLimits) -> None:
        self._rewards = rewards
        self._on_error = on_error
        self._limits = limits

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the rewards, in the order of ``--rewards``."""
        return tuple(reward.name for reward in self._rewards)

    @property
    def weights(self) -> tuple[float, ...]:
        """The weight of each reward."""
        return tuple(reward.weight for reward in self._rewards)

    @property
    def sources(self) -> dict[str, str | None]:
        """The SHA-256 of the file of each reward by its name; None for a built-in."""
        return {reward.name: reward.source_sha256 for reward in self._rewards}

    def check_columns(self, columns_by_source: Mapping[str, Collection[str]], option: str) -> None:
        """Check that the prompts have the columns that the rewards need.

        Args:
            columns_by_source: The columns that every prompt of a source has beside the prompt itself, by its name.
            option: The argument with the prompts, for the message.

        Raises:
            InputError: A column is missing, or has the name of another argument of a reward.
        """
        faults = []
        for name, columns in columns_by_source.items():
            for column in CALL_ARGUMENTS:
                if column in columns:
                    faults.append(
                        f"{option}: a column of {name} is called {column}, as an argument of rewards; rename the column"
                    )
        for reward in self._rewards:
            for column in reward.required_columns:
                advice = (
                    "add the column, or give one value for all prompts: "
                    f'--reward_settings \'{{"{reward.name}": {{"{column}": …}}}}\''
                )
                for name, columns in columns_by_source.items():
                    if column not in columns:
                        column_list = ", ".join(sorted(columns)) or "no column but the prompt"
                        faults.append(
                            f"--rewards {reward.spec} needs a column {column} of every prompt in {option}; {name} has "
                            f"{column_list}{nearest_name(column, columns)}; {advice}"
                        )
        if faults:
            raise InputError(*faults)

    def compute(
        self,
        completions: list[str],
        prompts: list[Any],
        columns: dict[str, list[Any]],
        is_interrupted: Callable[[], bool] = never,
    ) -> RewardTable:
        """Compute all rewards of completions, in all processes at the same time.

        A reward that returns something else than a finite number for a completion, or another number of values than
        completions, fails for these completions. If a whole call fails, because the function raises, its process dies
        or the time is over, each completion is sent alone, so that the fault of one does not cost the others their
        reward. A completion alone has a tenth of the time, or the share of its call if that had fewer than ten
        completions. After ``RewardLimits.retry_seconds``, the completions that are left fail. With ``on_error``
        ``stop``, the run is about to end, so no completion is sent alone.

        A failure or an interruption is returned, never raised or printed, because ranks differ in it: see
        ``reward_errors.py``.

        Args:
            completions: The texts of the completions.
            prompts: The prompt of each completion: a text, or the list of messages of a chat.
            columns: The values of the other columns of the prompts file for each completion.
            is_interrupted: Called several times a second; True kills the processes and ends the call.
        """
        num_completions = len(completions)
        no_rewards = RewardTable(
            values=np.zeros((len(self._rewards), num_completions)),
            total=np.zeros(num_completions),
            errors=[None] * num_completions,
            first_errors=[None] * len(self._rewards),
        )
        if num_completions == 0:
            return no_rewards
        try:
            return self._call(RewardCall(completions, prompts, columns), is_interrupted)
        except RewardInterruptedError:
            self.close()
            return replace(no_rewards, is_interrupted=True)

    def close(self) -> None:
        """End the processes."""
        for reward in self._rewards:
            reward.process.kill()

    def _call(self, call: RewardCall, is_interrupted: Callable[[], bool]) -> RewardTable:
        """Call all rewards with at least one completion, see :meth:`compute`.

        Raises:
            RewardInterruptedError: ``is_interrupted`` returned True.
        """
        num_completions = len(call.completions)
        values = np.zeros((len(self._rewards), num_completions))
        errors: list[str | None] = [None] * num_completions

        # all rewards work at the same time
        for reward in self._rewards:
            reward.process.send(call, self._limits.call_seconds, is_interrupted)
        outcomes: list[CallAnswer | RewardFailedError] = []
        for reward in self._rewards:
            try:
                outcomes.append(reward.process.receive())
            except RewardFailedError as failure:
                outcomes.append(failure)

        # retry failed calls only after all answers are in, because retries may outlast the deadlines of the others
        first_errors: list[str | None] = []
        for reward_index, (reward, outcome) in enumerate(zip(self._rewards, outcomes, strict=True)):
            call_failure = None
            if isinstance(outcome, RewardFailedError):
                call_failure = str(outcome)
                answer = self._send_alone(reward, call, call_failure, is_interrupted)
            else:
                answer = outcome
            first_errors.append(_describe_failures(reward, answer, call_failure))
            values[reward_index] = answer.values
            for completion_index, error in enumerate(answer.errors):
                if error is None:
                    continue
                earlier = errors[completion_index]
                described = f"{reward.name}: {error}"
                errors[completion_index] = described if earlier is None else f"{earlier}; {described}"

        # one addition after the other: the sum of a completion does not depend on how many there are
        total = np.zeros(num_completions)
        for reward_index, reward in enumerate(self._rewards):
            total += reward.weight * values[reward_index]
        return RewardTable(values, total, errors, first_errors)

    def _send_alone(
        self, reward: _Reward, call: RewardCall, call_failure: str, is_interrupted: Callable[[], bool]
    ) -> CallAnswer:
        """Send each completion of a call that has failed alone, within the limits of :meth:`compute`."""
        num_completions = len(call.completions)
        if num_completions == 1 or self._on_error == "stop":
            return CallAnswer(failure=None, values=[0.0] * num_completions, errors=[call_failure] * num_completions)
        alone_seconds = self._limits.call_seconds / min(num_completions, _SINGLE_CALL_DIVISOR)
        end = time.monotonic() + self._limits.retry_seconds
        values = []
        errors: list[str | None] = []
        for index in range(num_completions):
            if time.monotonic() >= end:
                values.append(0.0)
                errors.append(f"it was not called, because earlier completions took too long; {call_failure}")
                continue
            reward.process.send(call.of_one_completion(index), alone_seconds, is_interrupted)
            try:
                answer = reward.process.receive()
            except RewardFailedError as failure:
                values.append(0.0)
                errors.append(str(failure))
            else:
                values += answer.values
                errors += answer.errors
        return CallAnswer(failure=None, values=values, errors=errors)


def open_rewards(
    specs: Sequence[str],
    weights: Mapping[str, Any] | None,
    settings: Mapping[str, Mapping[str, Any]] | None,
    on_error: Literal["zero", "stop"],
    limits: RewardLimits,
) -> Rewards:
    """Open the rewards of a run: load each function in its process.

    Args:
        specs: The items of ``--rewards``.
        weights: The weights by the name of a reward; 1 for the others.
        settings: Values of columns that are the same for all prompts, by the name of a reward and the column.
        on_error: Whether a completion whose reward fails gets 0, or the run ends; see :meth:`Rewards.compute`.
        limits: The limits of each process.

    Raises:
        InputError: An item, a weight or a setting is wrong, or a function cannot be loaded.
    """
    weights = dict(weights or {})
    settings = dict(settings or {})
    for name, values in settings.items():
        if not isinstance(values, Mapping):
            raise InputError(
                f"--reward_settings: {name}: expected names with values, such as {{max_characters: 400}}, got "
                f"{values!r}"
            )
    candidates: dict[str, _Candidate] = {}
    faults: list[str] = []
    for spec in specs:
        try:
            request = _make_request(spec, settings, limits)
        except InputError as error:
            faults += error.faults
            continue
        name = request.function
        if name in candidates:
            faults.append(
                f"--rewards {spec}: {candidates[name].spec} is called {name} too; give functions with different names"
            )
            continue
        candidates[name] = _Candidate(spec, request, RewardProcess(request, limits))
    if not specs:
        faults.append(f"--rewards: give at least one reward: {', '.join(BUILTIN_REWARDS)}, or FILE.py:NAME")
    if not faults:  # the names of all rewards are known
        faults += _faults_of_weights(weights, list(candidates))
        for name in settings:
            if name not in candidates:
                faults.append(_unknown_name("--reward_settings", name, list(candidates)))
    if faults:
        raise InputError(*faults)

    # start all processes before waiting for the first
    rewards = []
    try:
        for candidate in candidates.values():
            candidate.process.start()
        for name, candidate in candidates.items():
            try:
                loaded = _wait_until_loaded(candidate)
            except InputError as error:
                faults += error.faults
                continue
            request = candidate.request
            source_sha256 = None
            if request.file:
                source_sha256 = hashlib.sha256(request.source.encode()).hexdigest()
            rewards.append(
                _Reward(
                    name=name,
                    spec=candidate.spec,
                    weight=float(weights.get(name, 1.0)),
                    source_sha256=source_sha256,
                    process=candidate.process,
                    required_columns=[column for column in loaded.required_columns if column not in request.settings],
                )
            )
        if faults:
            raise InputError(*faults)
    except BaseException:
        for candidate in candidates.values():
            candidate.process.kill()
        raise
    return Rewards(rewards, on_error, limits)


def name_rewards(specs: Sequence[str]) -> tuple[str, ...]:
    """Return the names of the rewards in ``--rewards``, without opening them."""
    return tuple(parse_spec(spec).name for spec in specs)


def parse_spec(spec: str) -> RewardSpec:
    """Return the parts of an item of ``--rewards``, which need not exist."""
    match = _FUNCTION_IN_FILE.fullmatch(spec)
    if match is None:
        return RewardSpec(spec, None)
    name = match["function"]
    if name is None:
        name = _DEFAULT_FUNCTION
    return RewardSpec(name, match["file"])


def describe_rewards(specs: Sequence[str]) -> list[Component]:
    """Return the descriptions, for a checkpoint, of the rewards in files; the built-in ones are known by their names.

    A file that cannot be read has no SHA-256; ``open_rewards`` refuses it.
    """
    components = []
    for spec in specs:
        parsed = parse_spec(spec)
        if parsed.file is None:
            continue
        source_sha256 = None
        with suppress(OSError):
            source_sha256 = hashlib.sha256(Path(parsed.file).expanduser().read_bytes()).hexdigest()
        components.append(Component("reward", parsed.name, parsed.file, source=source_sha256))
    return components


def _make_request(spec: str, settings: Mapping[str, Mapping[str, Any]], limits: RewardLimits) -> LoadRequest:
    """Return the request to load a reward, whose ``function`` is its name; InputError if it cannot exist."""
    parsed = parse_spec(spec)
    name = parsed.name

    # a built-in
    if parsed.file is None:
        if spec not in BUILTIN_REWARDS:
            raise InputError(
                f"--rewards {spec}: no built-in reward{nearest_name(spec, BUILTIN_REWARDS)}; give "
                f"{', '.join(BUILTIN_REWARDS)}, or FILE.py:NAME for a function of yours"
            )
        for package in BUILTIN_REWARDS[spec].packages:
            check_package(package, f"--rewards {spec}")
        return LoadRequest(
            file="",
            source="",
            function=spec,
            settings=dict(settings.get(spec, {})),
            memory_bytes=limits.memory_bytes,
        )

    # a function in a file
    file = Path(parsed.file).expanduser()
    if not name.isidentifier() or name in _RESERVED_NAMES:
        raise InputError(f"--rewards {spec}: {name!r} cannot be the name of a reward; give the name of a function")
    if not file.is_file():
        raise InputError(f"--rewards {spec}: no file {file}; give the path of a Python file")
    try:
        source = file.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise InputError(f"--rewards {spec}: {file} is not UTF-8; save it as UTF-8") from None
    return LoadRequest(
        file=str(file.resolve()),
        source=source,
        function=name,
        settings=dict(settings.get(name, {})),
        memory_bytes=limits.memory_bytes,
    )


def _describe_failures(reward: _Reward, answer: CallAnswer, call_failure: str | None) -> str | None:
    """Return one line on the failures of a reward in a call, see ``RewardTable.first_errors``.

    Args:
        reward: The reward.
        answer: Its values, after completions were sent alone.
        call_failure: Why the call with all completions failed; None if it did not.
    """
    num_completions = len(answer.errors)
    completion_errors = [error for error in answer.errors if error is not None]
    spec = one_line(reward.spec)
    if completion_errors:
        count = f"{len(completion_errors)} of {num_completions} completions"
        return f"--rewards {spec} failed for {count}: {completion_errors[0]}"
    if call_failure is not None:
        return f"--rewards {spec} failed for {num_completions} completions together, not for each alone: {call_failure}"
    return None


def _wait_until_loaded(candidate: _Candidate) -> LoadAnswer:
    """Return what a process says about its function; InputError if the function cannot be used."""
    spec = candidate.spec
    try:
        loaded = candidate.process.wait_until_loaded()
    except RewardFailedError as error:
        raise InputError(f"--rewards {spec}: {error}; correct the file") from None
    if loaded.failure is None:
        return loaded
    if loaded.failure == "out of memory":
        raise InputError(f"--rewards {spec}: out of memory; raise --reward_memory_gb")
    name = candidate.request.function
    if name in BUILTIN_REWARDS and candidate.request.settings:
        raise InputError(f"--reward_settings: {name}: {loaded.failure}; correct the setting")
    raise InputError(f"--rewards {spec}: {loaded.failure}; correct it")


def _faults_of_weights(weights: Mapping[str, Any], names: Sequence[str]) -> list[str]:
    """Return what is wrong with the weights of rewards that have these names."""
    faults = []
    for name, weight in weights.items():
        if name not in names:
            faults.append(_unknown_name("--reward_weights", name, names))
        elif isinstance(weight, bool) or not isinstance(weight, int | float) or not math.isfinite(weight):
            faults.append(f"--reward_weights: the weight of {name} is {weight!r}; give a finite number")
    if not faults and all(weights.get(name, 1.0) == 0 for name in names):
        faults.append("--reward_weights: every reward has weight 0, so there is nothing to learn; change a weight")
    return faults


def _unknown_name(option: str, name: str, names: Sequence[str]) -> str:
    return f"{option}: no reward is called {name}{nearest_name(name, names)}; --rewards has {', '.join(names)}"
