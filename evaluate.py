# PYTHON_ARGCOMPLETE_OK
"""Compare models by their loss on texts:  python evaluate.py --models BASE RUN/best --texts es=FILE --output_dir DIR"""

from arguments import EvaluateArguments, parse
from fabric_train.cli.errors import run_program


def main() -> None:
    """Print loss, perplexity and bits per byte by source and model, and write them into the output folder."""
    arguments = parse(EvaluateArguments)

    from fabric_train.evaluation.compare_models import compare_models  # slow

    compare_models(arguments)


if __name__ == "__main__":
    run_program(main)
