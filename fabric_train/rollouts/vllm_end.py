"""Say in one line why a vLLM server has ended, by its exit code and its log, and what to change if it lacks memory."""

import re
import signal
from dataclasses import dataclass

_LOG_PREFIX = re.compile(r"^(\(\w+ pid=\d+\) )?((?P<level>ERROR|WARNING|INFO|DEBUG) \S+ \S+ \[[^\]]*\] )?")
_ERROR = re.compile(r"\b\w*(Error|Exception): \S|\berror[:,] \S|\bstd::bad_alloc\b")
_SECONDARY_ERRORS = re.compile("root cause|stack trace above|Engine core initialization failed|EngineDeadError")
"""What vLLM logs after an error, and which does not say the cause."""
_CACHE_TOO_SMALL = re.compile("No available memory for the cache blocks|larger than the available KV cache memory")
_OUT_OF_MEMORY = re.compile(
    "out of memory|OutOfMemoryError|MemoryError|bad_alloc|(can't|Cannot) allocate memory|Free memory on device|"
    "Available memory on node"
)
_ADVICE_OF_VLLM = re.compile(
    r"\.? *(Try increasing|Try reducing|Decrease|Increase|Reduce|To resolve|On the CPU backend|Including non-PyTorch|"
    r"If reserved but|See https:).*"
)
"""How vLLM and torch go on: with arguments of their own, which a run does not have."""
_FIRST_SIGNAL_CODE = 128
"""``vllm_supervisor`` exits with this plus the number of the signal that killed the server, as a shell does."""


@dataclass(frozen=True)
class MemoryAdvice:
    """What to change in a run whose vLLM lacks memory."""

    if_out_of_memory: str
    if_cache_too_small: str
    """The keys and values of a single completion of full length do not fit."""


ON_GPUS_OF_RUN = MemoryAdvice(
    if_out_of_memory="give vLLM GPUs of its own with --sampler_devices, or let training take less (see --plan true)",
    if_cache_too_small="lower --max_new_tokens, or give vLLM GPUs of its own with --sampler_devices",
)
ON_OWN_GPUS = MemoryAdvice(
    if_out_of_memory="give GPUs with more free memory in --sampler_devices",
    if_cache_too_small="lower --max_new_tokens, or give GPUs with more memory in --sampler_devices",
)
ON_CPU = MemoryAdvice(
    if_out_of_memory="free memory on this machine, or set VLLM_CPU_KVCACHE_SPACE to fewer GB",
    if_cache_too_small="lower --max_new_tokens, or set VLLM_CPU_KVCACHE_SPACE to more GB",
)


def describe_end(exit_code: int | None, log: str, advice: MemoryAdvice) -> str:
    """Return why a server has ended.

    Args:
        exit_code: That of its supervisor; None if it has not ended.
        log: What the server has written.
        advice: What to change if it lacks memory.
    """
    signal_number = _signal_number(exit_code)
    # the system's out-of-memory killer leaves no line in the log; errors there are older
    if signal_number == signal.SIGKILL:
        return f"killed by signal 9 (often out of memory); if so, {advice.if_out_of_memory}"

    errors = find_errors(log)
    for error in reversed(errors):
        if lacks_memory(error):
            return describe_lack_of_memory(error, advice)
    if signal_number is not None:
        return f"killed by signal {signal_number}"
    causes = [error for error in errors if not _SECONDARY_ERRORS.search(error)]
    if causes:
        return causes[-1]
    if any("EngineDeadError" in error for error in errors):
        return f"its engine was killed (often out of memory); if so, {advice.if_out_of_memory}"
    return last_line(log)


def lacks_memory(message: str) -> bool:
    """Return whether an error says that there is too little memory."""
    return bool(_CACHE_TOO_SMALL.search(message) or _OUT_OF_MEMORY.search(message))


def describe_lack_of_memory(error: str, advice: MemoryAdvice) -> str:
    """Return an error that says that there is too little memory, with the run's advice in place of vLLM's."""
    shortened = _ADVICE_OF_VLLM.sub("", error)
    if _CACHE_TOO_SMALL.search(error):
        return f"{shortened}; {advice.if_cache_too_small}"
    return f"{shortened}; {advice.if_out_of_memory}"


def find_errors(log: str) -> list[str]:
    """Return the lines of a log that say an error, without what vLLM puts in front of them."""
    errors = []
    for line in log.splitlines():
        prefix = _LOG_PREFIX.match(line)
        assert prefix is not None  # all of its parts are optional
        message = line[prefix.end() :].strip()
        # vLLM also warns of errors that it handles
        if prefix["level"] in (None, "ERROR") and _ERROR.search(message):
            errors.append(message)
    return errors


def last_line(log: str) -> str:
    """Return the last line of a log that is not empty, without what vLLM puts in front of it."""
    for line in reversed(log.splitlines()):
        message = _LOG_PREFIX.sub("", line).strip()
        if message:
            return message
    return "it wrote no log"


def _signal_number(exit_code: int | None) -> int | None:
    """Return the number of the signal that killed the server or its supervisor, or None."""
    if exit_code is None:
        return None
    if exit_code < 0:  # the supervisor
        return -exit_code
    if exit_code > _FIRST_SIGNAL_CODE:
        return exit_code - _FIRST_SIGNAL_CODE
    return None
