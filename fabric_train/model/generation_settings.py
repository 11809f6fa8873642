"""Read and write the generation settings of a model, ``generation_config.json``, with the tokens that end a text."""

from collections.abc import Iterable
from pathlib import Path

from transformers import GenerationConfig, PretrainedConfig

from fabric_train.cli.errors import InputError, first_line, raise_if_limit_reached
from fabric_train.files.typed_json import read_json
from fabric_train.token_dataset.manifest import load_manifest

GENERATION_CONFIG = "generation_config.json"
_CORRECT_OR_FETCH = "correct the file, or download it again"


def read_generation_config(source: str, config: PretrainedConfig) -> GenerationConfig:
    """Return the generation settings of a folder or hub name, or if it has none, those that follow from ``config``."""
    file = Path(source) / GENERATION_CONFIG
    if file.exists():
        # refuses a damaged file or a pipe in one line; transformers would wait for a pipe
        read_json(file, dict, _CORRECT_OR_FETCH)
    try:
        generation_config = GenerationConfig.from_pretrained(source)
    except OSError as error:
        raise_if_limit_reached(error)
        if file.is_file():
            raise _damaged(file, error) from error
        return GenerationConfig.from_model_config(config)
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise _damaged(file, error) from error
    stop_token_ids = _stop_token_ids(generation_config)
    if not all(type(token_id) is int and token_id >= 0 for token_id in stop_token_ids):  # excludes bool
        raise InputError(
            f"{file}: eos_token_id {generation_config.eos_token_id!r} is not a token id or a list of them; "
            f"{_CORRECT_OR_FETCH}"
        )
    return generation_config


def _damaged(file: Path, error: BaseException) -> InputError:
    return InputError(f"{file}: damaged, {type(error).__name__}: {first_line(error)}; {_CORRECT_OR_FETCH}")


def _stop_token_ids(generation_config: GenerationConfig) -> list[int]:
    """Return ``eos_token_id``, which may be None, a number or a list, as a list."""
    token_ids = generation_config.eos_token_id
    if token_ids is None:
        return []
    if isinstance(token_ids, list):
        return token_ids
    return [token_ids]


def add_stop_tokens(generation_config: GenerationConfig, token_ids: Iterable[int]) -> None:
    """Let generation also stop at ``token_ids``, which come after the tokens that it already stops at."""
    stored = _stop_token_ids(generation_config)
    stop_token_ids = list(dict.fromkeys((*stored, *token_ids)))  # each once
    if stop_token_ids != stored:
        generation_config.eos_token_id = stop_token_ids if len(stop_token_ids) > 1 else stop_token_ids[0]


def checkpoint_generation_config(checkpoint: Path, config: PretrainedConfig) -> GenerationConfig:
    """Return a checkpoint's generation settings, with every token that ends a document or turn in its data.

    Checkpoints of earlier versions name these tokens only in their ``manifest.json``.
    """
    generation_config = read_generation_config(str(checkpoint), config)
    manifest = load_manifest(checkpoint)
    if manifest is not None:
        add_stop_tokens(generation_config, manifest.tokenizer.stop_token_ids)
    return generation_config


def write_generation_config(folder: Path, generation_config: GenerationConfig) -> None:
    """Write ``generation_config.json``.

    ``save_pretrained`` refuses changed settings whose flags contradict each other, such as a temperature without
    ``do_sample``. Published models have such flags, and transformers ignores them when it generates.
    """
    generation_config.to_json_file(folder / GENERATION_CONFIG, keys_to_pop=["compile_config"])
