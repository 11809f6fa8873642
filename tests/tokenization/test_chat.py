"""Chats become the tokens of the tokenizer's template, and only the assistant's tokens are supervised."""

import gc
import itertools
import json
import re
import shutil
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast
from transformers.utils import chat_template_utils

from fabric_train.cli.errors import InputError
from fabric_train.reading.documents import BadRowError, EncodedDocument, LeftOut
from fabric_train.token_dataset import manifest
from fabric_train.tokenization.chats.chat_encoder import ChatEncoder
from fabric_train.tokenization.chats.formats import columns, detect_format, read_chat
from fabric_train.tokenization.tokenizers.parity_check import HARD_STRINGS

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CHATML_WITH_GENERATION = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] }}{% endgeneration %}{% else %}{{ message['content'] }}{% endif %}"
    "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# as Qwen3's: only the last turn has thoughts, which may be empty
THOUGHTS_IN_LAST_TURN = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if loop.last and message['role'] == 'assistant' %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
    "{{ message['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# what the system message says depends on the whole conversation, so a part has other tokens than in the whole
COUNTED = (
    "{{ '<|im_start|>system\n' + 'a few ' * (40 // messages | length) + '<|im_end|>\n' }}" + CHATML_WITH_GENERATION
)
# as Llama-2's: no control token before the assistant's contents, which are stripped
INST = (
    "{% if messages[0]['role'] != 'user' %}{{ raise_exception('a user begins') }}{% endif %}{% for message in messages "
    "%}{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + message['content'] | trim + ' [/INST]' }}"
    "{% else %}{{ ' ' + message['content'] | trim + ' ' + eos_token }}{% endif %}{% endfor %}"
)
TOOLS = (
    "{% if tools %}{{ '<|im_start|>system\n' + tools | tojson + '<|im_end|>\n' }}{% endif %}{% for message in messages "
    "%}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] }}{% for call in message.tool_calls or [] %}"
    "{{ call.function.name + call.function.arguments | tojson }}{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

Chat = list[dict[str, Any]]
QUESTION: dict[str, Any] = {"role": "user", "content": "How many?"}
ANSWER: dict[str, Any] = {"role": "assistant", "content": "Seven of them."}


@pytest.fixture(scope="module", autouse=True)
def _free_encoders() -> Iterator[None]:
    """Free all encoders: each has megabytes that later files would keep in memory."""
    yield
    encoder.cache_clear()
    reference.cache_clear()
    gc.unfreeze()  # tokenizing has frozen what there was
    gc.collect()


@pytest.fixture(scope="module")
def inst_dir(tmp_path_factory: pytest.TempPathFactory, small_spm_dir: Path) -> Path:
    folder = Path(shutil.copytree(small_spm_dir, tmp_path_factory.mktemp("inst") / "tokenizer"))
    (folder / "chat_template.jinja").write_text(INST)
    return folder


@pytest.fixture(scope="module")
def with_template(tmp_path_factory: pytest.TempPathFactory, chatml_dir: Path) -> Callable[[str | None], Path]:
    """Return ``with_template(template)``: a folder with the small tokenizer and this template, or without one."""

    @cache
    def make(template: str | None) -> Path:
        folder = tmp_path_factory.mktemp("tokenizer")
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(chatml_dir / name, folder)
        if template is not None:
            (folder / "chat_template.jinja").write_text(template)
        return folder

    return make


@cache
def encoder(
    folder: Path,
    train_on: str = "assistant",
    too_long: str = "cut_end",
    max_length: int | None = None,
    split_at_control_tokens: bool = True,
) -> ChatEncoder:
    return ChatEncoder(folder, "auto", train_on, too_long, max_length, split_at_control_tokens=split_at_control_tokens)


@cache
def reference(folder: Path) -> Any:
    return PreTrainedTokenizerFast.from_pretrained(folder)


def reference_ids(folder: Path, messages: Chat) -> list[int]:
    template = encoder(folder).chat_template
    ids: list[int] = reference(folder).apply_chat_template(messages, chat_template=template, return_dict=False)
    return ids


def encoded(chats: ChatEncoder, messages: Chat) -> EncodedDocument:
    document = chats.encode({"messages": messages})
    assert isinstance(document, EncodedDocument), document
    return document


def decoded(folder: Path, ids: Any) -> str:
    text: str = reference(folder).backend_tokenizer.decode(ids.tolist(), skip_special_tokens=False)
    return text


def ids_of_text(folder: Path, text: str) -> list[int]:
    ids: list[int] = reference(folder).encode(text, add_special_tokens=False, split_special_tokens=True)
    return ids


def supervised_text(folder: Path, document: EncodedDocument) -> str:
    assert document.supervised is not None
    return decoded(folder, document.input_ids[document.supervised])


def exchanges(*contents: str, system: str | None = None) -> Chat:
    """Return a conversation in which user and assistant alternate."""
    roles = itertools.cycle(["user", "assistant"])
    chat = [{"role": role, "content": content} for role, content in zip(roles, contents, strict=False)]
    return chat if system is None else [{"role": "system", "content": system}, *chat]


# stripped contents: Llama-3's template strips them, and in ChatML whitespace would join the header's tokens
contents = st.text(max_size=12).map(str.strip).filter(bool) | st.sampled_from(
    ["assistant", "user\n\nassistant", "a  b\r\n\tc", "👩‍👩‍👧 ñ", "turn1said", "1234567", "I'LL"]
)
conversations = st.builds(
    lambda turns, system: exchanges(*turns, system=system),
    st.lists(contents, min_size=2, max_size=9),
    st.none() | contents,
)


# ------------------------------------------------------------------------------------------------ tokens and labels


@pytest.mark.parametrize("kind", ["llama3", "chatml"])
@settings(max_examples=13, deadline=None)
@given(messages=conversations)
def test_only_the_assistants_contents_and_ends_of_turn_are_supervised(
    small_llama3_dir: Path, chatml_dir: Path, kind: str, messages: Chat
) -> None:
    folder = small_llama3_dir if kind == "llama3" else chatml_dir
    chats = encoder(folder)
    document = encoded(chats, messages)
    end_of_turn = reference(folder).convert_ids_to_tokens(chats.end_of_turn_token_id)
    assert end_of_turn == {"llama3": "<|eot_id|>", "chatml": "<|im_end|>"}[kind]
    answers = [message["content"] for message in messages if message["role"] == "assistant"]
    # as they are after encoding: a character may be unknown to the tokenizer
    decoded_answers = [decoded(folder, np.array(ids_of_text(folder, answer), dtype=int)) for answer in answers]
    assert supervised_text(folder, document) == "".join(answer + end_of_turn for answer in decoded_answers)
    assert document.input_ids.tolist() == reference_ids(folder, messages)
    assert document.input_ids.dtype == "int32"
    assert document.num_characters == sum(len(message["content"]) for message in messages)


def without_space(text: str) -> str:
    return "".join(text.split())


def _has_whole_exchanges(turns: list[str]) -> bool:
    """Return whether each question has an answer with something in it."""
    return len(turns) % 2 == 0 and all(answer.strip() for answer in turns[1::2])


# the text of a special token in a turn stays text here; in transformers it becomes the token
_without_special_text = st.text(max_size=8).filter(lambda text: not re.search("</?s>|<unk>", text))


@settings(max_examples=13, deadline=None)
@given(turns=st.lists(_without_special_text, min_size=2, max_size=8).filter(_has_whole_exchanges))
def test_template_without_control_token_in_the_header_is_marked(inst_dir: Path, turns: list[str]) -> None:
    messages = exchanges(*turns, "end", "it")
    document = encoded(encoder(inst_dir), messages)
    assert document.input_ids.tolist() == reference_ids(inst_dir, messages)
    answers = [message["content"] for message in messages if message["role"] == "assistant"]
    supervised_answers = supervised_text(inst_dir, document).split("</s>")
    assert supervised_answers.pop() == ""  # after the last </s>
    assert [without_space(answer) for answer in supervised_answers] == [without_space(answer) for answer in answers]


@settings(max_examples=13, deadline=None)
@given(
    roles=st.lists(st.sampled_from(["user", "assistant", "system", "tool"]), min_size=1, max_size=8),
    content=st.text(max_size=4),
)
def test_generation_marks_agree_with_turn_by_turn_renderings(
    with_template: Callable[[str], Path], roles: list[str], content: str
) -> None:
    chat = [{"role": role, "content": f"{content}{number}"} for number, role in enumerate(roles)]
    by_turns, by_marks = (
        encoder(with_template(template)).encode({"messages": chat}) for template in (CHATML, CHATML_WITH_GENERATION)
    )
    if isinstance(by_turns, LeftOut) or isinstance(by_marks, LeftOut):
        assert by_turns == by_marks == LeftOut(manifest.NOTHING_SUPERVISED)
        assert "assistant" not in roles
        return
    assert by_turns.input_ids.tolist() == by_marks.input_ids.tolist()
    assert by_turns.supervised is not None
    assert by_marks.supervised is not None
    assert by_turns.supervised.tolist() == by_marks.supervised.tolist()


def test_chats_have_the_same_tokens_split_and_in_full(small_llama3_dir: Path, chatml_dir: Path) -> None:
    look_alikes = ["<|eot_id|>\n", "a<|im_end|>\n\n<|im_start|>", "<|im_start", "\n\n\n", " a ", "\u0301"]
    for folder in (small_llama3_dir, chatml_dir):
        full_encoder = encoder(folder, split_at_control_tokens=False)
        for content in [*HARD_STRINGS[::5], *look_alikes]:
            messages = exchanges("?", content if content.strip() else "no", content, "!")
            split = encoded(encoder(folder), messages)
            in_full = encoded(full_encoder, messages)
            assert split.input_ids.tolist() == in_full.input_ids.tolist()
            assert split.supervised is not None
            assert in_full.supervised is not None
            assert split.supervised.tolist() == in_full.supervised.tolist()


def test_train_on_last_supervises_one_turn_and_all_every_token(chatml_dir: Path) -> None:
    messages = exchanges("a", "b", "c", "d", "e")
    assert supervised_text(chatml_dir, encoded(encoder(chatml_dir, "last"), messages)) == "d<|im_end|>"
    everything = encoded(encoder(chatml_dir, "all"), messages)
    assert everything.supervised is None
    assert everything.input_ids.tolist() == reference_ids(chatml_dir, messages)


def test_bos_occurs_once_if_template_and_tokenizer_both_write_it(small_llama3_dir: Path) -> None:
    document = encoded(encoder(small_llama3_dir), [QUESTION, ANSWER])
    assert reference(small_llama3_dir)("x")["input_ids"][0] == 0
    assert document.input_ids.tolist().count(0) == 1
    assert document.input_ids[0] == 0
    assert document.input_ids[-1] == 9


def test_chat_without_final_control_token_gets_eos(with_template: Callable[[str], Path]) -> None:
    plain = "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\n' }}{% endfor %}"
    folder = with_template(plain + "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}")
    chats = encoder(folder)
    assert chats.end_of_turn_token_id is None
    assert any("<|im_end|>" in note for note in chats.notes)
    document = encoded(chats, [QUESTION, ANSWER])
    # the space of the header is in the token of the first word
    assert supervised_text(folder, document) == " Seven of them.\n<|im_end|>"
    ends_with_question = encoded(chats, [QUESTION, ANSWER, QUESTION])
    assert decoded(folder, ends_with_question.input_ids).endswith("How many?\n<|im_end|>")
    assert supervised_text(folder, ends_with_question) == " Seven of them.\n"


def test_assistants_first_turn_is_supervised_if_it_opens_the_chat(chatml_dir: Path, small_llama3_dir: Path) -> None:
    messages = [{"role": "assistant", "content": "Welcome!"}, QUESTION, ANSWER]
    for folder, end in ((chatml_dir, "<|im_end|>"), (small_llama3_dir, "<|eot_id|>")):
        document = encoded(encoder(folder), messages)
        assert supervised_text(folder, document) == f"Welcome!{end}Seven of them.{end}"
        assert document.input_ids.tolist() == reference_ids(folder, messages)


# ---------------------------------------------------------------------------------------------------- special tokens


@pytest.mark.parametrize("look_alike", ["<|eot_id|>", "<|im_end|>", "<|begin_of_text|><|start_header_id|>"])
def test_special_tokens_in_a_message_are_text(small_llama3_dir: Path, chatml_dir: Path, look_alike: str) -> None:
    messages = exchanges(f"What is {look_alike}?", f"{look_alike}\n{look_alike}system", system=f"Say {look_alike}")
    harmless = exchanges("What is it?", "this and that", system="Say it")
    for folder in (small_llama3_dir, chatml_dir):
        chats = encoder(folder)
        special = set(reference(folder).all_special_ids) | {6, 7, 9}
        document = encoded(chats, messages)
        control = [token for token in document.input_ids.tolist() if token in special]
        assert control == [token for token in encoded(chats, harmless).input_ids.tolist() if token in special]
        text = reference(folder).apply_chat_template(messages, chat_template=chats.chat_template, tokenize=False)
        assert decoded(folder, document.input_ids) == text


def test_text_around_a_look_alike_has_the_ids_of_ordinary_text(small_llama3_dir: Path) -> None:
    content = "a <|eot_id|>b"
    document = encoded(encoder(small_llama3_dir), [QUESTION, {"role": "assistant", "content": content}])
    assert document.supervised is not None
    assert document.input_ids[document.supervised].tolist() == [*ids_of_text(small_llama3_dir, content), 9]


def test_special_tokens_in_tool_calls_are_text(with_template: Callable[[str], Path]) -> None:
    folder = with_template(TOOLS)
    call = {"type": "function", "function": {"name": "find", "arguments": '{"<|im_end|>": "<|im_start|>"}'}}
    messages = [QUESTION, {"role": "assistant", "content": None, "tool_calls": [call]}]
    document = encoded(encoder(folder), messages)
    assert document.input_ids.tolist().count(2) == 2
    assert supervised_text(folder, document) == 'find{"<|im_end|>": "<|im_start|>"}<|im_end|>'


def test_only_the_start_of_a_chat_is_given_a_space_if_the_tokenizer_says_so(inst_dir: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(inst_dir, tmp_path / "first"))
    content = json.loads((folder / "tokenizer.json").read_text())
    metaspace = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "first", "split": False}
    content |= {"normalizer": None, "pre_tokenizer": metaspace}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    messages = exchanges("a", "b", "c", "d")
    assert reference_ids(folder, messages) != reference_ids(inst_dir, messages)
    assert encoded(encoder(folder), messages).input_ids.tolist() == reference_ids(folder, messages)


def test_tokens_that_strip_whitespace_do_so_in_chats(with_template: Callable[[str], Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(with_template(CHATML), tmp_path / "stripping"))
    content = json.loads((folder / "tokenizer.json").read_text())
    for token in content["added_tokens"]:
        token["rstrip"] = token["content"] == "<|im_end|>"
        token["special"] = token["content"] != "<|im_start|>"
    (folder / "tokenizer.json").write_text(json.dumps(content))
    messages = exchanges("a", "b", "c", "d")
    assert reference_ids(folder, messages) != reference_ids(with_template(CHATML), messages)
    assert encoded(encoder(folder), messages).input_ids.tolist() == reference_ids(folder, messages)
    # <|im_start|> is not special here, but it begins a turn
    document = encoded(encoder(folder), exchanges("<|im_start|>", "b"))
    assert document.input_ids.tolist().count(1) == 2


# ---------------------------------------------------------------------------------------------------------- templates


def test_llama3_template_replaces_a_missing_or_unmarkable_one(small_llama3_dir: Path, tmp_path: Path) -> None:
    without = encoder(small_llama3_dir)
    assert without.notes == ("the tokenizer has no chat template; using Llama-3's",)
    text = reference(small_llama3_dir).apply_chat_template(
        exchanges(" a\n", "b", system="s"), chat_template=without.chat_template, tokenize=False
    )
    assert text == "<|begin_of_text|>" + "".join(
        f"<|start_header_id|>{role}<|end_header_id|>\n\n{content}<|eot_id|>"
        for role, content in (("system", "s"), ("user", "a"), ("assistant", "b"))
    )
    folder = Path(shutil.copytree(small_llama3_dir, tmp_path / "thinking"))
    (folder / "chat_template.jinja").write_text(THOUGHTS_IN_LAST_TURN)
    instead = encoder(folder)
    assert instead.chat_template_sha256 == without.chat_template_sha256
    assert "cannot mark" in instead.notes[0]


def test_a_system_prompt_of_the_template_is_noted(
    chatml_dir: Path, inst_dir: Path, small_llama3_dir: Path, with_template: Callable[[str], Path]
) -> None:
    (note,) = encoder(chatml_dir).notes
    prompt = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
    assert f"adds its own system prompt to chats without one: '{prompt}'; to avoid this, give --chat_template" in note
    without = (
        inst_dir,
        small_llama3_dir,
        with_template(CHATML),
        with_template(THOUGHTS_IN_LAST_TURN),
        with_template(TOOLS),
    )
    for folder in without:
        assert not any("system prompt" in note for note in encoder(folder, "last").notes)
    (note,) = encoder(with_template(COUNTED)).notes
    assert f"'{'a few ' * 12}a few'" in note


def test_template_marking_only_last_turns_takes_single_exchanges(
    with_template: Callable[[str], Path],
) -> None:
    folder = with_template(THOUGHTS_IN_LAST_TURN)
    chats = encoder(folder)
    assert "--train_on last" in chats.notes[0]
    answer = "<think>\n\n</think>\n\nSeven of them.<|im_end|>"
    assert supervised_text(folder, encoded(chats, [QUESTION, ANSWER])) == answer
    with pytest.raises(BadRowError, match=r"turn 2.*--train_on last"):
        chats.encode({"messages": [QUESTION, ANSWER] * 2})
    last = encoder(folder, "last")
    assert last.notes == ()
    assert supervised_text(folder, encoded(last, [QUESTION, ANSWER] * 2)) == answer


def test_template_that_leaves_out_assistant_text_is_refused(with_template: Callable[[str], Path]) -> None:
    chats = encoder(with_template(CHATML.replace("message['content']", "message['content'].split('</think>')[-1]")))
    encoded(chats, [QUESTION, ANSWER])
    with pytest.raises(BadRowError, match="drops a part of turn 2"):
        chats.encode({"messages": [QUESTION, {"role": "assistant", "content": "<think>Hm.</think>Seven."}]})


def test_no_template_and_not_llama3_is_an_input_error(with_template: Callable[[str | None], Path]) -> None:
    with pytest.raises(InputError, match="has no chat template; give the tokenizer of an instruct model, or a"):
        encoder(with_template(None))
    with pytest.raises(InputError, match=r"unusable .*rejects it: never"):
        encoder(with_template("{{ raise_exception('never') }}"))


def test_chat_that_the_template_refuses_is_a_bad_row(inst_dir: Path) -> None:
    with pytest.raises(BadRowError, match="rejects it: a user begins"):
        encoder(inst_dir).encode({"messages": [ANSWER, QUESTION]})


def test_tool_calls_are_accepted_if_the_template_renders_them(
    small_llama3_dir: Path, with_template: Callable[[str], Path]
) -> None:
    call = {"id": None, "type": "function", "function": {"name": "count", "arguments": '{"of": "them"}'}}
    chat = [
        QUESTION,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "7"},
        ANSWER,
    ]
    folder = with_template(TOOLS)
    document = encoded(encoder(folder), chat)
    assert supervised_text(folder, document) == 'count{"of": "them"}<|im_end|>Seven of them.<|im_end|>'
    with pytest.raises(BadRowError, match="drops its tool_calls"):
        encoder(small_llama3_dir).encode({"messages": chat})
    tools = [{"type": "function", "function": {"name": "count"}}]
    with_tools = encoder(folder).encode({"messages": [QUESTION, ANSWER], "tools": tools})
    assert isinstance(with_tools, EncodedDocument)
    assert '"name": "count"' in decoded(folder, with_tools.input_ids)
    with pytest.raises(BadRowError, match="drops its tools"):
        encoder(small_llama3_dir).encode({"messages": [QUESTION, ANSWER], "tools": tools})


# ------------------------------------------------------------------------------------------------------------ formats


@pytest.mark.parametrize(
    ("row", "data_format"),
    [
        ({"messages": [QUESTION, ANSWER]}, "messages"),
        ({"messages": [{**QUESTION, "content": [{"type": "text", "text": "How many?"}]}, ANSWER]}, "messages"),
        ({"messages": [{**QUESTION, "name": None, "tool_calls": None}, ANSWER], "tools": None}, "messages"),
        (
            {"conversations": [{"from": "human", "value": "How many?"}, {"from": "gpt", "value": "Seven of them."}]},
            "conversations",
        ),
        ({"instruction": "How many?", "input": "", "output": "Seven of them."}, "alpaca"),
        ({"instruction": "How many?", "output": "Seven of them."}, "alpaca"),
        ({"prompt": "How many?", "completion": "Seven of them."}, "prompt_completion"),
        ({"prompt": [QUESTION], "completion": [ANSWER]}, "prompt_completion"),
    ],
)
def test_every_format_is_detected_and_read(chatml_dir: Path, row: dict[str, Any], data_format: str) -> None:
    assert detect_format(row) == data_format
    assert set(row) <= set(columns(data_format))
    expected = encoded(encoder(chatml_dir), [QUESTION, ANSWER])
    document = encoder(chatml_dir).encode(row)
    assert isinstance(document, EncodedDocument)
    assert document.input_ids.tolist() == expected.input_ids.tolist()
    assert supervised_text(chatml_dir, document) == "Seven of them.<|im_end|>"
    assert document.num_characters == len("How many?Seven of them.")
    assert read_chat(row, data_format) == read_chat(row, "auto")


def test_instruction_and_input_are_separated_by_an_empty_line(chatml_dir: Path) -> None:
    document = encoder(chatml_dir).encode({"instruction": "Add.", "input": "1 2", "output": "3"})
    assert isinstance(document, EncodedDocument)
    assert "user\nAdd.\n\n1 2<|im_end|>" in decoded(chatml_dir, document.input_ids)


def test_assistant_turns_in_a_prompt_are_not_supervised(chatml_dir: Path) -> None:
    row = {"prompt": [QUESTION, ANSWER, QUESTION], "completion": [{"role": "assistant", "content": "Eight."}]}
    document = encoder(chatml_dir).encode(row)
    assert isinstance(document, EncodedDocument)
    assert supervised_text(chatml_dir, document) == "Eight.<|im_end|>"


def test_row_of_another_format_than_the_given_one_is_refused() -> None:
    with pytest.raises(BadRowError, match=r"'messages' is missing; accepted: messages \[.*; the row: "):
        read_chat({"instruction": "x", "output": "y"}, "messages")


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"question": "How many?", "answer": "Seven"}, "no columns of a chat"),
        ({"messages": [{"role": "narrator", "content": "x"}]}, '"narrator" of turn 1 is not one of system'),
        ({"messages": [QUESTION, {"role": "assistant", "text": "x"}]}, "'content' is missing in turn 2"),
        ({"messages": [{"role": "user", "content": None}]}, "'content' of turn 1 is null"),
        ({"conversations": [{"from": "human", "text": "x"}]}, "'value' is missing in turn 1"),
        ({"conversations": [{"from": "human", "value": None}]}, "'value' of turn 1 is null"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "must be text or a list"),
        ({"messages": [{"role": "\ud800", "content": "x"}]}, "of turn 1 is not one of system"),
        ({"messages": ["How many?"]}, "a list of objects"),
        ({"conversations": [{"from": "bot", "value": "x"}]}, '"bot" of turn 1 is not one of system'),
        ({"instruction": ["x"], "output": "y"}, "must be text"),
        ({"prompt": "x", "completion": [ANSWER]}, "must be text"),
    ],
)
def test_row_of_unknown_format_is_shown_with_the_accepted_formats(
    chatml_dir: Path, row: dict[str, Any], reason: str
) -> None:
    with pytest.raises(BadRowError) as raised:
        encoder(chatml_dir).encode(row)
    message = str(raised.value)
    assert reason in message
    assert json.dumps(row) in message
    assert 'accepted: messages [{"role": "user"' in message
    assert "\n" not in message


def test_half_of_a_surrogate_pair_is_refused(chatml_dir: Path) -> None:
    with pytest.raises(BadRowError, match="half a surrogate pair"):
        encoder(chatml_dir).encode({"prompt": "\ud83d", "completion": "x"})


def test_long_row_is_shortened_in_the_message(chatml_dir: Path) -> None:
    with pytest.raises(BadRowError) as raised:
        encoder(chatml_dir).encode({"text": "x" * 10_000})
    assert len(str(raised.value)) < 1000


# ----------------------------------------------------------------------------------------------------------- too long


@pytest.mark.parametrize("train_on", ["assistant", "all"])
@settings(max_examples=10, deadline=None)
@given(messages=conversations, max_length=st.integers(10, 150))
def test_cut_end_keeps_the_most_whole_turns_that_fit(
    chatml_dir: Path, train_on: str, messages: Chat, max_length: int
) -> None:
    document = encoder(chatml_dir, train_on, "cut_end", None).encode({"messages": messages})
    assert isinstance(document, EncodedDocument)
    cut = with_limit(encoder(chatml_dir, train_on, "cut_end", 1), max_length).encode({"messages": messages})
    fitting: list[list[int]] = []  # the ids of the beginnings that fit, from the shortest on
    for end in range(1, len(messages) + 1):
        beginning = messages[:end]
        is_allowed = train_on == "all" or beginning[-1]["role"] == "assistant" or beginning == messages
        ids = reference_ids(chatml_dir, beginning)
        if is_allowed and len(ids) <= max_length:
            fitting.append(ids)
    if not fitting:
        assert cut == LeftOut(manifest.TOO_LONG, len(document.input_ids))
        return
    assert isinstance(cut, EncodedDocument)
    assert cut.input_ids.tolist() == fitting[-1]
    assert cut.num_tokens_cut == len(document.input_ids) - len(fitting[-1])


@settings(max_examples=10, deadline=None)
@given(messages=conversations, max_length=st.integers(10, 150))
def test_cut_start_keeps_the_system_message_and_begins_with_a_user(
    chatml_dir: Path, messages: Chat, max_length: int
) -> None:
    cut = with_limit(encoder(chatml_dir, "assistant", "cut_start", 1), max_length).encode({"messages": messages})
    system = [message for message in messages if message["role"] == "system"]
    turns = messages[len(system) :]
    parts = [system + turns[begin:] for begin in range(0, len(turns), 2)]
    fitting = [part for part in parts if len(reference_ids(chatml_dir, part)) <= max_length]
    if not fitting:
        assert cut == LeftOut(manifest.TOO_LONG, len(reference_ids(chatml_dir, messages)))
    elif all(message["role"] != "assistant" for message in fitting[0]):
        assert cut == LeftOut(manifest.NOTHING_SUPERVISED, len(reference_ids(chatml_dir, messages)))
    else:
        assert isinstance(cut, EncodedDocument)
        assert cut.input_ids.tolist() == reference_ids(chatml_dir, fitting[0])


_without_markup = contents.filter(lambda text: "<" not in text)


@pytest.mark.parametrize("too_long", ["cut_end", "cut_start"])
@pytest.mark.parametrize("template", [CHATML, CHATML_WITH_GENERATION, COUNTED, THOUGHTS_IN_LAST_TURN, INST])
@settings(max_examples=8, deadline=None)
@given(turns=st.lists(_without_markup, min_size=4, max_size=12), removed=st.integers(1, 60))
def test_every_cut_is_a_part_as_the_template_renders_it(
    with_template: Callable[[str], Path], inst_dir: Path, template: str, too_long: str, turns: list[str], removed: int
) -> None:
    folder = inst_dir if template == INST else with_template(template)
    train_on = "last" if template == THOUGHTS_IN_LAST_TURN else "assistant"
    if len(turns) % 2:  # the last question has no answer
        turns = turns[:-1]
    messages = exchanges(*turns)
    num_tokens = len(reference_ids(folder, messages))
    limit = num_tokens - removed
    cut = with_limit(encoder(folder, train_on, too_long, 1), limit).encode({"messages": messages})
    fitting: list[Chat] = []
    for border in range(2, len(messages), 2):
        part = messages[:border] if too_long == "cut_end" else messages[border:]
        if len(reference_ids(folder, part)) <= limit:
            fitting.append(part)
    if not isinstance(cut, EncodedDocument):
        assert cut == LeftOut(manifest.NOTHING_SUPERVISED if fitting else manifest.TOO_LONG, num_tokens)
        assert not fitting or train_on == "last"
        return
    longest = max(fitting, key=len)
    assert cut.input_ids.tolist() == reference_ids(folder, longest)
    assert cut.supervised is not None
    whole_at_once = encoded(encoder(folder, train_on, too_long, None, split_at_control_tokens=False), longest)
    assert whole_at_once.supervised is not None
    assert cut.supervised.tolist() == whole_at_once.supervised.tolist()


def test_a_cut_chat_is_rendered_three_times_and_no_text_is_encoded_twice(
    with_template: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    chats = encoder(with_template(CHATML), "assistant", "cut_end", 2000)
    text_encoder = chats._tokens._encoder
    assert text_encoder is not None
    rendered: list[Chat] = []
    texts: list[str] = []
    render = chat_template_utils.render_jinja_template
    encode_batch = text_encoder.encode_batch

    def render_and_count(conversations: list[Chat], **options: Any) -> Any:
        rendered.extend(conversations)
        return render(conversations, **options)

    def encode_and_collect(batch: list[str]) -> list[np.ndarray]:
        texts.extend(batch)
        return encode_batch(batch)

    messages = exchanges(*(f"{number} and {'more ' * (number % 50)}" for number in range(200)))
    encoded(chats, messages)  # learns the separators
    monkeypatch.setattr(chat_template_utils, "render_jinja_template", render_and_count)
    monkeypatch.setattr(text_encoder, "encode_batch", encode_and_collect)
    length = len(encoded(chats, messages).input_ids)
    whole, kept, longer = (len(conversation) for conversation in rendered)
    assert (whole, longer) == (200, kept + 2)
    assert length <= 2000 < len(reference_ids(with_template(CHATML), messages[:longer]))
    assert len(texts) == len(set(texts))
    assert sum(map(len, texts)) < 1.1 * sum(len(message["content"]) for message in messages)


def test_rows_around_a_bad_one_are_encoded_in_their_order(chatml_dir: Path) -> None:
    bad_row = BadRowError("no JSON")
    good_chats = [exchanges("a", str(number)) for number in range(4)]
    half_surrogate = exchanges("a", "\ud800")
    conversations: list[Chat] = [
        good_chats[0],
        good_chats[1],
        half_surrogate,
        [],
        good_chats[2],
        [QUESTION],
        good_chats[3],
    ]
    rows: list[Any] = [read_chat({"messages": messages}, "messages") for messages in conversations]
    rows.insert(1, bad_row)
    chats = encoder(chatml_dir)
    results = list(chats.encode_all(rows))
    assert results[1] is bad_row
    assert isinstance(results[3], BadRowError)
    assert results[4] == LeftOut(manifest.EMPTY)
    assert results[6] == LeftOut(manifest.NOTHING_SUPERVISED)
    documents = [result for result in results if isinstance(result, EncodedDocument)]
    expected = [encoded(chats, messages) for messages in good_chats]
    assert [document.input_ids.tolist() for document in documents] == [
        document.input_ids.tolist() for document in expected
    ]


def with_limit(chats: ChatEncoder, max_length: int) -> ChatEncoder:
    """Change the limit of an encoder, which is built only once."""
    chats._max_length = max_length
    return chats


def test_long_chat_is_dropped_or_cut_and_may_lose_all_labels(chatml_dir: Path) -> None:
    messages = exchanges("a", "b " * 50, "c", "d")
    row = {"messages": messages}
    length = len(reference_ids(chatml_dir, messages))
    drop = encoder(chatml_dir, "assistant", "drop", 1)
    assert with_limit(drop, length - 1).encode(row) == LeftOut(manifest.TOO_LONG, length)
    assert isinstance(with_limit(drop, length).encode(row), EncodedDocument)
    cut_end = encoder(chatml_dir, "last", "cut_end", length - 1)
    assert cut_end.encode(row) == LeftOut(manifest.NOTHING_SUPERVISED, length)
    cut_start = encoder(chatml_dir, "last", "cut_start", length - 1).encode(row)
    assert isinstance(cut_start, EncodedDocument)
    assert supervised_text(chatml_dir, cut_start) == "d<|im_end|>"


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([], manifest.EMPTY),
        (exchanges(" ", "\n"), manifest.EMPTY),
        ([QUESTION], manifest.NOTHING_SUPERVISED),
    ],
)
def test_chats_with_nothing_to_learn_are_left_out_with_a_reason(chatml_dir: Path, messages: Chat, reason: str) -> None:
    assert encoder(chatml_dir).encode({"messages": messages}) == LeftOut(reason)
