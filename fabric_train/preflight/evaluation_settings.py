"""Check what an evaluation needs: the sources that ``--best_by`` and ``--early_stopping`` name, sample prompts."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from fabric_train.cli.errors import InputError
from fabric_train.data.streaming import Stream
from fabric_train.inference.prompts import PromptEncoder, PromptLimits, encode_prompts, read_prompts
from fabric_train.model.hf_model import ModelShape, load_hf_tokenizer
from fabric_train.training.evaluation import METRICS, EarlyStopping, SamplePrompts, parse_early_stopping
from fabric_train.training.prepared_run import TrainingData

if TYPE_CHECKING:
    from arguments import EvaluationArguments, TrainArguments


def check_deciding_sources(given: "EvaluationArguments", data: TrainingData) -> EarlyStopping | None:
    """Check the sources of ``--best_by`` and ``--early_stopping``, and return the latter, None if it is not given.

    Raises:
        InputError: the validation split has no document of such a source.
    """
    names = _validated_sources(data)
    faults = [] if _can_decide(given.best_by, ["all", *names]) else [_fault("best_by", given.best_by, names)]
    stopping = None
    if given.early_stopping is not None:
        stopping = parse_early_stopping(given.early_stopping, names)
        if not names or not _can_decide(stopping.source, ["all", *names]):
            faults.append(_fault("early_stopping", stopping.source, names))
    if faults:
        raise InputError(*faults)
    return stopping


def _can_decide(source: str, names: list[str]) -> bool:
    """Return whether this is a source, a metric, or the metric of a source as METRIC/SOURCE."""
    metric, _, of_source = source.partition("/")
    return source in names or (metric in METRICS and (of_source or "all") in names)


def _fault(option: str, source: str, names: list[str]) -> str:
    if not names:
        return f"--{option} {source}: there is no validation split; tokenize with --validation_split above 0"
    if option == "early_stopping" and source.isdecimal():
        return f"--early_stopping {source}: a source comes before the number; give all:{source}, or {names[0]}:{source}"
    return f"--{option} {source}: the validation split has no such source; give all, {', '.join(names)}"


def _validated_sources(data: TrainingData) -> list[str]:
    dataset = data.held_out if isinstance(data, Stream) else data
    names: dict[str, None] = {}
    for part in dataset.parts if dataset else ():
        if part.validation is None:
            continue
        ledger = part.manifest.ledger.splits.get("validation") if part.manifest else None
        names |= dict.fromkeys(ledger.sources if ledger and ledger.sources else part.source_names)
    return list(names)


def open_sample_prompts(
    arguments: "TrainArguments", data: TrainingData, model: ModelShape, checkpoint: Path | None
) -> SamplePrompts | None:
    """Return the prompts of ``--sample_prompts`` with the tokenizer of the data; None if the run has none.

    Raises:
        InputError: the file cannot be read, a prompt does not fit into the model, or there is no validation split.
    """
    given = arguments.evaluation
    if given.sample_prompts is None or given.only_reads:
        return None
    if data.validation is None:
        raise InputError(
            f"--sample_prompts {given.sample_prompts}: the samples are of each evaluation, and there is no validation "
            "split; tokenize with --validation_split above 0"
        )
    prompts = read_prompts(Path(given.sample_prompts))
    tokenizer, name = _open_tokenizer(arguments, data, checkpoint)
    encoder = PromptEncoder(tokenizer, name, any(prompt.is_chat for prompt in prompts))
    limits = PromptLimits(model.vocab_size, model.max_positions)
    input_ids = encode_prompts(encoder, prompts, limits, given.sample_tokens, "--sample_tokens")
    texts = [
        prompt.content if isinstance(prompt.content, str) else tokenizer.decode(ids)
        for prompt, ids in zip(prompts, input_ids, strict=True)
    ]
    ends = {*data.stop_token_ids, *encoder.end_ids, tokenizer.eos_token_id} - {None}
    return SamplePrompts(tokenizer, texts, input_ids, frozenset(ends), given.sample_tokens)


def _open_tokenizer(arguments: "TrainArguments", data: TrainingData, checkpoint: Path | None) -> tuple[Any, str]:
    """Return the tokenizer with which the run's data is made, and its name."""
    in_data = [] if isinstance(data, Stream) else [path for path in data.attachments if path.name == "tokenizer"]
    in_checkpoint = [checkpoint / "tokenizer"] if checkpoint and (checkpoint / "tokenizer").is_dir() else []
    source = str(next(iter([*in_data, *in_checkpoint]), arguments.model.model_name))
    tokenizer = load_hf_tokenizer(source)
    if isinstance(data, Stream) and data.chat_template:
        tokenizer.chat_template = data.chat_template.source
    return tokenizer, source
