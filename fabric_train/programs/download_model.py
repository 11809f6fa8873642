# PYTHON_ARGCOMPLETE_OK
"""Download a model for machines without internet:  fabric-train download --model_name HUB_NAME --output_dir DIR"""

from dataclasses import dataclass
from pathlib import Path

from fabric_train.cli.errors import run_program
from fabric_train.cli.parser import parse_arguments


@dataclass(frozen=True)
class DownloadArguments:
    """Download a model or a tokenizer, for machines without internet

    PROGRAM --model_name meta-llama/Meta-Llama-3-8B --output_dir models/llama-3-8b
    PROGRAM --model_name meta-llama/Meta-Llama-3-8B --tokenizer_only true --output_dir models/llama-3-tokenizer
    PROGRAM --model_name OWNER/NAME --revision v1.0 --output_dir models/name
    """

    model_name: str
    """Hub name OWNER/NAME."""
    output_dir: str
    """Folder to write; must not exist yet."""
    revision: str = "main"
    """Branch, tag or commit."""
    tokenizer_only: bool = False
    """Download only the tokenizer and the configuration, not the weights."""
    pickles: bool = False
    """If there are no safetensors, download pickled weights."""


def main() -> None:
    """Download, then print the files and how to use them."""
    arguments = parse_arguments(DownloadArguments)

    from fabric_train.export.hub_download import download  # slow
    from fabric_train.model.hf_model import quiet_transformers

    quiet_transformers()
    name = arguments.model_name
    folder = Path(arguments.output_dir)
    tokenizer_only = arguments.tokenizer_only
    model = download(name, folder, arguments.revision, tokenizer_only=tokenizer_only, pickles=arguments.pickles)
    for file, size in model.file_sizes.items():
        print(f"{size:>15,}  {file}")
    print(f"{sum(model.file_sizes.values()):>15,}  bytes of {name} at {model.commit} in {folder}")
    option = "--tokenizer_name" if tokenizer_only else "--model_name"
    print(f"use it with {option} {folder}; on machines without internet access, set HF_HUB_OFFLINE=1")


if __name__ == "__main__":
    run_program(main)
