"""Print devices, driver, versions and the speed of matrix products as JSON: ``python -m benchmarks.environment``."""

import argparse
import json
import shutil
import subprocess
import time
from importlib.metadata import PackageNotFoundError, distributions, version
from typing import Any

import torch

from fabric_train.cli.errors import run_program

_PACKAGES = (
    "torch",
    "lightning",
    "transformers",
    "accelerate",
    "triton",
    "flash-attn",
    "liger-kernel",
    "torchao",
    "numpy",
)
_PRODUCTS = 20


def main() -> None:
    """Print what there is; a package that is not installed has no version."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", type=int, required=True, help="rows and columns of the matrices")
    size = parser.parse_args().size
    found = {
        "devices": [_device(index) for index in range(torch.cuda.device_count())],
        "driver": _driver(),
        "cuda": torch.version.cuda,
        "compiler": shutil.which("g++"),
        "versions": {name: _version(name) for name in _PACKAGES} | _versions_of_nvidia(),
        "tflops": _products_per_second(size) * 2 * size**3 / 1e12,
    }
    print(json.dumps(found))


def _device(index: int) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(index)
    capability = f"{properties.major}.{properties.minor}"
    return {"name": properties.name, "memory_bytes": properties.total_memory, "capability": capability}


def _driver() -> str | None:
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    command = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
    printed = subprocess.run(command, text=True, capture_output=True, timeout=60, check=True).stdout
    return printed.splitlines()[0].strip()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _versions_of_nvidia() -> dict[str, str]:
    """Return the versions of the libraries that torch's wheel needs, such as nvidia-nccl-cu13."""
    return {found.name: found.version for found in distributions() if found.name.startswith("nvidia-")}


def _products_per_second(size: int) -> float:
    """Return how many products of square bf16 matrices a device computes in a second."""
    left, right = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    for _ in range(3):
        left @ right
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(_PRODUCTS):
        left @ right
    torch.cuda.synchronize()
    return _PRODUCTS / (time.perf_counter() - started)


if __name__ == "__main__":
    run_program(main)
