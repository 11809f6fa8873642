# PYTHON_ARGCOMPLETE_OK
"""Download a model for machines without internet:  python download_model.py --model_name HUB_NAME --output_dir DIR"""

from fabric_train.cli.errors import run_program
from fabric_train.programs.download_model import main

if __name__ == "__main__":
    run_program(main)
