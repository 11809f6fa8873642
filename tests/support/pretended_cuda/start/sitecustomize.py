"""Give this Python pretended CUDA devices, before its program begins: ``PYTHONPATH`` starts with this folder."""

import os

if os.environ.get("PRETENDED_CUDA_LIBRARY"):
    from tests.support.pretended_cuda.install import install

    try:
        install()
    except Exception as error:  # Python would go on without the devices
        raise SystemExit(f"pretended CUDA devices: {error!r}") from error
