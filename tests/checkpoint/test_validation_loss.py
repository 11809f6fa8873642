"""The figures of a validation are those worked out by hand."""

import math

import pytest

from fabric_train.checkpoint import Evaluation, TokenLoss, compare_evaluations, perplexity


def test_bits_per_byte_divide_by_the_bytes_of_the_text() -> None:
    loss = TokenLoss(nats=12 * math.log(2), num_tokens=3, num_bytes=8.0)  # 12 bits for 3 tokens, which are 8 bytes
    assert loss.bits_per_byte == pytest.approx(1.5)
    assert loss.loss == pytest.approx(4 * math.log(2))
    assert loss.perplexity == pytest.approx(16)
    assert TokenLoss(1.0, 3).bits_per_byte is None
    assert math.isnan(TokenLoss(0.0, 0).loss)
    assert perplexity(1000.0) == math.inf


def test_a_single_source_is_shown_as_the_whole() -> None:
    es = TokenLoss(2.0, 1)
    ca = TokenLoss(6.0, 2)
    whole = TokenLoss(8.0, 3)
    assert Evaluation(TokenLoss(2.0, 1), {"es": es}).parts == {"all": es}
    first = Evaluation(es, {"es": es})
    now = Evaluation(whole, {"es": es, "ca": ca})
    assert list(compare_evaluations(first, now)) == [("es", es, es), ("ca", None, ca), ("all", es, whole)]
    assert [now.loss_of(name) for name in ("es", "ca", "all", "va")] == [2.0, 3.0, pytest.approx(8 / 3), None]
