"""Weights in 4 bits: what bitsandbytes logs when it is loaded."""

import importlib.util
import logging
import sys
from pathlib import Path
from types import ModuleType

import pytest

from fabric_train.model.nf4 import check_installed

WARNING = "Failed to load CPU gemm_4bit_forward from kernels-community: %s. Please make sure"
CPU_OPERATORS = "bitsandbytes.backends.cpu.ops"


def test_only_the_warning_about_a_kernel_that_is_not_used_is_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # given the warning that bitsandbytes has, and another one
    spec = importlib.util.find_spec("bitsandbytes")
    assert spec is not None
    assert spec.origin is not None
    operators = Path(spec.origin).parent / "backends" / "cpu" / "ops.py"
    assert WARNING in operators.read_text(encoding="utf-8")
    # a package that logs as bitsandbytes does when it is imported on a CPU with AVX512-BF16
    source = f"import logging\nlogger = logging.getLogger({CPU_OPERATORS!r})\n"
    source += f"logger.warning({WARNING!r}, 'no kernels')\nlogger.warning('the library is broken')\n"
    (tmp_path / "bitsandbytes.py").write_text(source, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    # setitem, so that the test's package is forgotten afterwards even if bitsandbytes was not imported before
    monkeypatch.setitem(sys.modules, "bitsandbytes", ModuleType("bitsandbytes"))
    del sys.modules["bitsandbytes"]

    check_installed()

    assert caplog.messages == ["the library is broken"]
    assert logging.getLogger(CPU_OPERATORS).filters == []
