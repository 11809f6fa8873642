"""What ``--devices`` means: a number, or the indices of GPUs."""

import pytest
from lightning.fabric.accelerators import CUDAAccelerator

from fabric_train.cli.errors import InputError
from fabric_train.distributed.devices import count_devices


@pytest.mark.parametrize(
    ("devices", "number"), [("auto", 4), (-1, 4), (3, 3), ("2,3", 2), ("0,3", 2), ("0,1,3", 3), (4, 4)]
)
def test_numbers_and_indices_of_gpus_are_counted(
    monkeypatch: pytest.MonkeyPatch, devices: int | str, number: int
) -> None:
    monkeypatch.setattr(CUDAAccelerator, "auto_device_count", lambda: 4)
    assert count_devices(devices, "cuda") == number


@pytest.mark.parametrize("devices", [5, "1,4"])
def test_a_gpu_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch, devices: int | str) -> None:
    monkeypatch.setattr(CUDAAccelerator, "auto_device_count", lambda: 4)
    with pytest.raises(InputError, match=rf"--devices {devices}: this machine has only 4 GPUs; give fewer"):
        count_devices(devices, "cuda")
