"""Write a translation as a training file: the arguments by group, with their origin, then what has no counterpart."""

import dataclasses
import json
import shlex
import textwrap
from typing import Any

from fabric_train.arguments import TrainArguments
from fabric_train.cli import argument_types, yaml_core
from fabric_train.translate.run_length import RunLength
from fabric_train.translate.tokenizing import tokenize_command
from fabric_train.translate.translation import Translation

_WIDTH = 118
_LONGEST_VALUE = 60


def config_text(translation: Translation, output: str, devices: int | None) -> str:
    """Return the text of the training file, which begins with the commands that tokenize and train."""
    sections = [_format_header(translation, output, devices)]
    sections += _format_groups(translation)
    if translation.absent:
        sections.append(_format_absent_settings(translation))
    return "\n".join(sections)


def train_command(output: str, devices: int | None) -> str:
    """Return the command that trains with the file ``output``."""
    devices_option = "" if devices is None else f" --devices {devices}"
    return f"fabric run fabric_train{devices_option} --config {shlex.quote(output)}"


def set_by_length(translation: Translation, length: RunLength) -> None:
    """Compute the arguments that depend on the number of steps."""
    for argument, setting in translation.by_length.items():
        comment = setting.formula
        if argument != "max_step":
            comment += f", {length.words}"
        if setting.comment:
            comment = f"{setting.comment}; {comment}"
        translation.set_training(argument, int(setting.compute(length)), comment=comment)
    translation.by_length.clear()


def _format_header(translation: Translation, output: str, devices: int | None) -> str:
    """Return the comment at the top of the file: its origin, the commands, and notes on them."""
    file = translation.file
    lines = [f"# Translated from {file.path} ({file.program}) by fabric-train translate.", "#"]
    command = tokenize_command(translation)
    if command:
        lines.append(f"# {command}")
    lines.append(f"# {train_command(output, devices)}")
    if translation.by_length:
        lines.append("#")
        words = (
            f"These depend on the number of steps: {', '.join(translation.by_length)}. After tokenizing, translate "
            "again with --train_data_dir and --devices to write them as numbers."
        )
        lines += _comment_lines(words)
    for argument, setting in translation.tokenizing.items():
        # A comment that only lists names is left out: the command has the values.
        has_words = ";" in setting.comment or " " in setting.comment.replace(", ", "")
        if has_words:
            lines += _comment_lines(f"--{argument}: {setting.comment}", first_indent="# - ", next_indent="#   ")
    for note in translation.notes:
        lines += _comment_lines(note, first_indent="# - ", next_indent="#   ")
    return "\n".join(lines) + "\n"


def _format_groups(translation: Translation) -> list[str]:
    """Return the arguments of training by group; values that depend on the number of steps are comments."""
    sections: list[str] = []
    for group in argument_types.groups_of(TrainArguments).values():
        lines: list[str] = []
        for field in dataclasses.fields(group):
            name = field.name
            if name in translation.by_length:
                length_setting = translation.by_length[name]
                origin = f"  ({length_setting.comment})" if length_setting.comment else ""
                lines.append(f"# {name}: {length_setting.formula}{origin}")
            elif name in translation.training:
                setting = translation.training[name]
                lines.append(_format_argument(name, setting.value, setting.comment))
        if lines:
            title = f"# {argument_types.title_of(group)}"
            sections.append("\n".join([title, *lines]) + "\n")
    return sections


def _format_argument(name: str, value: Any, comment: str) -> str:
    """Return an argument as YAML, with its comment after it or, if that is too long, above it."""
    if isinstance(value, list):
        text = f"{name}: [{', '.join(map(_format_element, value))}]"
    else:
        text = yaml_core.dump({name: value}).rstrip("\n")
    if not comment:
        return text
    comment = " ".join(comment.split())
    line = f"{text}  # {comment}"
    if "\n" not in line and len(line) <= _WIDTH:
        return line
    return "\n".join([*_comment_lines(comment), text])


def _format_element(value: Any) -> str:
    """Return an element of a list in brackets, where a comma and brackets end a text, which then needs quotes."""
    if isinstance(value, str) and set(value) & set(",[]{}"):
        return json.dumps(value, ensure_ascii=False)
    return yaml_core.dump({"element": value}).partition(": ")[2].rstrip("\n")


def _format_absent_settings(translation: Translation) -> str:
    """Return the settings without a counterpart as a comment; those with the same advice are listed together."""
    settings_by_advice: dict[str, list[str]] = {}
    for name, advice in translation.absent.items():
        value = translation.file.settings.get(name)
        text = name if value is None else f"{name}: {_format_short_value(value)}"
        settings_by_advice.setdefault(advice, []).append(text)
    lines = [f"# Without a counterpart in {translation.file.path}"]
    for advice, settings in settings_by_advice.items():
        lines += [f"#   {setting}" for setting in settings]
        lines += _comment_lines(advice, first_indent="#     → ", next_indent="#       ")
    return "\n".join(lines) + "\n"


def _format_short_value(value: Any) -> str:
    """Return a value as YAML in one line, shortened."""
    text = " ".join(yaml_core.dump({"value": value}).removeprefix("value:").split())
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]}…"


def _comment_lines(text: str, first_indent: str = "# ", next_indent: str = "# ") -> list[str]:
    words = " ".join(text.split())
    return textwrap.wrap(
        words, _WIDTH, initial_indent=first_indent, subsequent_indent=next_indent, break_long_words=False
    )
