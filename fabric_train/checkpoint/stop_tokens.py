"""Find the tokens at which generation with a checkpoint has to stop."""

from pathlib import Path

from transformers import GenerationConfig, PretrainedConfig

from fabric_train.model.generation_config import add_stop_tokens, read_generation_config
from fabric_train.tokenization.manifest import load_manifest


def checkpoint_generation_config(checkpoint: Path, config: PretrainedConfig) -> GenerationConfig:
    """Return a checkpoint's generation settings, with every token that ends a document or a turn in its data.

    Checkpoints of earlier versions name these tokens only in their ``manifest.json``.

    Raises:
        InputError: ``generation_config.json`` or ``manifest.json`` is damaged.
    """
    generation_config = read_generation_config(str(checkpoint), config)
    manifest = load_manifest(checkpoint)
    if manifest is not None:
        add_stop_tokens(generation_config, manifest.tokenizer.stop_token_ids)
    return generation_config
