# PYTHON_ARGCOMPLETE_OK
"""Show the completions of a run with --prompts: ``python -m fabric_train.rollouts RUN [--step N [--group G]]``."""

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path

from fabric_train.cli.argument_types import POSITIONAL, NonNegativeInt, PositiveInt64
from fabric_train.cli.errors import run_program
from fabric_train.cli.output import open_console
from fabric_train.cli.parser import parse_arguments
from fabric_train.cli.progress import transient_bar
from fabric_train.files.regular_file import open_to_write
from fabric_train.files.requirements import check_file_to_write
from fabric_train.rollouts.rendering import RolloutsView, print_rollouts, to_html, to_json
from fabric_train.rollouts.step_view import check_step, find_steps, read_groups, summarize_step

_REDIRECTED_WIDTH = 200  # of a table in redirected output, which rich would cut to 80


@dataclass(frozen=True)
class RolloutsArguments:
    """Show the completions that a run with --prompts sampled: rewards of each step, and the groups of a step

    PROGRAM runs/rl
    PROGRAM runs/rl --step 12 --group 3
    PROGRAM runs/rl --step 12 --html step-12.html
    """

    run: str = field(metadata=POSITIONAL)
    """Run folder: the --output_dir of training. A run that is still training works too."""
    step: PositiveInt64 | None = None
    """Show the groups of this step instead of all steps. A group is the completions of one prompt."""
    group: NonNegativeInt | None = None
    """With --step: show the prompt and the completions of this group, starting at 0, with rewards and advantages."""
    html: str | None = None
    """Also write what is shown to this file as an HTML page; with --step, it has the completions side by side."""
    json: bool = False
    """Print JSON; with --step, it has all prompts and completions."""

    def faults(self) -> list[str]:
        """Return a line for a group without its step."""
        if self.group is not None and self.step is None:
            return ["--group needs --step"]
        return []


def main(argv: list[str] | None = None) -> None:
    """Print the steps, or the groups of a step, and write them as a page if ``--html`` is given."""
    arguments = parse_arguments(RolloutsArguments, argv)
    run_folder = Path(arguments.run).expanduser()
    if arguments.html is not None:
        check_file_to_write(Path(arguments.html), "--html")

    # Read the means of all steps, or one step with its groups.
    steps = find_steps(run_folder)
    step_groups = None
    if arguments.step is not None:
        check_step(arguments.step, steps)
        steps = [arguments.step]
        step_groups = read_groups(run_folder, arguments.step)
        if arguments.group is not None:
            step_groups = step_groups.only(arguments.group)
    summaries = []
    with transient_bar("reading completions") as (progress, task):
        for step in progress.track(steps, task_id=task):
            summaries.append(summarize_step(run_folder, step))
    view = RolloutsView(run_folder, tuple(summaries), step_groups)

    # Show them.
    if arguments.json:
        print(json.dumps(to_json(view), indent=2, ensure_ascii=False))
    else:
        width = None if sys.stdout.isatty() else _REDIRECTED_WIDTH
        print_rollouts(view, open_console(width=width))
    if arguments.html is not None:
        with open_to_write(Path(arguments.html), "w") as file:
            file.write(to_html(view))
        print(f"written {arguments.html}", file=sys.stderr)


if __name__ == "__main__":
    run_program(main)
