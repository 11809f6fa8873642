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
    """Return the text of the training file, which begins with the commands."""
    parts = [_header(translation, output, devices)]
    parts += _groups(translation)
    parts.append(_absent(translation))
    return "\n".join(part for part in parts if part)


def train_command(output: str, devices: int | None) -> str:
    """Return the command that trains."""
    on_devices = "" if devices is None else f" --devices {devices}"
    return f"fabric run fabric_train{on_devices} --config {shlex.quote(output)}"


def set_by_length(translation: Translation, length: RunLength) -> None:
    """Compute what the number of steps decides."""
    for argument, setting in translation.by_length.items():
        words = setting.formula if argument == "max_step" else f"{setting.formula}, {length.words}"
        comment = "; ".join(filter(None, (setting.comment, words)))
        translation.train(argument, int(setting.compute(length)), comment=comment)
    translation.by_length.clear()


def _header(translation: Translation, output: str, devices: int | None) -> str:
    file = translation.file
    lines = [f"# Translated from {file.path} ({file.program}) by fabric-train translate.", "#"]
    command = tokenize_command(translation)
    if command:
        lines.append(f"# {command}")
    lines.append(f"# {train_command(output, devices)}")
    if translation.by_length:
        lines.append("#")
        words = (
            f"The number of steps decides: {', '.join(translation.by_length)}. After tokenizing, translate again with "
            "--train_data_dir and --devices, and they are written as numbers."
        )
        lines += _comment_lines(words)
    for argument, setting in translation.tokenizing.items():
        if ";" in setting.comment or (setting.comment and " " in setting.comment.replace(", ", "")):
            lines += _comment_lines(f"--{argument}: {setting.comment}", first="# - ", others="#   ")
    for note in translation.notes:
        lines += _comment_lines(note, first="# - ", others="#   ")
    return "\n".join(lines) + "\n"


def _groups(translation: Translation) -> list[str]:
    parts: list[str] = []
    for group in argument_types.groups_of(TrainArguments).values():
        lines: list[str] = []
        for field in dataclasses.fields(group):
            name = field.name
            if name in translation.by_length:
                setting = translation.by_length[name]
                origin = f"  ({setting.comment})" if setting.comment else ""
                lines.append(f"# {name}: {setting.formula}{origin}")
            elif name in translation.training:
                value = translation.training[name]
                lines.append(_line(name, value.value, value.comment))
        if lines:
            parts.append("\n".join([f"# {argument_types.title_of(group)}", *lines]) + "\n")
    return parts


def _line(name: str, value: Any, comment: str) -> str:
    text = yaml_core.dump({name: value}).rstrip("\n")
    if isinstance(value, list):
        text = f"{name}: [{', '.join(map(_element, value))}]"
    if not comment:
        return text
    comment = " ".join(comment.split())
    if "\n" not in text and len(text) + len(comment) + 4 <= _WIDTH:
        return f"{text}  # {comment}"
    return "\n".join([*_comment_lines(comment), text])


def _element(value: Any) -> str:
    """Return an element of a list in brackets, where more characters end a word than at the end of a line."""
    if isinstance(value, str) and set(value) & set(",[]{}"):
        return json.dumps(value, ensure_ascii=False)
    return yaml_core.dump({"element": value}).partition(": ")[2].rstrip("\n")


def _absent(translation: Translation) -> str:
    if not translation.absent:
        return ""
    by_advice: dict[str, list[str]] = {}
    for name, advice in translation.absent.items():
        value = translation.file.settings.get(name)
        shown = name if value is None else f"{name}: {_shortened(value)}"
        by_advice.setdefault(advice, []).append(shown)
    lines = [f"# Without a counterpart in {translation.file.path}"]
    for advice, names in by_advice.items():
        lines += [f"#   {name}" for name in names]
        lines += _comment_lines(advice, first="#     → ", others="#       ")
    return "\n".join(lines) + "\n"


def _shortened(value: Any) -> str:
    text = " ".join(yaml_core.dump({"value": value}).removeprefix("value:").split())
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]}…"


def _comment_lines(text: str, first: str = "# ", others: str = "# ") -> list[str]:
    return textwrap.wrap(
        " ".join(text.split()), _WIDTH, initial_indent=first, subsequent_indent=others, break_long_words=False
    )
