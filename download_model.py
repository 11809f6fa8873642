# PYTHON_ARGCOMPLETE_OK
"""Download a model for machines without internet:  python download_model.py --model_name HUB_NAME --output_dir DIR"""

from pathlib import Path

from arguments import DownloadArguments, parse
from fabric_train.cli.errors import run_program


def main() -> None:
    """Download, then print the files and how to use them."""
    arguments = parse(DownloadArguments)

    from fabric_train.export.model_download import DownloadRequest, download  # slow
    from fabric_train.model.hf_model import quiet_transformers

    quiet_transformers()
    request = DownloadRequest(arguments.model_name, arguments.revision, arguments.tokenizer_only, arguments.pickles)
    folder = Path(arguments.output_dir)
    downloaded = download(request, folder)
    for name, size in downloaded.sizes.items():
        print(f"{size:>15,}  {name}")
    print(f"{sum(downloaded.sizes.values()):>15,}  bytes of {request.name} at {downloaded.commit} in {folder}")
    option = "--tokenizer_name" if request.tokenizer_only else "--model_name"
    print(f"use it with {option} {folder}, and set HF_HUB_OFFLINE=1 on machines without internet")


if __name__ == "__main__":
    run_program(main)
