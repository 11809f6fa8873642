"""The arguments of ``evaluate.py``."""

from dataclasses import dataclass

from fabric_train.cli.argument_types import NonNegativeInt64, PositiveInt, RowLength

_LISTS = ("models", "texts", "pairs")


@dataclass(frozen=True)
class EvaluateArguments:
    """Compare models by their loss on texts, with confidence intervals; evaluate each checkpoint of a run as it trains

    PROGRAM --models models/llama-3-8b runs/1/best runs/1 --texts es=es.jsonl ca=ca/ --output_dir eval/1
    PROGRAM --models models/llama-3-8b runs/1/all --tasks tasks.yaml --output_dir eval/2
    PROGRAM --watch runs/1 --tasks tasks.yaml --texts es=es.jsonl --models models/llama-3-8b
    """

    models: list[str] | None = None
    """Models: RUN (its newest checkpoint), RUN/best, RUN/latest, RUN/step-500, RUN/all (each of its checkpoints), a
    checkpoint's folder, a Hugging Face folder, one with an adapter of peft, or a hub name. The others are compared with
    the first one. With --watch, they are evaluated too, once.
    """
    output_dir: str | None = None
    """Folder for the results and for finished parts. With the same folder, a stopped evaluation goes on, and further
    models and texts are added to those that are there. Default with --watch: RUN/evaluation.
    """
    texts: list[str] | None = None
    """Texts to evaluate the loss on, by source: es=PLACE, where PLACE is anything with text that fabric-train tokenize
    reads, or a token dataset, whose validation split is meant. Default without --watch and --tasks: the validation
    split of the first checkpoint in --models.
    """
    pairs: list[str] | None = None
    """Preference pairs, by name: ultra=PLACE, a token dataset of pairs (its validation split, or all if it has none) or
    rows that fabric-train tokenize reads as pairs. How often each model prefers the chosen answer is in pairs.json.
    """
    text_column: str = "text"
    """Column with the text in csv, json, jsonl, parquet and datasets. NAME:SEPARATOR joins lists of texts, such as
    'moves: ' with a space.
    """
    max_length: RowLength = 2048
    """Tokens that a model sees at once; 8k is 8192. Longer documents are read in windows."""
    overlap: RowLength = 1
    """Tokens before a window's first predicted token that the window has at least, so that it has context."""
    batch_tokens: RowLength = 8192
    """Tokens in one forward pass, padding included; fewer take less memory."""
    seed: NonNegativeInt64 = 0
    """Seed of the bootstrap."""
    watch: str | None = None
    """Evaluate each checkpoint of this run on --texts, on --tasks with lm_eval, or on both."""
    tasks: str | None = None
    """YAML file with lm_eval's tasks by language, on which --models, and each checkpoint of --watch, are evaluated."""
    wait: bool = True
    """With --watch: wait for further checkpoints until the run has ended; false ends after those that are there."""
    batch_size: PositiveInt = 8
    """With --tasks: requests of lm_eval in one forward pass."""

    def faults(self) -> list[str]:
        """Return missing names, models given twice, windows that overlap wholly, and arguments of the other mode."""
        faults = [f"--{name} names nothing: give one" for name in _LISTS if getattr(self, name) == []]

        # arguments that exclude each other, or need each other
        if self.pairs is not None and self.texts is not None:
            faults.append("--pairs and --texts: evaluate one after the other, which may have the same --output_dir")
        if self.pairs is not None and self.tasks is not None:
            faults.append("--pairs and --tasks: evaluate one after the other, which may have the same --output_dir")
        if self.watch is None:
            faults += [f"--{name} is required" for name in ("models", "output_dir") if getattr(self, name) is None]
        else:
            if self.pairs is not None:
                faults.append("--pairs and --watch: give --models instead, such as RUN/all")
            if self.tasks is None and self.texts is None:
                faults.append("--watch needs --tasks or --texts: give one of them")

        # values that do not fit together
        models = self.models or []
        repeated_models = {model for model in models if models.count(model) > 1}
        faults += [f"--models {model} is given twice: give it once" for model in sorted(repeated_models)]
        if self.overlap >= self.max_length:
            faults.append(f"--overlap {self.overlap} fills windows of --max_length {self.max_length}: give less")
        return faults
