# PYTHON_ARGCOMPLETE_OK
"""Compare models by their loss on texts:  fabric-train evaluate --models BASE RUN/best --texts es=FILE --output_dir DIR

Evaluate models, or each checkpoint of a run, on tasks of lm_eval:  fabric-train evaluate --watch RUN --tasks FILE.yaml
"""

from fabric_train.cli.errors import run_program
from fabric_train.cli.parser import parse_arguments
from fabric_train.evaluation.arguments import EvaluateArguments


def main() -> None:
    """Print the results by model, and write them to the output folder."""
    arguments = parse_arguments(EvaluateArguments)
    if arguments.watch is not None or arguments.tasks is not None:
        from fabric_train.evaluation.watch import watch_run  # slow

        watch_run(arguments)
        return

    from fabric_train.evaluation.compare_models import compare_models  # slow

    compare_models(arguments)


if __name__ == "__main__":
    run_program(main)
