"""On CUDA devices a run takes torch's kernel for documents by itself, and has the losses of a mask."""

from pathlib import Path

import pytest

from tests.support.pretended_cuda.run import run_pretended
from tests.support.unequal_rows import argv, metrics, write_model, write_rows

pytestmark = [pytest.mark.slow, pytest.mark.cuda_rehearsal]

WITH_KERNEL = """
import torch
from tests.support.varlen_kernel import varlen_kernel_on_cpu
torch.backends.cuda.is_flash_attention_available = lambda: True
kernel = varlen_kernel_on_cpu()
kernel.__enter__()
"""
"""Code for a rank: the build of torch has the kernel, by its stand-in."""
SLOW = (
    "attention is slow: it isolates documents with a mask of 24 × 24 tokens, because this build of torch has no flash"
)


def test_kernel_for_documents_is_taken_where_torch_has_it(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    tokens = write_rows(tmp_path / "tokens", packed_every=1)
    options = {"accelerator": "cuda", "devices": 2, "parallelism": "fsdp2", "max_step": 2, "micro_batch_size": 2}
    losses = {}
    for name, before in (("mask", ""), ("borders", WITH_KERNEL), ("slices", WITH_KERNEL)):
        given = options | ({"context_parallel_size": 2} if name == "slices" else {})
        words = argv(model, tokens, tmp_path / name, **given, precision="bf16-mixed")
        run = run_pretended(["fabric_train", *words], before=before)
        assert run.returncode == 0, run.stderr
        assert (SLOW in run.stdout) == (name == "mask")
        assert "--activation_checkpointing auto: none, which needs 2.0 GB of " in run.stdout
        losses[name] = [float(row["train_loss"]) for row in metrics(tmp_path / name)]
    assert losses["borders"] == pytest.approx(losses["mask"], rel=1e-4)
    assert losses["slices"] == pytest.approx(losses["mask"], rel=1e-4)
    assert losses["borders"] != losses["mask"]  # another kernel rounds in another way
