"""The memory of a machine is limited by the control groups of its containers and jobs."""

from pathlib import Path

import psutil
import pytest

from fabric_train.distributed import memory
from fabric_train.distributed.memory import available_memory, machine_memory

MIB = 2**20


def write_group(folder: Path, files: dict[str, object]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_text(f"{content}\n")


@pytest.mark.parametrize("version", [1, 2])
def test_the_tightest_control_group_counts_and_pages_of_files_are_free(
    version: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    membership = tmp_path / "cgroup"
    mounted = tmp_path / "sys"
    monkeypatch.setattr(memory, "_CGROUP_MEMBERSHIP", membership)
    monkeypatch.setattr(memory, "_CGROUP_MOUNT", mounted)
    if version == 1:
        root = mounted / "memory"
        limit = "memory.limit_in_bytes"
        usage = "memory.usage_in_bytes"
        prefix = "total_"
        membership.write_text("5:pids:/elsewhere\n4:memory:/slurm/job_1/step_0\n0::/\n")
        unlimited: object = 2**63 - 4096
    else:
        root = mounted
        limit = "memory.max"
        usage = "memory.current"
        prefix = ""
        membership.write_text("0::/slurm/job_1/step_0\n")
        unlimited = "max"
    counted = f"anon 1\n{prefix}inactive_file {30 * MIB}\n{prefix}active_file {10 * MIB}"
    write_group(root / "slurm/job_1/step_0", {limit: unlimited, usage: 90 * MIB, "memory.stat": counted})
    write_group(root / "slurm/job_1", {limit: 200 * MIB, usage: 90 * MIB, "memory.stat": counted})
    write_group(root / "slurm", {limit: 300 * MIB, usage: 290 * MIB, "memory.stat": counted})
    assert machine_memory() == 200 * MIB
    assert available_memory() == 50 * MIB  # of the outer group: 300 - (290 - 30 - 10)
    membership.write_text("")
    assert machine_memory() == psutil.virtual_memory().total
    assert available_memory() > 0
