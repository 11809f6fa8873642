"""Sample completions with vLLM, in a server process that this run starts, watches and ends.

Before each step, the weights of the model go through a folder in memory into the server (``weight_folder``), and both
sides compare log-probabilities (``transfer_check``). All ranks send their requests to the one server of the machine.
"""

import logging
import socket
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning import Fabric

from fabric_train.cli.errors import InputError, RunError, note
from fabric_train.distributed.memory import available_memory, machine_memory
from fabric_train.distributed.ranks import first_text
from fabric_train.model.hf_model import ModelShape
from fabric_train.rollouts.sampler import Completion, FinishReason, SampleRequest, SamplingSettings
from fabric_train.rollouts.transfer_check import ProbeAnswer, TransferCheck, compute_answer
from fabric_train.rollouts.vllm_client import VllmClient
from fabric_train.rollouts.vllm_server import ServerSettings, VllmServer, check_environment
from fabric_train.rollouts.weight_folder import WeightFolder

_LOWEST_TEMPERATURE = 0.01
"""vLLM takes a lower temperature for this one."""
_REQUESTS_AT_ONCE = 256
"""Of all ranks together; vLLM computes that many at once, and keeps further ones waiting."""
_PROBE_TOKENS = 64
_PROBE_NEW_TOKENS = 16
_PROBE_SEED = 0
_RESTARTED = "vLLM is started again, and samples what is missing"

_log = logging.getLogger("fabric_train")


def open_vllm_sampler(
    fabric: Fabric,
    shape: ModelShape,
    settings: SamplingSettings,
    *,
    run_dir: Path,
    max_prompt_length: int,
    probe_ids: Sequence[int],
    dtype: torch.dtype,
    python: Path,
    devices: tuple[str, ...] | None = None,
    tensor_parallel_size: int = 1,
    memory_share: float | None = None,
    start_seconds: float = 1800.0,
) -> "VllmSampler":
    """Check what a vLLM server needs. All ranks call this together; the first ``update_weights`` starts the server.

    Args:
        fabric: The run's Fabric.
        shape: The model in training.
        settings: How to sample.
        run_dir: The run's folder, for ``rollouts/vllm.log``.
        max_prompt_length: The largest number of tokens of a prompt.
        probe_ids: The token ids of a text of the run's kind, at least two, such as its first prompt. After each
            transfer, the log-probabilities of its first 64 tokens are compared.
        dtype: The dtype that the model in training computes its products in, see ``precision.compute_dtype``; vLLM gets
            the weights in this dtype.
        python: Python of the environment with vLLM.
        devices: GPUs of the server, as in CUDA_VISIBLE_DEVICES. None: the run's own GPUs, which the server frees
            while the model trains.
        tensor_parallel_size: The number of GPUs that share a copy of the model; each further group has a copy.
        memory_share: The share of each GPU's memory that the server may use; None: 0.4 on the run's own GPUs, vLLM's
            default on others, and on a CPU half of the memory that is available.
        start_seconds: How long the server may take to start.

    Raises:
        InputError: the environment, the model or an argument does not work with vLLM.
    """
    version = check_environment(python)
    _check_arguments(fabric, shape, settings, probe_ids)
    is_on_gpu = fabric.device.type == "cuda"
    shares_gpus = is_on_gpu and devices is None
    num_devices = 1
    if is_on_gpu:
        num_devices = fabric.world_size if devices is None else len(devices)
    if num_devices % tensor_parallel_size:
        raise InputError(
            f"vLLM has {num_devices} GPUs, which cannot be divided into groups of {tensor_parallel_size}; give a "
            "divisor of their number"
        )
    if shares_gpus and memory_share is None:
        memory_share = 0.4
    if not is_on_gpu and memory_share is None:
        # vLLM's default share of the whole memory leaves nothing for the model that trains
        memory_share = round(0.5 * available_memory() / machine_memory(), 2)
    server_settings = ServerSettings(
        python=python,
        log=run_dir / "rollouts" / "vllm.log",
        dtype=str(dtype).removeprefix("torch."),
        max_length=max_prompt_length + max(settings.max_new_tokens, _PROBE_NEW_TOKENS),
        start_seconds=start_seconds,
        devices=devices,
        tensor_parallel_size=tensor_parallel_size,
        data_parallel_size=num_devices // tensor_parallel_size,
        memory_share=memory_share,
        sleeps=shares_gpus,
        compiles=is_on_gpu,
    )
    text_config = shape.config.get_text_config()
    check = TransferCheck(
        dtype,
        num_layers=text_config.num_hidden_layers,
        width=getattr(text_config, "intermediate_size", None) or 4 * text_config.hidden_size,
        temperature=settings.temperature,
    )
    folder = WeightFolder(fabric, shape, dtype)
    server = VllmServer(server_settings) if fabric.is_global_zero else None
    socket_path: Path | None = fabric.broadcast(server.client.path if server is not None else None)
    assert socket_path is not None  # rank 0's
    if fabric.is_global_zero:
        _log.info("sampler: vLLM %s, log: %s", version, server_settings.log)
    return VllmSampler(
        fabric,
        settings,
        probe_ids=tuple(probe_ids[:_PROBE_TOKENS]),
        server=server,
        client=VllmClient(socket_path),
        folder=folder,
        check=check,
    )


def _check_arguments(fabric: Fabric, shape: ModelShape, settings: SamplingSettings, probe_ids: Sequence[int]) -> None:
    """Raise an InputError for what does not work with vLLM."""
    assert len(probe_ids) > 1
    if settings.temperature < _LOWEST_TEMPERATURE:
        raise InputError(
            f"--temperature {settings.temperature:g} is too low for vLLM; give {_LOWEST_TEMPERATURE:g} or more"
        )
    if shape.adapter is not None and shape.adapter.base_weights is not None:
        raise InputError(
            f"--sampler vllm does not work with --base_weights {shape.adapter.base_weights}: vLLM would get other base "
            "weights than the adapter is trained on; leave out one of them"
        )
    machine = socket.gethostname()
    other_machine = machine if machine != fabric.broadcast(machine) else None
    other_machine = first_text(fabric, other_machine)
    if other_machine is not None:
        raise InputError(
            f"--sampler vllm works on one machine, but a rank runs on {other_machine}; leave out --sampler to sample "
            "in the processes that train"
        )


class VllmSampler:
    """A ``Sampler`` that sends requests to a vLLM server. The tokens of a completion depend on its prompt and seed,
    and but for rounding not on what the server computes at the same time.
    """

    def __init__(
        self,
        fabric: Fabric,
        settings: SamplingSettings,
        probe_ids: tuple[int, ...],
        server: VllmServer | None,
        client: VllmClient,
        folder: WeightFolder,
        check: TransferCheck,
    ) -> None:
        """Set up the sampler, see :func:`open_vllm_sampler`; ``server`` is None on all ranks except 0."""
        self._fabric = fabric
        self._settings = settings
        self._probe_ids = probe_ids
        self._server = server
        self._client = client
        self._folder = folder
        self._check = check
        self._model: Any = None
        self._step = 0

    def update_weights(self, model: Any, step: int) -> None:
        """Take over the weights of the model, see ``Sampler.update_weights``; the first call starts the server."""
        self._model = model
        self._step = step
        started = time.monotonic()
        model_dir = self._folder.write(model, step)
        written = time.monotonic()
        self._free_cached_memory()
        try:
            self._run_on_rank_0(lambda server: self._load(server, model_dir))
            loaded = time.monotonic()
            self._compare()
        finally:
            self._folder.remove()
        if self._fabric.is_global_zero:
            _log.info(
                "weights of step %d are in vLLM: written in %.1f s, loaded in %.1f s, compared in %.1f s",
                *(step, written - started, loaded - written, time.monotonic() - loaded),
            )

    def sample(self, requests: Sequence[SampleRequest]) -> list[Completion]:
        """Return a completion for each request, see ``Sampler.sample``.

        If the server fails, it is started again once, and the requests without an answer are sent again.

        Raises:
            RunError: it has failed again.
        """
        self._free_cached_memory()
        self._run_on_rank_0(VllmServer.wake)
        completions: dict[int, Completion] = {}
        fault = first_text(self._fabric, self._request(requests, completions))
        if fault is not None:
            if self._server is not None:
                note(f"{self._explain(fault)}; {_RESTARTED}")
                self._server.stop()
            self.update_weights(self._model, self._step)
            fault = first_text(self._fabric, self._request(requests, completions))
        if fault is not None:
            raise RunError(first_text(self._fabric, self._explain(fault)))
        self._run_on_rank_0(VllmServer.sleep)
        return [completions[index] for index in range(len(requests))]

    def close(self) -> None:
        """End the server. One rank may call this alone."""
        self._model = None
        self._folder.remove()
        if self._server is not None:
            self._server.close()

    def _free_cached_memory(self) -> None:
        """Give memory of the GPU that no tensor uses back, for a server on the same GPU."""
        if self._fabric.device.type == "cuda":
            torch.cuda.empty_cache()

    def _run_on_rank_0(self, action: Callable[[VllmServer], None]) -> None:
        """Call a function with the server on rank 0, and raise its RunError on all ranks."""
        fault = None
        if self._server is not None:
            try:
                action(self._server)
            except RunError as error:
                fault = str(error)
        fault = first_text(self._fabric, fault)
        if fault is not None:
            raise RunError(fault)

    def _load(self, server: VllmServer, model_dir: Path) -> None:
        """Let the server load the weights in a folder; start it if it does not run."""
        if not server.is_running:
            server.start(model_dir)
        else:
            server.wake()
            server.reload(model_dir)
        server.client.post("/update_weight_version", {"new_version": self._weight_version})

    @property
    def _weight_version(self) -> str:
        """The name of the weights, which the server repeats for each completion."""
        return f"step-{self._step}"

    def _compare(self) -> None:
        """Compare log-probabilities of the server with those of the model in training.

        Raises:
            RunError: the server does not have the weights.
        """
        # the server's
        answer: Any = None
        fault = None
        if self._server is not None:
            try:
                answer = self._ask_probe()
            except RunError as error:
                fault = str(error)
        fault = first_text(self._fabric, fault)
        if fault is not None:
            raise RunError(fault)

        # the trainer's, for which all ranks compute together
        sampled_ids: list[int] | None = self._fabric.broadcast(
            answer[0].token_ids.tolist() if answer is not None else None
        )
        assert sampled_ids is not None  # rank 0's
        trainer = compute_answer(self._fabric, self._model, self._probe_ids, sampled_ids, self._settings.temperature)
        if answer is not None:
            completion, text = answer
            fault = self._check.find_fault(ProbeAnswer(text, completion.log_probabilities), trainer)
        fault = first_text(self._fabric, fault)
        if fault is not None:
            raise RunError(f"vLLM does not have the weights of step {self._step}: {fault}")

    def _ask_probe(self) -> tuple[Completion, np.ndarray]:
        """Return a completion of the probe's text, and the log-probabilities of the text, fp32 [tokens - 1]."""
        request = SampleRequest(self._probe_ids, _PROBE_SEED)
        parameters = {**self._parameters(request), "max_tokens": _PROBE_NEW_TOKENS, "prompt_logprobs": 0}
        answer = self._client.post(
            "/inference/v1/generate", {"token_ids": list(self._probe_ids), "sampling_params": parameters}
        )
        text = []
        for token_id, log_probabilities in zip(self._probe_ids[1:], answer["prompt_logprobs"][1:], strict=True):
            text.append(log_probabilities[str(token_id)]["logprob"])
        return self._read_completion(answer), np.array(text, dtype=np.float32)

    def _parameters(self, request: SampleRequest) -> dict[str, Any]:
        """Return vLLM's sampling parameters for a request: the full distribution at the temperature."""
        return {
            "temperature": self._settings.temperature,
            "top_p": 1.0,
            "top_k": 0,
            "min_p": 0.0,
            "max_tokens": self._settings.max_new_tokens,
            "seed": request.seed,
            "logprobs": 0,  # of the sampled token alone
            "stop_token_ids": list(self._settings.end_ids),
            "ignore_eos": True,  # only ``end_ids`` end a completion
            "detokenize": False,
        }

    def _request(self, requests: Sequence[SampleRequest], completions: dict[int, Completion]) -> str | None:
        """Add the completions of the requests that have none, by their index; return what has failed, or None."""
        indices = [index for index in range(len(requests)) if index not in completions]
        num_threads = max(1, _REQUESTS_AT_ONCE // self._fabric.world_size)

        def complete(index: int) -> None:
            request = requests[index]
            content = {"token_ids": list(request.prompt_ids), "sampling_params": self._parameters(request)}
            completions[index] = self._read_completion(self._client.post("/inference/v1/generate", content))

        with ThreadPoolExecutor(num_threads, thread_name_prefix="vllm") as threads:
            futures = [threads.submit(complete, index) for index in indices]
            try:
                for future in futures:
                    future.result()
            except RunError as error:
                threads.shutdown(cancel_futures=True)
                return str(error)
        return None

    def _read_completion(self, answer: Any) -> Completion:
        """Return the completion in an answer.

        Raises:
            RunError: it was not completed, or with other weights.
        """
        (choice,) = answer["choices"]
        reason: FinishReason = choice["finish_reason"]
        if reason not in ("stop", "length"):
            raise RunError(f"vLLM ended a completion with {reason!r}")
        versions = {span["version"] for span in choice["weight_versions"]}
        if versions != {self._weight_version}:
            raise RunError(f"vLLM sampled with weights of {', '.join(sorted(versions))}, not {self._weight_version}")
        log_probabilities = [token["logprob"] for token in choice["logprobs"]["content"]]
        return Completion(
            token_ids=np.array(choice["token_ids"], dtype=np.int64),
            log_probabilities=np.array(log_probabilities, dtype=np.float32),
            finish_reason=reason,
        )

    def _explain(self, fault: str) -> str:
        """Return what has failed; on rank 0 also why, if the server has ended."""
        if self._server is not None and not self._server.is_running:
            return f"vLLM ended: {self._server.describe_end()}"
        return fault
