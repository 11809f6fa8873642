# PYTHON_ARGCOMPLETE_OK
"""Compare models by their loss on texts:  python evaluate.py --models BASE RUN/best --texts es=FILE --output_dir DIR

Hugging Face has a package of the same name, which tasks of lm_eval import. With this folder on the path, they would
find this file. So ``import evaluate`` imports the package here too.
"""

import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from pathlib import Path

from fabric_train.cli.errors import run_program
from fabric_train.programs.evaluate import main


def become_package_of_hugging_face() -> None:
    """Put the package ``evaluate`` that is installed in the place of this module.

    Raises:
        ModuleNotFoundError: it is not installed.
    """
    checkout = Path(__file__).resolve().parent
    other_folders = [folder for folder in sys.path if Path(folder).resolve() != checkout]
    spec = PathFinder.find_spec(__name__, other_folders)
    if spec is None or spec.loader is None:
        raise ModuleNotFoundError(f"No module named {__name__!r}", name=__name__)
    package = module_from_spec(spec)
    sys.modules[__name__] = package
    spec.loader.exec_module(package)


if __name__ == "__main__":
    run_program(main)
elif __name__ == "evaluate":
    become_package_of_hugging_face()
