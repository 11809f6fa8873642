"""The hash of evaluated rows says whether two evaluations read the same ones."""

import torch

from fabric_train.data.batch import IGNORED_LABEL, SUM_OF_HASHES, hash_supervised


def test_the_hash_is_of_the_rows_in_any_order_up_to_their_last_label() -> None:
    ids = torch.arange(20).reshape(2, 10)
    labels = ids.clone()
    labels[:, 7:] = IGNORED_LABEL
    whole = hash_supervised(ids, labels)
    assert isinstance(whole, int)
    assert 0 <= whole < SUM_OF_HASHES
    assert whole == hash_supervised(ids.flip(0), labels.flip(0))
    assert whole == sum(hash_supervised(ids[row : row + 1], labels[row : row + 1]) for row in range(2)) % SUM_OF_HASHES
    after = ids.clone()
    before = ids.clone()
    after[:, 8] = 99
    before[:, 6] = 99
    assert whole == hash_supervised(after, labels)
    assert whole != hash_supervised(before, labels)
    assert whole != hash_supervised(ids, torch.where(labels == 3, IGNORED_LABEL, labels))
