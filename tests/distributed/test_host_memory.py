"""What a process frees serves the next tensor without a page fault."""

import sys

import pytest

from tests.support.programs import RunProgram

FAULTS_OF_FREED_MEMORY = """
import resource, sys
import numpy as np
from fabric_train.distributed.memory import reuse_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for megabytes in (200, 5, 70):
        np.ones(megabytes * 2**18, np.float32)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

usual = min(faults(), faults())
reuse_freed_memory()
faults()
print(usual, faults())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's malloc")
def test_freed_memory_is_used_again_without_page_faults(run_program: RunProgram) -> None:
    finished = run_program("-c", FAULTS_OF_FREED_MEMORY)
    usual, kept = map(int, finished.stdout.split())
    assert usual > 100  # of 2 MiB, where pages are huge
    assert kept < 10
