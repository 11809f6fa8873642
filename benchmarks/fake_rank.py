"""Train as rank 0 of many on fake CUDA tensors, which have shapes and no content, and print the counts of a step.

``python -m benchmarks.fake_rank ARGUMENTS`` takes the arguments of ``fabric_train`` except data and output, and
``--row_tokens`` and ``--row_documents``. For a distillation, ``--teacher_preset`` has the sizes of the teacher, and
``--teacher_form`` says whether it is live or stored. It runs the program's own functions, from the checks before a run
to the training loop, with the collectives of torch's fake process group. Weights are not read, and no checkpoint is
written.
"""

import importlib.util
import itertools
import json
import os
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from benchmarks.fake_teacher import FORMS, FakeTeacher, count_teacher, move_buffers, write_hollow_model

if TYPE_CHECKING:
    from benchmarks.op_counts import StepCounter, StepCounts
    from fabric_train.arguments import TrainArguments
    from fabric_train.data.step_sampler import Window

LENGTH = 8192
DOCUMENTS = 4
_STEPS = 2  # the first makes the optimizer's state


@dataclass(frozen=True)
class FakeRun:
    """The second step of a run on fake tensors, and what ``--plan`` says of it.

    ``planned`` is the bytes by kind in the plan's phase with the most, without CUDA's own.
    """

    step: "StepCounts"
    planned: dict[str, int]


@dataclass(frozen=True)
class FakeWindows:
    """A ``WindowSource`` of windows that were read before. The loop ends after them, before it saves."""

    read: list["Window"]

    def windows(self, after_step: int, last_step: int) -> Iterator["Window"]:
        """Yield the windows."""
        return iter(self.read)


def run_fake_rank(
    argv: list[str],
    work: Path,
    length: int = LENGTH,
    documents: int = DOCUMENTS,
    teacher: FakeTeacher | None = None,
) -> FakeRun:
    """Train two steps as rank 0 and return the counts of the second.

    This changes torch for the rest of the process. So call it in a process of its own, before torch is imported or with
    pretended devices.

    Args:
        argv: the arguments of ``fabric_train``, with ``--devices`` and ``--num_nodes``.
        work: a folder for the token dataset.
        length: tokens of a row.
        documents: in a row, of equal length.
        teacher: of a distillation.
    """
    from fabric_train.arguments import TrainArguments, parse

    if teacher is not None:
        argv = [*argv, *teacher.argv]
    added = f"--train_data_dir {work / 'tokens'} --output_dir {work / 'run'} --accelerator cuda --num_workers 0"
    added += " --log_step_interval 1 --save_step_interval 1000"
    if "--compile" not in argv:
        added += " --compile false"
    arguments = parse(TrainArguments, [*argv, *added.split()])
    _have_cuda(int(arguments.device.devices))
    if arguments.adapter.is_given:
        arguments = _with_base(arguments, work / "base")
    world_size = int(arguments.device.devices) * arguments.device.num_nodes
    num_rows = (_STEPS + 1) * world_size * arguments.training.micro_batch_size
    num_rows *= arguments.training.gradient_accumulation_steps
    write = _write_pairs if arguments.preference.compares_answers else _write_rows
    write(work / "tokens", num_rows, length, documents)
    if teacher is not None:
        teacher.write(arguments)
    _become_rank_0(world_size, arguments.device.num_nodes)
    with _fake_devices(arguments.adapter.lora_rank or 0) as counter:
        return _train(arguments, counter, work / "reference.npy")


def _with_base(arguments: "TrainArguments", folder: Path) -> "TrainArguments":
    """Write a base of the sizes in the arguments, and return arguments for an adapter of it.

    Its weights are a hole in a file: nothing reads them but the fingerprint.
    """
    from fabric_train.model.init_weights import new_shape

    given = arguments.model
    config = new_shape(given, arguments.fsdp.auto_wrap_policy).config
    write_hollow_model(folder, config)
    base = type(given)(model_name=str(folder), attention=given.attention, precision=given.precision)
    return replace(arguments, model=base)


def _train(arguments: "TrainArguments", counter: "StepCounter", reference: Path) -> FakeRun:
    from torch._subclasses.fake_tensor import FakeTensorMode

    from fabric_train.distributed.signals import Heartbeat
    from fabric_train.distributed.strategy import build_fabric
    from fabric_train.preflight.memory_forecast import make_request
    from fabric_train.preflight.prepare import prepare
    from fabric_train.training.build_run import build_loop, set_up_model, set_up_optimizer
    from fabric_train.training.logger import Logger, Outputs
    from fabric_train.training.objective import build_objective, connect_objective

    run = prepare(arguments)
    if arguments.preference.needs_reference:
        _write_reference(reference, run.data)
    planned = make_request(run).forecast().budget.most.parts
    fabric = build_fabric(arguments, run.model.layer_classes)
    fakes = FakeTensorMode(allow_non_fake_inputs=True)
    objective = build_objective(arguments)
    with fakes, counter:
        run = connect_objective(objective, fabric, run)
        model, decayed = set_up_model(fabric, run, shows_notes=False)  # which would read the weights
        move_buffers(model, fabric.device)
        counter.know_modules(model)
        optimizer = set_up_optimizer(fabric, model, decayed, run)
    steps: list[StepCounts] = []

    class CountedSteps(Logger):
        def log(self, _: Any) -> None:
            steps.append(counter.take())

    outputs = Outputs([CountedSteps()], arguments.logging.log_model)
    loop = build_loop(fabric, model, optimizer, objective, run, Heartbeat(), None, outputs)
    windows = list(itertools.islice(loop.batches.windows(0, run.plan.num_steps), _STEPS))
    with fakes, counter:
        counter.take()
        replace(loop, batches=FakeWindows(windows)).train()
    return FakeRun(steps[-1], dict(planned))


def _write_rows(folder: Path, num_rows: int, length: int, documents: int) -> None:
    import datasets

    starts = list(range(0, length, length // documents))
    rows = {"input_ids": [[1] * length] * num_rows, "document_starts": [starts] * num_rows}
    datasets.DatasetDict({"train": datasets.Dataset.from_dict(rows)}).save_to_disk(str(folder))


def _write_pairs(folder: Path, num_rows: int, length: int, documents: int) -> None:
    """Write rows of preference pairs of two sources. Nearly all of their tokens are supervised."""
    from benchmarks.pair_rows import TEMPLATE_TOKENS, write_chat_tokenizer, write_pairs

    words = length // documents - TEMPLATE_TOKENS - 1
    tokenizer = write_chat_tokenizer(folder.with_name("tokenizer"))
    write_pairs(folder, tokenizer, [(1, words, words)] * (num_rows * documents // 2), length, num_sources=2)


def _write_reference(file: Path, data: Any) -> None:
    """Give all pairs the log-probability 0 under the reference model, as ``training.reference`` would its own."""
    import numpy as np

    np.save(file, np.zeros((len(data.train.index.documents), 2)))
    data.train.use_reference(file)


def _become_rank_0(world_size: int, num_nodes: int) -> None:
    """Set the variables of torchrun, and initialize the fake process group, which Fabric then uses."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "GROUP_RANK": "0", "WORLD_SIZE": str(world_size)}
    os.environ |= {"LOCAL_WORLD_SIZE": str(world_size // num_nodes), "TORCHELASTIC_RUN_ID": "fake"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    os.environ |= {"TORCHELASTIC_RESTART_COUNT": "0"}
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)


@contextmanager
def _fake_devices(adapter_rank: int) -> Iterator["StepCounter"]:
    """Replace what needs a device: attention's choice of a kernel, values that the host reads, pinned memory, weights.

    The host reads zeros. Layers are compiled by ``LayerCompiler``, which finds an adapter's products by its rank.
    """
    import torch
    import torch.nn.functional as F
    from lightning.fabric.strategies import ParallelStrategy, Strategy
    from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
    from torch.distributed.tensor import _utils as sharding

    from benchmarks.compiled_counts import LayerCompiler
    from benchmarks.kernels import Kernel
    from benchmarks.op_counts import StepCounter
    from fabric_train.model import parallelize
    from fabric_train.optim import adamw
    from fabric_train.optim.adamw import LowPrecisionAdamW
    from fabric_train.optim.tensor_table import Row, Storage, TensorTable
    from fabric_train.preflight import prepare
    from fabric_train.preflight.memory_gpu import attention_on_gpu
    from fabric_train.training import build_run, step
    from fabric_train.training.step_exchange import StepReport, exchange_step

    counter = StepCounter()
    # without a kernel for CUDA, autograd would compute this one by several operations
    kernels = torch.library.Library("aten", "IMPL", "CUDA")
    if not torch._C._dispatch_has_kernel_for_dispatch_key("aten::silu_backward", "CUDA"):
        kernels.impl("silu_backward", lambda grad, hidden: torch.empty_like(hidden))

    def read_zeros(tensor: FakeTensor) -> Any:
        if tensor.fake_device.type == "cuda":
            counter.note_wait("tolist")
        return _zeros(tuple(tensor.shape))

    def make_table(storage: Storage, rows: list[tuple[Row, Any]], device: torch.device) -> TensorTable:
        nothing = torch.empty(0)
        return TensorTable(storage, nothing, nothing, nothing, sum(row.numel for row, _ in rows))

    def count_launch(table: TensorTable) -> None:
        stored = table.storage.weights.itemsize + 2 * table.storage.moments.itemsize
        read = stored + table.storage.gradient.itemsize
        counter.add_kernel("optimizer", Kernel(table.numel * read, table.numel * stored))

    def use_triton(optimizer: LowPrecisionAdamW) -> None:
        optimizer.launch = count_launch

    offset_of = sharding._compute_local_shape_and_global_offset

    def compute_offset(*args: Any, **kwargs: Any) -> Any:
        with unset_fake_temporarily():  # it computes numbers with CPU tensors
            return offset_of(*args, **kwargs)

    def exchange_with_targets(*args: Any) -> StepReport:
        # all counts are read as zeros, and a step without targets would not update the weights
        return replace(exchange_step(*args), count=1)

    swap_tensors = torch.utils.swap_tensors

    def swap(tensor: torch.Tensor, other: torch.Tensor) -> None:
        if tensor.device != other.device:  # else FSDP2 only asks for the parameters again; others may refer to them
            swap_tensors(tensor, other)

    def pin(tensor: torch.Tensor, device: None = None) -> torch.Tensor:
        counter.pinned.append(tensor.untyped_storage())
        return tensor

    with ExitStack() as patches:
        for owner, name, new in (
            (FakeTensor, "tolist", read_zeros),
            (torch.Tensor, "pin_memory", pin),
            (torch.utils, "swap_tensors", swap),
            (torch.backends.cuda, "is_flash_attention_available", lambda: True),
            (build_run, "use_triton", use_triton),
            (build_run, "first_text", lambda _, text: text),  # the other ranks have the same fault, or none
            (step, "exchange_step", exchange_with_targets),
            (adamw, "tensor_table", make_table),
            (F, "scaled_dot_product_attention", attention_on_gpu),
            (parallelize, "read_weights", lambda model, weights: None),
            (parallelize, "start_magnitudes", lambda model, weights: None),
            (parallelize, "compile_layers", LayerCompiler(counter, adapter_rank).compile_layers),
            (prepare, "check_compiler", lambda *args: None),  # no code is generated
            (sharding, "_compute_local_shape_and_global_offset", compute_offset),
        ):
            patches.enter_context(patch.object(owner, name, new))
        patches.enter_context(count_teacher(counter))
        for kind in (Strategy, ParallelStrategy):
            patches.enter_context(patch.object(kind, "broadcast", lambda _, obj, src=0: obj))
        yield counter


def _zeros(shape: tuple[int, ...]) -> Any:
    return [_zeros(shape[1:]) for _ in range(shape[0])] if shape else 0


def _have_cuda(num_devices: int) -> None:
    """Make a torch that was built without CUDA believe in devices, unless it is imported already and does."""
    if "torch" in sys.modules:
        return
    folder = importlib.util.find_spec("torch")
    assert folder is not None
    assert folder.origin is not None
    if list(Path(folder.origin).parent.glob("lib/libtorch_cuda*")):
        return
    from tests.support.pretended_cuda.build import build
    from tests.support.pretended_cuda.install import install

    os.environ |= {"PRETENDED_CUDA_LIBRARY": str(build()), "PRETENDED_CUDA_DEVICES": str(num_devices)}
    install()


def main() -> None:
    """Print the counts as JSON in the last line."""
    import argparse
    import logging

    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--row_tokens", type=int, default=LENGTH)
    parser.add_argument("--row_documents", type=int, default=DOCUMENTS)
    parser.add_argument("--teacher_preset")
    parser.add_argument("--teacher_form", choices=FORMS, default="live")
    parser.add_argument("--teacher_layers", type=int)
    options, argv = parser.parse_known_args()

    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")  # torch's, about addresses of fake tensors
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        teacher = None
        if options.teacher_preset is not None:
            teacher = FakeTeacher(
                options.teacher_preset, options.teacher_form, options.teacher_layers, work / "teacher"
            )
        found = run_fake_rank(argv, work, options.row_tokens, options.row_documents, teacher)
    print(json.dumps(asdict(found)), flush=True)
    os._exit(0)  # the threads of autograd end only with the process


if __name__ == "__main__":
    main()
