"""Sample completions with vLLM, in server processes that this run starts, watches and ends.

Each machine has one server, which the first rank of the machine starts. Before each step, the weights of the model go
through a folder into the servers (``weight_folder``), and both sides compare log-probabilities (``transfer_check``).
The ranks send their requests to the server of their machine. On several GPUs, each GPU of a server has a copy of the
model, a replica.
"""

import logging
import math
import os
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
from fabric_train.distributed.machines import Machines, find_machines
from fabric_train.distributed.memory import available_memory, machine_memory
from fabric_train.distributed.ranks import first_text, gather_over_ranks, run_together
from fabric_train.model.hf_model import ModelShape
from fabric_train.rollouts.sampler import Completion, FinishReason, SampleRequest, SamplingSettings
from fabric_train.rollouts.transfer_check import EngineAnswer, TrainerAnswer, TransferCheck, compute_answer
from fabric_train.rollouts.vllm_client import GeneratedTokens, ServerFailedError, VllmClient
from fabric_train.rollouts.vllm_end import ON_CPU, ON_GPUS_OF_RUN, ON_OWN_GPUS, lacks_memory
from fabric_train.rollouts.vllm_server import ServerSettings, VllmServer, check_environment
from fabric_train.rollouts.weight_folder import WeightFolder

SHARED_GPU_SHARE = 0.4
"""The share of the memory of each of the run's GPUs that vLLM may use while it samples."""
REQUESTS_PER_REPLICA = 256
"""Requests of all ranks of a machine together; a replica computes that many at once, and keeps further ones waiting."""
_FINISH_REASONS: dict[str, FinishReason] = {"stop": "stop", "length": "length"}
"""The finish reasons of vLLM for completions that are complete, such as not ``abort``."""
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
    """Check what vLLM servers need. All ranks call this together; the first ``update_weights`` starts the servers.

    Args:
        fabric: The run's Fabric.
        shape: The model in training.
        settings: How to sample.
        run_dir: The run's folder, for ``rollouts/vllm.log``, which all machines share.
        max_prompt_length: The largest number of tokens of a prompt.
        probe_ids: The token ids of a text of the run's kind, such as its longest prompt. After each transfer, the
            log-probabilities of its first 64 tokens are compared, so it needs two.
        dtype: The dtype that the model in training computes its products in, see ``precision.compute_dtype``; vLLM gets
            the weights in this dtype.
        python: Python of the environment with vLLM.
        devices: GPUs of the server of each machine, as in CUDA_VISIBLE_DEVICES. None: the run's own GPUs, which the
            server frees while the model trains.
        on_batch: Called before each batch of completions is awaited, equally often on all ranks.

    Raises:
        InputError: the environment, the model or an argument does not work with vLLM.
    """
    if len(probe_ids) < 2:
        raise InputError(
            "--sampler vllm needs a prompt of at least two tokens, whose log-probabilities it compares with the "
            "trainer's; leave out --sampler to sample in the processes that train"
        )
    machines = find_machines(fabric)
    _check_arguments(fabric, shape, devices)
    version = _check_python(fabric, machines, python)
    is_on_gpu = fabric.device.type == "cuda"
    shares_gpus = is_on_gpu and devices is None
    num_replicas = 1
    memory_share = None  # vLLM's default, for GPUs of its own
    memory_advice = ON_CPU
    if shares_gpus:
        num_replicas = machines.num_local_ranks
        memory_share = SHARED_GPU_SHARE
        memory_advice = ON_GPUS_OF_RUN
    elif devices is not None:
        num_replicas = len(devices)
        memory_advice = ON_OWN_GPUS
    else:
        # on a CPU, vLLM's default share of the whole memory leaves nothing for the model that trains
        memory_share = round(0.5 * available_memory() / machine_memory(), 2)
    shared_dir = run_dir / "rollouts" if machines.count > 1 else None
    folder = WeightFolder(fabric, shape, dtype, shared_dir)
    log_name = "vllm.log" if machines.count == 1 else f"vllm-{machines.index}.log"
    server_settings = ServerSettings(
        python=python,
        log=run_dir / "rollouts" / log_name,
        dtype=str(dtype).removeprefix("torch."),
        max_length=max_prompt_length + max(settings.max_new_tokens, _PROBE_NEW_TOKENS),
        weights_root=None if folder.is_shared else folder.root,
        memory_advice=memory_advice,
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
    server = None
    if machines.is_first_local_rank:
        server = VllmServer(server_settings)
        _log.info("sampler: vLLM %s, log: %s", version, server_settings.log)
    socket_path: Path | None = None
    for index, first_rank in enumerate(machines.first_ranks):
        path = fabric.broadcast(server.client.path if server is not None else None, src=first_rank)
        if index == machines.index:
            socket_path = path
    assert socket_path is not None  # the machine's first rank has a server
    return VllmSampler(
        fabric,
        machines,
        settings,
        probe_ids=tuple(probe_ids[:_PROBE_TOKENS]),
        server=server,
        client=VllmClient(socket_path),
        folder=folder,
        checks=checks,
        on_batch=on_batch,
    )


def _check_python(fabric: Fabric, machines: Machines, python: Path) -> str:
    """Return the version of vLLM on this machine, see ``check_environment``, whose InputError is raised on all ranks.

    Only the first rank of a machine looks for it; the others return "".
    """
    version = ""

    def check() -> None:
        nonlocal version
        version = check_environment(python)

    run_together(fabric, check, runs=machines.is_first_local_rank)
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
    """A ``Sampler`` that sends requests to vLLM servers.

    The tokens of a completion depend on the weights, its prompt and its seed, and but for rounding not on what a server
    computes at the same time.
    """

    def __init__(
        self,
        fabric: Fabric,
        machines: Machines,
        settings: SamplingSettings,
        probe_ids: tuple[int, ...],
        server: VllmServer | None,
        client: VllmClient,
        folder: WeightFolder,
        checks: list[TransferCheck],
        on_batch: Callable[[], None],
    ) -> None:
        """Set up the sampler, see :func:`open_vllm_sampler`.

        ``server`` is None on all ranks except the first of each machine; ``checks`` has one for each replica of the
        machine.
        """
        self._fabric = fabric
        self._machines = machines
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

        If the server fails, or has failed since the last call, it is started again, once in a step.
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
        model_dir = self._folder.path(self._step)
        if not self._folder.is_shared:
            # its supervisor removes the folder if this process is killed while it writes
            self._run_on_servers(lambda server: self._start_if_needed(server, model_dir))
        self._folder.write(self._model, self._step)
        written = time.monotonic()
        self._free_cached_memory()
        try:
            self._run_on_servers(lambda server: self._load(server, model_dir))
            loaded = time.monotonic()
            self._compare()
        finally:
            self._folder.remove()
        compared = time.monotonic()
        if self._fabric.is_global_zero:
            seconds = f"written in {written - started:.1f} s, loaded in {loaded - written:.1f} s"
            seconds += f", compared in {compared - loaded:.1f} s"
            _log.info("weights of step %d are in vLLM: %s", self._step, seconds)

    def _restart(self, error: ServerFailedError) -> None:
        """Start the servers again after one of them has failed.

        Those of other machines are started again, too: they would only wait for the one that failed.

        Raises:
            RunError: it has been started again in this step already, or fails again.
        """
        if self._has_restarted:
            raise error
        self._has_restarted = True
        if self._server is not None:
            self._server.stop()
        if self._fabric.is_global_zero:
            _log.warning("%s; vLLM is started again", error)
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
            self._run_on_servers(VllmServer.sleep)
        except ServerFailedError as error:  # the completions are there
            self._has_stopped = True
            if self._server is not None:
                self._server.stop()
            if self._fabric.is_global_zero:
                _log.warning("%s; vLLM is started again before the next completions", error)
        return [completions[index] for index in range(len(requests))]

    def _complete(self, requests: Sequence[SampleRequest], completions: dict[int, Completion]) -> None:
        """Add the completions of the requests that have none, by their index.

        Raises:
            ServerFailedError: the server has failed; raised on all ranks.
            RunError: the server refuses a request, and would refuse it again; raised on all ranks.
        """
        self._run_on_servers(VllmServer.wake)
        fault: str | None = None
        refusal: str | None = None
        with self._watch():
            error = self._request(requests, completions)
            if isinstance(error, ServerFailedError):
                fault = str(error)
            elif error is not None:
                refusal = str(error)
            refusal = first_text(self._fabric, refusal)
            fault = first_text(self._fabric, fault)
        if refusal is not None:
            raise RunError(refusal)
        if fault is not None:
            failure = ServerFailedError(fault)
            # the same error comes back on a rank that has no server, or one that runs: it does not know why
            explained = self._explain(failure)
            cause = first_text(self._fabric, str(explained) if explained is not failure else None)
            raise ServerFailedError(cause or fault)

    @contextmanager
    def _watch(self) -> Iterator[None]:
        """End the server if it computes no token for ``_HANG_SECONDS``; open requests of its machine's ranks then fail.

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
        """Return GPU memory that no tensor uses to the driver, for a server on the same GPU."""
        if self._fabric.device.type == "cuda":
            torch.cuda.empty_cache()

    def _run_on_servers(self, action: Callable[[VllmServer], None]) -> None:
        """Call a function with the server of each machine, and raise the RunError of the first one on all ranks."""

        def run_and_explain() -> None:
            assert self._server is not None
            try:
                action(self._server)
            except ServerFailedError as error:
                raise self._explain(error) from error

        run_together(self._fabric, run_and_explain, runs=self._server is not None)

    def _start_if_needed(self, server: VllmServer, model_dir: Path) -> None:
        """Start a server that does not run; it waits for the weights."""
        if not server.is_started:
            server.start(model_dir)

    def _load(self, server: VllmServer, model_dir: Path) -> None:
        """Let the server load the weights in a folder; the first time, start it."""
        self._start_if_needed(server, model_dir)
        if not server.has_answered:
            server.wait_until_it_answers()
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

        self._run_on_servers(ask_replicas)
        sampled_ids_of_replicas = [answer.sampled_ids for answer in engine_answers]
        trainer_answers = self._compute_answers(sampled_ids_of_replicas)
        fault = None
        for check, engine_answer in zip(self._checks, engine_answers, strict=False):  # no answers without a server
            fault = fault or check.find_fault(engine_answer, trainer_answers[tuple(engine_answer.sampled_ids)])
        fault = first_text(self._fabric, fault)
        if fault is not None:
            raise RunError(f"vLLM does not have the weights of step {self._step}: {fault}")

    def _compute_answers(self, sampled_ids_of_replicas: list[list[int]]) -> dict[tuple[int, ...], TrainerAnswer]:
        """Let the model in training compute the probe, once for each completion that replicas have sampled.

        Replicas mostly sample the same tokens, for which the model computes once. All ranks call this together.

        Args:
            sampled_ids_of_replicas: On the first rank of a machine, the tokens that each of its replicas has sampled.

        Returns:
            The answers by the sampled tokens.
        """
        answers: dict[tuple[int, ...], TrainerAnswer] = {}
        for first_rank in self._machines.first_ranks:
            for sampled_ids in self._fabric.broadcast(sampled_ids_of_replicas, src=first_rank):
                if tuple(sampled_ids) not in answers:
                    answers[tuple(sampled_ids)] = compute_answer(
                        self._fabric, self._model, self._probe_ids, sampled_ids, self._settings.temperature
                    )
        return answers

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

    def _request(self, requests: Sequence[SampleRequest], completions: dict[int, Completion]) -> RunError | None:
        """Add the completions of the requests that have none, by their index; return what has failed, or None.

        All ranks call this together, and ``on_batch`` equally often.
        """
        indices = [index for index in range(len(requests)) if index not in completions]
        most_indices = int(gather_over_ranks(self._fabric, torch.tensor(len(indices))).max())
        batch_size = max(1, REQUESTS_PER_REPLICA * len(self._checks) // self._machines.num_local_ranks)

        def complete(index: int) -> None:
            request = requests[index]
            generated = self._client.generate(request.prompt_ids, self._parameters(request))
            completions[index] = self._make_completion(generated)

        # The server always has ``batch_size`` requests to compute, so the threads do not wait for a batch to end.
        threads = ThreadPoolExecutor(batch_size, thread_name_prefix="vllm")
        first_error: RunError | None = None
        try:
            futures = [threads.submit(complete, index) for index in indices]
            for batch_index in range(math.ceil(most_indices / batch_size)):
                self._on_batch()
                start = batch_index * batch_size
                try:
                    for future in futures[start : start + batch_size]:
                        future.result()
                except RunError as error:
                    first_error = error
                    threads.shutdown(cancel_futures=True)
                    futures = []  # this rank only counts the batches of the others
        finally:
            # A run that stops does not wait for requests of the next batches: they end with the server.
            threads.shutdown(wait=False, cancel_futures=True)
        return first_error

    def _make_completion(self, generated: GeneratedTokens) -> Completion:
        """Return the completion in an answer.

        Raises:
            ServerFailedError: it was not completed, or with other weights.
        """
        reason = _FINISH_REASONS.get(generated.finish_reason)
        if reason is None:
            raise ServerFailedError(f"vLLM ended a completion with {generated.finish_reason!r}")
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
        """Return the error, or its cause if this rank has the server, which has ended or hangs."""
        server = self._server
        if server is None or not server.is_started:
            return error
        if self._hangs:
            return ServerFailedError(f"vLLM computed no token for {_HANG_SECONDS:g} s")
        if server.has_ended(_END_SECONDS):
            return ServerFailedError(f"vLLM ended: {server.describe_end()}")
        if lacks_memory(str(error)):
            return ServerFailedError(server.describe_lack_of_memory(str(error)))
        return error
