"""Runs for the tests of the report: a trunk with a resume and a signal, a branch, and an evaluation beside them."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from fabric_train.cli.errors import STOPPED
from fabric_train.report.__main__ import main
from tests.support.forked_runs import ForkedRuns
from tests.support.short_runs import TERMINATE, argv, at_point
from tests.support.token_datasets import TEXTS, tokenize, write_jsonl

HOSTILE = "<img src=x onerror=alert(1)>"
"""A prompt, which is no markup in any page."""


@dataclass(frozen=True)
class ReportedRuns:
    trunk: Path
    branch: Path


@pytest.fixture(scope="session")
def reported(tmp_path_factory: pytest.TempPathFactory, forked_runs: ForkedRuns, tiny_model_dir: Path) -> ReportedRuns:
    """Two sources; the trunk is stopped by SIGTERM in step 3 and resumed, the branch follows step 4. Both reported."""
    folder = tmp_path_factory.mktemp("report")
    files = [write_jsonl(folder / "es.jsonl"), write_jsonl(folder / "other.jsonl", [text[::-1] for text in TEXTS])]
    names = [f"{name}={file}" for name, file in zip(("es", "other_texts"), files, strict=True)]
    tokenize(folder / "tokens", tiny_model_dir, *names, validation_split=0.2)
    (folder / "prompts.txt").write_text(f"{HOSTILE}\n", encoding="utf-8")
    given: dict[str, Any] = {"max_step": 6, "eval_step_interval": 2, "save_step_interval": 2, "eval_at_start": None}
    given |= {"sample_prompts": folder / "prompts.txt", "sample_tokens": 3, "report": "true"}
    words = argv(tiny_model_dir, folder / "tokens", folder / "trunk", **given)
    stopped = forked_runs.start(words, 1, before=at_point(TERMINATE, 3, "COMPUTING", ranks=(0,)))
    assert stopped.wait() == [STOPPED]
    resumed = forked_runs.start([*words, "--resume", "true"], 1)
    resumed.finish()
    assert "written" in resumed.stdout()
    more = {**given, "report": "false", "branch": f"{folder / 'trunk'}@4", "lr": 5e-4}
    forked_runs.start(argv(tiny_model_dir, folder / "tokens", folder / "branch", **more), 1).finish()
    main([str(folder / "branch"), "--price_per_hour", "3"])
    return ReportedRuns(folder / "trunk", folder / "branch")
