# PYTHON_ARGCOMPLETE_OK
"""Turn texts into a token dataset:  python tokenize_dataset.py --dataset FILE --tokenizer_name NAME --output_dir DIR"""

from fabric_train.cli.errors import run_program
from fabric_train.programs.tokenize_dataset import main

if __name__ == "__main__":
    run_program(main)
