"""Why a vLLM server has ended, by its exit code and its log. The logs are those of vLLM 0.32."""

import signal

import pytest

from fabric_train.rollouts.vllm_end import ON_CPU, ON_GPUS_OF_RUN, ON_OWN_GPUS, MemoryAdvice, describe_end

ENGINE_KILLED = (
    "(APIServer pid=6) ERROR 11-29 00:38:05 [async_llm.py:1] vllm.v1.engine.exceptions.EngineDeadError: EngineCore "
    "encountered an issue. See stack trace (above) for the root cause.\n"
)
HANDLED = "(APIServer pid=6) WARNING 11-29 01:52:50 [base.py:380] ValueError: Tokenizer not available\n"
OUT_OF_MEMORY = (
    "(EngineCore pid=7) ERROR 11-29 00:38:06 [core.py:2] torch.OutOfMemoryError: CUDA out of memory. Tried to allocate "
    "2.00 GiB. GPU 0 has a total capacity of 79.10 GiB of which 1.20 GiB is free. Including non-PyTorch memory, this "
    "process has 77.00 GiB memory in use. If reserved but unallocated memory is large try setting PYTORCH_ALLOC_CONF\n"
)
CACHE_TOO_SMALL = (
    "(EngineCore pid=7) ERROR 11-29 00:38:06 [core.py:2] ValueError: To serve at least one request with the model's "
    "max seq len (9000), (2.1 GiB KV cache is needed, which is larger than the available KV cache memory (1.0 GiB). "
    "Based on the available memory, the estimated maximum model length is 4000. Try increasing "
    "`gpu_memory_utilization` (which also controls CPU memory on the CPU backend) or decreasing `max_model_len`.\n"
)
SECONDARY = "(APIServer pid=6) RuntimeError: Engine core initialization failed. See root cause above.\n"


def describe(log: str, exit_code: int | None = 1, advice: MemoryAdvice = ON_CPU) -> str:
    return describe_end(exit_code, log, advice)


def test_the_last_error_is_the_cause_and_not_what_points_to_it() -> None:
    error = "(EngineCore pid=7) ERROR 11-29 00:38:06 [core.py:2] ValueError: No attention for this head.\n"
    log = f"(EngineCore pid=7) INFO 11-29 00:38:05 [core.py:1] loading\n{error}{SECONDARY}\n"
    assert describe(log) == "ValueError: No attention for this head."
    of_pydantic = (
        "(APIServer pid=6) pydantic_core.ValidationError: 1 validation error for ModelConfig\n"
        "(APIServer pid=6)   Value error, max_model_len (1024) is too large. [type=value_error]\n"
        "(APIServer pid=6)     For further information visit a page\n"
    )
    assert describe(of_pydantic) == "Value error, max_model_len (1024) is too large. [type=value_error]"
    assert describe("one\ntwo\n") == "two"
    assert describe("") == "it wrote no log"


def test_an_error_that_vllm_handles_is_no_cause() -> None:
    assert describe(f"{HANDLED}(APIServer pid=6) INFO 11-29 01:53:00 [a.py:1] shutting down\n") == "shutting down"


@pytest.mark.parametrize("exit_code", [128 + signal.SIGKILL, -signal.SIGKILL])
def test_a_killed_server_is_not_explained_by_an_older_error_of_its_log(exit_code: int) -> None:
    expected = (
        "killed by signal 9 (often out of memory); if so, free memory on this machine, or set VLLM_CPU_KVCACHE_SPACE "
        "to fewer GB"
    )
    assert describe(HANDLED + OUT_OF_MEMORY, exit_code) == expected


def test_a_killed_engine_is_not_explained_by_the_error_that_follows() -> None:
    assert describe(HANDLED + ENGINE_KILLED, advice=ON_OWN_GPUS) == (
        "its engine was killed (often out of memory); if so, give GPUs with more free memory in --sampler_devices"
    )


def test_other_signals_are_named_unless_the_log_says_more() -> None:
    assert describe(HANDLED, 128 + signal.SIGSEGV) == "killed by signal 11"
    aborted = "terminate called after throwing an instance of 'std::bad_alloc'\n"
    assert ON_CPU.if_out_of_memory in describe(aborted, 128 + signal.SIGABRT)


def test_too_little_memory_names_what_to_change_in_place_of_vllms_arguments() -> None:
    assert describe(OUT_OF_MEMORY + SECONDARY, advice=ON_GPUS_OF_RUN) == (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.10 "
        "GiB of which 1.20 GiB is free; give vLLM GPUs of its own with --sampler_devices, or let training take less "
        "(see --plan true)"
    )
    too_small = describe(CACHE_TOO_SMALL + SECONDARY)
    assert too_small.endswith("4000; lower --max_new_tokens, or set VLLM_CPU_KVCACHE_SPACE to more GB")
    assert "gpu_memory_utilization" not in too_small
