"""Sample completions with vLLM, in a server process that this run starts, watches and ends.

Before each step, the weights of the model go through a folder in memory into the server (``weight_folder``), and both
sides compare log-probabilities (``transfer_check``). All ranks send their requests to the one server of the machine.
On several GPUs, each GPU of the server has a copy of the model, a replica.
"""

import logging
import math
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning import Fabric

from fabric_train.cli.errors import InputError, RunError
from fabric_train.distributed.memory import available_memory, machine_memory
from fabric_train.distributed.ranks import first_text, gather_over_ranks
from fabric_train.model.hf_model import ModelShape
from fabric_train.rollouts.sampler import Completion, FinishReason, SampleRequest, SamplingSettings
from fabric_train.rollouts.transfer_check import EngineAnswer, TransferCheck, compute_answer
from fabric_train.rollouts.vllm_client import GeneratedTokens, ServerFailedError, VllmClient
from fabric_train.rollouts.vllm_server import ServerSettings, VllmServer, check_environment
from fabric_train.rollouts.weight_folder import WeightFolder

SHARED_GPU_SHARE = 0.4
"""The share of the memory of each of the run's GPUs that vLLM may use while it samples."""
REQUESTS_PER_REPLICA = 256
"""Requests of all ranks together; a replica computes that many at once, and keeps further ones waiting."""
_PROBE_TOKENS = 64
_PROBE_NEW_TOKENS = 16
_PROBE_SEED = 0
_HANG_SECONDS = 300.0
"""A server that computes no token for so long, although requests wait, hangs. An iteration takes seconds at most."""
_WATCH_SECONDS = 10.0
_END_SECONDS = 30.0
"""How long a server that has failed may take to end: its supervisor waits for what it leaves."""

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
    devices: tuple[str, ...] | None,
    on_batch: Callable[[], None],
) -> "VllmSampler":
    """Check what a vLLM server needs. All ranks call this together; the first ``update_weights`` starts the server.

    Args:
        fabric: The run's Fabric.
        shape: The model in training.
        settings: How to sample.
        run_dir: The run's folder, for ``rollouts/vllm.log``.
        max_prompt_length: The largest number of tokens of a prompt.
        probe_ids: The token ids of a text of the run's kind, such as its longest prompt. After each transfer, the
            log-probabilities of its first 64 tokens are compared, so it needs two.
        dtype: The dtype that the model in training computes its products in, see ``precision.compute_dtype``; vLLM gets
            the weights in this dtype.
        python: Python of the environment with vLLM.
        devices: GPUs of the server, as in CUDA_VISIBLE_DEVICES. None: the run's own GPUs, which the server frees
            while the model trains.
        on_batch: Called before each batch of completions is awaited, equally often on all ranks.

    Raises:
        InputError: the environment, the model or an argument does not work with vLLM.
    """
    if len(probe_ids) < 2:
        raise InputError(
            "--sampler vllm needs a prompt of at least two tokens, whose log-probabilities it compares with the "
            "trainer's; leave out --sampler to sample in the processes that train"
        )
    _check_machine(fabric)
    _check_arguments(fabric, shape, devices)
    version = _check_python(fabric, python)
    is_on_gpu = fabric.device.type == "cuda"
    shares_gpus = is_on_gpu and devices is None
    num_replicas = 1
    memory_share = None  # vLLM's default, for GPUs of its own
    if shares_gpus:
        num_replicas = fabric.world_size
        memory_share = SHARED_GPU_SHARE
    elif devices is not None:
        num_replicas = len(devices)
    else:
        # on a CPU, vLLM's default share of the whole memory leaves nothing for the model that trains
        memory_share = round(0.5 * available_memory() / machine_memory(), 2)
    server_settings = ServerSettings(
        python=python,
        log=run_dir / "rollouts" / "vllm.log",
        dtype=str(dtype).removeprefix("torch."),
        max_length=max_prompt_length + max(settings.max_new_tokens, _PROBE_NEW_TOKENS),
        devices=devices,
        num_replicas=num_replicas,
        memory_share=memory_share,
        sleeps=shares_gpus,
        compiles=is_on_gpu,
    )
    text_config = shape.config.get_text_config()
    width = getattr(text_config, "intermediate_size", None) or 4 * text_config.hidden_size
    checks = []
    for _ in range(num_replicas):
        checks.append(TransferCheck(dtype, text_config.num_hidden_layers, width, settings.temperature))
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
        checks=checks,
        on_batch=on_batch,
    )


def _check_machine(fabric: Fabric) -> None:
    """Raise an InputError on all ranks if a rank runs on another machine than rank 0."""
    machine = socket.gethostname()
    other_machine = machine if machine != fabric.broadcast(machine) else None
    other_machine = first_text(fabric, other_machine)
    if other_machine is not None:
        raise InputError(
            f"--sampler vllm works on one machine, but a rank runs on {other_machine}; leave out --sampler to sample "
            "in the processes that train"
        )


def _check_python(fabric: Fabric, python: Path) -> str:
    """Return the version of vLLM, see ``check_environment``, whose InputError is raised on all ranks."""
    version = ""
    fault = None
    if fabric.is_global_zero:
        try:
            version = check_environment(python)
        except InputError as error:
            fault = str(error)
    fault = first_text(fabric, fault)
    if fault is not None:
        raise InputError(fault)
    return version


def _check_arguments(fabric: Fabric, shape: ModelShape, devices: tuple[str, ...] | None) -> None:
    """Raise an InputError on all ranks for what does not work with vLLM."""
    if shape.adapter is not None and shape.adapter.base_weights is not None:
        raise InputError(
            f"--sampler vllm does not work with --base_weights {shape.adapter.base_weights}: vLLM would get other base "
            "weights than the adapter is trained on; leave out one of them"
        )
    if devices is None:
        return
    if fabric.device.type != "cuda":
        raise InputError(
            f"--sampler_devices {','.join(devices)} names GPUs, but the run trains on {fabric.device.type}; leave out "
            "--sampler_devices"
        )
    own_device = physical_device(fabric.device.index, os.environ.get("CUDA_VISIBLE_DEVICES"))
    shared_device = first_text(fabric, own_device if own_device in devices else None)
    if shared_device is not None:
        raise InputError(
            f"--sampler_devices {','.join(devices)}: the run trains on GPU {shared_device}; give other GPUs, or leave "
            "out --sampler_devices to share the run's"
        )


def physical_device(index: int, visible_devices: str | None) -> str:
    """Return how CUDA_VISIBLE_DEVICES names the GPU that torch calls ``index``; None: the variable is not set."""
    if visible_devices is None:
        return str(index)
    return visible_devices.split(",")[index].strip()


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
        checks: list[TransferCheck],
        on_batch: Callable[[], None],
    ) -> None:
        """Set up the sampler, see :func:`open_vllm_sampler`.

        ``server`` is None on all ranks except 0; ``checks`` has one for each replica.
        """
        self._fabric = fabric
        self._settings = settings
        self._probe_ids = probe_ids
        self._server = server
        self._client = client
        self._folder = folder
        self._checks = checks
        self._on_batch = on_batch
        self._model: Any = None
        self._step = 0
        self._has_restarted = False  # in this step
        self._has_stopped = False  # the server, after it had failed to sleep
        self._hangs = False

    def update_weights(self, model: Any, step: int) -> None:
        """Take over the weights of the model, see ``Sampler.update_weights``; the first call starts the server.

        If the server has failed since, or fails now, it is started again, once in a step.
        """
        self._model = model
        self._step = step
        self._has_restarted = False
        try:
            self._transfer()
        except ServerFailedError as error:
            self._restart(error)

    def _transfer(self) -> None:
        """Write the weights, let the server load them, and compare.

        Raises:
            ServerFailedError: the server has failed; raised on all ranks.
            RunError: the server cannot be started, or does not have the weights; raised on all ranks.
        """
        self._has_stopped = False
        started = time.monotonic()
        model_dir = self._folder.write(self._model, self._step)
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
                *(self._step, written - started, loaded - written, time.monotonic() - loaded),
            )

    def _restart(self, error: ServerFailedError) -> None:
        """Start a server that has failed again.

        Raises:
            RunError: it has been started again in this step already, or fails again.
        """
        if self._has_restarted:
            raise error
        self._has_restarted = True
        if self._server is not None:
            _log.warning("%s; vLLM is started again", error)
            self._server.stop()
        self._transfer()

    def sample(self, requests: Sequence[SampleRequest]) -> list[Completion]:
        """Return a completion for each request, see ``Sampler.sample``.

        If the server fails, it is started again, once in a step, and the requests without an answer are sent again.

        Raises:
            RunError: it has failed again.
            RunStopped: ``on_batch`` raised it.
        """
        self._free_cached_memory()
        completions: dict[int, Completion] = {}
        try:
            if self._has_stopped:
                self._transfer()
            self._complete(requests, completions)
        except ServerFailedError as error:
            self._restart(error)
            self._complete(requests, completions)
        try:
            self._run_on_rank_0(VllmServer.sleep)
        except ServerFailedError as error:  # the completions are there
            self._has_stopped = True
            if self._server is not None:
                _log.warning("%s; vLLM is started again before the next completions", error)
                self._server.stop()
        return [completions[index] for index in range(len(requests))]

    def _complete(self, requests: Sequence[SampleRequest], completions: dict[int, Completion]) -> None:
        """Add the completions of the requests that have none, by their index.

        Raises:
            ServerFailedError: the server has failed; raised on all ranks.
        """
        self._run_on_rank_0(VllmServer.wake)
        with self._watch():
            fault = first_text(self._fabric, self._request(requests, completions))
        if fault is not None:
            explained = self._explain(ServerFailedError(fault))
            raise self._fabric.broadcast(explained)  # rank 0, which has the server, knows why

    @contextmanager
    def _watch(self) -> Iterator[None]:
        """End the server on rank 0 if it computes no token for ``_HANG_SECONDS``; open requests of all ranks then fail.

        All ranks must leave the block together.
        """
        self._hangs = False
        server = self._server
        if server is None:
            yield
            return
        has_finished = threading.Event()

        def watch() -> None:
            last_num_tokens: float | None = None
            changed = time.monotonic()
            while not has_finished.wait(_WATCH_SECONDS):
                num_tokens = self._client.num_tokens()
                if num_tokens is not None and num_tokens != last_num_tokens:
                    last_num_tokens = num_tokens
                    changed = time.monotonic()
                if time.monotonic() - changed > _HANG_SECONDS:
                    self._hangs = True
                    server.terminate()
                    return

        thread = threading.Thread(target=watch, name="vllm-watch", daemon=True)
        thread.start()
        try:
            yield
        finally:
            has_finished.set()
            thread.join()

    def close(self) -> None:
        """End the server, see ``Sampler.close``."""
        self._model = None
        self._folder.remove()
        if self._server is not None:
            self._server.stop()

    def _free_cached_memory(self) -> None:
        """Give memory of the GPU that no tensor uses back, for a server on the same GPU."""
        if self._fabric.device.type == "cuda":
            torch.cuda.empty_cache()

    def _run_on_rank_0(self, action: Callable[[VllmServer], None]) -> None:
        """Call a function with the server on rank 0, and raise its RunError on all ranks."""
        fault: RunError | None = None
        if self._server is not None:
            try:
                action(self._server)
            except ServerFailedError as error:
                fault = self._explain(error)
            except RunError as error:
                fault = error
        fault = self._fabric.broadcast(fault)
        if fault is not None:
            raise fault

    def _load(self, server: VllmServer, model_dir: Path) -> None:
        """Let the server load the weights in a folder; the first time, start it."""
        if not server.is_started:
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
        """Compare log-probabilities of each replica of the server with those of the model in training.

        Raises:
            RunError: a replica does not have the weights.
        """
        engine_answers: list[EngineAnswer] = []

        def ask_replicas(server: VllmServer) -> None:
            for replica in range(len(self._checks)):
                engine_answers.append(self._ask_probe(server.client, replica))

        self._run_on_rank_0(ask_replicas)
        for replica, check in enumerate(self._checks):
            # all ranks compute the trainer's answer together
            sampled_ids: list[int] | None = None
            if engine_answers:
                sampled_ids = engine_answers[replica].sampled_ids
            sampled_ids = self._fabric.broadcast(sampled_ids)
            assert sampled_ids is not None  # rank 0's
            trainer_answer = compute_answer(
                self._fabric, self._model, self._probe_ids, sampled_ids, self._settings.temperature
            )
            fault = None
            if engine_answers:
                fault = check.find_fault(engine_answers[replica], trainer_answer)
            fault = first_text(self._fabric, fault)
            if fault is not None:
                raise RunError(f"vLLM does not have the weights of step {self._step}: {fault}")

    def _ask_probe(self, client: VllmClient, replica: int) -> EngineAnswer:
        """Return what a replica computes for the probe."""
        request = SampleRequest(self._probe_ids, _PROBE_SEED)
        parameters = {**self._parameters(request), "max_tokens": _PROBE_NEW_TOKENS, "prompt_logprobs": 0}
        generated = client.generate(self._probe_ids, parameters, replica, waits=False)
        completion = self._make_completion(generated)
        return EngineAnswer(
            text=np.array(generated.prompt_log_probabilities, dtype=np.float32),
            sampled=completion.log_probabilities,
            sampled_ids=generated.token_ids,
        )

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
        """Add the completions of the requests that have none, by their index; return what has failed, or None.

        All ranks call this together, and ``on_batch`` equally often.
        """
        indices = [index for index in range(len(requests)) if index not in completions]
        most_indices = int(gather_over_ranks(self._fabric, torch.tensor(len(indices))).max())
        batch_size = max(1, REQUESTS_PER_REPLICA * len(self._checks) // self._fabric.world_size)

        def complete(index: int) -> None:
            request = requests[index]
            generated = self._client.generate(request.prompt_ids, self._parameters(request))
            completions[index] = self._make_completion(generated)

        # The server always has ``batch_size`` requests to compute, so the threads do not wait for a batch to end.
        threads = ThreadPoolExecutor(batch_size, thread_name_prefix="vllm")
        fault = None
        try:
            futures = [threads.submit(complete, index) for index in indices]
            for batch_index in range(math.ceil(most_indices / batch_size)):
                self._on_batch()
                start = batch_index * batch_size
                try:
                    for future in futures[start : start + batch_size]:
                        future.result()
                except RunError as error:
                    fault = str(error)
                    threads.shutdown(cancel_futures=True)
                    futures = []  # this rank only counts the batches of the others
        finally:
            # A run that stops does not wait for requests of the next batches: they end with the server.
            threads.shutdown(wait=False, cancel_futures=True)
        return fault

    def _make_completion(self, generated: GeneratedTokens) -> Completion:
        """Return the completion in an answer.

        Raises:
            ServerFailedError: it was not completed, or with other weights.
        """
        if generated.finish_reason not in ("stop", "length"):
            raise ServerFailedError(f"vLLM ended a completion with {generated.finish_reason!r}")
        reason: FinishReason = "stop" if generated.finish_reason == "stop" else "length"
        versions = generated.weight_versions
        if versions != {self._weight_version}:
            raise ServerFailedError(
                f"vLLM sampled with weights of {', '.join(sorted(versions))}, not {self._weight_version}"
            )
        return Completion(
            token_ids=np.array(generated.token_ids, dtype=np.int64),
            log_probabilities=np.array(generated.log_probabilities, dtype=np.float32),
            finish_reason=reason,
        )

    def _explain(self, error: ServerFailedError) -> ServerFailedError:
        """Return the error; on rank 0 with its cause, if the server has ended or hangs."""
        server = self._server
        if server is None or not server.is_started:
            return error
        if self._hangs:
            return ServerFailedError(f"vLLM computed no token for {_HANG_SECONDS:g} s")
        if server.has_ended(_END_SECONDS):
            return ServerFailedError(f"vLLM ended: {server.describe_end()}")
        return error
