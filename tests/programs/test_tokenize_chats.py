"""tokenize_dataset.py on chats and instructions: labels, rows and counts."""

import json
import shutil
import sys
from hashlib import sha256
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from fabric_train.cli.errors import InputError
from fabric_train.cli.tables import CHAT_FORMATS
from fabric_train.data.token_dataset import open_dataset
from fabric_train.inspection.report import make_report
from fabric_train.programs import tokenize_dataset
from fabric_train.tokenization.chats import chat_template
from fabric_train.tokenization.merge import merge
from tests.support.programs import option_words
from tests.support.token_datasets import manifest_of, write_jsonl

QUESTIONS = [f"What is {number} plus {number}?" for number in range(30)]
ANSWERS = [f"It is {2 * number}." + " Really." * (number % 5) for number in range(30)]
FORMATS: dict[str, Any] = {
    "messages": lambda q, a: {"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": a}]},
    "conversations": lambda q, a: {"conversations": [{"from": "human", "value": q}, {"from": "gpt", "value": a}]},
    "alpaca": lambda q, a: {"instruction": q, "input": "", "output": a},
    "prompt_completion": lambda q, a: {"prompt": q, "completion": a},
}
PLAIN_TEXT = "Plain text, all of this is supervised."

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer_dir(tmp_path_factory: pytest.TempPathFactory, chatml_dir: Path) -> Path:
    """The small tokenizer with a template that adds no system message."""
    folder = Path(shutil.copytree(chatml_dir, tmp_path_factory.mktemp("chats") / "tokenizer"))
    (folder / "chat_template.jinja").write_text(CHATML)
    return folder


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def run(folder: Path, tokenizer: Path, *sources: Path, **options: object) -> datasets.DatasetDict:
    arguments = {
        "dataset": list(sources),
        "tokenizer_name": tokenizer,
        "output_dir": folder,
        "max_length": 128,
        "num_proc": 1,
        **options,
    }
    tokenize_dataset.main(option_words(arguments))
    return datasets.load_from_disk(folder)


def supervised_texts(split: datasets.Dataset, tokenizer: PreTrainedTokenizerFast) -> list[str]:
    """Return the texts of supervised runs of tokens, with control tokens."""
    texts = []
    for labels in np.array(split["labels"][:]):
        for run_ in np.split(labels, np.flatnonzero(np.diff(labels != -100)) + 1):
            if run_[0] != -100:
                texts.append(str(tokenizer.decode(run_)))
    return texts


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory, tokenizer_dir: Path) -> Path:
    """A dataset of chats in every row format, each with its own name in the answers, and of plain text."""
    folder = tmp_path_factory.mktemp("together")
    sources = [
        write(folder / f"{name}.jsonl", [make(q, a) for q, a in zip(QUESTIONS, answers_of(name), strict=True)])
        for name, make in FORMATS.items()
    ]
    texts = write_jsonl(folder / "text.jsonl", [PLAIN_TEXT] * 20)
    run(folder / "out", tokenizer_dir, *sources, texts, validation_split=0)
    return folder / "out"


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory, tokenizer_dir: Path) -> Path:
    """A dataset of nine chats with one turn each."""
    folder = tmp_path_factory.mktemp("plain")
    source = write(folder / "a.jsonl", [FORMATS["messages"]("Hi", "Ho")] * 9)
    run(folder / "out", tokenizer_dir, source, validation_split=0)
    return folder / "out"


def answers_of(name: str) -> list[str]:
    return [answer.replace("It", name) for answer in ANSWERS]


def test_only_answers_are_supervised_in_every_row_format_and_all_of_a_text(together: Path) -> None:
    rows = datasets.load_from_disk(together)["train"]
    tokenizer = PreTrainedTokenizerFast.from_pretrained(together / "tokenizer")
    expected = [f"{answer}<|im_end|>" for name in FORMATS for answer in answers_of(name)]
    supervised = supervised_texts(rows, tokenizer)
    answers = [text for text in supervised if not text.startswith("<|im_start|>")]
    assert sorted(answers) == sorted(expected)
    texts = "".join(text for text in supervised if text not in answers)  # nothing lies between two in a row
    assert texts == f"<|im_start|>{PLAIN_TEXT}<|im_end|>" * 20
    manifest = manifest_of(together)
    assert [source.documents for source in manifest.sources] == [30, 30, 30, 30, 20]
    assert manifest.tokenizer.end_of_turn_token_id == tokenizer.convert_tokens_to_ids("<|im_end|>")
    split = manifest.ledger.splits["train"]
    assert split.tokens_supervised == sum(label != -100 for labels in rows["labels"][:] for label in labels)
    assert split.tokens_padding / (split.rows * 128) < 0.15  # the last row of each of five sources has more


def test_rows_of_llama3_chats_load_as_batches_with_labels_and_borders(tmp_path: Path, small_llama3_dir: Path) -> None:
    source = write(tmp_path / "a.jsonl", [FORMATS["messages"](q, a) for q, a in zip(QUESTIONS, ANSWERS, strict=True)])
    run(tmp_path / "out", small_llama3_dir, source, packing="best_fit")
    batch = open_dataset(str(tmp_path / "out")).train.__getitems__([0, 1])
    assert batch.documents is not None
    assert 0 < (batch.labels != -100).sum() < batch.labels.numel() / 2
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tmp_path / "out" / "tokenizer")
    assert tokenizer.chat_template  # Llama-3's, which exports need
    manifest = manifest_of(tmp_path / "out")
    assert manifest.tokenizer.end_of_turn_token_id == tokenizer.convert_tokens_to_ids("<|eot_id|>")


def test_row_of_unknown_format_is_shown_with_file_line_and_formats(tmp_path: Path, tokenizer_dir: Path) -> None:
    source = write(tmp_path / "a.jsonl", [FORMATS["messages"]("Hi", "Ho"), {"messages": "Hello"}])
    with pytest.raises(InputError, match=r"line 2: .*accepted: messages \[.*Hello.*--on_bad_rows skip"):
        run(tmp_path / "out", tokenizer_dir, source, packing="none")
    with pytest.raises(InputError, match=r"no column 'text'; it has question; .*conversations .*the row: \{"):
        run(tmp_path / "out", tokenizer_dir, write(tmp_path / "b.jsonl", [{"question": "Hi"}]))


def test_tokenizer_without_chat_template_is_refused_for_chats(tmp_path: Path, tiny_model_dir: Path) -> None:
    source = write(tmp_path / "a.jsonl", [FORMATS["messages"]("Hi", "Ho")])
    with pytest.raises(InputError, match="no chat template"):
        run(tmp_path / "out", tiny_model_dir, source)
    assert not (tmp_path / "out").exists()


# ------------------------------------------------------------------------------------------------ what chats lose


def chats_of(*contents: tuple[str, ...]) -> list[Any]:
    """Return rows with one chat for each tuple of contents, which user and assistant say in turn."""
    return [
        {"messages": [{"role": ("user", "assistant")[n % 2], "content": content} for n, content in enumerate(chat)]}
        for chat in contents
    ]


LONG_CHAT = tuple(f"turn {number} is a sentence" for number in range(14))


def problems_in_chats(folder: Path) -> list[str]:
    """Return what the inspector says about chats."""
    report = make_report(folder, "train", range(0), lambda done, total: None)
    return [problem.text for problem in report.problems if problem.split == "chats"]


def test_packing_that_cuts_no_chat_is_the_default_for_chats(together: Path, plain: Path) -> None:
    assert manifest_of(plain).settings.packing == "best_fit"  # chats alone
    assert manifest_of(together).settings.packing == "best_fit"  # and chats with text
    assert problems_in_chats(plain) == problems_in_chats(together) == []


def test_concat_is_the_default_for_text_alone(tmp_path: Path, tokenizer_dir: Path) -> None:
    source = write_jsonl(tmp_path / "text.jsonl", [PLAIN_TEXT] * 20)
    run(tmp_path / "out", tokenizer_dir, source, max_length=32, validation_split=0)
    assert manifest_of(tmp_path / "out").settings.packing == "concat"
    assert problems_in_chats(tmp_path / "out") == []


def test_chats_that_rows_cut_are_counted_and_complained_of(
    tmp_path: Path, tokenizer_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chats = chats_of(*[("Hi", f"It is {number}. " * 12) for number in range(20)])
    source = write(tmp_path / "chats.jsonl", chats)
    texts = write_jsonl(tmp_path / "text.jsonl", ["Plain text, all of this is supervised. " * 9] * 9)
    rows = run(tmp_path / "out", tokenizer_dir, source, texts, max_length=64, packing="concat", validation_split=0)
    severed = set()
    document = -1
    for labels, starts in zip(rows["train"]["labels"][:], rows["train"]["document_starts"][:], strict=True):
        continued = labels[: starts[0] if starts else 64]
        if document < len(chats) and any(label != -100 for label in continued):
            severed.add(document)
        document += len(starts)
    assert manifest_of(tmp_path / "out").ledger.splits["train"].chats_severed == len(severed) > 10
    (problem,) = problems_in_chats(tmp_path / "out")
    assert problem.startswith(f"{len(severed)} of 29 documents are chats that continue in another row")
    assert problem.endswith("use --packing best_fit")
    assert f"warning    {problem}" in capsys.readouterr().out


def test_a_chat_whose_cut_loses_nothing_supervised_is_not_severed(tmp_path: Path, tokenizer_dir: Path) -> None:
    # the question fills the first row and more, and all answers lie in the row in which their chat begins
    chats = chats_of(("Hi", "Ho", "And then? " * 40))
    source = write(tmp_path / "a.jsonl", chats)
    run(tmp_path / "out", tokenizer_dir, source, max_length=32, packing="concat", validation_split=0)
    assert manifest_of(tmp_path / "out").ledger.splits["train"].chats_severed == 0


@pytest.mark.parametrize("too_long", ["cut_end", "cut_start", "drop"])
def test_long_chats_are_cut_at_turns_or_dropped_and_complained_of(
    tmp_path: Path, tokenizer_dir: Path, capsys: pytest.CaptureFixture[str], too_long: str
) -> None:
    source = write(tmp_path / "a.jsonl", chats_of(*[("Hi", "Ho")] * 9, LONG_CHAT))
    folder = tmp_path / "out"
    run(folder, tokenizer_dir, source, max_length=64, too_long=too_long, packing="none", validation_split=0)
    ledger = manifest_of(folder).ledger
    cut = ledger.tokens_cut["too_long"]
    kept = ledger.splits["train"].tokens_in
    if too_long == "drop":
        assert (ledger.documents_kept, ledger.documents_skipped) == (9, {"too_long": 1})
        assert cut > 200  # the whole chat
    else:
        assert (ledger.documents_kept, ledger.documents_skipped) == (10, {})
        assert 100 < cut < 200
    share = f"{cut:,} of {cut + kept:,} tokens ({cut / (cut + kept):.0%}) were cut off"
    (problem,) = problems_in_chats(folder)
    assert problem.startswith(share)
    assert f"warning    {share}" in capsys.readouterr().out


def test_less_than_five_percent_cut_off_is_not_complained_of(tmp_path: Path, tokenizer_dir: Path) -> None:
    source = write(tmp_path / "a.jsonl", chats_of(*[("Hi", "Ho")] * 400, LONG_CHAT))
    run(tmp_path / "out", tokenizer_dir, source, max_length=64, validation_split=0)
    ledger = manifest_of(tmp_path / "out").ledger
    assert 0 < ledger.tokens_cut["too_long"] < 0.05 * ledger.splits["train"].tokens_in
    assert problems_in_chats(tmp_path / "out") == []


# -------------------------------------------------------------------------------------------------- --chat_template


OTHER_TEMPLATE = CHATML.replace("<|im_start|>", "<|im_start|>the ")


def test_the_chosen_template_is_used_and_becomes_the_tokenizers_own(tmp_path: Path, tokenizer_dir: Path) -> None:
    folder = Path(shutil.copytree(tokenizer_dir, tmp_path / "tokenizer"))
    (folder / "chat_template.jinja").unlink()
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": CHATML}))
    file = tmp_path / "mine.jinja"
    file.write_text(OTHER_TEMPLATE)
    source = write(tmp_path / "a.jsonl", [FORMATS["messages"](q, a) for q, a in zip(QUESTIONS, ANSWERS, strict=True)])
    rows = run(tmp_path / "out", folder, source, chat_template=file, train_on="last")["train"]
    saved = tmp_path / "out" / "tokenizer"
    tokenizer = PreTrainedTokenizerFast.from_pretrained(saved)
    assert tokenizer.decode(rows["input_ids"][0]).startswith("<|im_start|>the user\nWhat is ")
    assert tokenizer.chat_template == (saved / "chat_template.jinja").read_text() == OTHER_TEMPLATE
    assert "chat_template" not in json.loads((saved / "tokenizer_config.json").read_text())
    manifest = manifest_of(tmp_path / "out")
    assert manifest.settings.chat_template == str(file)
    assert manifest.tokenizer.chat_template_sha256 == sha256(OTHER_TEMPLATE.encode()).hexdigest()


def test_a_chosen_template_is_never_replaced_by_llama3s(tmp_path: Path, small_llama3_dir: Path) -> None:
    file = tmp_path / "mine.jinja"
    file.write_text("{{ messages[0].content }}")  # cannot mark an assistant's turn
    source = write(tmp_path / "a.jsonl", [FORMATS["messages"]("Hi", "Ho")])
    with pytest.raises(InputError, match="cannot mark the assistant's tokens"):
        run(tmp_path / "out", small_llama3_dir, source, chat_template=file)
    assert not (tmp_path / "out").exists()


def test_a_template_that_never_ends_is_one_fault(
    tmp_path: Path, tokenizer_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat_template, "_SECONDS", 0.2)
    folder = Path(shutil.copytree(tokenizer_dir, tmp_path / "tokenizer"))
    loop = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    (folder / "chat_template.jinja").write_text(loop)
    source = write(tmp_path / "a.jsonl", [FORMATS["messages"]("Hi", "Ho")])
    with pytest.raises(InputError) as raised:
        run(tmp_path / "out", folder, source)
    (fault,) = raised.value.faults
    assert fault.startswith(
        "the tokenizer has an unusable chat template (the chat template is still running after 0.2 s"
    )
    assert "\n" not in fault
    assert not (tmp_path / "out").exists()


def test_a_tokenizers_template_that_is_not_utf_8_is_refused(tmp_path: Path, tokenizer_dir: Path) -> None:
    folder = Path(shutil.copytree(tokenizer_dir, tmp_path / "tokenizer"))
    (folder / "chat_template.jinja").write_bytes(b"{{ '\xff' }}")
    source = write(tmp_path / "a.jsonl", [FORMATS["messages"]("Hi", "Ho")])
    with pytest.raises(InputError, match=r"chat_template.jinja: byte 4 is not UTF-8 \(0xff\)"):
        run(tmp_path / "out", folder, source)


# ------------------------------------------------------------------------------------------------------ large rows


def test_rows_that_the_disk_cannot_hold_are_refused_at_once(
    tmp_path: Path, tokenizer_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write(tmp_path / "a.jsonl", [FORMATS["messages"]("Hi", "Ho")] * 400)
    disk = shutil.disk_usage(tmp_path)._replace(free=5 * 10**9)
    monkeypatch.setattr(shutil, "disk_usage", lambda _folder: disk)
    options = {"packing": "none", "max_length": 2**24}
    with pytest.raises(InputError, match=r"rows of 16,777,216 tokens, 100% .* need .* has 5\.0 GB left"):
        run(tmp_path / "out", tokenizer_dir, source, **options)
    assert not (tmp_path / "out").exists()


def test_turns_of_tools_and_of_text_end_with_tokens_of_their_own(
    tmp_path: Path, tokenizer_dir: Path, plain: Path
) -> None:
    folder = Path(shutil.copytree(tokenizer_dir, tmp_path / "tokenizer"))
    by_turn = "('<|endoftext|>' if 'call' in message['content'] else '<|im_end|>')"
    (folder / "chat_template.jinja").write_text(CHATML.replace("'<|im_end|>\n'", by_turn + " + '\n'"))
    chats = chats_of(("Hi", "call it", "so?", "Ho"), ("Hi", "Ho"))
    run(tmp_path / "out", folder, write(tmp_path / "a.jsonl", chats), packing="none", validation_split=0)
    tokenizer = manifest_of(tmp_path / "out").tokenizer
    assert tokenizer.turn_end_token_ids == (0, 2)
    assert manifest_of(plain).tokenizer.turn_end_token_ids == (2,)


def test_a_merged_dataset_knows_the_ends_of_all_turns(tmp_path: Path, tokenizer_dir: Path, plain: Path) -> None:
    folders = [plain, tmp_path / "all"]
    run(folders[1], tokenizer_dir, plain.parent / "a.jsonl", validation_split=0, train_on="all")
    assert manifest_of(folders[1]).tokenizer.stop_token_ids == (2,)
    manifest, _ = merge([*reversed(folders)], tmp_path / "merged")
    assert manifest.tokenizer.turn_end_token_ids == manifest_of(folders[0]).tokenizer.turn_end_token_ids == (2,)


def test_columns_beside_a_text_are_named(
    tmp_path: Path, tokenizer_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"text": f"Text {number}.", "label": 1, "topic": ""} for number in range(30)]
    short = {"max_length": 16, "packing": "best_fit", "validation_split": 0}
    lines = write(tmp_path / "a.jsonl", [*rows, {"text": "The last.", "topic": "sums"}])
    run(tmp_path / "lines", tokenizer_dir, lines, **short)
    assert "a.jsonl: columns not used: label, topic" in capsys.readouterr().out
    assert manifest_of(tmp_path / "lines").sources[0].unused_columns == ("label", "topic")
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "b.parquet")
    run(tmp_path / "table", tokenizer_dir, tmp_path / "b.parquet", **short)
    assert "b.parquet: columns not used: label, topic" in capsys.readouterr().out


def test_turns_that_are_rows_of_their_own_are_no_texts(tmp_path: Path, tokenizer_dir: Path) -> None:
    rows = [{"text": "Which town?", "role": "prompter", "parent_id": None}, {"text": "Sueca.", "role": "assistant"}]
    file = write(tmp_path / "oasst.jsonl", rows)
    with pytest.raises(InputError, match="one turn of a conversation") as refused:
        run(tmp_path / "out", tokenizer_dir, file)
    assert "oasst.jsonl, line 1: " in str(refused.value)
    run(tmp_path / "out", tokenizer_dir, file, data_format="text", validation_split=0, packing="none")
    assert manifest_of(tmp_path / "out").sources[0].unused_columns == ("role",)


FORMAT_MODULE = """
from fabric_train import CHAT_FORMATS
from fabric_train.tokenization.chats.formats import ChatFormat
from fabric_train.reading.documents import Chat


def read(columns, turns):
    user, assistant = columns["dialogue"]
    return Chat([{"role": "user", "content": user}, {"role": "assistant", "content": assistant}])


CHAT_FORMATS["pairs-of-lines"] = ChatFormat(
    example="dialogue [question, answer]",
    columns=("dialogue",),
    recognises=lambda row: isinstance(row.get("dialogue"), list),
    read=read,
)
"""


def test_a_format_of_a_module_is_read_and_recorded(
    tmp_path: Path, tokenizer_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = tmp_path / "line_formats.py"
    module.write_text(FORMAT_MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    rows = [{"dialogue": ["Which town?", f"Town {number}."], "text": "x", "id": number} for number in range(4)]
    words = ["--dataset", str(write(tmp_path / "a.jsonl", rows)), "--tokenizer_name", str(tokenizer_dir)]
    words += ["--validation_split", "0", "--max_length", "64", "--num_proc", "1"]
    try:
        tokenize_dataset.main([*words, "--output_dir", "out", "--extensions", "line_formats"])
        split = datasets.load_from_disk(str(tmp_path / "out"))["train"]
        tokenizer = PreTrainedTokenizerFast.from_pretrained(tokenizer_dir)
        expected = [f"Town {number}.<|im_end|>" for number in range(4)]
        assert "".join(supervised_texts(split, tokenizer)) == "".join(expected)
        manifest = manifest_of(tmp_path / "out")
        assert [(one.name, one.module) for one in manifest.chat_formats] == [("pairs-of-lines", "line_formats")]
        assert manifest.settings.extensions == ["line_formats"]
        assert manifest.sources[0].unused_columns == ("id", "text")
        assert CHAT_FORMATS.registered == ["pairs-of-lines"]
        module.write_text(FORMAT_MODULE + "# changed")
        pushed = [*words, "--output_dir", "out", "--extensions", "line_formats", "--push_to_hub", "me/tokens"]
        with pytest.raises(InputError, match="with another version of the data_format pairs-of-lines of line_formats"):
            tokenize_dataset.main(pushed)
        tokenize_dataset.main([*words, "--output_dir", "changed", "--extensions", "line_formats"])
        merged, notes = merge([tmp_path / "out", tmp_path / "changed"], tmp_path / "merged")
        assert len(merged.chat_formats) == 2
        assert any("different versions of the data_format pairs-of-lines" in note for note in notes)
    finally:
        CHAT_FORMATS.pop("pairs-of-lines", None)
        sys.modules.pop("line_formats", None)


def test_what_is_left_out_of_chats_is_counted_and_what_is_not_used_is_named(
    tmp_path: Path, tokenizer_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        {"instruction": QUESTIONS[0], "output": "Yes.", "text": "Below is an instruction.", "id": 7},
        {"instruction": QUESTIONS[1], "output": " ", "source": "a row that is left out"},
        {"instruction": QUESTIONS[2], "output": "No.", "label": False},
        {"instruction": QUESTIONS[3], "output": "Well.", "text": "Below", "topic": "sums"},
    ]
    split = run(tmp_path / "out", tokenizer_dir, write(tmp_path / "a.jsonl", rows), validation_split=0)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tokenizer_dir)
    assert supervised_texts(split["train"], tokenizer) == ["Yes.<|im_end|>", "Well.<|im_end|>"]
    manifest = manifest_of(tmp_path / "out")
    assert manifest.ledger.documents_skipped == {"empty_answer": 1, "undesirable_answer": 1}
    assert manifest.sources[0].unused_columns == ("id", "text", "topic")
    assert "a.jsonl: columns not used: id, text, topic" in capsys.readouterr().out
    assert not manifest.imbalances()
    run(
        tmp_path / "text",
        tokenizer_dir,
        tmp_path / "a.jsonl",
        validation_split=0,
        data_format="alpaca",
        max_documents=1,
    )
    assert manifest_of(tmp_path / "text").sources[0].unused_columns == ("id", "text", "topic")


def test_text_beside_a_chat_is_read_if_it_is_asked_for(tmp_path: Path, tokenizer_dir: Path) -> None:
    source = write(tmp_path / "a.jsonl", [{"body": "Plain.", **FORMATS["messages"]("Hi", "Ho")}])
    split = run(tmp_path / "out", tokenizer_dir, source, validation_split=0, text_column="body", max_length=5)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tokenizer_dir)
    assert "Plain" in tokenizer.decode(split["train"]["input_ids"][0])
