"""What Fabric's plugins for launchers get wrong is corrected. MPI and gloo themselves: tests/launchers/."""

import sys
import warnings
from pathlib import Path

import pytest
from lightning import Fabric
from lightning.fabric.plugins.environments import LightningEnvironment, mpi
from lightning_utilities.core.imports import RequirementCache

from fabric_train.cli.errors import InputError
from fabric_train.distributed.cluster_environment import SrunEnvironment, check_address, find_cluster_environment

STEP = {
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_NAME": "interactive",  # as salloc calls it
    "SLURM_NTASKS": "8",
    "SLURM_PROCID": "3",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_STEP_NODELIST": "no-such-node[3-4].invalid",
}


@pytest.fixture
def step(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A task of a Slurm step on nodes whose names do not resolve; returns a folder of programs on its path."""
    monkeypatch.setenv("MASTER_ADDR", "")  # so that it is restored after the test
    monkeypatch.delenv("MASTER_ADDR")
    monkeypatch.setenv("PATH", str(tmp_path))
    for name, value in STEP.items():
        monkeypatch.setenv(name, value)
    return tmp_path


def write_program(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def test_node_whose_name_does_not_resolve_has_the_address_slurm_knows(step: Path) -> None:
    write_program(step / "scontrol", 'echo "NodeName=$3 Arch=x86_64"; echo "   NodeAddr=127.0.0.5 NodeHostName=$3"')
    assert SrunEnvironment(num_nodes=2).main_address == "127.0.0.5"


def test_an_exported_address_is_the_one_that_counts(step: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.9")
    assert SrunEnvironment(num_nodes=2).main_address == "127.0.0.9"


def test_tasks_of_one_node_need_no_name(step: Path) -> None:
    assert SrunEnvironment(num_nodes=1).main_address == "127.0.0.1"


def test_an_address_that_does_not_resolve_is_refused(step: Path) -> None:
    with pytest.raises(InputError, match=r"srun: MASTER_ADDR 'no-such-node3\.invalid', the machine of rank 0"):
        find_cluster_environment(num_nodes=2, accelerator="cpu")
    with pytest.raises(InputError, match="give torchrun --local-addr ADDRESS on rank 0's machine"):
        check_address("no-such-node.invalid", "torchrun")


def test_any_tasks_of_a_step_are_its_world(step: Path) -> None:
    """Fabric wants --ntasks-per-node, counts the job's tasks, and lets each task of salloc train alone."""
    write_program(step / "srun", "")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        environment = SrunEnvironment(num_nodes=1)
    environment.validate_settings(num_devices=2, num_nodes=2)
    assert (environment.world_size(), environment.global_rank()) == (4, 3)


@pytest.mark.parametrize(
    ("variables", "is_imported"),
    [({}, False), ({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0"}, True)],
)
def test_mpi_is_started_for_mpiexec_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, variables: dict[str, str], is_imported: bool
) -> None:
    """Here mpi4py has no MPI library, which ends Fabric's own search for a plugin in any run."""
    (tmp_path / "mpi4py").mkdir()
    (tmp_path / "mpi4py" / "__init__.py").write_text("")
    (tmp_path / "mpi4py" / "MPI.py").write_text("raise RuntimeError('cannot load MPI library')")
    monkeypatch.syspath_prepend(tmp_path)
    # Lightning remembers that there is an mpi4py, and Python the module: later tests have none
    monkeypatch.setattr(mpi, "_MPI4PY_AVAILABLE", RequirementCache("mpi4py"))
    for name in ("mpi4py", "mpi4py.MPI"):
        monkeypatch.setitem(sys.modules, name, None)
        del sys.modules[name]
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    if is_imported:
        with pytest.raises(InputError, match=r"mpi4py finds no MPI library \(cannot load MPI library\); load"):
            find_cluster_environment(num_nodes=1, accelerator="cpu")
    else:
        environment = find_cluster_environment(num_nodes=1, accelerator="cpu")
        assert isinstance(environment, LightningEnvironment)
        Fabric(accelerator="cpu", devices=1, plugins=[environment])
