"""``python -m docs_build`` writes the pages from the code; ``figures`` draws them, ``site`` builds, ``serve`` shows."""

import sys

from docs_build import reference, site
from fabric_train.cli.errors import InputError, run_program


def main() -> None:
    """Run the command that the first word names."""
    command = " ".join(sys.argv[1:])
    if not command:
        reference.write()
    elif command == "site":
        if pages := list(reference.stale_files()):
            raise InputError(f"docs/{pages[0]} and {len(pages) - 1} others are stale; run python -m docs_build")
        print(f"the site is {site.build() / 'index.html'}")
    elif command == "serve":
        site.serve()
    elif command == "figures":
        from docs_build import figures  # takes seconds

        figures.draw()
    else:
        raise InputError(f"python -m docs_build {command}: no such command; write figures, site, serve or nothing")


if __name__ == "__main__":
    run_program(main)
