# PYTHON_ARGCOMPLETE_OK
"""Convert a checkpoint to a verified Hugging Face folder:  python convert_to_hf.py --checkpoint RUN --output_dir DIR"""

from fabric_train.cli.errors import run_program
from fabric_train.programs.convert_to_hf import main

if __name__ == "__main__":
    run_program(main)
