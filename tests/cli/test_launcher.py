"""Variables of launchers are checked where they come in: a world that was not asked for is refused."""

import importlib.util

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fabric_train.cli.launcher import (
    check_environment,
    find_other_world_size,
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
NAMES = [*TORCHRUN, "NODE_RANK", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "PMI_RANK", "PMI_SIZE", "SLURM_PROCID"]


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
        ({**TORCHRUN, "RANK": "5"}, "RANK=5 in the environment is not below WORLD_SIZE=2: ranks count from 0"),
        ({"RANK": "1"}, "RANK=1 in the environment without a launcher (no TORCHELASTIC_RUN_ID)"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "RANK=0 and WORLD_SIZE=2 in the environment without a launcher"),
        ({"PMI_RANK": "3", "PMI_SIZE": "2"}, "PMI_RANK=3 in the environment is not below PMI_SIZE=2"),
    ],
)
def test_a_variable_that_cannot_be_meant_is_named(environment: dict[str, str], fault: str) -> None:
    (found,) = check_environment(environment)
    assert found.startswith(fault)
    with pytest.raises(ValueError, match="in the environment"):
        launcher_arguments(environment)


@pytest.mark.parametrize("environment", [{}, TORCHRUN, {"SLURM_PROCID": "3", "SLURM_NTASKS": "4"}, {"LOCAL_RANK": "0"}])
def test_the_variables_of_a_launcher_are_accepted(environment: dict[str, str]) -> None:
    assert check_environment(environment) == []


@pytest.mark.skipif(importlib.util.find_spec("mpi4py") is not None, reason="mpi4py is installed")
@pytest.mark.parametrize("name", ["OMPI_COMM_WORLD", "PMI"])
def test_mpiexec_without_mpi4py_is_refused(name: str) -> None:
    """Every process would train alone, into the same folder."""
    (fault,) = check_environment({f"{name}_RANK": "1", f"{name}_SIZE": "2"})
    assert "which find each other by mpi4py, and it is not installed: pip install mpi4py" in fault
    assert check_environment({f"{name}_RANK": "0", f"{name}_SIZE": "1"}) == []


def test_another_number_of_processes_is_named() -> None:
    assert find_other_world_size(2, TORCHRUN) is None
    assert find_other_world_size(1, {}) is None
    fault = "torchrun has started 2 processes (WORLD_SIZE), but --devices times --num_nodes is 1; make them agree"
    assert find_other_world_size(1, TORCHRUN) == fault
    fault = find_other_world_size(4, {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}) or ""
    assert fault.startswith("mpiexec (Open MPI) has started 2 processes (OMPI_COMM_WORLD_SIZE), but --devices")


NUMBERS = st.integers(-2, 70_000).map(str)
VALUES = st.one_of(NUMBERS, st.sampled_from(["", "0", "1", "2", "²", "1e3", " 1", "0x10", "١"]), st.text(max_size=6))


@given(st.dictionaries(st.sampled_from([*NAMES, "FABRIC_TRAIN_LAUNCHER", "LT_DEVICES", "LT_CLI_USED"]), VALUES))
def test_any_environment_is_accepted_or_refused_in_a_line(environment: dict[str, str]) -> None:
    assert isinstance(global_rank(environment), int)
    launcher_process(environment)
    try:
        launcher_arguments(environment)
    except ValueError as error:
        lines = [str(line) for line in error.args]
    else:
        find_other_world_size(2, environment)
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
