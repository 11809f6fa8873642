"""evaluate.py gives the loss that lm_eval's rolling loglikelihood gives for the same documents."""

import json
import subprocess
from pathlib import Path

import pytest

from fabric_train.cli.parser import parse_arguments
from fabric_train.evaluation.arguments import EvaluateArguments
from fabric_train.evaluation.compare_models import compare_models
from tests.support.token_datasets import write_jsonl

MAX_LENGTH = 64
# add_bos_token: by default lm_eval lets a tokenizer add BOS, and then predicts it after the BOS that it adds itself
SCRIPT = f"""
import json, sys
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

model, *texts = sys.argv[1:]
lm = HFLM(model, device="cpu", dtype="float32", max_length={MAX_LENGTH}, batch_size=3, add_bos_token=False)
requests = [Instance("loglikelihood_rolling", {{}}, (text,), 0) for text in texts]
print(json.dumps(lm.loglikelihood_rolling(requests)))
"""

pytestmark = pytest.mark.downstream


def test_loss_is_that_of_lm_evals_rolling_loglikelihood(
    tmp_path: Path, tiny_model_dir: Path, shakespeare_jsonl: Path, lm_eval_python: Path
) -> None:
    with shakespeare_jsonl.open(encoding="utf-8") as lines:
        work = json.loads(next(lines))["text"]
    texts = [work[start : start + length] for start, length in ((0, 20), (100, 300), (1000, 2000))] + ["Fin é 😀", " x"]
    command = [lm_eval_python, "-c", SCRIPT, tiny_model_dir, *texts]
    ran = subprocess.run(command, text=True, capture_output=True, timeout=600, check=True)
    theirs = json.loads(ran.stdout.splitlines()[-1])
    documents = write_jsonl(tmp_path / "texts.jsonl", texts)
    words = ["--models", tiny_model_dir, "--texts", f"en={documents}", "--output_dir", tmp_path / "out"]
    compare_models(parse_arguments(EvaluateArguments, [*map(str, words), "--max_length", str(MAX_LENGTH)]))
    written = (tmp_path / "out" / "documents.jsonl").read_text(encoding="utf-8")
    ours = [json.loads(line) for line in written.splitlines()]
    assert max(line["tokens"] for line in ours) > 3 * MAX_LENGTH
    for line, loglikelihood in zip(ours, theirs, strict=True):
        assert line["nats"] == pytest.approx(-loglikelihood, abs=1e-4 * line["tokens"])
    assert sum(line["nats"] for line in ours) == pytest.approx(-sum(theirs), rel=1e-5)
