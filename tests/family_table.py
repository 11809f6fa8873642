"""Write the tables of model families in docs/models.md: ``python -m tests.family_table --write`` (7 minutes).

Each family is tried with a small random model (``tests/support/small_families.py``): the program's own checks and plan
run on it, and its export is verified.
"""

import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from lightning import Fabric
from transformers import AutoModelForCausalLM, PretrainedConfig

from fabric_train.arguments import TrainArguments, parse
from fabric_train.cli.errors import InputError
from fabric_train.export.convert import write_export
from fabric_train.export.model_card import CardFacts
from fabric_train.export.model_comparison import compare
from fabric_train.export.source import ExportSource
from fabric_train.model.adapter import Adapter
from fabric_train.model.attention_choice import why_not_varlen
from fabric_train.model.hf_model import DEFAULT_LAYER_CLASS, ModelShape, quiet_transformers, shape_from_config
from fabric_train.preflight.memory_activations import MicroBatch, TraceError, trace_activations
from fabric_train.training.isolation_check import check_isolation
from tests.support.checkpoint_examples import TOKENIZER_FILES, write_full
from tests.support.small_families import FAMILIES, NotSmallError, small_config, small_model
from tests.support.tiny_model import write_tokenizer

PAGE = Path(__file__).resolve().parents[1] / "docs" / "models.md"
BEGIN = "<!-- the rest: python -m tests.family_table --write -->\n"
ROWS_OF_RUN = 200
"""Tokens of the longest row of a pretended run, which decides how long the rows of the check are."""
_PLANNED = ["--train_data_dir", "tokens", "--output_dir", "run"]
_TEXT = "First Citizen: Before we proceed any further, hear me speak. All: Speak, speak."


@dataclass(frozen=True)
class Family:
    """What was found out about a family."""

    name: str
    outcome: str
    """``packed``, ``apart`` (trains with one document in a row), ``refused`` or ``untried``."""
    reason: str = ""
    """Why documents cannot share a row, or why the family is refused."""
    has_adapter: bool = False
    attentions: tuple[str, ...] = ()
    """Values of ``--attention``."""
    needs_no_mask: bool = False
    """Whether torch's kernel for documents computes its attention on a GPU."""
    has_plan: bool = False
    is_exported: bool = False


def try_family(name: str, folder: Path) -> Family:
    """Return what the program does with a family; ``folder`` is empty and gets the files of an export."""
    try:
        config = small_config(name)
    except NotSmallError:
        return Family(name, "untried")

    # the model: its configuration, its layers, its attention
    try:
        shape = _shape(config, attention="sdpa")
    except InputError:
        try:
            shape = _shape(small_config(name), attention="eager")
        except InputError as error:
            return _refused(name, error)
    try:
        small_model(shape.config)
    except NotSmallError:
        return Family(name, "untried")

    # several documents in a row
    outcome = "packed"
    reason = ""
    try:
        _check_isolation(name)
    except InputError as error:
        outcome = "apart"
        reason = _short_reason(str(error))
    except RuntimeError:  # the small sizes do not go together
        return Family(name, "untried")

    return Family(
        name,
        outcome,
        reason=reason,
        has_adapter=_works(
            lambda: _shape(small_config(name), shape.config._attn_implementation, Adapter("lora", 4, 8))
        ),
        attentions=_attentions(shape),
        needs_no_mask=why_not_varlen(shape, torch.bfloat16) is None,
        has_plan=_works(lambda: _plan(shape)),
        is_exported=_works(lambda: _export(name, folder)),
    )


def _shape(config: PretrainedConfig, attention: str | None, adapter: Adapter | None = None) -> ModelShape:
    return shape_from_config(config, "model", DEFAULT_LAYER_CLASS, attention, adapter=adapter)


def _refused(name: str, error: InputError) -> Family:
    """Return a family that is refused because of what it is, or untried if its small sizes are the reason."""
    if "decoder layers" in str(error):
        return Family(name, "refused", reason="no stack of decoder layers")
    return Family(name, "untried")


def _short_reason(message: str) -> str:
    """Return the reason that ``check_isolation`` gives, without its figure."""
    _, _, reason = message.partition("the documents of a row: ")
    reason, _, _ = reason.partition("; give")
    reason, _, _ = reason.partition(", by ")
    assert reason
    return reason


def _check_isolation(name: str) -> None:
    fabric = Fabric(accelerator="cpu", devices=1)
    model = fabric.setup_module(small_model(small_config(name))).train()
    check_isolation(fabric, model, "model", ROWS_OF_RUN, torch.float32)


def _attentions(shape: ModelShape) -> tuple[str, ...]:
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(shape.config)
    supported = {
        "sdpa": model._supports_sdpa,
        "flash_attention_2": model._supports_flash_attn,
        "flex_attention": model._supports_flex_attn,
        "eager": True,
    }
    return tuple(name for name, is_supported in supported.items() if is_supported)


def _works(function: Callable[[], Any]) -> bool:
    """Return whether the program does not refuse something, and transformers can do it."""
    try:
        function()
    except (ArithmeticError, AssertionError, AttributeError, LookupError, TypeError, ValueError):  # of transformers
        return False
    except (InputError, RuntimeError, TraceError):
        return False
    return True


def _plan(shape: ModelShape) -> None:
    """Trace a micro-batch of packed rows as ``--plan`` does."""
    attention = "sdpa" if shape.config._attn_implementation == "sdpa" else "eager"
    arguments = parse(TrainArguments, [*_PLANNED, "--attention", attention])
    batch = MicroBatch(1, 64, torch.bfloat16, None, has_borders=True, on_gpu=True, by_unit=True)
    trace_activations(shape, arguments, batch)


def _export(name: str, folder: Path) -> None:
    """Export a checkpoint and verify the export."""
    model_dir = folder / "model"
    model_dir.mkdir(parents=True)
    vocabulary_size = write_tokenizer(model_dir, [_TEXT])
    config = small_config(name, vocab_size=vocabulary_size, vocab_size_per_layer_input=vocabulary_size)
    model = small_model(config).eval()
    config.save_pretrained(model_dir)
    model.generation_config.save_pretrained(model_dir)
    assert all((model_dir / file).is_file() for file in TOKENIZER_FILES)
    weights = {name: parameter.detach().contiguous() for name, parameter in model.named_parameters()}
    saved_names = model.state_dict().keys()
    weights |= {name: buffer.contiguous() for name, buffer in model.named_buffers() if name in saved_names}
    source = ExportSource(write_full(folder / "step-00000001", model_dir, weights, step=1))
    export = folder / "export"
    export.mkdir()
    write_export(source, export, torch.float32, "5GB", CardFacts(name))
    report = compare(export, source, torch.float32)
    # transformers rebuilds the tokenizers of some families, which changes this one: it is none of theirs
    settings = [setting for setting in report.settings if not setting.endswith("of the tokenizer")]
    faults = [fault for fault in report.faults if not fault.startswith("different from the checkpoint's")]
    if settings or faults:
        raise ValueError(", ".join([*settings, *faults]))


def tables_of(families: Iterable[Family]) -> str:
    """Return the tables and lists of the page as Markdown."""
    families = list(families)
    packed = [row_of(family) for family in families if family.outcome == "packed"]
    apart = [f"{row_of(family)} {family.reason} |" for family in families if family.outcome == "apart"]
    head = "| family | adapters | `--plan` | export | no mask on a GPU | `--attention` |"
    return "\n".join(
        [
            f"## Documents share rows\n\nIn these {len(packed)} families of "
            f"transformers {transformers.__version__}, several documents can share a row.\n",
            f"{head}\n|---|---|---|---|---|---|",
            *packed,
            f"\n## One document in a row\n\nThese {len(apart)} families can only be "
            "trained with `--isolate_documents false`.\n",
            f"{head} why |\n|---|---|---|---|---|---|---|",
            *apart,
            "\n## Refused\n\nThe program finds no class of decoder layers in these families, so it cannot shard them "
            "by layer:",
            _listed(family.name for family in families if family.outcome == "refused"),
            "\n## Not tried\n\nWe have no small models of these families for the test, so we do not know whether they "
            "work:",
            _listed(family.name for family in families if family.outcome == "untried"),
            "",
        ]
    )


def row_of(family: Family) -> str:
    """Return a family's row of a table."""
    cells = [_yes(value) for value in (family.has_adapter, family.has_plan, family.is_exported, family.needs_no_mask)]
    return f"| `{family.name}` | {' | '.join(cells)} | {', '.join(family.attentions)} |"


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names) + "."


def main() -> None:
    """Try every family and write the page, or print its tables."""
    quiet_transformers()
    families = []
    for name in sorted(FAMILIES):
        with tempfile.TemporaryDirectory() as folder:
            families.append(try_family(name, Path(folder)))
        print(families[-1], file=sys.stderr)
    tables = tables_of(families)
    if "--write" in sys.argv[1:]:
        text = PAGE.read_text(encoding="utf-8").partition(BEGIN)[0]
        PAGE.write_text(f"{text}{BEGIN}\n{tables}", encoding="utf-8")
    else:
        print(tables)


if __name__ == "__main__":
    main()
