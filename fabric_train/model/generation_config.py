"""Read a model's generation_config.json, and let generation stop at the tokens that end documents and turns."""

from collections.abc import Iterable
from pathlib import Path

from transformers import GenerationConfig, PretrainedConfig

from fabric_train.cli.errors import InputError, first_line, raise_reached_limit
from fabric_train.files.typed_json import read_json

FILE_NAME = "generation_config.json"


def read_generation_config(source: str, config: PretrainedConfig) -> GenerationConfig:
    """Return the generation settings of a folder or hub name; without its own, those that follow from ``config``.

    Raises:
        InputError: the file is damaged.
    """
    file = Path(source) / FILE_NAME
    if file.exists():
        read_json(file, dict, _ADVICE)  # transformers would wait for a pipe
    try:
        found = GenerationConfig.from_pretrained(source)
    except OSError as error:
        raise_reached_limit(error)
        if file.is_file():
            raise _damaged(file, error) from error
        return GenerationConfig.from_model_config(config)
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise _damaged(file, error) from error
    if not all(type(end) is int and end >= 0 for end in _ends(found)):
        raise InputError(f"{file}: eos_token_id {found.eos_token_id!r} is not a token id or a list of them; {_ADVICE}")
    return found


def add_stop_tokens(generation_config: GenerationConfig, token_ids: Iterable[int]) -> None:
    """Let generation stop at ``token_ids`` too; those that it stops at already come first."""
    known = _ends(generation_config)
    both = list(dict.fromkeys((*known, *token_ids)))
    if both != known:
        generation_config.eos_token_id = both if len(both) > 1 else both[0]


def write_generation_config(folder: Path, generation_config: GenerationConfig) -> None:
    """Write ``generation_config.json``.

    ``save_pretrained`` refuses changed settings whose flags contradict each other, such as a temperature without
    ``do_sample``. Published models have such flags, and transformers ignores them when it generates.
    """
    generation_config.to_json_file(folder / FILE_NAME, keys_to_pop=["compile_config"])


def _ends(generation_config: GenerationConfig) -> list[int]:
    ends = generation_config.eos_token_id
    return ends if isinstance(ends, list) else [] if ends is None else [ends]


_ADVICE = "correct the file, or fetch it again"


def _damaged(file: Path, error: BaseException) -> InputError:
    return InputError(f"{file}: damaged, {type(error).__name__}: {first_line(error)}; {_ADVICE}")
