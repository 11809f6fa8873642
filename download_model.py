# PYTHON_ARGCOMPLETE_OK
"""Download a model for machines without internet:  python download_model.py --model_name HUB_NAME --output_dir DIR"""

from pathlib import Path

from arguments import DownloadArguments, parse
from fabric_train.cli.errors import run_program


def main() -> None:
    """Download, then print the files and how to use them."""
    arguments = parse(DownloadArguments)

    from fabric_train.export.hub import download  # slow
    from fabric_train.model.hf_model import quiet_transformers

    quiet_transformers()
    name, folder, tokenizer_only = arguments.model_name, Path(arguments.output_dir), arguments.tokenizer_only
    commit, sizes = download(name, folder, arguments.revision, tokenizer_only, arguments.pickles)
    for file, size in sizes.items():
        print(f"{size:>15,}  {file}")
    print(f"{sum(sizes.values()):>15,}  bytes of {name} at {commit} in {folder}")
    option = "--tokenizer_name" if tokenizer_only else "--model_name"
    print(f"use it with {option} {folder}, and set HF_HUB_OFFLINE=1 on machines without internet")


if __name__ == "__main__":
    run_program(main)
