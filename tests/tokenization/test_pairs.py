"""Preference pairs are read in each form, encoded as two chats, shortened, cleaned, packed and checked."""

import itertools
import json
import math
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import load_from_disk
from hypothesis import given, settings
from hypothesis import strategies as st

from fabric_train.cleaning.cleaner import Cleaner
from fabric_train.cleaning.language import LanguageFilter
from fabric_train.cleaning.personal_data import open_redaction
from fabric_train.cleaning.results import Dropped
from fabric_train.cli.errors import InputError
from fabric_train.inspection.split_check import PairSequences, pair_faults
from fabric_train.reading.documents import BadRowError, EncodedDocument, LeftOut, Pair
from fabric_train.reading.sources import open_sources
from fabric_train.token_dataset import manifest
from fabric_train.token_dataset.arrow_folder import write_dataset_dict, write_split
from fabric_train.token_dataset.rows import plan_rows
from fabric_train.token_dataset.spooled_documents import SpooledDocuments, SpooledFile
from fabric_train.token_dataset.token_folder import RowBatch
from fabric_train.tokenization.chats.chat_encoder import ChatEncoder
from fabric_train.tokenization.chats.formats import columns, detect_format, read_chat, read_pair
from fabric_train.tokenization.corpus import find_kind
from fabric_train.tokenization.pairs import PairEncoder

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
Turns = list[dict[str, Any]]


def say(*contents: str) -> Turns:
    """Return a conversation in which user and assistant alternate."""
    roles = itertools.cycle(["user", "assistant"])
    return [{"role": role, "content": content} for role, content in zip(roles, contents, strict=False)]


def answer(content: str) -> dict[str, Any]:
    return {"role": "assistant", "content": content}


SYSTEM = {"role": "system", "content": "Be brief."}
LONG = {"chosen": say("Hi", "Ho", "How many?", "Seven."), "rejected": say("Hi", "Ho", "How many?", "None at all.")}
FORMS: dict[str, dict[str, Any]] = {
    "whole conversations": LONG,
    "whole conversations whose user the prompt repeats": {**LONG, "prompt": "How many? "},
    "answers to messages": {
        "prompt": LONG["chosen"][:3],
        "chosen": [answer("Seven.")],
        "rejected": [answer("None at all.")],
    },
    "whole conversations beside their prompt": {**LONG, "prompt": LONG["chosen"][:3]},
    "texts after messages": {"prompt": LONG["chosen"][:3], "chosen": "Seven.", "rejected": "None at all."},
    "ShareGPT": {
        "conversations": [
            {"from": "human", "value": "Hi"},
            {"from": "gpt", "value": "Ho"},
            {"from": "human", "value": "How many?"},
        ],
        "chosen": {"from": "gpt", "value": "Seven."},
        "rejected": {"from": "gpt", "value": "None at all."},
    },
}
SHORT = {"chosen": "Seven.", "rejected": "None at all."}
SHORT_FORMS: dict[str, dict[str, Any]] = {
    "texts": {**SHORT, "prompt": "How many?"},
    "texts with a question": {**SHORT, "question": "How many?"},
    "texts with an instruction": {**SHORT, "instruction": "How many?", "input": ""},
    "messages after a text": {
        "prompt": "How many?",
        "chosen": [answer("Seven.")],
        "rejected": [answer("None at all.")],
    },
}


@pytest.mark.parametrize("form", [*FORMS, *SHORT_FORMS])
def test_every_form_of_a_pair_is_detected_and_read(form: str) -> None:
    row = {**FORMS, **SHORT_FORMS}[form]
    assert detect_format(row) == "preference"
    assert set(row) <= set(columns("preference"))
    prompt = say("Hi", "Ho", "How many?") if form in FORMS else say("How many?")
    pair = read_pair(row)
    assert (pair.prompt, pair.chosen, pair.rejected) == (prompt, [answer("Seven.")], [answer("None at all.")])
    with_system = read_pair({**row, "system": "Be brief."})
    assert with_system.prompt == [SYSTEM, *prompt]


def test_answers_of_several_turns_begin_where_the_conversations_part() -> None:
    pair = read_pair(
        {"chosen": say("Hi", "Ho", "And?", "Yes.", "So?", "Go."), "rejected": say("Hi", "Ho", "And?", "No.")}
    )
    assert (len(pair.prompt), len(pair.chosen), len(pair.rejected)) == (3, 3, 1)
    longer = read_pair({"chosen": say("Hi", "Ho"), "rejected": say("Hi", "Ho", "And?", "No.")})
    assert (len(longer.prompt), len(longer.chosen), len(longer.rejected)) == (1, 1, 3)


@pytest.mark.parametrize(
    ("ratings", "margin"),
    [
        ({"score_chosen": 8.5, "score_rejected": 6}, 2.5),
        ({"chosen-rating": 3, "rejected-rating": 4}, -1.0),
        ({"score_chosen": 8.5, "score_rejected": None}, math.nan),
        ({"score_chosen": math.inf, "score_rejected": 1.0}, math.nan),
        ({"score_chosen": 10**400, "score_rejected": 1.0}, math.nan),
    ],
)
def test_ratings_are_kept_as_a_margin(ratings: dict[str, Any], margin: float) -> None:
    assert read_pair({**LONG, **ratings}).rating_margin == pytest.approx(margin, nan_ok=True)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (SHORT, "texts without a prompt; add the prompt as a column named prompt"),
        (
            {"chosen": "\n\nHuman: Hi\n\nAssistant: Ho", "rejected": "\n\nHuman: Hi\n\nAssistant: No"},
            "without a prompt",
        ),
        ({"chosen": [answer("a")], "rejected": [answer("b")]}, "answers without a prompt"),
        (
            {"chosen": say("Hi", "Ho"), "rejected": say("He", "Ho")},
            "differ in the prompt, before the assistant's answer",
        ),
        ({"chosen": say("Hi", "Ho", "x", "y"), "rejected": say("Hi", "Ho", "z", "y")}, "differ in the prompt"),
        ({"chosen": say("Hi", "Ho", "Go"), "rejected": say("Hi", "Ho")}, "must end with the assistant's answer"),
        ({**LONG, "prompt": "Something else"}, "the prompt is not among the user's turns in chosen"),
        (
            {"chosen": [SYSTEM, *LONG["chosen"]], "rejected": [SYSTEM, *LONG["rejected"]], "system": "Go."},
            "column system",
        ),
        ({"chosen": ["Hi"], "rejected": say("Hi", "Ho")}, "a list of objects"),
        ({"chosen": say("Hi", "Ho")}, "'rejected' is missing"),
    ],
)
def test_a_row_that_is_no_pair_is_shown_with_the_accepted_form(row: dict[str, Any], reason: str) -> None:
    with pytest.raises(BadRowError) as raised:
        read_pair(row)
    assert reason in str(raised.value)
    assert "accepted: chosen, rejected" in str(raised.value)
    assert raised.value.reason == manifest.BAD_ROW


def test_empty_and_equal_answers_have_reasons_of_their_own() -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"chosen": say("Hi", " "), "rejected": say("Hi", "Ho")}, manifest.EMPTY_ANSWER),
        ({"prompt": "Hi", "chosen": "Ho", "rejected": ""}, manifest.EMPTY_ANSWER),
        ({"chosen": say("Hi", "Ho"), "rejected": say("Hi", "Ho")}, manifest.EQUAL_ANSWERS),
    ]
    for row, reason in cases:
        with pytest.raises(BadRowError) as raised:
            read_pair(row)
        assert raised.value.reason == reason


def test_training_streams_chats_beside_pairs_and_refuses_pairs(tmp_path: Path) -> None:
    for name, row in {"both": {**LONG, "messages": LONG["chosen"]}, "pairs": LONG}.items():
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(row) + "\n")
    files = [str(tmp_path / f"{name}.jsonl") for name in ("both", "pairs")]
    both, pairs = open_sources(files, "--dataset", False, tmp_path)
    assert find_kind(both, "text", False) == "messages"
    assert find_kind(both, "text", False, with_pairs=True) == "preference"
    with pytest.raises(
        InputError, match=r"this is a preference pair; write a token dataset with fabric-train tokenize first"
    ):
        find_kind(pairs, "text", False)
    with pytest.raises(BadRowError, match="a preference pair, where a chat is expected"):
        read_chat(LONG, "auto")


# ------------------------------------------------------------------------------------------------ tokens


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, chatml_dir: Path, small_llama3_dir: Path) -> dict[str, Path]:
    folder = Path(shutil.copytree(chatml_dir, tmp_path_factory.mktemp("pairs") / "tokenizer"))
    (folder / "chat_template.jinja").write_text(CHATML)
    return {"chatml": folder, "llama3": small_llama3_dir}


@pytest.fixture(scope="module")
def chats_of(folders: dict[str, Path]) -> Callable[[str], ChatEncoder]:
    return cache(lambda kind: ChatEncoder(folders[kind], "messages", "assistant", "drop", None))


contents = st.text(max_size=12).map(str.strip).filter(bool)


@st.composite
def pairs(draw: st.DrawFn) -> Pair:
    """Draw a pair of single answers to a prompt, which ends with the user's turn and may begin with a system turn."""
    num_questions = draw(st.integers(1, 4))
    num_turns = 2 * num_questions - 1
    prompt = say(*draw(st.lists(contents, min_size=num_turns, max_size=num_turns)))
    if draw(st.booleans()):
        prompt = [SYSTEM, *prompt]
    return Pair(prompt, [answer(draw(contents))], [answer(draw(contents))])


@pytest.mark.parametrize("kind", ["llama3", "chatml"])
@settings(max_examples=16, deadline=None)
@given(pair=pairs(), max_length=st.integers(20, 200))
def test_a_pair_is_two_chats_with_as_many_turns_of_one_prompt_as_fit(
    chats_of: Callable[[str], ChatEncoder], kind: str, pair: Pair, max_length: int
) -> None:
    chats = chats_of(kind)

    def expected(first_turn: int) -> EncodedDocument | None:
        """Return the tokens without the turns before this one, as supervised fine-tuning has them; None if too long."""
        prompt = [*(turn for turn in pair.prompt if turn["role"] == "system"), *pair.prompt[first_turn:]]
        chosen, rejected = chats.encode_all(Pair(prompt, pair.chosen, pair.rejected).conversations)
        assert isinstance(chosen, EncodedDocument)
        assert isinstance(rejected, EncodedDocument)
        assert chosen.supervised is not None
        assert rejected.supervised is not None
        ids = np.concatenate([chosen.input_ids, rejected.input_ids])
        supervised = np.concatenate([chosen.supervised, rejected.supervised])
        if len(ids) > max_length:
            return None
        return EncodedDocument(ids, supervised, num_characters=0, num_bytes=0)

    (result,) = PairEncoder(chats, "cut_start", max_length).encode_all([pair])
    if pair.chosen == pair.rejected:
        assert isinstance(result, BadRowError)
        assert result.reason == manifest.EQUAL_ANSWERS
        return
    user_turns = [index for index, turn in enumerate(pair.prompt) if turn["role"] == "user"]
    longest: EncodedDocument | None = None  # that fits
    for turn in user_turns:
        longest = expected(turn)
        if longest is not None:
            break
    (dropped,) = PairEncoder(chats, "drop", max_length).encode_all([pair])
    whole = expected(user_turns[0])
    assert isinstance(dropped, EncodedDocument if whole else LeftOut)
    if longest is None:
        assert isinstance(result, LeftOut)
        assert result.reason == manifest.TOO_LONG
        return
    assert isinstance(result, EncodedDocument)
    assert result.supervised is not None
    assert longest.supervised is not None
    assert result.input_ids.tolist() == longest.input_ids.tolist()
    assert result.supervised.tolist() == longest.supervised.tolist()
    if whole is None:
        assert isinstance(dropped, LeftOut)
        assert result.num_tokens_cut == dropped.num_tokens_cut - len(result.input_ids) > 0


def test_errors_keep_their_place_among_pairs(chats_of: Callable[[str], ChatEncoder]) -> None:
    bad = BadRowError("bad")
    results = list(PairEncoder(chats_of("chatml"), "drop", 500).encode_all([bad, read_pair(LONG), bad]))
    assert [results[0], results[2]] == [bad, bad]
    assert isinstance(results[1], EncodedDocument)
    assert results[1].pair is not None
    rejected_at, chosen, rejected, is_prefix, *_ = results[1].pair[0].tolist()
    assert results[1].supervised is not None
    halves = np.split(results[1].supervised, [rejected_at])
    assert [int(half.sum()) for half in halves] == [chosen, rejected]
    assert not is_prefix
    (prefix,) = PairEncoder(chats_of("chatml"), "drop", 500).encode_all(
        [Pair(say("Hi"), [answer("Yes")], [answer("Yes, so")])]
    )
    assert isinstance(prefix, EncodedDocument)
    assert prefix.pair is not None
    assert prefix.pair["is_prefix"].all()


# ------------------------------------------------------------------------------------------------ cleaning


def test_a_pair_is_kept_if_both_conversations_are_and_its_prompt_is_changed_once() -> None:
    question = "¿Puedo renovar por internet los dos libros que me llevé la semana pasada? Soy ana@uni.es."
    spanish = "Sí, puedes renovarlos dos veces desde tu cuenta, salvo que otra persona los haya reservado antes."
    english = "They are on the second floor, to the left of the stairs. " * 4
    pair = Pair(say(question), [answer(spanish)], [answer(f"{spanish} Escribe a bea@uni.es.")])
    cleaner = Cleaner({"redact": open_redaction(["email"])}, near_duplicates=0.8)
    cleaned = cleaner.clean_chat(pair)
    assert not isinstance(cleaned, Dropped)
    assert sum(cleaned.edits.values()) == 2
    assert cleaned.signature is not None
    assert [turn["content"] for turn in cleaned.content.joined.messages] == [
        question.replace("ana@uni.es", "<EMAIL>"),
        spanish,
        f"{spanish} Escribe a <EMAIL>.",
    ]
    filtered = Cleaner({"language": LanguageFilter(("es",), 0.65, "document")}, None)
    assert not isinstance(filtered.clean_chat(pair), Dropped)
    assert isinstance(filtered.clean_chat(Pair(pair.prompt, pair.chosen, [answer(english)])), Dropped)
    assert isinstance(filtered.clean_chat(Pair(pair.prompt, [answer(english)], pair.rejected)), Dropped)


# ------------------------------------------------------------------------------------------------ rows


@settings(max_examples=16, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(3, 20), st.integers(3, 20)), min_size=1, max_size=30),
    seed=st.integers(0, 9),
    is_packed=st.booleans(),
)
def test_rows_hold_whole_pairs_with_two_borders_each(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[tuple[int, int]], seed: int, is_packed: bool
) -> None:
    folder = tmp_path_factory.mktemp("rows")
    max_length = 48
    pad = -1
    sizes = np.array(lengths, dtype=np.int64)  # [pairs, 2], of the chosen and the rejected sequence
    # sequence s has the tokens 1000 s, 1000 s + 1, ...
    sequences = [1000 * sequence + np.arange(size) for sequence, size in enumerate(sizes.ravel())]
    ids = np.concatenate(sequences)
    supervised = ids % 1000 >= 2  # prompts of two tokens
    (folder / "tokens").write_bytes(ids.astype(np.int32).tobytes())
    (folder / "masks").write_bytes(supervised.astype(np.uint8).tobytes())
    documents = SpooledDocuments(sizes.sum(axis=1), (SpooledFile(folder / "tokens", folder / "masks"),), sizes[:, 0])
    order = np.random.default_rng(seed).permutation(len(lengths))
    plan = plan_rows(documents.lengths, order, "best_fit" if is_packed else "none", max_length, 0)
    num_supervised, _ = write_split(folder / "train", documents, plan, pad)
    write_dataset_dict(folder, ["train"])
    rows = load_from_disk(folder)["train"].with_format("numpy")
    sequence_numbers: list[int] = []
    for row in rows:
        is_content = row["input_ids"] != pad
        content = row["input_ids"][is_content]
        starts = row["document_starts"]
        assert len(starts) % 2 == 0
        assert starts[0] == 0
        for sequence_ids in np.split(content, starts[1:]):
            sequence = int(sequence_ids[0]) // 1000
            assert sequence_ids.tolist() == sequences[sequence].tolist()
            sequence_numbers.append(sequence)
        assert len(content) <= max_length
        is_target = is_content & (row["input_ids"] % 1000 >= 2)
        assert row["labels"].tolist() == np.where(is_target, row["input_ids"], -100).tolist()
    chosen = sequence_numbers[::2]
    rejected = sequence_numbers[1::2]
    assert rejected == [sequence + 1 for sequence in chosen]  # of the same pair
    assert sorted(sequence_numbers) == list(range(2 * len(lengths)))
    assert num_supervised == supervised.sum()


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (None, None),
        ("drop a border", "rows with half a pair of sequences"),
        ("unsupervised answer", "pairs of sequences without two supervised answers"),
        ("other prompt", "pairs of sequences with different prompts"),
        ("longer prompt", "pairs of sequences with different prompts"),
    ],
)
def test_what_is_wrong_with_pairs_is_found_by_row(change: str | None, fault: str | None) -> None:
    # two rows with two pairs each; a sequence has 3 tokens of prompt and 2 of answer
    ids = np.tile([5, 6, 7, 1, 2, 5, 6, 7, 3, 4], 4)
    supervised = np.tile([False, False, False, True, True], 8)
    begins = np.arange(0, 40, 5)
    rows = begins // 20
    if change == "drop a border":
        begins = np.delete(begins, 5)
        rows = np.delete(rows, 5)
    elif change == "unsupervised answer":
        supervised[28:30] = False
    elif change == "other prompt":
        ids[25] = 9
    elif change == "longer prompt":
        supervised[21:23] = True
    stops = np.append(begins[1:], 40)
    batch = RowBatch(0, ids, np.array([0, 20, 40]), np.where(supervised, ids, -100), begins % 20, rows)
    sequences = PairSequences(begins, stops, rows)
    rows_by_fault: dict[str, list[int]] = {}
    for kind, faulty_rows in pair_faults(batch, supervised, sequences, with_prompts=True):
        if len(faulty_rows):
            rows_by_fault[kind] = faulty_rows.tolist()
    assert rows_by_fault == ({} if fault is None else {fault: [1]})
