"""Runs of ``--objective distill`` equal plain PyTorch, whatever the split, the models and the settings."""

import functools
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.support.forked_runs import ForkedRuns
from tests.support.plain_distillation import NUM_IDS, PlainDistillation, write_adapter, write_student, write_teacher
from tests.support.plain_training import GRAD_CLIP, LR, WEIGHT_DECAY, train_plainly
from tests.support.unequal_rows import argv, metrics, write_rows

pytestmark = pytest.mark.slow

ROWS_PER_EPOCH = 11
ROWS_PER_WINDOW = 6  # the second window of an epoch has 5 rows
NUM_STEPS = 3
TOLERANCE = 1e-5  # relative, in fp32
Options = dict[str, Any]


@dataclass(frozen=True)
class Folders:
    """The models and the rows of all runs."""

    student: Path
    tied_student: Path
    student_adapter: Path
    """An adapter on ``student`` whose matrices are random."""
    teacher: Path
    tied_teacher: Path
    teacher_adapter: Path
    """An adapter on ``teacher`` whose matrices are random."""
    tokens: Path


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    folder = tmp_path_factory.mktemp("distillation")
    student = write_student(folder / "student")
    teacher = write_teacher(folder / "teacher")
    return Folders(
        student=student,
        tied_student=write_student(folder / "tied-student", tie_word_embeddings=True),
        student_adapter=write_adapter(folder / "student-adapter", student),
        teacher=teacher,
        tied_teacher=write_teacher(folder / "tied-teacher", tie_word_embeddings=True),
        teacher_adapter=write_adapter(folder / "teacher-adapter", teacher),
        tokens=write_rows(folder / "tokens", num_rows=ROWS_PER_EPOCH, vocabulary=NUM_IDS),
    )


@dataclass(frozen=True)
class Case:
    """A run: how a window of ``ROWS_PER_WINDOW`` rows is split, and what else differs from the defaults."""

    name: str
    parallelism: str
    num_ranks: int
    micro_batch_size: int
    student: str = "student"
    teacher: str = "teacher"
    loss: Options = field(default_factory=dict)
    """Fields of ``PlainDistillation``."""
    options: Options = field(default_factory=dict)
    """Arguments that do not change the losses."""
    tolerance: float = TOLERANCE

    def __str__(self) -> str:
        return self.name


BFLOAT16 = 2.0**-8
"""The relative rounding of a number. Activations and logits are rounded in each layer, and their errors average out in
the sums of losses and gradients, so these differ by a few roundings."""
CASES = [
    Case("single", "single", 1, 6),
    Case("micro-batches", "single", 1, 1, loss={"divergence": "reverse_kl", "temperature": 2.0, "sft_weight": 0.5}),
    Case("all tokens", "single", 1, 3, loss={"distill_on": "all", "sft_weight": 0.5}),
    Case("bf16-mixed", "single", 1, 6, options={"precision": "bf16-mixed"}, tolerance=8 * BFLOAT16),
    Case("ddp", "ddp", 2, 1, teacher="tied_teacher", loss={"temperature": 0.5}),
    Case("fsdp", "fsdp", 3, 1, student="tied_student", loss={"divergence": "jsd", "jsd_beta": 0.3}),
    Case("fsdp2", "fsdp2", 2, 3, loss={"sft_weight": 0.5}, options={"activation_checkpointing": "full"}),
    Case("tensor parallel", "fsdp2", 2, 3, loss={"temperature": 2.0}, options={"tensor_parallel_size": 2}),
    Case("fsdp2 adapters", "fsdp2", 3, 2, student="student_adapter", teacher="teacher_adapter"),
    # further points, in tests/matrix.txt
    Case("tensor parallel on 4", "fsdp2", 4, 1, teacher="tied_teacher", options={"tensor_parallel_size": 2}),
    Case("fsdp on 2", "fsdp", 2, 3, teacher="tied_teacher", options={"activation_checkpointing": "full"}),
    Case("fsdp2 on 3", "fsdp2", 3, 1, student="tied_student", teacher="tied_teacher", loss={"divergence": "jsd"}),
    Case("fsdp adapters", "fsdp", 2, 1, student="student_adapter", teacher="teacher_adapter"),
    Case("ddp adapters", "ddp", 2, 3, student="student_adapter", teacher="teacher_adapter"),
    Case("fsdp all tokens", "fsdp", 3, 2, loss={"distill_on": "all", "divergence": "reverse_kl"}),
    Case("fsdp gathered", "fsdp", 2, 1, options={"sharding_strategy": "SHARD_GRAD_OP"}),
    Case("fsdp2 gathered", "fsdp2", 2, 1, options={"sharding_strategy": "SHARD_GRAD_OP"}),
    Case("fsdp each micro-batch", "fsdp", 2, 1, options={"gradient_reduction": "micro_batch"}),
    Case("fsdp2 each micro-batch", "fsdp2", 2, 1, options={"gradient_reduction": "micro_batch"}),
    Case("bf16-true", "single", 1, 6, options={"precision": "bf16-true"}, tolerance=16 * BFLOAT16),
    Case("fsdp bf16-mixed", "fsdp", 2, 3, options={"precision": "bf16-mixed"}, tolerance=8 * BFLOAT16),
    Case("fsdp2 bf16-true", "fsdp2", 2, 3, options={"precision": "bf16-true"}, tolerance=16 * BFLOAT16),
    Case("fsdp2 tiles and workers", "fsdp2", 2, 3, options={"mlp_tile_size": 8, "num_workers": 1}),
]


@functools.cache
def load(folder: Path) -> Any:
    """Return a model in fp32, with its adapter if the folder has one; its weights are never changed."""
    if (folder / "adapter_config.json").is_file():
        return peft.AutoPeftModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def load_student(folder: Path) -> Any:
    """Return a model to be trained, in fp32."""
    if (folder / "adapter_config.json").is_file():
        return peft.AutoPeftModelForCausalLM.from_pretrained(folder, is_trainable=True, dtype=torch.float32)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def run_options(folders: Folders, student: str, teacher: str) -> Options:
    """Return the options of a run that name its models."""
    options: Options = {"objective": "distill", "teacher": getattr(folders, teacher)}
    if student == "student_adapter":
        options |= {"init_adapter": folders.student_adapter, "adapter": "lora"}
    return options


def loss_options(loss: Options) -> Options:
    """Return the arguments of a run for the fields of ``PlainDistillation``."""
    renamed = {"temperature": "distill_temperature"}
    return {renamed.get(name, name): value for name, value in loss.items()}


def assert_equals_plain_pytorch(run: Path, folders: Folders, case: Case) -> None:
    """Compare the metrics of each step with those of plain PyTorch."""
    plain = PlainDistillation(load(getattr(folders, case.teacher)), **case.loss)
    student = load_student(getattr(folders, case.student))
    losses, norms = train_plainly(student, folders.tokens, ROWS_PER_WINDOW, NUM_STEPS, row_losses=plain)
    means = plain.means(ROWS_PER_EPOCH, ROWS_PER_WINDOW, NUM_STEPS)
    columns = ("train_loss", "grad_norm", "train_divergence", "train_cross_entropy", "train_agreement")
    rows = metrics(run)
    assert len(rows) == NUM_STEPS
    for row, loss, norm, step_means in zip(rows, losses, norms, means, strict=True):
        values = [float(row[column]) for column in columns]
        assert values == pytest.approx([loss, norm, *step_means], rel=case.tolerance), row["step"]


def train(runs: ForkedRuns, run: Path, folders: Folders, case: Case, before: str = "") -> None:
    """Train a case; each rank executes ``before`` first."""
    model = "student" if case.student == "student_adapter" else case.student
    options = {
        "parallelism": case.parallelism,
        "devices": case.num_ranks,
        "micro_batch_size": case.micro_batch_size,
        "total_batch_size": ROWS_PER_WINDOW,
        "max_step": NUM_STEPS,
        "lr": LR,
        "grad_clip": GRAD_CLIP,  # most cases have larger gradients
        "weight_decay": WEIGHT_DECAY,
        "report": "false",
        **run_options(folders, case.student, case.teacher),
        **loss_options(case.loss),
        **case.options,
    }
    line = argv(getattr(folders, model), folders.tokens, run, **options)
    runs.start(line, case.num_ranks, before=before).finish()


@pytest.mark.numerical
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_split_equals_plain_pytorch(
    forked_runs: ForkedRuns, tmp_path: Path, folders: Folders, case: Case
) -> None:
    train(forked_runs, tmp_path / "run", folders, case)
    assert_equals_plain_pytorch(tmp_path / "run", folders, case)


@pytest.mark.numerical
def test_frequencies_of_a_teacher_do_not_depend_on_the_micro_batch(
    forked_runs: ForkedRuns, tmp_path: Path, folders: Folders
) -> None:
    """transformers would choose other frequencies for a batch whose documents have up to 16 tokens."""
    rope = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "original_max_position_embeddings": 16,
        "factor": 4.0,
        "short_factor": [1.0] * 6,
        "long_factor": [4.0] * 6,
    }
    teacher = write_teacher(tmp_path / "teacher", rope_parameters=rope)
    tables = []
    for micro_batch_size in (1, 6):
        run = tmp_path / f"micro-batches-of-{micro_batch_size}"
        case = Case("longrope", "single", 1, micro_batch_size, options={"teacher": teacher})
        train(forked_runs, run, folders, case)
        tables.append([float(row["train_divergence"]) for row in metrics(run)])
    assert tables[0] == pytest.approx(tables[1], rel=TOLERANCE)


# ------------------------------------------------------------------------------------------------------------- defects

DEFECTS = {
    "the teacher's distributions of the next position": """
from dataclasses import replace
from fabric_train.training.teacher import LiveTeacher
read = LiveTeacher.read
LiveTeacher.read = lambda self, batch, targets: read(self, batch, replace(targets, positions=targets.positions + 1))
""",
    "labels that are not shifted": """
from dataclasses import replace
from fabric_train.training.distillation import Distillation
loss = Distillation.loss
def unshifted(self, model, batch, scale=None):
    targets = batch.targets
    ids = batch.input_ids.flatten()[targets.positions]
    return loss(self, model, replace(batch, targets=replace(targets, ids=ids)), scale)
Distillation.loss = unshifted
""",
    "rows without a token in the softmax": """
from fabric_train.training import distillation
from fabric_train.training.teacher_vocabulary import NamedIdRange
distillation.find_named_ids = lambda *_: NamedIdRange(300, ())
""",
    "ids without a token in the softmax": """
from fabric_train.training import distillation
from fabric_train.training.teacher_vocabulary import NamedIdRange
distillation.find_named_ids = lambda *_: NamedIdRange(290, ())
""",
    "the temperature on one side only": """
import copy
from fabric_train.model.divergence_loss import FullRows
compare = FullRows.compare
def compare_at_1(self, student, chunk, loss, needs_gradient):
    loss = copy.copy(loss)
    loss.temperature = 1.0
    return compare(self, student, chunk, loss, needs_gradient)
FullRows.compare = compare_at_1
""",
    "a mean of the means of micro-batches": """
import torch
from dataclasses import replace
from fabric_train.training.distillation import Distillation
count, loss = Distillation.count, Distillation.loss
def mean_loss(self, model, batch, scale=None):
    loss_of_batch = loss(self, model, batch)
    num_tokens = count(self, batch).clamp(min=1)
    return replace(loss_of_batch, total=loss_of_batch.total / num_tokens, metrics=loss_of_batch.metrics / num_tokens)
Distillation.loss = mean_loss
Distillation.count = lambda self, batch: (count(self, batch) > 0).long()
""",
    "the teacher in training mode": """
from fabric_train.training import distillation
set_up_teacher = distillation.set_up_teacher
def set_up_training_teacher(*arguments):
    teacher = set_up_teacher(*arguments)
    teacher.model.train()
    return teacher
distillation.set_up_teacher = set_up_training_teacher
""",
}


@pytest.mark.parametrize("defect", DEFECTS)
def test_a_planted_defect_is_caught(forked_runs: ForkedRuns, tmp_path: Path, folders: Folders, defect: str) -> None:
    case = Case(defect, "single", 1, 2, loss={"temperature": 2.0, "sft_weight": 0.5})
    train(forked_runs, tmp_path / "run", folders, case, before=DEFECTS[defect])
    with pytest.raises(AssertionError, match="approx"):
        assert_equals_plain_pytorch(tmp_path / "run", folders, case)


# ------------------------------------------------------------------------------------------ what a rank keeps of it

PROBE = """
import json, weakref
import torch
from pathlib import Path
from torch.distributed.fsdp import FullyShardedDataParallel
from fabric_train.distributed.sharded_parameters import local_part
from fabric_train.training import distillation, run as run_module
from fabric_train.training.teacher import LiveTeacher
facts = dict(num_teachers=0, reads=0, grads=[], trains=[], hidden_has_graph=False, shared=0)
teachers = []
set_up_teacher = distillation.set_up_teacher
def set_up_counted(*arguments):
    teachers.append(set_up_teacher(*arguments))
    facts["num_teachers"] += 1
    return teachers[-1]
distillation.set_up_teacher = set_up_counted
read = LiveTeacher.read
def counted_read(self, batch, targets):
    rows = read(self, batch, targets)
    facts["reads"] += 1
    facts["hidden_has_graph"] |= rows.hidden.requires_grad
    return rows
LiveTeacher.read = counted_read
set_up_optimizer = run_module.set_up_optimizer
def set_up_probed(fabric, model, *arguments):
    optimizer = set_up_optimizer(fabric, model, *arguments)
    teacher_tensors = [*teachers[0].model.parameters(), teachers[0].head.weight]
    teacher_ids = set(map(id, teacher_tensors))
    optimized = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    facts["shared"] = sum(id(parameter) in teacher_ids for parameter in [*optimized, *model.parameters()])
    return optimizer
run_module.set_up_optimizer = set_up_probed
_train = run_module._train_loop
def train_probed(loop):
    end = _train(loop)
    named = [*teachers[0].model.named_parameters(), ("head", teachers[0].head.weight)]
    facts["grads"] = [name for name, parameter in named if parameter.grad is not None]
    facts["trains"] = [name for name, parameter in named if parameter.requires_grad]
    facts["training"] = teachers[0].model.training
    facts["bytes"] = sum(local_part(parameter).numel() * parameter.element_size() for _, parameter in named)
    for unit in FullyShardedDataParallel.fsdp_modules(teachers[0].model):
        if unit._handle is not None:  # FSDP1 keeps gathered weights apart from its parameters
            facts["bytes"] += unit._handle.flat_param._full_param_padded.untyped_storage().nbytes()
    Path(f"{FILE}.{rank}").write_text(json.dumps(facts))
    return end
run_module._train_loop = train_probed
"""
KEEPS_GRADIENTS = """
from fabric_train.training import distillation
from fabric_train.training.teacher import LiveTeacher
LiveTeacher.read = LiveTeacher.read.__wrapped__  # without torch.no_grad
set_up_frozen = distillation.set_up_teacher
def set_up_with_gradient(*arguments):
    teacher = set_up_frozen(*arguments)
    teacher.model.requires_grad_(True)
    teacher.head.weight.requires_grad_(True)
    return teacher
distillation.set_up_teacher = set_up_with_gradient
"""


def probe(runs: ForkedRuns, folder: Path, folders: Folders, case: Case, before: str = "") -> list[dict[str, Any]]:
    """Train a case, and return each rank's facts about its teacher."""
    source = f"FILE = {str(folder / 'facts')!r}\n" + before + PROBE
    train(runs, folder / "run", folders, case, before=source)
    return [json.loads((folder / f"facts.{rank}").read_text()) for rank in range(case.num_ranks)]


def assert_frozen(facts: dict[str, Any]) -> None:
    """Check that nothing of the teacher trains or has a gradient."""
    assert facts["grads"] == []
    assert facts["trains"] == []
    assert not facts["hidden_has_graph"]
    assert not facts["training"]
    assert facts["shared"] == 0


@pytest.mark.parametrize("parallelism", ["single", "fsdp", "fsdp2"])
def test_one_frozen_teacher_is_kept_and_stays_sharded(
    forked_runs: ForkedRuns, tmp_path: Path, folders: Folders, parallelism: str
) -> None:
    num_ranks = 1 if parallelism == "single" else 2
    options: Options = {} if parallelism == "single" else {"sharding_strategy": "SHARD_GRAD_OP"}
    case = Case("probed", parallelism, num_ranks, 3, options=options)
    teacher = load(folders.teacher)
    head_bytes = teacher.lm_head.weight.nbytes
    other_bytes = sum(parameter.nbytes for parameter in teacher.parameters()) - head_bytes
    for facts in probe(forked_runs, tmp_path, folders, case):
        assert_frozen(facts)
        assert facts["num_teachers"] == 1
        num_micro_batches = NUM_STEPS * ROWS_PER_WINDOW // (3 * num_ranks)
        assert facts["reads"] == num_micro_batches + 4  # and the four rows of the check of isolation
        # the last norm stays gathered, and shards are padded
        assert facts["bytes"] <= head_bytes + 1.01 * other_bytes / num_ranks


def test_a_gradient_that_the_teacher_keeps_is_caught(forked_runs: ForkedRuns, tmp_path: Path, folders: Folders) -> None:
    case = Case("planted", "single", 1, 6)
    (facts,) = probe(forked_runs, tmp_path, folders, case, before=KEEPS_GRADIENTS)
    with pytest.raises(AssertionError):
        assert_frozen(facts)
