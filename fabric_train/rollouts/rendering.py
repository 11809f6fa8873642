"""Show the completions of a run on a terminal, as an HTML page that needs no other files, or as JSON.

Terminal and page show the same tables. Prompts, completions and errors are from data and from reward functions, so they
are made visible or escaped everywhere.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.cells import cell_len
from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from fabric_train.cli.argument_types import counted
from fabric_train.cli.output import escape_controls, visible
from fabric_train.inspection.rendering import print_facts, print_heading, rich_table
from fabric_train.inspection.tables import TextTable, flat_table
from fabric_train.pages.markdown import page_templates
from fabric_train.rollouts.step_view import CompletionGroup, StepGroups, StepSummary, rewards_by_name
from fabric_train.rollouts.store import RolloutManifest, StoredCompletion

_SHOWN_PROMPT = 60
"""The last characters of a prompt in a table: its beginning is the same in all prompts with a chat template."""
_STEP_COLUMNS = ("tokens", "cut", "flat", "replaced", "errors", "sampling s", "rewards s")
"""The columns of a table of steps after those of the single rewards."""
_FIRST_REWARD = 3
"""The column of the first single reward, in the tables of steps and of completions."""
_COLUMN_GAP = 3  # of rich's tables
_FINISHES = {"stop": "ended", "length": "cut"}


@dataclass(frozen=True)
class RolloutsView:
    """What is shown: the steps, and the groups of one of them if it was asked for."""

    run_folder: Path
    steps: tuple[StepSummary, ...]
    step: StepGroups | None


def step_table(steps: Sequence[StepSummary]) -> TextTable:
    """Return the means of each step, with a column for each reward that any step has."""
    reward_names: dict[str, None] = {}
    for step in steps:
        reward_names |= dict.fromkeys(step.rewards)
    lines = []
    for step in steps:
        rewards = [_number(step.rewards.get(name)) for name in reward_names]
        cells = {
            "tokens": f"{step.tokens:,.1f}",
            "cut": f"{step.share_cut:.1%}",
            "flat": f"{step.share_without_variance:.1%}",
            "replaced": f"{step.replaced_prompts:,}",
            "errors": f"{step.reward_errors:,}",
            "sampling s": f"{step.sampling_seconds:,.1f}",
            "rewards s": f"{step.reward_seconds:,.1f}",
        }
        last_cells = [cells[name] for name in _STEP_COLUMNS]
        lines.append((f"{step.step:,}", f"{step.completions:,}", _number(step.reward), *rewards, *last_cells))
    columns = ("step", "completions", "reward", *reward_names, *_STEP_COLUMNS)
    return flat_table(columns, lines, num_words=0)


STEP_NOTE = (
    "Rewards and tokens are means over completions. cut: share of completions that reached --max_new_tokens without an "
    "end. flat: share of groups whose completions all have the same reward. replaced: prompts that --refill replaced. "
    "errors: completions for which a reward function failed. sampling s, rewards s: seconds on the slowest rank."
)


def group_table(step: StepGroups) -> TextTable:
    """Return a line for each group of a step."""
    lines = []
    for group in step.groups:
        rewards = [completion.reward for completion in group.completions]
        lines.append(
            (
                f"{group.group}",
                group.prompt_id,
                group.prompt[-_SHOWN_PROMPT:],
                _number(group.mean_reward),
                _number(min(rewards)),
                _number(max(rewards)),
                f"{group.mean_tokens:,.1f}",
            )
        )
    columns = ("group", "prompt", "end of the prompt", "reward", "lowest", "highest", "tokens")
    return flat_table(columns, lines, num_words=3)


def completion_table(manifest: RolloutManifest, group: CompletionGroup) -> TextTable:
    """Return a line for each completion of a group."""
    lines = []
    for index, completion in enumerate(group.completions):
        rewards = [_number(reward) for reward in completion.rewards.tolist()]
        cells = [f"{index + 1}", _finish(completion), _number(completion.reward), *rewards]
        lines.append((*cells, _advantage(completion), f"{len(completion.token_ids):,}"))
    columns = ("completion", "", "reward", *manifest.reward_names, "advantage", "tokens")
    return flat_table(columns, lines, num_words=2)


def describe_completion(manifest: RolloutManifest, completion: StoredCompletion) -> str:
    """Return the rewards, advantage, length and end of a completion in one line."""
    rewards = ", ".join(f"{name} {_number(value)}" for name, value in rewards_by_name(manifest, completion).items())
    length = counted(len(completion.token_ids), "token")
    return (
        f"reward {_number(completion.reward)} ({rewards}), advantage {_advantage(completion)}, {length}, "
        f"{_finish(completion)}"
    )


def _group_title(group: CompletionGroup) -> str:
    count = counted(len(group.completions), "completion")
    return f"group {group.group:,}: {group.prompt_id}, {count}, mean reward {_number(group.mean_reward)}"


def _group_note(group: CompletionGroup) -> str:
    """Return what a reader should know of a group; "" if there is nothing."""
    if group.lacks_variance:
        return "All completions have the same reward, so the step learns nothing from this group."
    return ""


def _finish(completion: StoredCompletion) -> str:
    return _FINISHES.get(completion.finish_reason, completion.finish_reason)


def _advantage(completion: StoredCompletion) -> str:
    return f"{completion.advantage:+.3g}" if completion.advantage else "0"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def print_rollouts(view: RolloutsView, console: Console) -> None:
    """Print the table of steps; of a chosen step, the table of its groups; of a single group, its completions."""
    if view.step is None:
        print_heading(f"completions of {view.run_folder}", console)
        _print_steps(view.steps, console)
        console.print(Text(STEP_NOTE))
    elif len(view.step.groups) > 1:
        print_heading(f"completions of {view.run_folder}, step {view.step.manifest.step:,}", console)
        _print_steps(view.steps, console)
        console.print(rich_table(group_table(view.step)))
    else:
        _print_group(view.step.manifest, view.step.groups[0], console)


def _print_group(manifest: RolloutManifest, group: CompletionGroup, console: Console) -> None:
    """Print a prompt, the table of its completions, and their texts one below the other."""
    print_heading(f"step {manifest.step:,}, {_group_title(group)}", console)
    print_facts([("source", group.source)], console)
    if group.lacks_variance:
        console.print(Text(_group_note(group)))
    print_heading("prompt", console)
    _print_text(group.prompt, console)
    print_heading("completions", console)
    table = completion_table(manifest, group)
    rewards = range(_FIRST_REWARD, _FIRST_REWARD + len(manifest.reward_names))
    _print_table(table, rewards[::-1], console)
    for index, completion in enumerate(group.completions):
        print_heading(f"completion {index + 1}", console)
        description = describe_completion(manifest, completion)
        console.print(Text(visible(description), style="dim"), soft_wrap=True)
        if completion.reward_error is not None:
            console.print(Text(f"✗ {visible(completion.reward_error)}", style="bold red"), soft_wrap=True)
        _print_text(completion.text, console)


def _print_steps(steps: Sequence[StepSummary], console: Console) -> None:
    """Print the table of steps; a narrow terminal leaves out what matters least, and single rewards last."""
    table = step_table(steps)
    first = len(table.columns) - len(_STEP_COLUMNS)
    columns = {name: first + index for index, name in enumerate(_STEP_COLUMNS)}
    optional = [columns[name] for name in ("replaced", "errors", "rewards s", "sampling s", "cut", "tokens", "flat")]
    rewards = range(_FIRST_REWARD, first)
    _print_table(table, [*optional, *rewards[::-1]], console)


def _print_table(table: TextTable, optional: Sequence[int], console: Console) -> None:
    """Print a table without columns for which the terminal is too narrow, and name these below it.

    ``optional`` are the columns that can be left out, the first one first.
    """
    widths = {}
    for index, name in enumerate(table.columns):
        cells = [name, *(line[index] for line in table.lines)]
        widths[index] = max(cell_len(visible(cell)) for cell in cells) + _COLUMN_GAP
    for index in optional:
        if sum(widths.values()) + 1 <= console.width:
            break
        del widths[index]
    columns = tuple(table.columns[index] for index in widths)
    lines = [tuple(line[index] for index in widths) for line in table.lines]
    console.print(rich_table(flat_table(columns, lines, table.num_words)))
    hidden = [visible(name) for index, name in enumerate(table.columns) if index not in widths]
    if hidden:
        advice = "use a wider terminal, --html or --json"
        console.print(Text(f"no room for {', '.join(hidden)}; {advice}", style="dim"), soft_wrap=True)


def _print_text(text: str, console: Console) -> None:
    """Print a text with its line breaks, indented."""
    lines = [visible(line) for line in text.split("\n")]
    console.print(Padding(Text("\n".join(lines)), (0, 0, 0, 2), expand=False))


def to_html(view: RolloutsView) -> str:
    """Return a page with the same tables, and all completions of the groups side by side."""
    template = _TEMPLATES.get_template("rollouts.html.j2")
    title = f"completions of {visible(view.run_folder.resolve().name)}"
    page = template.render(
        title=title,
        steps=step_table(view.steps),
        step_note=STEP_NOTE,
        step=view.step,
        groups=group_table(view.step) if view.step else None,
        group_title=_group_title,
        group_note=_group_note,
        describe=describe_completion,
    )
    return escape_controls(page)


_TEMPLATES = page_templates(Path(__file__).with_name("templates"), keep_trailing_newline=True)


def to_json(view: RolloutsView) -> Any:
    """Return the steps, or of a chosen step its means and its groups with all completions."""
    if view.step is None:
        return [asdict(step) for step in view.steps]
    groups = []
    for group in view.step.groups:
        completions = []
        for completion in group.completions:
            completions.append(
                {
                    "text": completion.text,
                    "reward": completion.reward,
                    "rewards": rewards_by_name(view.step.manifest, completion),
                    "reward_error": completion.reward_error,
                    "advantage": completion.advantage,
                    "tokens": len(completion.token_ids),
                    "finish_reason": completion.finish_reason,
                }
            )
        groups.append(
            {
                "group": group.group,
                "prompt_id": group.prompt_id,
                "source": group.source,
                "prompt": group.prompt,
                "lacks_variance": group.lacks_variance,
                "completions": completions,
            }
        )
    (summary,) = view.steps
    return asdict(summary) | {"groups": groups}
