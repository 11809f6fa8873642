"""A teacher's weights are gathered only while it computes, however the run is sharded."""

from pathlib import Path

import pytest

from tests.support import short_runs
from tests.support.forked_runs import ForkedRuns

# After each of the teacher's forward passes, the bytes of its parameters on this rank are printed.
_NOTE_BYTES = """
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from fabric_train.training.teacher import LiveTeacher

def read(self, batch, targets, original=LiveTeacher.read):
    rows = original(self, batch, targets)
    num_bytes = 0
    for unit in FullyShardedDataParallel.fsdp_modules(self.model):
        num_bytes += unit._handle.flat_param.untyped_storage().nbytes()
        num_bytes += unit._handle.flat_param._full_param_padded.untyped_storage().nbytes()
    for module in self.model.modules():
        if isinstance(module, FSDPModule):
            for parameter in module._get_fsdp_state()._fsdp_param_group.fsdp_params:
                num_bytes += parameter._sharded_param_data.untyped_storage().nbytes()
                num_bytes += parameter._unsharded_param.untyped_storage().nbytes()
    with open(f"bytes-{rank}", "a") as file:
        print(num_bytes, file=file)
    return rows

LiveTeacher.read = read
"""


@pytest.mark.parametrize("parallelism", ["fsdp", "fsdp2"])
@pytest.mark.parametrize("sharding", ["FULL_SHARD", "SHARD_GRAD_OP"])
def test_a_rank_has_its_shards_alone_after_the_teachers_forward_pass(
    forked_runs: ForkedRuns,
    tmp_path: Path,
    tiny_model_dir: Path,
    tiny_tokens_dir: Path,
    parallelism: str,
    sharding: str,
) -> None:
    options = {"objective": "distill", "teacher": tiny_model_dir, "max_step": 1, "eval_step_interval": 9}
    options |= {"parallelism": parallelism, "sharding_strategy": sharding}
    words = short_runs.argv(tiny_model_dir, tiny_tokens_dir, tmp_path / "run", **options)
    forked_runs.start(words, 2, cwd=tmp_path, before=_NOTE_BYTES).finish()

    weights = (tiny_model_dir / "model.safetensors").stat().st_size  # fp32, with a few bytes of names
    for rank in range(2):
        for line in (tmp_path / f"bytes-{rank}").read_text().split():
            assert 0 < int(line) < 0.6 * weights
