"""The arguments of ``evaluate.py``."""

from dataclasses import dataclass

from fabric_train.cli.argument_types import NonNegativeInt64, PositiveInt, RowLength

_LISTS = ("models", "texts", "pairs")


@dataclass(frozen=True)
class EvaluateArguments:
    """Compare models by their loss on texts, with confidence intervals, or evaluate every checkpoint of a run

    PROGRAM --models models/llama-3-8b runs/1/best runs/1 --texts es=es.jsonl ca=ca/ --output_dir eval/1
    PROGRAM --models models/llama-3-8b runs/1/all --tasks tasks.yaml --output_dir eval/2
    PROGRAM --watch runs/1 --tasks tasks.yaml --texts es=es.jsonl --models models/llama-3-8b
    """

    models: list[str] | None = None
    """Models: RUN (its newest checkpoint), RUN/best, RUN/latest, RUN/step-500, RUN/all (every checkpoint), a
    checkpoint's folder, a Hugging Face folder, a folder with a peft adapter, or a hub name. All are compared with the
    first one. With --watch, they are also evaluated, once.
    """
    output_dir: str | None = None
    """Folder for the results and for finished parts. Use the same folder again to continue a stopped evaluation or to
    add models and texts to it. Default with --watch: RUN/evaluation.
    """
    texts: list[str] | None = None
    """Texts to evaluate the loss on, by source: es=PATH, where PATH is any text source that fabric-train tokenize
    reads, or a token dataset, whose validation split is used. Default without --watch and --tasks: the validation split
    of the first checkpoint in --models.
    """
    pairs: list[str] | None = None
    """Preference pairs, by name: ultra=PATH, where PATH is a token dataset of pairs (its validation split, or all rows
    if it has none) or any source that fabric-train tokenize reads as pairs. pairs.json shows how often each model
    prefers the chosen answer.
    """
    teacher: str | None = None
    """Also compare the models with this teacher on the texts: how far their distributions of the next token are from
    the teacher's, and how often they find the same token likeliest. It needs the models' tokenizer.
    """
    text_column: str = "text"
    """Column that holds the text in csv, json, jsonl, parquet and datasets. NAME:SEPARATOR joins lists of texts; for
    example, 'moves: ' joins them with a space.
    """
    max_length: RowLength = 2048
    """Context length in tokens; 8k is 8192. Longer documents are evaluated in windows."""
    overlap: RowLength = 1
    """Minimum number of context tokens before the first predicted token of a window."""
    batch_tokens: RowLength = 8192
    """Tokens per forward pass, including padding; a lower number takes less memory."""
    seed: NonNegativeInt64 = 0
    """Seed of the bootstrap."""
    watch: str | None = None
    """Evaluate every checkpoint of this run as it trains, on --texts, on --tasks with lm_eval, or on both."""
    tasks: str | None = None
    """YAML file of lm_eval tasks by language, to evaluate --models and every checkpoint of --watch on."""
    wait: bool = True
    """With --watch: wait for new checkpoints until the run ends; false only evaluates the existing ones."""
    batch_size: PositiveInt = 8
    """With --tasks: lm_eval requests per forward pass."""

    def faults(self) -> list[str]:
        """Return missing names, models given twice, windows that overlap wholly, and arguments of the other mode."""
        faults = [f"--{name} is empty; give at least one value" for name in _LISTS if getattr(self, name) == []]

        # arguments that exclude each other, or need each other
        if self.pairs is not None and self.texts is not None:
            faults.append(
                "--pairs and --texts cannot be combined; evaluate them one after the other, in the same --output_dir "
                "if you like"
            )
        if self.pairs is not None and self.tasks is not None:
            faults.append(
                "--pairs and --tasks cannot be combined; evaluate them one after the other, in the same --output_dir "
                "if you like"
            )
        if self.watch is None:
            faults += [f"--{name} is required" for name in ("models", "output_dir") if getattr(self, name) is None]
        else:
            if self.pairs is not None:
                faults.append(
                    "--pairs and --watch cannot be combined; give --models instead of --watch, such as RUN/all"
                )
            if self.tasks is None and self.texts is None:
                faults.append("--watch needs --tasks or --texts; give at least one of them")

        if self.teacher is not None and (self.pairs is not None or self.watch is not None or self.tasks is not None):
            faults.append("--teacher cannot be combined with --pairs, --tasks or --watch; leave out --teacher")

        # values that do not fit together
        models = self.models or []
        repeated_models = {model for model in models if models.count(model) > 1}
        faults += [f"--models {model} is given twice; give it once" for model in sorted(repeated_models)]
        if self.overlap >= self.max_length:
            faults.append(
                f"--overlap {self.overlap} leaves nothing to predict in windows of --max_length {self.max_length}; "
                "give a smaller --overlap"
            )
        return faults
