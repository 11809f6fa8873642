"""Rows in the shapes of public data sets: each key is used or named, and what is supervised is what the row says."""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet
from transformers import PreTrainedTokenizerFast

from fabric_train.reading.documents import BadRowError, EncodedDocument, LeftOut
from fabric_train.reading.files import FileReader
from fabric_train.reading.listing import FilePart, list_file
from fabric_train.token_dataset import manifest
from fabric_train.tokenization.chats.chat_encoder import ChatEncoder
from fabric_train.tokenization.chats.formats import columns, detect_format, read_chat, read_pair
from fabric_train.tokenization.pairs import PairEncoder

Row = dict[str, Any]
PLAIN = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# shows everything: tools, thoughts of each turn, calls, the name of a tool, and a variable
FULL = (
    "{% if mood %}{{ '<|im_start|>system\nmood ' + mood + '<|im_end|>\n' }}{% endif %}"
    "{% if tools %}{{ '<|im_start|>system\n' + tools | tojson + '<|im_end|>\n' }}{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'tool' and m.name %}"
    "{{ m.name + ': ' }}{% endif %}{% if m.reasoning_content %}{{ '(' + m.reasoning_content + ')' }}{% endif %}"
    "{{ m.content }}{% for call in m.tool_calls or [] %}"
    "{{ '[' + call.function.name + call.function.arguments | tojson + ']' }}{% endfor %}{{ '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# as Zephyr's: who is neither user nor assistant says nothing
TWO_SPEAKERS = (
    "{% for m in messages %}{% if m.role in ['user', 'assistant'] %}"
    "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# as Qwen3's: only the last turn has its thoughts
LAST_THOUGHTS = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if loop.last and m.reasoning_content %}"
    "{{ '(' + m.reasoning_content + ')' }}{% endif %}{{ m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SCHEMA: Row = {"name": "find", "parameters": {"type": "object", "properties": {"town": {"type": "string"}}}}
TOOL: Row = {"type": "function", "function": SCHEMA}


def user(text: str, **more: Any) -> Row:
    return {"role": "user", "content": text, **more}


def assistant(text: Any, **more: Any) -> Row:
    return {"role": "assistant", "content": text, **more}


def human(text: str, **more: Any) -> Row:
    return {"from": "human", "value": text, **more}


def gpt(text: str, **more: Any) -> Row:
    return {"from": "gpt", "value": text, **more}


def call(arguments: object, name: str = "find") -> Row:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


@dataclass(frozen=True)
class Case:
    """A row, what is supervised of it (its end-of-turn tokens as |), and what nothing is made of."""

    row: Row
    supervised: str
    unused: tuple[str, ...] = ()
    context: tuple[str, ...] = ()
    """Texts that are not supervised, and come in this order."""
    train_on: str = "assistant"


Q = "Which town?"
A = "Sueca."
CASES: dict[str, Case] = {
    "UltraChat": Case(
        {"prompt": Q, "prompt_id": "f0e3", "messages": [user(Q), assistant(A), user("Sure?"), assistant("Yes.")]},
        "Sueca.|Yes.|",
        ("prompt", "prompt_id"),
    ),
    "OpenHermes": Case(
        {
            "conversations": [human(Q), gpt(A)],
            "source": "airoboros",
            "system_prompt": "Be brief.",
            "custom_instruction": None,
        },
        "Sueca.|",
        ("source",),
        ("Be brief.", Q),
    ),
    "OpenHermes, whose column repeats the turn": Case(
        {"conversations": [{"from": "system", "value": "Be brief."}, human(Q), gpt(A)], "system_prompt": "Be brief."},
        "Sueca.|",
        (),
        ("Be brief.", Q),
    ),
    "SlimOrca": Case(
        {
            "conversations": [
                {"from": "system", "value": "Be brief.", "weight": None},
                human(Q, weight=0.0),
                gpt("Alzira.", weight=0.0),
                human("No.", weight=0.0),
                gpt(A, weight=1.0),
            ]
        },
        "Sueca.|",
        (),
        ("Be brief.", Q, "Alzira.", "No."),
    ),
    "OpenAI": Case(
        {
            "messages": [user(Q), assistant("Alzira.", weight=0), user("No."), assistant(A, weight=1)],
            "parallel_tool_calls": False,
        },
        "Sueca.|",
        ("parallel_tool_calls",),
        (Q, "Alzira."),
    ),
    "axolotl": Case(
        {"conversations": [human(Q, train=False), gpt("Alzira.", train=False), human("No."), gpt(A, train=True)]},
        "Sueca.|",
    ),
    "axolotl, whose user is trained": Case(
        {"messages": [user(Q, train=True), assistant(A, training=True)]},
        "Sueca.|",
        ("what trains turns that are not the assistant's",),
    ),
    "axolotl, whose details agree": Case(
        {
            "conversations": [
                human(Q),
                gpt("Alzira.", train_detail=[{"begin_offset": 0, "end_offset": 7, "train": False}]),
                human("No."),
                gpt(A),
            ]
        },
        "Sueca.|",
    ),
    "axolotl's parts of a content": Case(
        {
            "messages": [
                user(Q),
                assistant([{"type": "text", "text": "Alzira.", "train": False}]),
                user("No."),
                assistant(
                    [{"type": "text", "text": "Sue"}, {"type": "text", "text": "ca.", "cache_control": {"a": 1}}]
                ),
            ]
        },
        "Sueca.|",
        ("content.cache_control",),
    ),
    "axolotl's details that do not say": Case(
        {"conversations": [human(Q), gpt(A, train_detail=[{"begin_offset": 0, "end_offset": 5}])]}, "Sueca.|"
    ),
    "a turn that is not trained, with parts that are": Case(
        {
            "messages": [
                user(Q),
                assistant([{"type": "text", "text": "Alzira.", "train": True}], weight=0),
                user("No."),
                assistant([{"type": "text", "text": A, "train": True}]),
            ]
        },
        "Sueca.|",
    ),
    "ms-swift": Case(
        {
            "messages": [user(Q), assistant("Alzira.", loss=False), user("No."), assistant(A, loss=True)],
            "channel": "chat",
        },
        "Sueca.|",
        ("channel",),
    ),
    "torchtune": Case(
        {
            "messages": [
                user(Q, masked=True),
                assistant("Alzira.", masked=True),
                user("No."),
                assistant(A, masked=False),
            ]
        },
        "Sueca.|",
    ),
    "masks of turns": Case(
        {"messages": [user(Q, loss_mask=0), assistant("Alzira.", loss_mask=0), user("No."), assistant(A, loss_mask=1)]},
        "Sueca.|",
    ),
    "a masked turn with --train_on all": Case(
        {"messages": [user(Q), assistant("Alzira.", weight=0), user("No."), assistant(A)]},
        "user\nWhich town?|assistant\n\nuser\nNo.|assistant\nSueca.|",
        train_on="all",
    ),
    "a masked turn of the user with --train_on all": Case(
        {"messages": [user(Q, weight=0), assistant("Alzira.", weight=0), user("No."), assistant(A)]},
        "user\nWhich town?|assistant\n\nuser\nNo.|assistant\nSueca.|",
        ("what leaves out turns that are not the assistant's",),
        train_on="all",
    ),
    "a masked turn with --train_on last": Case(
        {"messages": [user(Q), assistant("Alzira."), user("No."), assistant(A, weight=1)]}, "Sueca.|", train_on="last"
    ),
    "ShareGPT-Vicuna": Case(
        {
            "id": "QWJhYvA_0",
            "conversations": [
                human(Q),
                gpt(A),
                {"from": "user", "value": "Sure?"},
                {"from": "chatgpt", "value": "Yes."},
            ],
        },
        "Sueca.|Yes.|",
        ("id",),
    ),
    "Capybara in messages": Case(
        {"source": "Airoboros", "messages": [user(Q), assistant(A)], "images": [], "note": "", "score": None},
        "Sueca.|",
        ("source",),
    ),
    "Tülu 3": Case({"id": "1", "messages": [user(Q), assistant(A)], "source": "ai2"}, "Sueca.|", ("id", "source")),
    "smoltalk2": Case(
        {
            "messages": [user(Q), assistant(A)],
            "chat_template_kwargs": {"mood": "calm", "enable_thinking": False},
            "source": "x",
        },
        "Sueca.|",
        ("chat_template_kwargs.enable_thinking", "source"),
        ("mood calm", Q),
    ),
    "OpenThoughts": Case(
        {
            "system": "Think.",
            "conversations": [{"from": "user", "value": Q}, {"from": "assistant", "value": "<think>s</think>Sueca."}],
        },
        "<think>s</think>Sueca.|",
        (),
        ("Think.", Q),
    ),
    "OpenThoughts in roles": Case(
        {"conversations": [user(Q), assistant(A, reasoning="It grows rice.")], "difficulty": 3, "domain": None},
        "(It grows rice.)Sueca.|",
        ("difficulty",),
    ),
    "Nemotron": Case(
        {
            "system": "Be brief.",
            "mask": "User",
            "type": "VALUE_TO_TEXT",
            "conversations": [{"from": "User", "value": Q, "label": None}, {"from": "Assistant", "value": A}],
        },
        "Sueca.|",
        ("type",),
        ("Be brief.", Q),
    ),
    "Nemotron's labels of turns": Case(
        {"conversations": [{"from": "User", "value": Q}, {"from": "Assistant", "value": A, "label": "quality:4"}]},
        "Sueca.|",
        ("label of the assistant's turns",),
    ),
    "Magpie": Case(
        {
            "uuid": "u",
            "instruction": Q,
            "response": A,
            "conversations": [human(Q), gpt(A)],
            "gen_input_configs": {"t": 1},
        },
        "Sueca.|",
        ("gen_input_configs", "instruction", "response", "uuid"),
    ),
    "Dolly": Case(
        {"instruction": "When?", "context": "It began in 1238.", "response": A, "category": "closed_qa"},
        "Sueca.|",
        ("category",),
        ("When?\n\nIt began in 1238.",),
    ),
    "xLAM": Case(
        {
            "id": 3,
            "query": Q,
            "answers": '[{"name": "find", "arguments": {"town": "Sueca"}}]',
            "tools": json.dumps([SCHEMA]),
        },
        '[find{"town": "Sueca"}]|',
        ("id",),
        ('"town": {"type": "string"}', Q),
    ),
    "Aya": Case({"inputs": Q, "targets": A, "language": "Catalan"}, "Sueca.|", ("language",), (Q,)),
    "HelpSteer": Case({"prompt": Q, "response": A, "helpfulness": 4}, "Sueca.|", ("helpfulness",), (Q,)),
    "OpenOrca": Case(
        {"id": "t0", "system_prompt": "Be brief.", "question": Q, "response": A}, "Sueca.|", ("id",), ("Be brief.", Q)
    ),
    "Capybara": Case(
        {"source": "x", "conversation": [{"input": Q, "output": A}, {"input": "Sure?", "output": "Yes.", "n": 1}]},
        "Sueca.|Yes.|",
        ("n", "source"),
        (Q, "Sure?"),
    ),
    "Evol-Instruct": Case({"conversation": [{"human": Q, "assistant": A}]}, "Sueca.|", (), (Q,)),
    "LMSYS": Case({"conversation": [user(Q), assistant(A)], "model": "x"}, "Sueca.|", ("model",), (Q,)),
    "turns in a conversation, with calls of one turn": Case(
        {
            "conversation": [
                user("Find it."),
                assistant("I look."),
                {"role": "tool_call", "content": '{"name": "find", "arguments": {"town": "Sueca"}}'},
                {"role": "tool_response", "content": "yes"},
                assistant(A),
            ]
        },
        'I look.[find{"town": "Sueca"}]|Sueca.|',
        (),
        ("tool\nyes",),
    ),
    "Alpaca with its text": Case(
        {"instruction": "Name it.", "input": "", "output": A, "text": "Below is an instruction."}, "Sueca.|", ("text",)
    ),
    "Alpaca of LLaMA-Factory": Case(
        {"instruction": "And now?", "input": "", "output": A, "system": "Be brief.", "history": [["Who?", "Ana."]]},
        "Sueca.|",
        (),
        ("Be brief.", "Who?", "Ana.", "And now?"),
    ),
    "Alpaca whose history has messages": Case(
        {"instruction": "And now?", "output": A, "history": [user("Who?"), assistant("Ana.")]},
        "Sueca.|",
        (),
        ("Who?", "Ana.", "And now?"),
    ),
    "Alpaca in a csv": Case(
        {"instruction": "And now?", "input": "", "output": A, "system": "", "history": '[["Who?", "Ana."]]'},
        "Sueca.|",
        (),
        ("Who?", "Ana."),
    ),
    "ShareGPT of LLaMA-Factory": Case(
        {
            "system": "Be brief.",
            "tools": json.dumps([SCHEMA]),
            "conversations": [
                human("Find it."),
                {"from": "function_call", "value": '{"name": "find", "arguments": {"town": "Sueca"}}'},
                {"from": "observation", "value": '{"found": true}'},
                gpt(A),
            ],
        },
        '[find{"town": "Sueca"}]|Sueca.|',
        (),
        ('"town": {"type": "string"}', "Be brief.", '{"found": true}'),
    ),
    "ms-swift's agents": Case(
        {
            "messages": [
                user("Find both."),
                assistant("I look."),
                {"role": "tool_call", "content": '{"name": "find", "arguments": {"town": "Sueca"}}'},
                {"role": "tool_call", "content": '{"name": "find", "arguments": {"town": "Elx"}}'},
                {"role": "tool_response", "content": "yes"},
                assistant(A),
            ]
        },
        'I look.[find{"town": "Sueca"}][find{"town": "Elx"}]|Sueca.|',
        (),
        ("tool\nyes",),
    ),
    "Hermes' tool use": Case(
        {
            "id": "x",
            "conversations": [
                {"from": "system", "value": "You have tools."},
                human("Find it."),
                gpt('<tool_call>{"name": "find"}</tool_call>'),
                {"from": "tool", "value": "<tool_response>yes</tool_response>"},
                gpt(A),
            ],
            "tools": json.dumps([TOOL]),
            "category": "geo",
        },
        '<tool_call>{"name": "find"}</tool_call>|Sueca.|',
        ("category", "id"),
        ('"name": "find"', "<tool_response>yes</tool_response>"),
    ),
    "OpenAI's tools": Case(
        {
            "messages": [
                user("Find it."),
                assistant(None, tool_calls=[{"id": "c1", **call('{"town": "Sueca", "near": null}')}]),
                {"role": "tool", "tool_call_id": "c1", "name": "find", "content": "yes"},
                assistant(A),
            ],
            "tools": [TOOL],
        },
        '[find{"town": "Sueca", "near": null}]|Sueca.|',
        ("tool_call_id of the tool's turns",),
        ("find: yes",),
    ),
    "OpenAI's functions": Case(
        {
            "messages": [
                {"role": "developer", "content": "Be brief."},
                user("Find it."),
                assistant(None, function_call={"name": "find", "arguments": '{"town": "Sueca"}'}),
                {"role": "function", "name": "find", "content": "yes"},
                assistant(A),
            ],
            "functions": [SCHEMA],
        },
        '[find{"town": "Sueca"}]|Sueca.|',
        (),
        ('"type": "function"', '"name": "find"', "system\nBe brief.", "find: yes"),
    ),
    "calls without a wrapper": Case(
        {"messages": [user("Find it."), assistant("", tool_calls=[{"name": "find", "arguments": {"town": "Sueca"}}])]},
        '[find{"town": "Sueca"}]|',
    ),
    "calls with parameters": Case(
        {
            "messages": [
                user("Find both."),
                assistant(
                    "",
                    tool_calls=[
                        {"name": "find", "parameters": {"town": "Sueca"}},
                        {"name": "find", "arguments": None, "parameters": {"town": "Elx"}},
                    ],
                ),
            ]
        },
        '[find{"town": "Sueca"}][find{"town": "Elx"}]|',
    ),
    "calls without arguments": Case(
        {"messages": [user("Find it."), assistant("", tool_calls=[call(" ")])]}, "[find{}]|"
    ),
    "thoughts under two names": Case(
        {"messages": [user(Q), assistant(A, reasoning="It grows rice.", reasoning_content="It grows rice.")]},
        "(It grows rice.)Sueca.|",
    ),
    "thoughts of gpt-oss": Case(
        {
            "reasoning_language": "English",
            "messages": [user(Q, thinking=None), assistant(A, thinking="It grows rice.")],
        },
        "(It grows rice.)Sueca.|",
        ("reasoning_language",),
    ),
    "prompt and completion of TRL": Case(
        {"prompt": [user(Q)], "completion": [assistant(A)], "chat_template_kwargs": {"mood": "calm"}, "tools": None},
        "Sueca.|",
        (),
        ("mood calm",),
    ),
    "KTO's good answers": Case({"prompt": [user(Q)], "completion": [assistant(A)], "label": True}, "Sueca.|"),
    "a class beside a chat": Case({"messages": [user(Q), assistant(A)], "label": 3}, "Sueca.|", ("label",)),
    "ms-swift's rejected answers": Case(
        {"messages": [user(Q), assistant(A)], "rejected_response": "Alzira."}, "Sueca.|", ("rejected_response",)
    ),
    "pictures": Case({"messages": [user(f"<image>{Q}"), assistant(A)], "images": ["a.png"]}, "Sueca.|", ("images",)),
    "keys of messages": Case(
        {"messages": [user(Q, id="m1"), assistant(A, id="m2", model="gpt", name="bot")], "train_on_input": False},
        "Sueca.|",
        (
            "id of the assistant's turns",
            "id of the user's turns",
            "model of the assistant's turns",
            "name of the assistant's turns",
        ),
    ),
    "the prompt's loss": Case({"prompt": Q, "completion": A, "train_on_input": True}, "Sueca.|", ("train_on_input",)),
}


@pytest.fixture(scope="module")
def open_encoder(tmp_path_factory: pytest.TempPathFactory, chatml_dir: Path) -> Callable[..., ChatEncoder]:
    """Return ``open_encoder(template, train_on)``, an encoder with the small tokenizer and this template."""

    @cache
    def open_(template: str, train_on: str = "assistant") -> ChatEncoder:
        folder = tmp_path_factory.mktemp("tokenizer")
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(chatml_dir / name, folder)
        (folder / "chat_template.jinja").write_text(template)
        return ChatEncoder(folder, "auto", train_on, "drop", None)

    return open_


@pytest.fixture(scope="module")
def decode(chatml_dir: Path) -> Callable[[Any], str]:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(chatml_dir).backend_tokenizer
    return lambda ids: tokenizer.decode(ids.tolist(), skip_special_tokens=False)


@pytest.mark.parametrize("name", CASES)
def test_rows_of_public_data_sets_are_supervised_and_named_as_they_say(
    name: str, open_encoder: Callable[..., ChatEncoder], decode: Callable[[Any], str]
) -> None:
    case = CASES[name]
    document = open_encoder(FULL, case.train_on).encode(case.row)
    assert isinstance(document, EncodedDocument), document
    assert document.supervised is not None
    supervised = decode(document.input_ids[document.supervised]).replace("<|im_start|>", "").replace("\n<", "<")
    assert supervised.replace("<|im_end|>", "|").replace("|\n", "|") == case.supervised
    assert document.unused == set(case.unused)
    text = decode(document.input_ids)
    places = [text.find(context) for context in case.context]
    assert -1 not in places
    assert places == sorted(places)


BAD_ROWS: dict[str, tuple[Row, str]] = {
    "part of a weight": ({"messages": [user(Q), assistant(A, weight=0.5)]}, "weight 0.5 of turn 2"),
    "weights that contradict": ({"messages": [user(Q), assistant(A, weight=0, train=True)]}, "contradict"),
    "parts of a turn": (
        {"conversations": [human(Q), gpt(A, train_detail=[{"train": True}, {"train": False}])]},
        "only parts of turn 2 are trained",
    ),
    "masked by token": ({"messages": [user(Q), assistant(A, loss_mask=[0, 1])]}, "loss_mask"),
    "the assistant is masked": ({"mask": "Assistant", "conversations": [human(Q), gpt(A)]}, "mask 'Assistant'"),
    "another system prompt": (
        {"system": "Be long.", "conversations": [{"from": "system", "value": "Be brief."}, human(Q), gpt(A)]},
        "differs from the system message",
    ),
    "history that is text": ({"instruction": Q, "output": A, "history": "Who? Ana."}, "history is not JSON"),
    "a call that is not JSON": (
        {"conversations": [human(Q), {"from": "function_call", "value": "find(Sueca)"}]},
        "is not JSON",
    ),
    "a template's own name": (
        {"messages": [user(Q), assistant(A)], "chat_template_kwargs": {"messages": []}},
        "not a template variable",
    ),
    "a turn without text": ({"conversations": [human(Q), {"from": "gpt", "text": A}]}, "'value' is missing in turn 2"),
    "a null after an exchange": (
        {"conversation": [{"input": Q, "output": A}, {"role": "user", "content": None}]},
        "'content' of turn 3 is null",
    ),
    "a null": ({"conversations": [human(Q), {"from": "gpt", "value": None}]}, "'value' of turn 2 is null"),
}


@pytest.mark.parametrize("name", BAD_ROWS)
def test_what_cannot_be_trained_as_a_row_says_is_a_bad_row(name: str, open_encoder: Callable[..., ChatEncoder]) -> None:
    row, fault = BAD_ROWS[name]
    with pytest.raises(BadRowError) as raised:
        open_encoder(FULL).encode(row)
    assert fault in str(raised.value)


@pytest.mark.parametrize(
    ("template", "row", "what"),
    [
        (PLAIN, {"messages": [user(Q), assistant("5", reasoning_content="Count: 5")]}, "thoughts"),
        (PLAIN, {"messages": [user(Q), assistant("5", thinking="5"), user(Q), assistant(A)]}, "of turn 2"),
        (LAST_THOUGHTS, {"messages": [user(Q), assistant("5", reasoning="Count"), user(Q), assistant(A)]}, "thoughts"),
        (PLAIN, {"messages": [user(Q), assistant("find", tool_calls=[call({})])]}, "tool_calls"),
        (
            FULL.replace("call.function.arguments | tojson", "''"),
            {"messages": [user("Sueca"), assistant("", tool_calls=[call({"town": "Sueca"})])]},
            "tool_calls",
        ),
        (
            FULL.replace("call.function.arguments | tojson", "call.function.arguments.values() | list | tojson"),
            {"messages": [user(Q), assistant("", tool_calls=[call({"town": "Sueca"})])]},
            "tool_calls",
        ),
        (PLAIN, {"messages": [user(Q), assistant(A)], "tools": [TOOL]}, "tools"),
        (
            TWO_SPEAKERS,
            {"messages": [user("is it true"), assistant("?"), {"role": "tool", "content": "true"}, assistant(A)]},
            "part of turn 3",
        ),
        (TWO_SPEAKERS, {"system": "Be brief.", "conversations": [human(Q), gpt(A)]}, "part of turn 1"),
    ],
)
@pytest.mark.parametrize("train_on", ["assistant", "all"])
def test_no_part_of_a_message_is_lost_in_a_template(
    template: str, row: Row, what: str, train_on: str, open_encoder: Callable[..., ChatEncoder]
) -> None:
    with pytest.raises(BadRowError, match="the chat template drops") as raised:
        open_encoder(template, train_on).encode(row)
    assert what in str(raised.value)


def test_thoughts_of_turns_that_are_context_may_be_left_out(open_encoder: Callable[..., ChatEncoder]) -> None:
    chat = [user(Q), assistant("5", reasoning_content="Count"), user(Q), assistant(A, reasoning_content="Rice")]
    document = open_encoder(LAST_THOUGHTS, "last").encode({"messages": chat})
    assert isinstance(document, EncodedDocument)
    assert document.unused == {"reasoning_content of turns that are not supervised"}


def test_a_function_call_is_text_for_a_template_without_tools(
    open_encoder: Callable[..., ChatEncoder], decode: Callable[[Any], str]
) -> None:
    value = '{"name":"find",  "arguments":{"town":"Sueca"}}'
    turns = [human(Q), {"from": "function_call", "value": value}, {"from": "observation", "value": "yes"}, gpt(A)]
    document = open_encoder(PLAIN).encode({"conversations": turns})
    assert isinstance(document, EncodedDocument)
    assert decode(document.input_ids[document.supervised]) == f"{value}<|im_end|>{A}<|im_end|>"


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"instruction": Q, "input": "", "output": ""}, manifest.EMPTY_ANSWER),
        ({"prompt": Q, "completion": "  \n"}, manifest.EMPTY_ANSWER),
        ({"messages": [user(Q), assistant("")]}, manifest.EMPTY_ANSWER),
        ({"messages": [user(Q), assistant(""), user(Q), assistant(A)]}, manifest.EMPTY_ANSWER),
        ({"messages": [user(Q), assistant(A, weight=0)]}, manifest.NOTHING_SUPERVISED),
        ({"prompt": [user(Q)], "completion": [assistant(A)], "label": False}, manifest.UNDESIRABLE_ANSWER),
        ({"conversations": [human(Q), gpt(A)], "kto_tag": "False"}, manifest.UNDESIRABLE_ANSWER),
    ],
)
def test_rows_without_an_answer_to_learn_are_left_out_with_a_reason(
    row: Row, reason: str, open_encoder: Callable[..., ChatEncoder]
) -> None:
    assert open_encoder(FULL).encode(row) == LeftOut(reason)


def test_no_answer_before_a_masked_last_one_is_learned_as_the_last(open_encoder: Callable[..., ChatEncoder]) -> None:
    turns = [user(Q), assistant(A), user("Sure?"), assistant("Yes.", weight=0)]
    assert open_encoder(FULL, "last").encode({"messages": turns}) == LeftOut(manifest.NOTHING_SUPERVISED)


def test_an_empty_answer_that_is_context_is_kept(open_encoder: Callable[..., ChatEncoder]) -> None:
    chat = [user(Q), assistant("", weight=0), user(Q), assistant(A)]
    assert isinstance(open_encoder(FULL).encode({"messages": chat}), EncodedDocument)


PAIRS: dict[str, tuple[Row, str, tuple[str, ...]]] = {
    "Orca DPO": (
        {"system": "Be brief.", "question": Q, "chosen": A, "rejected": "Elx."},
        "system\nBe brief.",
        (),
    ),
    "UltraFeedback": (
        {
            "prompt": Q,
            "prompt_id": "p",
            "chosen": [user(Q), assistant(A)],
            "rejected": [user(Q), assistant("Elx.")],
            "messages": [user(Q), assistant(A)],
            "score_chosen": 8.0,
            "score_rejected": 5.0,
        },
        "user\nWhich",
        ("messages", "prompt_id"),
    ),
    "LLaMA-Factory": (
        {"instruction": "And now?", "input": "", "chosen": A, "rejected": "Elx.", "history": [["Who?", "Ana."]]},
        "user\nWho?",
        (),
    ),
    "tools": (
        {"prompt": [user(Q)], "chosen": [assistant(A)], "rejected": [assistant("Elx.")], "tools": json.dumps([TOOL])},
        '"name": "find"',
        (),
    ),
    "another question": (
        {"prompt": Q, "question": "Which one?", "chosen": A, "rejected": "Elx.", "label": True},
        "user\nWhich town?",
        ("label", "question"),
    ),
    "variables": (
        {"prompt": Q, "chosen": A, "rejected": "Elx.", "chat_template_kwargs": {"mood": "calm"}},
        "mood calm",
        (),
    ),
    "turns that are not trained": (
        {
            "prompt": [user(Q)],
            "chosen": [assistant("Rice.", weight=0), user("So?"), assistant(A)],
            "rejected": [assistant("Elx.")],
        },
        "assistant\nRice.",
        (),
    ),
}


@pytest.mark.parametrize("name", PAIRS)
def test_pairs_lose_no_column_without_a_word(
    name: str, open_encoder: Callable[..., ChatEncoder], decode: Callable[[Any], str]
) -> None:
    row, shown, unused = PAIRS[name]
    (document,) = PairEncoder(open_encoder(FULL), "drop", 2048).encode_all([read_pair(row)])
    assert isinstance(document, EncodedDocument)
    assert shown in decode(document.input_ids)
    assert decode(document.input_ids[document.supervised]) == f"{A}<|im_end|>Elx.<|im_end|>"
    assert document.unused == set(unused)


def test_rows_of_parquet_have_the_keys_that_they_had(tmp_path: Path) -> None:
    calls = [{"city": "Alzira"}, {"a": 1.0, "b": [1, None]}]
    schemas = [
        {"properties": {"city": {"type": "string"}}},
        {"properties": {"a": {"type": "number"}, "b": {"items": 1}}},
    ]
    rows = [
        {
            "messages": [user("Go.", tool_calls=None), assistant(None, tool_calls=[call(arguments)])],
            "tools": [{"type": "function", "function": {"name": "find", "parameters": schema}}],
            "extra": 1,
        }
        for arguments, schema in zip(calls, schemas, strict=True)
    ]
    file = tmp_path / "rows.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    listed = list_file(file)
    reader = FileReader(FilePart(listed, listed.size), columns("messages"))
    for (_, row), arguments, schema in zip(reader, calls, schemas, strict=True):
        assert not isinstance(row, BadRowError)
        chat = read_chat(row, "messages")
        assert chat.messages[1]["tool_calls"][0]["function"]["arguments"] == arguments
        assert chat.tools is not None
        assert chat.tools[0]["function"]["parameters"] == schema
    assert reader.unread_columns == {"extra"}


def test_a_format_is_recognised_beside_other_columns() -> None:
    for case in CASES.values():
        assert detect_format(case.row) not in (None, "preference")


@pytest.mark.parametrize(
    "row",
    [
        {"question": Q, "context": "Rice grows there.", "response": A},
        {"question": Q, "answer": A},  # GSM8K
        {"question": Q, "answers": {"text": [A], "answer_start": [1]}},
        {"prompt": Q, "answers": [{"answer": A, "rank": 1}]},  # Nectar
        {"system": "You are", "chat": f"USER: {Q} ASSISTANT: {A}"},  # Glaive
        {"data": [Q, A]},  # UltraChat
    ],
)
def test_rows_of_a_format_without_a_reader_are_no_chats(row: Row) -> None:
    assert detect_format(row) is None
    for row, _, _ in PAIRS.values():
        assert detect_format(row) == "preference"
    for row in ({"text": "a", "messages": []}, {"text": "a", "instruction": None, "output": "b"}, {"prompt": "a"}):
        assert detect_format(row) is None
