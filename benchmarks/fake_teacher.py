"""Write a teacher without content for ``fake_rank``, live or stored, and count what a step takes for it.

The teacher's weights are a hole in a file. All stored rows are the same zeros.
"""

import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

if TYPE_CHECKING:
    import torch
    from lightning import Fabric
    from torch import nn
    from transformers import PretrainedConfig

    from benchmarks.op_counts import StepCounter
    from fabric_train.arguments import TrainArguments
    from fabric_train.data.teacher_states import TeacherStates
    from fabric_train.data.token_dataset import TokenDataset
    from fabric_train.model.divergence_loss import TeacherHead
    from fabric_train.model.load_weights import MetaModel
    from fabric_train.teacher_states.record import StatesContent
    from fabric_train.teacher_states.stored import StoredStates
    from fabric_train.training.prepared_run import PreparedRun

TOP_K = 64
FORMS = ("live", "top", "hidden")
"""A live teacher, its stored top ``TOP_K``, or its stored hidden states."""


@dataclass(frozen=True)
class FakeTeacher:
    """A teacher with the sizes of a preset."""

    preset: str
    form: str
    """A value of ``FORMS``."""
    num_layers: int | None
    """The number of its layers; None for those of the preset."""
    folder: Path
    """Where the model or the stored values are written."""

    @property
    def argv(self) -> list[str]:
        """The arguments of ``fabric_train`` that name the teacher."""
        option = "--teacher" if self.form == "live" else "--teacher_states"
        return ["--objective", "distill", option, str(self.folder)]

    def write(self, arguments: "TrainArguments") -> None:
        """Write the teacher of a run, whose token dataset exists; add a tokenizer to that."""
        from fabric_train.data.token_dataset import open_dataset

        config = self._read_config()
        token_dataset = Path(arguments.data.data_dirs[0])
        write_tokenizer(token_dataset / "tokenizer", config.vocab_size)
        if self.form == "live":
            write_hollow_model(self.folder, config)
            write_tokenizer(self.folder, config.vocab_size)
            return
        self._write_states(arguments, config, open_dataset(str(token_dataset)))

    def _read_config(self) -> "PretrainedConfig":
        from fabric_train.arguments import TrainArguments, parse
        from fabric_train.model.init_weights import new_shape

        words = ["--config", f"configs/{self.preset}.yaml", "--train_data_dir", "none", "--output_dir", "none"]
        if self.num_layers is not None:
            words += ["--num_layers", str(self.num_layers)]
        arguments = parse(TrainArguments, words)
        return new_shape(arguments.model, arguments.fsdp.auto_wrap_policy).config

    def _write_states(self, arguments: "TrainArguments", config: "PretrainedConfig", dataset: "TokenDataset") -> None:
        """Write the values of one row, to which the files of all rows are links."""
        from fabric_train.data.batch import find_targets, hash_row
        from fabric_train.model.origin import ModelOrigin, TeacherModel
        from fabric_train.teacher_states.blocks import BlockContent, write_block
        from fabric_train.teacher_states.record import (
            HEAD,
            StatesRecord,
            StatesShard,
            StatesSplit,
            list_blocks,
            write_record,
        )

        row = dataset.train.__getitems__([0])
        num_targets = len(find_targets(row.labels).ids)
        content = self._describe_states(arguments, config, dataset)
        splits = {"train": StatesSplit(len(dataset.train), num_targets * len(dataset.train))}
        first_file, *other_files = [self.folder / block.file_name for block in list_blocks(splits, rows_per_block=1)]
        self.folder.mkdir()
        states = _zero_states(content, num_targets)
        row_hash = hash_row(row.input_ids[0].numpy(), row.labels[0].numpy())
        write_block(first_file, BlockContent([row_hash], [num_targets], states))
        for file in other_files:
            os.link(first_file, file)
        files = {file.relative_to(self.folder).as_posix(): file.stat().st_size for file in (first_file, *other_files)}
        if content.top_k is None:
            _write_hollow_tensors(self.folder / HEAD, {"weight": (config.vocab_size, config.hidden_size)})
            files[HEAD] = (self.folder / HEAD).stat().st_size
        teacher = TeacherModel(self.preset, content.teacher, ModelOrigin(self.preset))
        write_record(self.folder, StatesRecord(content, teacher, splits, StatesShard(), files))

    def _describe_states(
        self, arguments: "TrainArguments", config: "PretrainedConfig", dataset: "TokenDataset"
    ) -> "StatesContent":
        from fabric_train.distributed.precision import compute_dtype
        from fabric_train.teacher_states.record import StatesContent
        from fabric_train.teacher_states.vocabulary import NamedIdRange, hash_tokens, open_tokenizer

        return StatesContent(
            token_dataset=dataset.fingerprint,
            isolate_documents=dataset.isolates,
            distill_on=arguments.preference.distill_on,
            teacher="0",
            tokenizer=hash_tokens(open_tokenizer(dataset.folder)),
            named_ids=NamedIdRange(config.vocab_size, ()),
            dtype=str(compute_dtype(arguments.model.precision)).removeprefix("torch."),
            attention=arguments.model.attention,
            top_k=TOP_K if self.form == "top" else None,
            temperature=1.0,
            hidden_size=config.hidden_size,
            rows_per_batch=1,
            rows_per_block=1,
        )


def _zero_states(content: "StatesContent", num_targets: int) -> "TeacherStates":
    import torch

    from fabric_train.data.teacher_states import HiddenStates, TopStates

    if content.top_k is None:
        return HiddenStates(torch.zeros(num_targets, content.hidden_size, dtype=torch.int16))
    ids = torch.zeros(num_targets, content.top_k, dtype=torch.int32)
    return TopStates(ids, torch.zeros(num_targets, content.top_k + 1))


def write_hollow_model(folder: Path, config: "PretrainedConfig") -> None:
    """Write a model whose weights in bf16 are holes in files, one for each layer: files are mapped into memory."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import SAFE_WEIGHTS_INDEX_NAME

    from fabric_train.distributed.sharded_parameters import IN_LAYER

    config.save_pretrained(folder)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shapes_by_file: dict[str, dict[str, tuple[int, ...]]] = {}
    weight_map: dict[str, str] = {}
    for name, parameter in model.named_parameters():
        in_layer = IN_LAYER.fullmatch(name)
        file_name = f"layer-{in_layer[2]}.safetensors" if in_layer else "other.safetensors"
        shapes_by_file.setdefault(file_name, {})[name] = tuple(parameter.shape)
        weight_map[name] = file_name
    for file_name, shapes in shapes_by_file.items():
        _write_hollow_tensors(folder / file_name, shapes)
    (folder / SAFE_WEIGHTS_INDEX_NAME).write_text(json.dumps({"weight_map": weight_map}))


def _write_hollow_tensors(file: Path, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Write a safetensors file of tensors in bf16, all of whose content is a hole."""
    import torch

    from fabric_train.checkpoint.tensors import safetensors_header

    entries = [(name, torch.bfloat16, shape) for name, shape in shapes.items()]
    header, _ = safetensors_header(entries, {"format": "pt"})
    num_values = sum(math.prod(shape) for shape in shapes.values())
    with file.open("wb") as opened:
        opened.write(header)
        opened.truncate(len(header) + torch.bfloat16.itemsize * num_values)


def write_tokenizer(folder: Path, num_tokens: int, *, ends: bool = False) -> None:
    """Write a tokenizer that has a token for each id below ``num_tokens``, as Llama-3's has.

    With ``ends``, token 0 ends a text; otherwise none does.
    """
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    vocabulary = {str(token_id): token_id for token_id in range(num_tokens)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="0"))
    end_token = "0" if ends else None
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=end_token).save_pretrained(folder)


def _make_head(meta_model: "MetaModel", device: "torch.device", dtype: "torch.dtype") -> "TeacherHead":
    """Make the head of a live teacher, see ``teacher_head.read_head``."""
    import torch

    from fabric_train.model.divergence_loss import TeacherHead

    model: Any = meta_model.model
    weight = model.get_output_embeddings().weight
    return TeacherHead(torch.empty(weight.shape, dtype=dtype, device=device), bias=None)


def _make_stored_head(states: "StoredStates", device: "torch.device") -> "TeacherHead":
    """Make the head that is stored beside hidden states, see ``StoredStates.read_head``."""
    import torch

    from fabric_train.model.divergence_loss import TeacherHead

    content = states.record.content
    shape = (content.named_ids.end, content.hidden_size)
    return TeacherHead(torch.empty(shape, dtype=torch.bfloat16, device=device), bias=None)


def move_buffers(model: "nn.Module", device: "torch.device") -> None:
    """Move the buffers of a fake model; FSDP does it by assigning to ``.data``, which fake tensors do not follow."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else buffer.to(device)


@contextmanager
def count_teacher(counter: "StepCounter") -> Iterator[None]:
    """Count the operations and the memory of a teacher apart, and do not read its weights."""
    from benchmarks.op_counts import TEACHER, TEACHERS_HEAD
    from fabric_train.model.divergence_loss import FullRows
    from fabric_train.teacher_states.stored import StoredStates
    from fabric_train.training import distillation, teacher
    from fabric_train.training.teacher import LiveTeacher

    set_up_teacher = distillation.set_up_teacher
    read = LiveTeacher.read
    compute_logits = FullRows.compute_logits

    def set_up_counted_teacher(fabric: "Fabric", run: "PreparedRun") -> LiveTeacher:
        with counter.counted_as(TEACHER):
            live_teacher = set_up_teacher(fabric, run)
            move_buffers(live_teacher.model, fabric.device)
        return live_teacher

    def make_counted_head(*args: Any) -> "TeacherHead":
        with counter.counted_as(TEACHER):
            return _make_stored_head(*args)

    def counted_read(*args: Any) -> FullRows:
        with counter.counted_as(TEACHER):
            return read(*args)

    def compute_counted_logits(*args: Any) -> "torch.Tensor":
        with counter.counted_as(TEACHERS_HEAD):
            return compute_logits(*args)

    with ExitStack() as patches:
        for owner, name, new in (
            (distillation, "hash_reference", lambda *args: "0"),
            (distillation, "set_up_teacher", set_up_counted_teacher),
            (distillation, "check_teacher_isolation", lambda *args: None),  # there is no content to compare
            (teacher, "read_head", _make_head),
            (StoredStates, "read_head", make_counted_head),
            (LiveTeacher, "read", counted_read),
            (FullRows, "compute_logits", compute_counted_logits),
        ):
            patches.enter_context(patch.object(owner, name, new))
        yield
