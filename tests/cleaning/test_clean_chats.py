"""Chats and instructions: --language, --near_duplicates and --redact, alone and beside texts, and refusals."""

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from fabric_train.cleaning.cleaner import (
    Cleaner,
    all_text,
    change_texts,
    spoken_text,
    text_without_system,
)
from fabric_train.cleaning.language import LanguageFilter, identify
from fabric_train.cleaning.near_duplicates import NO_WORDS, signature, similarities
from fabric_train.cleaning.results import Dropped
from fabric_train.cli.errors import InputError
from fabric_train.programs import tokenize_dataset
from fabric_train.reading.documents import Chat
from fabric_train.tokenization import merge
from fabric_train.tokenization.chats.formats import read_chat
from fabric_train.tokenization.shards import ShardSizes
from tests.support.dirty_texts import OTHER_LANGUAGES
from tests.support.programs import option_words
from tests.support.token_datasets import manifest_of, tokenize, write_jsonl

SYSTEM = (
    "You are the assistant of a public library. Answer politely and in a few sentences. If you do not know the answer, "
    "say so instead of guessing. Never give medical, legal or financial advice; name a professional whom the reader "
    "can ask. Loans last three weeks and can be renewed twice, unless another reader has reserved the book. "
) * 2
ES = (
    "¿Puedo renovar por internet los dos libros que me llevé la semana pasada?",
    "Sí, puedes renovarlos dos veces desde tu cuenta, salvo que otra persona los haya reservado antes.",
)
ES_2 = (
    "¿Cómo se llama el río que pasa por la ciudad de Zaragoza y desemboca en el Mediterráneo?",
    "Es el Ebro, el más caudaloso de España; nace en Cantabria y forma un delta junto al mar.",
)
ES_3 = (
    "Explícame en una frase qué hace el Consejo de Seguridad de las Naciones Unidas.",
    "Vela por la paz entre los países y puede imponer sanciones o enviar tropas para mantenerla.",
)
EN = ("Where do I find the books on gardening?", "They are on the second floor, to the left of the stairs.")


def chat_of(*turns: str, system: str | None = SYSTEM) -> dict[str, Any]:
    roles = itertools.cycle(["user", "assistant"])
    messages = [{"role": role, "content": turn} for role, turn in zip(roles, turns, strict=False)]
    if system is not None:
        messages = [{"role": "system", "content": system}, *messages]
    return {"messages": messages}


def write_rows(path: Path, rows: Sequence[Any]) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def with_tools() -> Chat:
    call = {"type": "function", "function": {"name": "search", "arguments": {"name": "ana@uni.es", "id": ["b@uni.es"]}}}
    turns = [
        {"role": "system", "content": "Be brief, a@uni.es."},
        {"role": "user", "content": "¿Quién es?"},
        {"role": "assistant", "content": None, "tool_calls": [call], "id": "m1@uni.es"},
        {"role": "tool", "content": "Ana", "name": "search"},
    ]
    return read_chat({"messages": turns, "tools": [{"name": "search"}]}, "messages")


def test_language_is_that_of_what_is_said_and_repeats_are_of_all_but_system() -> None:
    chat = read_chat(chat_of(*ES), "messages")
    assert identify(all_text(chat))[0] == "en"
    assert spoken_text(chat) == text_without_system(chat) == "\n".join(ES)
    assert spoken_text(with_tools()) == "¿Quién es?\n"
    assert text_without_system(with_tools()).split() == ["¿Quién", "es?", "ana@uni.es", "b@uni.es", "Ana"]
    assert all_text(with_tools()).startswith("Be brief")


def test_a_chat_of_a_system_message_alone_repeats_no_other() -> None:
    cleaned = Cleaner({}, near_duplicates=0.8).clean_chat(read_chat(chat_of(), "messages"))
    assert not isinstance(cleaned, Dropped)
    assert cleaned.signature is not None
    assert (cleaned.signature == NO_WORDS).all()


def test_every_argument_of_a_tool_call_is_changed_whatever_its_name() -> None:
    changed = change_texts(with_tools(), str.upper)
    assert changed.messages[2]["tool_calls"][0]["function"] == {
        "name": "search",
        "arguments": {"name": "ANA@UNI.ES", "id": ["B@UNI.ES"]},
    }
    assert (changed.messages[2]["id"], changed.tools) == ("m1@uni.es", [{"name": "search"}])


def test_a_shared_system_prompt_makes_chats_neither_alike_nor_english() -> None:
    cleaner = Cleaner({"language": LanguageFilter(("es",), 0.65, "document")}, near_duplicates=0.8)
    results = [cleaner.clean_chat(read_chat(chat_of(*turns), "messages")) for turns in (ES, ES_2)]
    first, second = (result.signature for result in results if not isinstance(result, Dropped))
    assert first is not None
    assert second is not None
    assert similarities(first[None], second[None])[0] < 0.1
    whole = [signature(all_text(read_chat(chat_of(*turns), "messages"))) for turns in (ES, ES_2)]
    assert similarities(whole[0][None], whole[1][None])[0] > 0.4
    assert isinstance(cleaner.clean_chat(read_chat(chat_of(*EN, system=" ".join(ES)), "messages")), Dropped)


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Texts, chats and instructions with planted rows; the rows that are left out later come before near duplicates."""
    folder = tmp_path_factory.mktemp("sources")
    poem = "Caminante, son tus huellas el camino y nada más; caminante, no hay camino, se hace camino al andar. " * 3
    texts = write_jsonl(folder / "t.jsonl", [poem, " ".join(OTHER_LANGUAGES["fr"])])
    chats = [
        chat_of(*ES),
        chat_of(" ", "", system=" "),  # 2: empty
        "{no JSON",  # 3: bad row
        chat_of(*EN),  # 4: another language
        {"messages": [{"role": "robot", "content": " ".join(EN)}]},  # 5: bad row
        chat_of(*ES_3, *(f"{turn} {n}" for n in range(60) for turn in ES)),  # 6: too long, and like no other
        chat_of(ES_2[0]),  # 7: nothing is supervised
        chat_of(*ES_2),
        chat_of(ES[0].upper(), ES[1].replace(",", " --"), system="Be brief."),  # 9: near duplicate of 1
        {"messages": [{"role": "user", "content": f"{' '.join(ES)} \ud800"}]},  # 10: bad row
        chat_of(f"  {ES_2[0]}", f"{ES_2[1]}\n", system=None),  # 11: near duplicate of 8
        chat_of(*ES_3),
    ]
    instructions = [
        {"instruction": ES_3[0], "output": ES_3[1].replace("Vela", "— Vela")},  # near duplicate of the chat
        {"instruction": f"Traduce al español: {EN[0]}", "input": "", "output": poem},
        {"instruction": EN[0], "output": EN[1]},
    ]
    return [texts, write_rows(folder / "c.jsonl", chats), write_rows(folder / "i.jsonl", instructions)]


OPTIONS = {
    "language": "es",
    "near_duplicates": 0.8,
    "on_bad_rows": "skip",
    "too_long": "drop",
    "max_length": 512,
    "validation_split": 0,
}


def test_chats_beside_texts_are_left_out_for_what_is_wrong_with_each(
    tmp_path: Path, chatml_dir: Path, sources: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    tokenize(tmp_path / "out", chatml_dir, *sources, **OPTIONS)
    manifest = manifest_of(tmp_path / "out")
    expected = {"bad_row": 3, "empty": 1, "nothing_supervised": 1, "too_long": 1}
    assert manifest.ledger.documents_skipped == {**expected, "other_language": 3, "near_duplicate": 3}
    assert [source.documents for source in manifest.sources] == [1, 3, 1]
    assert "3 near duplicate" in capsys.readouterr().out
    lines = [json.loads(line) for line in (tmp_path / "out" / "dropped.jsonl").read_text(encoding="utf-8").splitlines()]
    places = {(line["reason"], line["place"].rpartition("/")[2]): line for line in lines}
    assert places.keys() == {
        ("other_language", "t.jsonl:2"),
        ("other_language", "c.jsonl:4"),
        ("other_language", "i.jsonl:3"),
        ("near_duplicate", "c.jsonl:9"),
        ("near_duplicate", "c.jsonl:11"),
        ("near_duplicate", "i.jsonl:1"),
    }
    assert places["other_language", "c.jsonl:4"]["text"] == "\n".join(EN)
    originals = {"c.jsonl:9": "c.jsonl:1", "c.jsonl:11": "c.jsonl:8", "i.jsonl:1": "c.jsonl:12"}
    for place, original in originals.items():
        assert places["near_duplicate", place]["detail"].endswith(original)


def test_shards_of_mixed_sources_merge_to_one_run_byte_for_byte(
    tmp_path: Path, chatml_dir: Path, sources: list[Path]
) -> None:
    sizes = ShardSizes(smallest=6_000)
    flags = option_words({**OPTIONS, "dataset": sources, "tokenizer_name": chatml_dir})
    tokenize_dataset.main([*flags, "--num_proc", "2", "--output_dir", str(tmp_path / "one")], sizes)
    for task in "12":
        flags_of_task = ["--shard", f"{task}/2", "--num_proc", "1", "--output_dir", f"{tmp_path}/{task}"]
        tokenize_dataset.main([*flags, *flags_of_task], sizes)
    merge.main([f"{tmp_path}/2", f"{tmp_path}/1", "--output_dir", str(tmp_path / "merged")], sizes)
    for file in (path for path in (tmp_path / "one").rglob("*") if path.is_file()):
        assert (tmp_path / "merged" / file.relative_to(tmp_path / "one")).read_bytes() == file.read_bytes(), file


def test_a_bad_chat_in_another_language_is_reported_and_not_dropped(tmp_path: Path, chatml_dir: Path) -> None:
    rows = [chat_of(*ES), {"messages": [{"role": "robot", "content": " ".join(EN)}]}, chat_of(*EN)]
    source = write_rows(tmp_path / "c.jsonl", rows)
    with pytest.raises(InputError, match=r"c\.jsonl, line 2: role \"robot\" of turn 1 is not one of"):
        tokenize(tmp_path / "out", chatml_dir, source, language="es")


def test_switches_for_texts_are_refused_for_chats_with_their_reasons(tmp_path: Path, chatml_dir: Path) -> None:
    sources = write_jsonl(tmp_path / "t.jsonl"), write_rows(tmp_path / "c.jsonl", [chat_of(*ES)])
    options = {"boilerplate": 10, "quality": "gopher", "language": "es", "language_by": "paragraph"}
    with pytest.raises(InputError) as raised:
        tokenize(tmp_path / "out", chatml_dir, *sources, **options)
    assert raised.value.faults == tuple(
        f"--{name} does not work with chats ({reason}), but a source has messages; tokenize that source without "
        f"--{name}, then merge"
        for name, reason in {
            "boilerplate": "it would remove single lines from a turn",
            "language_by paragraph": "it would remove single paragraphs from a turn",
            "quality": "its rules are for web pages, but a good answer may be a single word",
        }.items()
    )
    assert not (tmp_path / "out").exists()
