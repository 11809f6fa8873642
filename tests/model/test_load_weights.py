"""No rank ever holds a whole copy of the model that is read: what its memory grows by, seen by the kernel."""

from pathlib import Path

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from tests.support.forked_runs import ForkedRuns
from tests.support.unequal_rows import VOCABULARY, argv, write_rows

pytestmark = pytest.mark.slow

_MEASURE = """
import ctypes, os
import torch.distributed
import fabric_train.training.build_run as building
from fabric_train.distributed.precision import weights_dtype
from fabric_train.model.load_weights import MetaModel, load_model

def status(name):
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))

read, set_up = building.open_model, building.setup_model
def measured_read(run):
    global before
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the peak begins here
    # freed memory goes back to the system, as with a real model's large tensors
    ctypes.CDLL(None).mallopt(-3, 1 << 16)
    before = status("VmRSS")
    return MetaModel(load_model(run.model, weights_dtype("32-true")), None) if WHOLE else read(run)
def measured_set_up(*args, **options):
    set_up(*args, **options)
    print("grown by", status("VmHWM") - before, flush=True)
    torch.distributed.barrier()
    os._exit(0)  # what follows is of no interest here
building.open_model, building.setup_model = measured_read, measured_set_up
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """168 MB in fp32, 84 in its files of 5 MB; a layer has 10 MB."""
    folder = tmp_path_factory.mktemp("memory") / "model"
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=16,
        num_attention_heads=8,
        max_position_embeddings=64,
    )
    LlamaForCausalLM(config).bfloat16().save_pretrained(folder, max_shard_size="5MB")
    return folder


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rows(tmp_path_factory.mktemp("memory") / "tokens")


def growth(runs: ForkedRuns, folder: Path, model: Path, tokens: Path, parallelism: str, *, whole: bool) -> float:
    """Return by how much a rank's peak memory grows while it loads the model, as a part of the model's fp32 size."""
    line = argv(model, tokens, folder, parallelism=parallelism, max_step=1, total_batch_size=2)
    run = runs.start(line, 2, before=_MEASURE.replace("WHOLE", str(whole)))
    run.wait()
    printed = [line for rank in (0, 1) for line in run.stdout(rank).splitlines() if line.startswith("grown by")]
    assert len(printed) == 2, run.report()
    size = 2 * sum(file.stat().st_size for file in model.glob("*.safetensors"))
    return max(int(line.split()[-1]) for line in printed) / size


@pytest.mark.parametrize("parallelism", ["fsdp", "fsdp2"])
def test_a_rank_reads_its_part_and_never_holds_the_whole(
    forked_runs: ForkedRuns, tmp_path: Path, model: Path, tokens: Path, parallelism: str
) -> None:
    # half of the model, a layer, and the mapped pages of the files
    assert growth(forked_runs, tmp_path / "run", model, tokens, parallelism, whole=False) < 0.8


def test_a_rank_that_loads_the_whole_model_is_seen_to(
    forked_runs: ForkedRuns, tmp_path: Path, model: Path, tokens: Path
) -> None:
    # the whole model, and this rank's half
    assert growth(forked_runs, tmp_path / "run", model, tokens, "fsdp", whole=True) > 1.2
