# PYTHON_ARGCOMPLETE_OK
"""Generate text:  python generate.py --model_name CHECKPOINT|RUN|HF_FOLDER|ADAPTER_FOLDER|HUB_NAME --prompt TEXT"""

from fabric_train.cli.errors import run_program
from fabric_train.programs.generate import main

if __name__ == "__main__":
    run_program(main)
