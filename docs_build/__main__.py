"""``python -m docs_build site`` builds the site, ``serve`` shows it and follows changes of the documents."""

import sys

from docs_build import site
from fabric_train.cli.errors import InputError, run_program


def main() -> None:
    """Run the command that the first word names."""
    command = sys.argv[1:] or [""]
    if command == ["site"]:
        print(f"the site is {site.build() / 'index.html'}")
    elif command == ["serve"]:
        site.serve()
    else:
        raise InputError(f"python -m docs_build {' '.join(command)}: no such command; write site or serve")


if __name__ == "__main__":
    run_program(main)
