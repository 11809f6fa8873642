"""Hub → folder, for machines without internet:  python download_model.py --model_name HUB_NAME --output_dir DIR"""

from pathlib import Path

from arguments import DownloadArguments, parse
from fabric_train.cli.errors import run_program
from fabric_train.export.model_download import Wanted, download
from fabric_train.model.hf_model import quiet_transformers


def main() -> None:
    """Download, then say what there is and how it is used."""
    arguments = parse(DownloadArguments)
    quiet_transformers()
    wanted = Wanted(arguments.model_name, arguments.revision, arguments.tokenizer_only, arguments.pickles)
    folder = Path(arguments.output_dir)
    downloaded = download(wanted, folder)
    for name, size in downloaded.sizes.items():
        print(f"{size:>15,}  {name}")
    print(f"{sum(downloaded.sizes.values()):>15,}  bytes of {wanted.name} at {downloaded.commit} in {folder}")
    option = "--tokenizer_name" if wanted.tokenizer_only else "--model_name"
    print(f"use it with {option} {folder}, and HF_HUB_OFFLINE=1 where there is no internet")


if __name__ == "__main__":
    run_program(main)
