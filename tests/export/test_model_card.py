"""The model card says where the model comes from, and its metadata are what the hub accepts."""

import json
import re
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard, constants
from huggingface_hub.utils import validate_repo_id

from arguments import ConvertArguments, parse
from fabric_train.cli.errors import InputError
from fabric_train.export.model_card import CardFacts, write_model_card
from fabric_train.model.origin import ModelOrigin, find_origin
from tests.support.bad_input_folder import edit_json
from tests.support.checkpoint_examples import trained_weights, write_full
from tests.support.exports import VERIFY_IN_PROCESS
from tests.support.forked_runs import ForkedRuns
from tests.support.short_runs import argv
from tests.support.token_datasets import tokenize, write_jsonl

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
    write_model_card(checkpoint, folder, facts or CardFacts("model"))
    return ModelCard.load(folder / "README.md")


def check_metadata(metadata: dict[str, Any]) -> None:
    """Check what https://huggingface.co/docs/hub/model-cards says about each field of the metadata."""
    known = {"base_model", "datasets", "language", "library_name", "pipeline_tag", "tags"}
    assert metadata.keys() <= known | {"license", "license_name", "license_link"}
    for repository in [metadata.get("base_model"), *metadata.get("datasets", [])]:
        if repository is not None:
            validate_repo_id(repository)
    assert re.fullmatch(r"[a-z0-9.+-]+", metadata.get("license", "none"))
    assert ("license_name" in metadata) >= (metadata.get("license") == "other")
    for language in metadata.get("language", []):
        assert re.fullmatch(r"[a-z]{2,3}|code|multilingual", language)


def test_base_model_licence_and_languages_are_in_the_metadata(checkpoint: Path) -> None:
    card = card_of(checkpoint, CardFacts("owner/name", languages=("es", "ca")))
    metadata = card.data.to_dict()
    assert metadata["base_model"] == "meta-llama/Meta-Llama-3-8B"
    assert metadata["license"] == "llama3"
    assert metadata["language"] == ["es", "ca"]
    check_metadata(metadata)
    assert f"(revision `{COMMIT}`), trained further with Fabric Train. The base model's licence applies" in card.text


def test_the_snippet_loads_the_name_that_is_pushed(checkpoint: Path) -> None:
    text = card_of(checkpoint, CardFacts("owner/name")).text
    assert text.lstrip().startswith("# name\n")
    assert text.count('from_pretrained("owner/name"') == 2


def test_a_model_from_random_weights_has_no_base_and_no_licence(checkpoint: Path) -> None:
    edit_json(checkpoint / "trainer.json", lambda content: content["arguments"].update(model_name=LLAMA.name))
    card = card_of(checkpoint, origin=None)
    assert not {"base_model", "license"} & card.data.to_dict().keys()
    assert "Trained with Fabric Train from random weights." in card.text
    assert "Llama-3" not in card.text
    check_metadata(card.data.to_dict())


def test_a_checkpoint_of_an_earlier_version_claims_no_base(checkpoint: Path) -> None:
    edit_json(checkpoint / "trainer.json", lambda content: content["arguments"].update(model_name=LLAMA.name))
    edit_json(checkpoint / "trainer.json", lambda content: content.pop("base_model"))
    write_model_card(checkpoint, checkpoint.parent, CardFacts("model"))
    card = ModelCard.load(checkpoint.parent / "README.md")
    assert "its base model is not known" in card.text
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
    assert "[LICENSE](LICENSE)" in card.text
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
    assert "Sources: `train.jsonl`, `both.jsonl`. " in card_of(checkpoint).text


def test_only_datasets_of_the_hub_are_listed_without_subset_and_revision(
    tmp_path: Path, checkpoint: Path, tiny_model_dir: Path
) -> None:
    tokenize(tmp_path / "tokens", tiny_model_dir, write_jsonl(tmp_path / "train.jsonl"))
    shutil.copyfile(tmp_path / "tokens" / "manifest.json", checkpoint / "manifest.json")
    (local,) = json.loads((checkpoint / "manifest.json").read_text())["sources"]
    hub = [
        {**local, "kind": "hub", "name": name, "place": name}
        for name in ("some/texts", "some/texts:es@v1", "other/texts@main")
    ]
    edit_json(checkpoint / "manifest.json", lambda content: content.update(sources=[local, *hub]))
    card = card_of(checkpoint)
    assert card.data.get("datasets") == ["some/texts", "other/texts"]
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
    assert "Streamed: `texts:es`, `data/texts`, `old/texts`." in card.text


@pytest.mark.parametrize("loss", [1234.5, float("inf"), float("nan")])
def test_a_diverged_run_gets_its_card(checkpoint: Path, loss: float) -> None:
    edit_json(checkpoint / "trainer.json", lambda content: content.update(val_loss=loss))
    assert f"| validation loss | {loss:.4f} |" in card_of(checkpoint).text


@pytest.mark.parametrize(
    ("option", "value", "fault"),
    [
        ("--license", "Apache 2.0", "--license: expected an identifier of the hub such as apache-2.0"),
        ("--language", "Spanish", "--language: expected ISO 639 codes such as en, es or ca"),
        ("--base_model", "models/my/llama", "--base_model: expected OWNER/NAME on the hub"),
    ],
)
def test_metadata_that_the_hub_refuses_are_refused(option: str, value: str, fault: str) -> None:
    with pytest.raises(InputError) as refused:
        parse(ConvertArguments, ["--checkpoint", "RUN", "--output_dir", "out", option, value])
    assert refused.value.faults[0].startswith(fault)


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
def test_runs_and_exports_carry_the_origin_on_also_without_the_models_folder(
    tmp_path: Path, tiny_model_dir: Path, tiny_tokens_dir: Path, forked_runs: ForkedRuns
) -> None:
    model = Path(shutil.copytree(tiny_model_dir, tmp_path / "model"))
    (model / "hub_source.json").write_text(json.dumps({"repository": "some/model", "revision": COMMIT}))
    (model / "README.md").write_text("---\nlicense: llama3\n---\n# A model\n")
    (model / "LICENSE").write_text("You may.")
    settings = {"max_step": 2, "save_step_interval": 2, "eval_iters": 1}
    forked_runs.start(argv(model, tiny_tokens_dir, tmp_path / "first", **settings), 1).finish()
    more = {**settings, "checkpoint": tmp_path / "first", "weights_only": "true"}
    forked_runs.start(argv(tiny_model_dir, tiny_tokens_dir, tmp_path / "second", **more), 2).finish()
    shutil.rmtree(model)
    words = ["--checkpoint", tmp_path / "second" / "best", "--output_dir", tmp_path / "export"]
    forked_runs.start(words, 1, program="convert_to_hf", before=VERIFY_IN_PROCESS).finish()
    metadata = ModelCard.load(tmp_path / "export" / "README.md").data.to_dict()
    assert (metadata["base_model"], metadata["license"]) == ("some/model", "llama3")
    assert (tmp_path / "export" / "LICENSE").read_text() == "You may."


@pytest.mark.slow
def test_a_run_from_scratch_stores_that_it_has_no_base(
    tmp_path: Path, tiny_model_dir: Path, tiny_tokens_dir: Path, forked_runs: ForkedRuns
) -> None:
    sizes = {"hidden_width": 32, "num_layers": 1, "num_heads": 2, "intermediate_size": 64, "max_context_width": 64}
    options = {**sizes, "vocab_size": 1000, "from_scratch": "llama", "max_step": 1, "eval_iters": 1}
    forked_runs.start(argv(tiny_model_dir, tiny_tokens_dir, tmp_path / "run", **options), 1).finish()
    trainer = json.loads((tmp_path / "run" / "checkpoints" / "step-00000001" / "trainer.json").read_text())
    assert trainer["base_model"] is None
