"""The model card says where the model comes from, and its metadata are what the hub accepts."""

import hashlib
import json
import math
import re
import shutil
import socket
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from huggingface_hub import ModelCard, constants
from huggingface_hub.utils import validate_repo_id
from markdown_it import MarkdownIt

from fabric_train.checkpoint import read_trainer_json
from fabric_train.cli.errors import InputError
from fabric_train.cli.parser import parse_arguments
from fabric_train.export import model_card
from fabric_train.export.card_facts import PublicNames, read_record
from fabric_train.export.convert import write_export
from fabric_train.export.model_card import CardFacts, draw_card_picture, write_model_card
from fabric_train.export.source import ExportSource
from fabric_train.model.origin import ModelOrigin, find_origin
from fabric_train.programs.convert_to_hf import ConvertArguments, print_gaps
from fabric_train.tokenization import merge
from fabric_train.training.loggers import CSVLogger
from fabric_train.training.metrics import Metrics
from tests.support.bad_input_folder import edit_json
from tests.support.checkpoint_examples import trained_weights, write_full
from tests.support.exports import convert_run
from tests.support.forked_runs import ForkedRuns
from tests.support.short_runs import argv
from tests.support.token_datasets import TEXTS, tokenize, write_jsonl

COMMIT = "0123456789abcdef0123456789abcdef01234567"
LLAMA = ModelOrigin("meta-llama/Meta-Llama-3-8B", "meta-llama/Meta-Llama-3-8B", COMMIT, "llama3")


@pytest.fixture
def checkpoint(tmp_path: Path, tiny_model_dir: Path) -> Path:
    return write_full(tmp_path / "step-00000001", tiny_model_dir, trained_weights(tiny_model_dir), step=1)


def card_of(checkpoint: Path, facts: CardFacts | None = None, origin: ModelOrigin | None = LLAMA) -> ModelCard:
    """Return the card of a checkpoint that began with the model ``origin``."""
    edit_json(checkpoint / "trainer.json", lambda content: content.update(base_model=origin and asdict(origin)))
    folder = checkpoint.parent / "export"
    folder.mkdir(exist_ok=True)
    for file in checkpoint.glob("LICENSE*"):
        shutil.copyfile(file, folder / file.name)
    write_model_card(read_record(read_trainer_json(checkpoint)), folder, facts or CardFacts("model"))
    return ModelCard.load(folder / "README.md")


def check_metadata(metadata: dict[str, Any]) -> None:
    """Check what https://huggingface.co/docs/hub/model-cards says about each field of the metadata."""
    known = {"base_model", "datasets", "language", "library_name", "model-index", "pipeline_tag", "tags"}
    assert metadata.keys() <= known | {"base_model_relation", "license", "license_name", "license_link"}
    assert ("base_model_relation" in metadata) == ("base_model" in metadata)
    assert metadata.get("base_model_relation", "finetune") in ("adapter", "finetune", "merge", "quantized")
    assert (metadata["library_name"], metadata["pipeline_tag"]) == ("transformers", "text-generation")
    for repository in [metadata.get("base_model"), *metadata.get("datasets", [])]:
        if repository is not None:
            validate_repo_id(repository)
    assert re.fullmatch(r"[a-z0-9.+-]+", metadata.get("license", "none"))
    if metadata.get("license") == "other":
        assert re.fullmatch(r"[a-z0-9.-]+", metadata["license_name"])
        assert metadata["license_link"] in ("LICENSE", "LICENSE.md") or "://" in metadata["license_link"]
    for language in metadata.get("language", []):
        assert re.fullmatch(r"[a-z]{2,3}|code|multilingual", language)
    for model in metadata.get("model-index", []):
        assert model["name"]
        for result in model["results"]:
            assert result["task"]["type"] == "text-generation"
            assert result["dataset"].keys() >= {"type", "name"}
            assert all(metric["type"] and math.isfinite(metric["value"]) for metric in result["metrics"])


def test_base_model_licence_and_languages_are_in_the_metadata(checkpoint: Path) -> None:
    card = card_of(checkpoint, CardFacts("owner/name", languages=("es", "ca")))
    metadata = card.data.to_dict()
    assert metadata["base_model"] == "meta-llama/Meta-Llama-3-8B"
    assert metadata["license"] == "llama3"
    assert metadata["language"] == ["es", "ca"]
    check_metadata(metadata)
    assert f"(revision `{COMMIT}`), further trained with Fabric Train. It was trained on 64 tokens, in 1 " in card.text
    assert "- **Licence:** llama3, as the base model\n- **Languages:** es, ca\n" in card.text
    assert "- **Context length:** 256 tokens\n" in card.text


def test_the_snippet_loads_the_name_that_is_pushed(checkpoint: Path) -> None:
    text = card_of(checkpoint, CardFacts("owner/name")).text
    assert text.lstrip().startswith("# name\n")
    assert text.count('from_pretrained("owner/name"') == 2
    assert "@misc{name,\n  title = {name},\n  author = {owner},\n  url = {https://huggingface.co/owner/name}\n}" in text
    assert "Cite the base model as described on [its card](https://huggingface.co/meta-llama/Meta-Llama-3-8B)." in text


def test_a_model_from_random_weights_has_no_base_and_no_licence(checkpoint: Path) -> None:
    edit_json(checkpoint / "trainer.json", lambda content: content["arguments"].update(model_name=LLAMA.name))
    card = card_of(checkpoint, origin=None)
    assert not {"base_model", "license"} & card.data.to_dict().keys()
    assert "trained with Fabric Train from random weights." in card.text
    assert "Llama-3" not in card.text
    check_metadata(card.data.to_dict())


def test_what_the_card_lacks_is_asked_for_and_a_base_only_where_there_is_one(checkpoint: Path, capsys: Any) -> None:
    facts = CardFacts("model", languages=("es",))
    notes = []
    for origin in (ModelOrigin("my-llama"), None, LLAMA):
        card_of(checkpoint, facts, origin)
        print_gaps(ExportSource(checkpoint), checkpoint.parent / "export")
        notes.append(capsys.readouterr().err)
    assert notes == [
        "note: the model card is incomplete; --base_model and --license would complete it\n",
        "note: the model card is incomplete; --license would complete it\n",
        "",
    ]


def test_a_checkpoint_of_an_earlier_version_claims_no_base(checkpoint: Path) -> None:
    edit_json(checkpoint / "trainer.json", lambda content: content["arguments"].update(model_name=LLAMA.name))
    edit_json(checkpoint / "trainer.json", lambda content: content.pop("base_model"))
    write_model_card(read_record(read_trainer_json(checkpoint)), checkpoint.parent, CardFacts("model"))
    card = ModelCard.load(checkpoint.parent / "README.md")
    assert "from an unknown base model" in card.text
    assert "base_model" not in card.data.to_dict()


def test_options_replace_what_the_checkpoint_says(checkpoint: Path) -> None:
    facts = CardFacts("model", license="apache-2.0", base_model="some/other")
    card = card_of(checkpoint, facts)
    assert (card.data.get("base_model"), card.data.get("license")) == ("some/other", "apache-2.0")
    assert COMMIT not in card.text
    of_a_folder = card_of(checkpoint, facts, ModelOrigin("my-llama"))
    assert of_a_folder.data.get("base_model") == "some/other"
    assert card_of(checkpoint, facts, None).data.get("base_model") == "some/other"


def test_a_licence_without_identifier_is_named_and_linked(checkpoint: Path) -> None:
    (checkpoint / "LICENSE").write_text("You may.")
    card = card_of(checkpoint, origin=ModelOrigin("my-llama"))
    assert card.data.get("license") == "other"
    assert card.data.get("license_link") == "LICENSE"
    assert "- **Licence:** as the base model: [LICENSE](LICENSE)\n" in card.text
    check_metadata(card.data.to_dict())
    custom = replace(LLAMA, license="other", license_name="llama-x", license_link="LICENSE.txt")
    data = card_of(checkpoint, origin=custom).data
    assert data.get("license_name") == "llama-x"
    assert data.get("license_link") == "https://huggingface.co/meta-llama/Meta-Llama-3-8B/blob/main/LICENSE.txt"


def test_validation_files_are_no_sources_of_training(tmp_path: Path, checkpoint: Path, tiny_model_dir: Path) -> None:
    for name in ("train.jsonl", "held-out.jsonl", "both.jsonl"):
        write_jsonl(tmp_path / name)
    sources = [tmp_path / "train.jsonl", tmp_path / "both.jsonl"]
    held_out = ["--validation_dataset", tmp_path / "held-out.jsonl", tmp_path / "both.jsonl"]
    tokenize(tmp_path / "tokens", tiny_model_dir, *sources, *held_out)
    shutil.copyfile(tmp_path / "tokens" / "manifest.json", checkpoint / "manifest.json")
    card = card_of(checkpoint)
    assert re.findall(r"^\| `(.*?)` \| [0-9.]+% ", card.text, re.MULTILINE) == ["train.jsonl", "both.jsonl"]


def test_what_was_read_kept_and_left_out_is_listed_by_source(
    tmp_path: Path, checkpoint: Path, tiny_model_dir: Path
) -> None:
    write_jsonl(tmp_path / "a.jsonl", [*TEXTS, "", TEXTS[0]])
    write_jsonl(tmp_path / "b.jsonl", [TEXTS[1], *(f"{text} ana@uni.es" for text in TEXTS)])
    tokenize(tmp_path / "one", tiny_model_dir, tmp_path / "a.jsonl", tmp_path / "b.jsonl", deduplicate="true")
    tokenize(tmp_path / "two", tiny_model_dir, tmp_path / "b.jsonl", redact="email")
    merge.main([str(tmp_path / "one"), str(tmp_path / "two"), "--output_dir", str(tmp_path / "both")])
    shutil.copyfile(tmp_path / "one" / "manifest.json", checkpoint / "manifest.json")
    text = card_of(checkpoint).text
    assert "| `a.jsonl` | 42 | 40 | 1 empty, 1 duplicate |" in text
    assert "| `b.jsonl` | 41 | 40 | 1 duplicate |" in text
    assert "| all | 83 | 80 | 2 duplicate, 1 empty |" in text
    assert "Steps before" not in text
    shutil.copyfile(tmp_path / "both" / "manifest.json", checkpoint / "manifest.json")
    text = card_of(checkpoint).text
    assert "| `b.jsonl` | 82 | 81 | 1 duplicate |" in text
    assert "| `one` | none |  |" in text
    assert re.search(r"^\| `two` \| `redact` \| `\{", text, re.MULTILINE)


def test_the_tasks_that_the_training_data_was_compared_with_are_listed(
    tmp_path: Path, checkpoint: Path, tiny_model_dir: Path
) -> None:
    task = tmp_path / "arc_es.jsonl"
    task.write_text(json.dumps({"question": "one two three four five six seven eight"}))
    source = write_jsonl(tmp_path / "a.jsonl", ["One, two, three: four five six seven eight.", "ana@uni.es " * 9])
    tokenize(
        tmp_path / "tokens",
        tiny_model_dir,
        source,
        decontaminate=task,
        redact="email",
        max_length=4,
        validation_split=0,
    )
    shutil.copyfile(tmp_path / "tokens" / "manifest.json", checkpoint / "manifest.json")
    text = card_of(checkpoint).text
    assert "with an item of these evaluation tasks (arXiv:2005.14165, appendix C) were left out." in text
    assert "| `arc_es` | 1 | 0 | all | 1 |" in text
    assert "| redacted email | 9 |" in text


def test_only_datasets_of_the_hub_are_listed_without_subset_and_revision(
    checkpoint: Path, tiny_tokens_dir: Path
) -> None:
    shutil.copyfile(tiny_tokens_dir / "manifest.json", checkpoint / "manifest.json")
    (local,) = json.loads((checkpoint / "manifest.json").read_text())["sources"]
    hub = [
        {**local, "kind": "hub", "name": name, "place": name}
        for name in ("some/texts", "some/texts:es@v1", "other/texts@main")
    ]
    edit_json(checkpoint / "manifest.json", lambda content: content.update(sources=[local, *hub]))
    card = card_of(checkpoint)
    assert card.data.get("datasets") == ["some/texts", "other/texts"]
    assert "| [some/texts](https://huggingface.co/datasets/some/texts) |" in card.text
    check_metadata(card.data.to_dict())


def test_a_stream_lists_datasets_of_the_hub_and_not_folders(checkpoint: Path) -> None:
    order = {"text_column": "text", "max_length": 8, "tokenizer": "0", "special_text_is_plain": False}
    identities = ["some/texts, subset es, train, commit 0123456", "old/texts, train, version 1.0.0"]
    identities.append("a.txt, 10 bytes, sha256 of its ends 0123456789abcdef")
    data = {**order, "rows_per_window": 1, "sources": identities}
    edit_json(checkpoint / "trainer.json", lambda content: content.update(data=data))
    names = ["es=some/texts:es", "data/texts", "old/texts"]
    edit_json(checkpoint / "trainer.json", lambda content: content["arguments"].update(streaming_dataset=names))
    card = card_of(checkpoint)
    assert card.data.get("datasets") == ["some/texts", "old/texts"]
    rows = ["`es`: [some/texts](https://huggingface.co/datasets/some/texts) | 1 | `0123456`", "`texts` | 1 |"]
    rows.append("[old/texts](https://huggingface.co/datasets/old/texts) | 1 | `1.0.0`")
    assert [row for row in rows if f"| {row} " not in card.text] == []
    assert "- a.txt, 10 bytes, sha256 of its ends 0123456789abcdef" in card.text


def test_results_before_and_after_are_a_table_and_metadata(checkpoint: Path) -> None:
    def evaluation(step: int, es: float, ca: float) -> dict[str, Any]:
        sources = {
            "es": {"nats": es * 100, "num_tokens": 100, "num_bytes": 400.0},
            "ca": {"nats": ca * 100, "num_tokens": 100, "num_bytes": None},
        }
        return {"step": step, "sources": sources, "whole": {"nats": (es + ca) * 100, "num_tokens": 200}}

    both = {"first_evaluation": evaluation(0, 4.0, 8.0), "evaluation": evaluation(1, 3.0, 9.0)}
    edit_json(checkpoint / "trainer.json", lambda content: content.update(both))
    card = card_of(checkpoint, CardFacts("owner/name"))
    text = card.text.replace("\u00a0", " ")
    assert "| es | 100 | 4.000 → 3.000 | 54.598 → 20.086 | 1.443 → 1.082 | −25.0% |" in text
    assert "| ca | 100 | 8.000 → 9.000 | 2,981 → 8,103 |  | +12.5% |" in text
    assert "| all sources | 200 | 6.000 → 6.000 |" in text
    results = card.data.get("eval_results")
    found = {(one.dataset_type, one.metric_type): one.metric_value for one in results}
    assert (found["es", "bits_per_byte"], found["ca", "loss"]) == (1.08202, 9.0)
    assert ("ca", "bits_per_byte") not in found
    check_metadata(card.data.to_dict())
    again = ModelCard(str(card))
    assert (again.data.get("eval_results"), again.data.to_dict()) == (results, card.data.to_dict())


def test_source_files_can_be_checked_by_their_hashes(tmp_path: Path, checkpoint: Path, tiny_model_dir: Path) -> None:
    for name in ("a/texts.jsonl", "b/texts.jsonl", "c/part-1.jsonl", "c/part-2.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        write_jsonl(tmp_path / name, [f"Text of {name}."] * 9)
    sources = [f"es={tmp_path}/a/texts.jsonl", tmp_path / "b" / "texts.jsonl", f"ca={tmp_path}/c"]
    tokenize(tmp_path / "tokens", tiny_model_dir, *sources)
    shutil.copyfile(tmp_path / "tokens" / "manifest.json", checkpoint / "manifest.json")
    text = card_of(checkpoint).text
    hashes = (tmp_path / "export" / "training_data.sha256").read_text().splitlines()
    names = {"es/texts.jsonl": "a/texts.jsonl", "texts.jsonl/texts.jsonl": "b/texts.jsonl"}
    names |= {f"ca/{name}": f"c/{name}" for name in ("part-1.jsonl", "part-2.jsonl")}
    of_files = {name: hashlib.sha256((tmp_path / file).read_bytes()).hexdigest() for name, file in names.items()}
    assert hashes == [f"{digest}  {name}" for name, digest in of_files.items()]
    lines = "".join(f"{line}\n" for line in hashes[2:])
    in_short = [*list(of_files.values())[:2], hashlib.sha256(lines.encode()).hexdigest()]
    rows = re.findall(r"^\| `(.*?)` \| .*% \| .* \| .* \| ([0-9]) \| `(.*)` \|$", text, re.MULTILINE)
    assert rows == [
        (name, files, digest[:12])
        for name, files, digest in zip(("es", "texts.jsonl", "ca"), "112", in_short, strict=True)
    ]


def test_devices_and_hours_are_added_up_over_resumes_and_branches(checkpoint: Path) -> None:
    def session(after_step: int, num_devices: int, hours: float) -> dict[str, Any]:
        device = "NVIDIA H100 80GB HBM3"
        return {"after_step": after_step, "device": device, "num_devices": num_devices, "seconds": hours * 3600}

    branch = {"run": "/home/someone/trunk", "step": 60, "continues_data": True, "changed": {}}
    sessions = [session(0, 8, 1), session(40, 8, 2), session(60, 8, 0.5), session(80, 4, 20)]
    more = {"step": 100, "lineage": [branch], "sessions": sessions}
    edit_json(
        checkpoint / "trainer.json", lambda content: (content.update(more), content["arguments"].update(max_step=100))
    )
    text = card_of(checkpoint).text
    assert "- **Compute:** 108.0 GPU hours on 8 × NVIDIA H100 80GB HBM3 and 4 × NVIDIA H100 80GB HBM3\n" in text
    table = text.split("| steps | devices | hours | GPU hours |\n")[1].split("\n\n")[0].splitlines()[1:]
    assert table == [
        "| 1 to 60 | 8 × NVIDIA H100 80GB HBM3 | 3 | 24.0 |",
        "| 61 to 80 | 8 × NVIDIA H100 80GB HBM3 | 0.5 | 4 |",
        "| 81 to 100 | 4 × NVIDIA H100 80GB HBM3 | 20.0 | 80.0 |",
        "| all |  | 23.5 | 108.0 |",
    ]
    edit_json(checkpoint / "trainer.json", lambda content: content.update(sessions=sessions[2:], lineage=[]))
    assert "The time of the first 60 steps was not recorded." in card_of(checkpoint).text
    edit_json(checkpoint / "trainer.json", lambda content: content.pop("sessions"))  # of an earlier version
    assert "Compute" not in card_of(checkpoint).text


def test_the_card_has_the_losses_of_the_run_and_of_its_trunk(tmp_path: Path, tiny_model_dir: Path) -> None:
    for run, steps in (("trunk", range(6)), ("run", range(4, 7))):
        (tmp_path / run).mkdir()
        table = CSVLogger(tmp_path / run / "metrics.csv", 0)
        for step in steps:
            table.log(Metrics(step=step, epoch=0, train_loss=9.0 - step, val_loss=8.0 - step))
        table.close()
    folder = tmp_path / "run" / "checkpoints" / "step-00000006"
    checkpoint = write_full(folder, tiny_model_dir, trained_weights(tiny_model_dir), step=6)
    branch = {"run": str(tmp_path / "trunk"), "step": 3, "continues_data": True, "changed": {}}
    edit_json(checkpoint / "trainer.json", lambda content: content.update(lineage=[branch]))
    drawn: list[Any] = []
    with patch.object(model_card, "draw_loss_curves", lambda *given: drawn.append(given)):
        draw_card_picture(read_record(read_trainer_json(checkpoint)), tmp_path, CardFacts("owner/name"))
    ((table, picture, title, branches),) = drawn
    assert table.steps.tolist() == list(range(7))
    assert (picture, title, branches) == (tmp_path / "loss_curves.png", "name", [3])
    draw_card_picture(read_record(read_trainer_json(checkpoint)), tmp_path, CardFacts("owner/name"))
    write_model_card(read_record(read_trainer_json(checkpoint)), tmp_path, CardFacts("owner/name"))
    assert "optimizer steps](loss_curves.png)" in (tmp_path / "README.md").read_text()
    (tmp_path / "loss_curves.png").unlink()
    (tmp_path / "run" / "metrics.csv").write_text("something else\n")
    draw_card_picture(read_record(read_trainer_json(checkpoint)), tmp_path, CardFacts("owner/name"))
    write_model_card(read_record(read_trainer_json(checkpoint)), tmp_path, CardFacts("owner/name"))
    assert "There is no picture of the losses" in (tmp_path / "README.md").read_text()


def test_the_code_of_the_card_runs_with_the_export(tmp_path: Path, checkpoint: Path, capsys: Any) -> None:
    (tmp_path / "model").mkdir()
    write_export(ExportSource(checkpoint), tmp_path / "model", torch.float32, "5GB", CardFacts("name-of-the-model"))
    text = (tmp_path / "model" / "README.md").read_text().replace("name-of-the-model", str(tmp_path / "model"))
    of_text, of_chat = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    names: dict[str, Any] = {}
    exec(of_text, names)
    assert capsys.readouterr().out.startswith("Once upon a time")
    exec(of_chat, names)
    assert names["inputs"]["input_ids"].shape[1] < names["output"].shape[1]
    (checkpoint / "tokenizer" / "chat_template.jinja").unlink()
    assert "apply_chat_template" not in card_of(checkpoint).text


def test_nothing_private_is_in_the_card(
    tmp_path: Path, checkpoint: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_plantedtoken")
    private = ("someone", "secret", "planted", socket.gethostname(), str(tmp_path))
    corpus = tmp_path / "someone" / "secret"
    corpus.mkdir(parents=True)
    for name in ("es.jsonl", "ca.jsonl"):
        write_jsonl(corpus / name)
    tokenize(tmp_path / "tokens", tiny_model_dir, corpus / "es.jsonl", f"ca={corpus}/ca.jsonl")
    manifest = json.loads((tmp_path / "tokens" / "manifest.json").read_text())
    url = "https://someone:secret@planted.host/secret/web.jsonl?token=planted"
    manifest["sources"].append({**manifest["sources"][0], "name": url, "place": url, "folder": None})
    manifest["tokenizer"]["name"] = "/home/someone/tokenizer"
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))
    loss = {"nats": 300.0, "num_tokens": 100, "num_bytes": 400.0}
    evaluation = {
        "whole": loss,
        "step": 1,
        "sources": {str(corpus / "es.jsonl"): loss, url: loss, "/home/someone/x": loss},
    }
    branch = {"run": "/home/someone/secret/trunk", "step": 1, "continues_data": False}
    changed = {"train_data_dir": ["/home/someone/a", url], "entity": ["someone", "secret"], "lr": [1.0, 2.0]}
    mixture = ["/home/someone/secret/a:es", "secret/someone/b"]

    def plant(content: dict[str, Any]) -> None:
        given = {
            "output_dir": "/home/someone/run",
            "entity": "someone",
            "project": "secret",
            "precision": "hf_plantedtoken",
        }
        content["arguments"].update(given, tokenizer_name="/home/someone/tokenizer")
        content.update(evaluation=evaluation, first_evaluation={**evaluation, "step": 0}, rows_of_sources=[1, 2])
        content.update(lineage=[{**branch, "changed": changed}], mixture_sources=mixture)

    edit_json(checkpoint / "trainer.json", plant)
    card_of(checkpoint, CardFacts("owner/name"))
    for file in (tmp_path / "export").iterdir():
        text = file.read_text()
        assert [word for word in private if word in text] == [], file.name
    card = (tmp_path / "export" / "README.md").read_text()
    assert "| x | 100 | 3.000" in card
    assert "`train_data_dir`: a → web.jsonl, `lr`: 1.0 → 2.0" in card
    assert r"| `precision` | \*\*\* |" in card


def test_two_sources_never_have_the_same_public_name(checkpoint: Path) -> None:
    names = PublicNames(None)
    assert [names[name] for name in ("a/x.jsonl", "b/x.jsonl", "a/x.jsonl", "x.jsonl (2)", "s3://b/k/y.gz", "/")] == [
        *("x.jsonl", "x.jsonl (2)", "x.jsonl", "x.jsonl (2) (2)", "y.gz", "unnamed"),
    ]


@pytest.mark.parametrize("loss", [1234.5, float("inf"), float("nan")])
def test_a_diverged_run_gets_its_card(checkpoint: Path, loss: float) -> None:
    edit_json(checkpoint / "trainer.json", lambda content: content.update(val_loss=loss))
    assert f"Validation loss {loss:.4f} nats per token" in card_of(checkpoint).text
    evaluation = {"whole": {"nats": loss, "num_tokens": 1, "num_bytes": 4.0}, "sources": {}, "step": 1}
    edit_json(checkpoint / "trainer.json", lambda content: content.update(evaluation=evaluation))
    card = card_of(checkpoint)
    assert f"| validation | 1 | {loss:,.0f} |" in card.text
    check_metadata(card.data.to_dict())


@pytest.mark.parametrize(
    ("option", "value", "fault"),
    [
        ("--license", "Apache 2.0", "--license: expected a hub license identifier such as apache-2.0"),
        ("--license", "other", "--license other is not supported"),
        ("--language", "Spanish", "--language: expected ISO 639 codes such as en, es or ca"),
        ("--language", "sp", "--language: expected ISO 639 codes such as en, es or ca"),
        ("--base_model", "models/my/llama", "--base_model: expected OWNER/NAME on the hub"),
    ],
)
def test_metadata_that_the_hub_refuses_are_refused(option: str, value: str, fault: str) -> None:
    with pytest.raises(InputError) as refused:
        parse_arguments(ConvertArguments, ["--checkpoint", "RUN", "--output_dir", "out", option, value])
    assert refused.value.faults[0].startswith(fault)


def test_names_from_the_data_are_no_html_and_no_markdown(
    tmp_path: Path, checkpoint: Path, tiny_model_dir: Path
) -> None:
    name = "<img src=x onerror=alert(1)>"
    (tmp_path / name).mkdir()
    tricky = f"{name}/a\\|{name}.jsonl"
    for file in (f"{name}.jsonl", tricky):
        write_jsonl(tmp_path / file)
    tokenize(tmp_path / "tokens", tiny_model_dir, tmp_path / f"{name}.jsonl", tmp_path / tricky)
    shutil.copyfile(tmp_path / "tokens" / "manifest.json", checkpoint / "manifest.json")
    (hub, *others) = json.loads((checkpoint / "manifest.json").read_text())["sources"]
    hub |= {"kind": "hub", "name": f"o/{name}", "place": f"o/{name}"}
    edit_json(checkpoint / "manifest.json", lambda content: content.update(sources=[hub, *others]))
    loss = {"nats": 300.0, "num_tokens": 100}
    evaluation = {"step": 1, "sources": {f"{name}.jsonl": loss, "[a](b)": loss}, "whole": loss}
    session = {"after_step": 0, "device": name, "num_devices": 1, "seconds": 9.0}
    branch = {
        "run": name,
        "step": 1,
        "continues_data": True,
        "changed": {"lr": [name, 2], "train_data_dir": [name, "a"]},
    }
    stage_source = {"name": name, "share": 1.0, "tokens": 1, "documents": 1, "files": [f"0  a/{name}"], "datasets": []}
    stage = {"run": name, "step": 1, "num_tokens": 1, "base_model": {"name": name}, "sources": [stage_source]}
    forged = {"evaluation": evaluation, "first_evaluation": {**evaluation, "step": 0}, "versions": {name: "1"}}
    forged |= {"lineage": [branch], "sessions": [session], "stages": [{**stage, "sessions": [session]}]}
    edit_json(
        checkpoint / "trainer.json",
        lambda content: (content.update(forged), content["arguments"].update(lr_schedule=name)),
    )
    (checkpoint / f"LICENSE.{name}").write_text("You may.")
    origin = ModelOrigin(name, license=name)
    text = card_of(checkpoint, CardFacts(f"{name}/x{name}"), origin).text
    html = MarkdownIt("commonmark", {"html": True}).enable("table").render(text)
    assert "<table>" in html
    assert "<img src=x" not in html
    assert 'href="b"' not in html


def test_a_wheel_has_the_templates_and_all_other_files() -> None:
    package = Path(model_card.__file__).parents[1]
    text = (package.parent / "pyproject.toml").read_text(encoding="utf-8")
    (listed,) = re.findall(r"^fabric_train = (\[[^]]*\])$", text, re.MULTILINE)
    packed = {file for pattern in json.loads(listed) for file in package.glob(pattern)}
    files = {path for path in package.rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc")}
    assert package / "export" / "templates" / "model_card.md.j2" in files
    assert files == packed


# ------------------------------------------------------------------------------------------- where a model comes from


def test_a_downloaded_folder_knows_its_repository_and_licence(tmp_path: Path, tiny_model_dir: Path) -> None:
    folder = Path(shutil.copytree(tiny_model_dir, tmp_path / "model"))
    (folder / "hub_source.json").write_text(json.dumps({"repository": "some/model", "revision": COMMIT}))
    (folder / "README.md").write_text("---\nlicense: llama3\nlanguage: [en]\n---\n# A model\n")
    for name in ("LICENSE", "Notice", "USE_POLICY.md", "NOTES.txt"):
        (folder / name).write_text(name)
    origin, files = find_origin(str(folder))
    assert origin == ModelOrigin("some/model", "some/model", COMMIT, "llama3")
    assert [file.name for file in files] == ["LICENSE", "Notice", "USE_POLICY.md"]


def test_a_folder_of_unknown_origin_has_only_its_name(tmp_path: Path) -> None:
    (tmp_path / "my-model").mkdir()
    damaged = ("[1", "- a", "license: [mit, {}]", "license: 7", "[" * 9999)
    for card in ("no metadata", *(f"---\n{metadata}\n---\n" for metadata in damaged)):
        (tmp_path / "my-model" / "README.md").write_text(card)
        assert find_origin(str(tmp_path / "my-model")) == (ModelOrigin("my-model"), ())


def test_a_model_in_the_cache_of_the_hub_is_recognized(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--some--model"
    snapshot = repository / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    (snapshot / "config.json").write_text("{}")
    (snapshot / "LICENSE").write_text("You may.")
    expected = ModelOrigin("some/model", "some/model", COMMIT)
    assert find_origin("some/model") == (expected, (snapshot / "LICENSE",))
    assert find_origin(str(snapshot)) == (expected, (snapshot / "LICENSE",))
    assert find_origin("some/other") == (ModelOrigin("some/other", "some/other"), ())


@pytest.mark.slow
def test_runs_and_exports_carry_the_origin_and_all_stages_on_also_without_the_models_folder(
    tmp_path: Path, tiny_model_dir: Path, tiny_tokens_dir: Path, forked_runs: ForkedRuns
) -> None:
    model = Path(shutil.copytree(tiny_model_dir, tmp_path / "model"))
    (model / "hub_source.json").write_text(json.dumps({"repository": "some/model", "revision": COMMIT}))
    (model / "README.md").write_text("---\nlicense: llama3\n---\n# A model\n")
    (model / "LICENSE").write_text("You may.")
    for name in ("es", "ca", "chats"):
        write_jsonl(tmp_path / f"{name}.jsonl", [f"Text {number} of {name}." for number in range(40)])
    tokenize(tmp_path / "mix", tiny_model_dir, f"es={tmp_path}/es.jsonl", f"ca={tmp_path}/ca.jsonl")
    tokenize(tmp_path / "talk", tiny_model_dir, tmp_path / "chats.jsonl")
    settings = {"max_step": 2, "save_step_interval": 2, "eval_iters": 1, "eval_at_start": "true"}
    forked_runs.start(argv(model, tmp_path / "mix", tmp_path / "first", **settings), 1).finish()
    second = argv(tmp_path / "first" / "best", tmp_path / "talk", tmp_path / "second", **settings)
    forked_runs.start(second, 2).finish()
    forked_runs.start([*second, "--resume", "true", "--max_step", "3"], 1).finish()
    forked_runs.start(
        argv(
            model, tiny_tokens_dir, tmp_path / "branch", **settings | {"branch": f"{tmp_path}/second@2", "max_step": 3}
        ),
        1,
    ).finish()
    shutil.rmtree(model)
    convert_run(forked_runs, tmp_path / "export", "--checkpoint", tmp_path / "second" / "step-3", "--language", "es")
    forked_runs.start(argv(tmp_path / "export", tiny_tokens_dir, tmp_path / "third", **settings), 1).finish()
    convert_run(forked_runs, tmp_path / "last", "--checkpoint", tmp_path / "third", "--language", "es")
    for name in ("export", "last"):
        metadata = ModelCard.load(tmp_path / name / "README.md").data.to_dict()
        assert (metadata["base_model"], metadata["license"]) == ("some/model", "llama3")
        assert (tmp_path / name / "LICENSE").read_text() == "You may."

    (branched,) = read_trainer_json(tmp_path / "branch" / "checkpoints" / "step-00000003").stages
    third = read_trainer_json(tmp_path / "third" / "checkpoints" / "step-00000002")
    assert third.base_model is not None
    assert (third.base_model.repository, third.base_model.revision) == ("some/model", COMMIT)
    stages = third.stages
    assert [(stage.run, stage.step, len(stage.sessions)) for stage in stages] == [("first", 2, 1), ("second", 3, 2)]
    assert stages[0] == branched
    assert [source.name for source in stages[0].sources] == ["es", "ca"]
    assert sum(source.share for source in stages[0].sources) == pytest.approx(1)
    digests = [hashlib.sha256((tmp_path / f"{name}.jsonl").read_bytes()).hexdigest() for name in ("es", "ca", "chats")]
    card = (tmp_path / "last" / "README.md").read_text()
    assert "On held-out documents, before stage 3 of training (after stage 2) → after step 2." in card
    assert re.findall(r"^\| (\d) \| `(\w+)` \| (`some/model`|stage \d) \| [\d,]+ \| (\d) \| ", card, re.MULTILINE) == [
        ("1", "first", "`some/model`", "2"),
        ("2", "second", "stage 1", "3"),
        ("3", "third", "stage 2", "2"),
    ]
    assert re.findall(r"^\| (\d) \| `([\w.]+)` \| .*%.* \| 1 \| `(\w+)` \|$", card, re.MULTILINE) == [
        (number, name, digest[:12])
        for number, name, digest in zip("112", ("es", "ca", "chats.jsonl"), digests, strict=True)
    ]
    hashes = (tmp_path / "last" / "training_data.sha256").read_text()
    assert [digest for digest in digests if digest not in hashes] == []
    for name in ("README.md", "training_stages.json"):
        assert str(tmp_path) not in (tmp_path / "last" / name).read_text()
    (tmp_path / "export" / "training_stages.json").write_text("[{}]")
    damaged = forked_runs.start(argv(tmp_path / "export", tiny_tokens_dir, tmp_path / "none", **settings), 1)
    assert damaged.wait() == [2]
    assert "training_stages.json: damaged (0.run: Field required)" in damaged.stderr()


@pytest.mark.slow
def test_a_run_from_scratch_stores_that_it_has_no_base(
    tmp_path: Path, tiny_model_dir: Path, tiny_tokens_dir: Path, forked_runs: ForkedRuns
) -> None:
    sizes = {"hidden_width": 32, "num_layers": 1, "num_heads": 2, "intermediate_size": 64, "max_context_width": 64}
    options = {**sizes, "vocab_size": 1000, "from_scratch": "llama", "max_step": 1, "eval_iters": 1}
    forked_runs.start(argv(tiny_model_dir, tiny_tokens_dir, tmp_path / "run", **options), 1).finish()
    trainer = json.loads((tmp_path / "run" / "checkpoints" / "step-00000001" / "trainer.json").read_text())
    assert trainer["base_model"] is None


def test_the_card_of_a_distilled_model_names_teacher_divergence_and_unit(checkpoint: Path) -> None:
    def evaluation(step: int, nats: float) -> dict[str, Any]:
        metrics = {"divergence": nats, "cross_entropy": nats + 1, "agreement": 0.5}
        return {
            "step": step,
            "sources": {},
            "whole": {"nats": nats * 100, "num_tokens": 100, "has_own_unit": True, "further": metrics},
        }

    def distill(content: dict[str, Any]) -> None:
        origin = ModelOrigin("owner/Teacher-8B", "owner/Teacher-8B", COMMIT, "apache-2.0")
        content["teacher"] = {"location": "/home/someone/secret", "fingerprint": "0" * 64, "origin": asdict(origin)}
        settings: dict[str, Any] = {"objective": "distill", "teacher": "/home/someone/secret"}
        settings["divergence"] = "reverse_kl"
        settings |= {"distill_temperature": 2.0, "sft_weight": 0.25}
        content["arguments"].update(settings)
        content.update(first_evaluation=evaluation(0, 4.0), evaluation=evaluation(1, 3.0), val_loss=3.0)

    edit_json(checkpoint / "trainer.json", distill)
    card = card_of(checkpoint)
    text = card.text.replace("\u00a0", " ")
    teacher_link = "[owner/Teacher-8B](https://huggingface.co/owner/Teacher-8B)"
    assert f"distilled from {teacher_link} (revision `{COMMIT}`, licence apache-2.0) by `reverse_kl`" in text
    assert "The loss is the divergence from the teacher, plus 0.25 times the cross entropy, in nats per token" in text
    assert "| validation | 100 | 4.000 → 3.000 | 4.000 → 3.000 | 5.000 → 4.000 | 0.500 → 0.500 | −25.0% |" in text
    for name, value in (("divergence", "reverse_kl"), ("distill_temperature", "2.0"), ("sft_weight", "0.25")):
        assert f"| `{name}` | {value} |" in text
    assert "Loss (nats per token)" in {result.metric_name for result in card.data.get("eval_results")}
    assert "perplexity" not in text.lower()
    assert "someone" not in str(card)
    check_metadata(card.data.to_dict())


def test_a_distilled_model_without_an_evaluation_has_a_loss_and_no_perplexity(checkpoint: Path) -> None:
    def distill(content: dict[str, Any]) -> None:
        content["teacher"] = {"location": "teachers/8b", "fingerprint": "0" * 64, "origin": None, "stored_as": "top 8"}
        content["arguments"].update(objective="distill", teacher="teachers/8b", divergence="forward_kl")
        content.update(val_loss=3.0)

    edit_json(checkpoint / "trainer.json", distill)
    text = card_of(checkpoint).text
    assert "distilled from `8b` (licence not stated) by `forward_kl`, from stored values (top 8)" in text
    assert "Validation loss 3.0000 nats per token." in text


def test_the_card_of_reinforcement_learning_names_rewards_and_no_pairs(checkpoint: Path) -> None:
    def reinforce(content: dict[str, Any]) -> None:
        settings: dict[str, Any] = {"objective": "rl", "prompts": ["/home/someone/p.jsonl"], "group_size": 4}
        settings["rewards"] = ["/home/someone/judge.py:vowels", "length"]
        content["arguments"].update(settings)
        content.update(train_loss=-0.5)

    edit_json(checkpoint / "trainer.json", reinforce)
    card = card_of(checkpoint)
    assert "Training loss of the last step: -0.5000 (policy gradient)." in card.text
    assert "trained on completions that it sampled itself for prompts" in card.text
    assert "| `rewards` | vowels, length |" in card.text
    assert "| `group_size` | 4 |" in card.text
    assert "gradient_accumulation_steps" not in card.text
    assert "someone" not in str(card)
    check_metadata(card.data.to_dict())
