"""Variables of launchers are checked where they come in: a world that was not asked for is refused."""

import importlib.util

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fabric_train.cli.launcher import (
    check_environment,
    find_launcher,
    find_other_world,
    global_rank,
    launcher_arguments,
    launcher_process,
    machine_name,
)
from tests.support.forked_runs import ForkedRuns

TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_RESTART_COUNT": "0",
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "0",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
SBATCH = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}  # its own shell
SRUN = {
    **SBATCH,
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
}
SHELL = {**SRUN, "SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "1", "SLURM_PROCID": "0"}
NAMES = [*TORCHRUN, "NODE_RANK", *OPEN_MPI, *MPICH, *SRUN, "SLURM_PTY_PORT", "PBS_JOBID"]


@pytest.mark.parametrize(
    ("environment", "fault"),
    [
        ({**TORCHRUN, "MASTER_PORT": "abc"}, "MASTER_PORT='abc' in the environment: expected a whole number from 1 to"),
        ({**TORCHRUN, "MASTER_PORT": "99999"}, "MASTER_PORT='99999' in the environment: expected a whole number"),
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "0"}, "LOCAL_WORLD_SIZE='0' in the environment: expected a whole number"),
        ({**TORCHRUN, "TORCHELASTIC_RESTART_COUNT": "abc"}, "TORCHELASTIC_RESTART_COUNT='abc' in the environment"),
        ({**TORCHRUN, "WORLD_SIZE": "abc"}, "WORLD_SIZE='abc' in the environment: expected a whole number from 1"),
        ({**TORCHRUN, "WORLD_SIZE": ""}, "WORLD_SIZE='' in the environment: expected a whole number from 1"),
        ({**TORCHRUN, "RANK": "²"}, "RANK='²' in the environment: expected a whole number from 0"),
        ({**TORCHRUN, "RANK": "5"}, "RANK=5 in the environment is not below WORLD_SIZE=2, but ranks count from 0"),
        ({"RANK": "1"}, "RANK=1 in the environment without a launcher (no TORCHELASTIC_RUN_ID)"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "RANK=0 and WORLD_SIZE=2 in the environment without a launcher"),
        ({"PMI_RANK": "3", "PMI_SIZE": "2"}, "PMI_RANK=3 in the environment is not below PMI_SIZE=2"),
        ({"PMI_RANK": "0", "PMI_SIZE": "2"}, "PMI_SIZE=2 in the environment: an unknown launcher has"),
        ({"JSM_NAMESPACE_SIZE": "4"}, "JSM_NAMESPACE_SIZE=4 in the environment: an unknown launcher has"),
    ],
)
def test_a_variable_that_cannot_be_meant_is_named(environment: dict[str, str], fault: str) -> None:
    (found,) = check_environment(environment)
    assert found.startswith(fault)
    with pytest.raises(ValueError, match="in the environment"):
        launcher_arguments(environment)


@pytest.mark.parametrize("environment", [{}, TORCHRUN, SRUN, {"LOCAL_RANK": "0"}, {"SLURM_JOB_ID": "7"}])
def test_the_variables_of_a_launcher_are_accepted(environment: dict[str, str]) -> None:
    assert check_environment(environment) == []


@pytest.mark.parametrize(
    ("environment", "name", "rank"),
    [
        ({}, None, 0),
        ({"LOCAL_RANK": "1", "WORLD_SIZE": "2"}, "the program that set LOCAL_RANK", 1),
        (TORCHRUN, "torchrun", 1),
        (SBATCH, None, 0),
        ({**SBATCH, "LOCAL_RANK": "1"}, "the program that set LOCAL_RANK", 1),  # a child of rank 0 in the job's shell
        (SRUN, "srun", 3),
        ({**SRUN, "SLURM_JOB_NAME": "interactive"}, "srun", 3),  # srun inside salloc
        ({**SRUN, "PMI_RANK": "3", "PMI_SIZE": "4"}, "srun", 3),  # srun --mpi=pmi2
        ({**SRUN, **TORCHRUN}, "torchrun", 1),
        ({**SRUN, **OPEN_MPI}, "mpiexec (Open MPI)", 1),
        ({**SRUN, **MPICH}, "mpiexec (MPICH)", 1),
        ({**SHELL, "SLURM_PTY_PORT": "40000"}, None, 0),
        ({**SHELL, "SLURM_JOB_NAME": "bash"}, None, 0),
        ({**SHELL, "SLURM_STEP_ID": "4294967290"}, None, 0),  # salloc's shell on a node
        (SHELL, "srun", 0),
    ],
)
def test_the_innermost_launcher_is_recognised(environment: dict[str, str], name: str | None, rank: int) -> None:
    launcher = find_launcher(environment)
    assert (launcher.name if launcher else None) == name
    assert global_rank(environment) == rank
    by_hand = name in (None, "the program that set LOCAL_RANK")
    assert (launcher_process(environment) is None) == by_hand


@pytest.mark.parametrize(("environment", "nodes"), [(TORCHRUN, "1"), (SRUN, "2")])
def test_a_launcher_gives_devices_and_nodes(environment: dict[str, str], nodes: str) -> None:
    given = launcher_arguments(environment)
    assert (given["devices"].value, given["num_nodes"].value) == ("2", nodes)


@pytest.mark.parametrize(
    ("environment", "fault"),
    [
        (SBATCH, "this Slurm job has 4 tasks (SLURM_NTASKS), but srun has not started this process (no SLURM_STEP_ID)"),
        ({**SRUN, "SLURM_STEP_TASKS_PER_NODE": "3,1"}, "srun has not started the same number of tasks on every node"),
        ({**SRUN, "SLURM_PROCID": "4"}, "SLURM_PROCID=4 in the environment is not below SLURM_STEP_NUM_TASKS=4"),
        (
            {"TORCHELASTIC_RUN_ID": "none", "RANK": "0", "WORLD_SIZE": "2"},
            "torchrun has started this process (TORCHELASTIC_RUN_ID in the environment), but LOCAL_RANK is not set",
        ),
    ],
)
def test_what_is_missing_for_one_world_is_named(environment: dict[str, str], fault: str) -> None:
    (found,) = check_environment(environment)
    assert found.startswith(fault)


@pytest.mark.skipif(importlib.util.find_spec("mpi4py") is not None, reason="mpi4py is installed")
@pytest.mark.parametrize(("name", "of_machine"), [("OMPI_COMM_WORLD", {}), ("PMI", {"MPI_LOCALNRANKS": "1"})])
def test_mpiexec_without_mpi4py_is_refused(name: str, of_machine: dict[str, str]) -> None:
    """Every process would train alone, into the same folder."""
    ranks = {f"{name}_RANK": "1", f"{name}_SIZE": "2", f"{name}_LOCAL_RANK": "0", "MPI_LOCALRANKID": "0", **of_machine}
    (fault,) = check_environment(ranks)
    assert "which need mpi4py to find each other, but it is not installed; run pip install mpi4py" in fault
    assert check_environment({**ranks, f"{name}_RANK": "0", f"{name}_SIZE": "1"}) == []


def test_another_world_than_asked_for_is_named() -> None:
    assert find_other_world(2, 1, TORCHRUN) is None
    assert find_other_world(1, 1, {}) is None
    fault = "torchrun has started 2 processes (WORLD_SIZE), but --devices times --num_nodes is 1; make them agree"
    assert find_other_world(1, 1, TORCHRUN) == fault
    assert find_other_world(2, 2, OPEN_MPI) is None
    fault = find_other_world(1, 2, OPEN_MPI) or ""
    assert fault.startswith("mpiexec (Open MPI) has started 4 processes (OMPI_COMM_WORLD_SIZE), but --devices")
    fault = find_other_world(2, 1, SHELL) or ""
    assert fault.startswith("srun has started 1 process (SLURM_STEP_NUM_TASKS), but --devices times --num_nodes is 2")


@pytest.mark.parametrize(
    ("environment", "job"),
    [
        ({"MASTER_ADDR": "node1"}, ", with torchrun"),
        ({"PBS_JOBID": "7"}, ", which PBS does not do (PBS_JOBID; use launch/pbs.sh, or mpiexec), with torchrun"),
        (
            {"SLURM_JOB_ID": "7"},
            ", which Slurm does only with srun (no SLURM_STEP_ID), with torchrun",
        ),
    ],
)
def test_several_machines_need_a_launcher(environment: dict[str, str], job: str) -> None:
    fault = find_other_world(2, 3, environment) or ""
    assert fault.startswith(f"--num_nodes 3: start the run on every machine{job} --nnodes 3, srun, or fabric run")


NUMBERS = st.integers(-2, 70_000).map(str)
VALUES = st.one_of(NUMBERS, st.sampled_from(["", "0", "1", "2", "²", "1e3", " 1", "0x10", "١"]), st.text(max_size=6))


@settings(suppress_health_check=[HealthCheck.too_slow])  # the first of all texts take a second on a busy machine
@given(st.dictionaries(st.sampled_from([*NAMES, "FABRIC_TRAIN_LAUNCHER", "LT_DEVICES", "LT_CLI_USED"]), VALUES))
def test_any_environment_is_accepted_or_refused_in_a_line(environment: dict[str, str]) -> None:
    assert isinstance(global_rank(environment), int)
    launcher_process(environment)
    try:
        launcher_arguments(environment)
    except ValueError as error:
        lines = [str(line) for line in error.args]
    else:
        find_other_world(2, 1, environment)
        lines = []
    assert not any("\n" in line for line in lines)


@pytest.mark.slow
def test_a_run_with_a_rank_alone_ends_with_one_line(forked_runs: ForkedRuns) -> None:
    run = forked_runs.start(["--train_data_dir", "x", "--output_dir", "out"], 1, env={"RANK": "0"})
    assert run.wait() == [2]
    assert run.stderr().startswith("error: RANK=0 in the environment without a launcher")
    assert run.stderr().count("\n") == 1


def test_slurms_name_of_a_machine_comes_before_the_hosts() -> None:
    assert machine_name({"SLURMD_NODENAME": "gpu17"}) == "gpu17"
    assert machine_name({})
