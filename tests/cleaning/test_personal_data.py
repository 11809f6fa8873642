"""--redact: personal data becomes placeholders, and what only looks like it stays."""

import json
import sys
import tracemalloc
from collections import Counter
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from fabric_train.cleaning.personal_data import PLACEHOLDERS, open_redaction
from fabric_train.cli.errors import InputError
from tests.support.token_datasets import documents_in, manifest_of, tokenize, write_jsonl

ALL = tuple(PLACEHOLDERS)
FOUND = {
    "email": {
        "Escriu a ana.garcia+web@example.com.": "Escriu a <EMAIL>.",
        "| Ana | ana@uni.es | sí |": "| Ana | <EMAIL> | sí |",
        "Ana\tana@uni.es\tsí": "Ana\t<EMAIL>\tsí",
        "|ana@uni.es|bo@uni.es|": "|<EMAIL>|<EMAIL>|",
        "[correu](mailto:ana@uni.es)": "[correu](mailto:<EMAIL>)",
        '<a href="mailto:ana@uni.es">ana@uni.es</a>': '<a href="mailto:<EMAIL>"><EMAIL></a>',
        "josé.pérez@españa.es": "<EMAIL>",
        "a@b.co,c@d.org;e@f.net": "<EMAIL>,<EMAIL>;<EMAIL>",
        "Contact...ana@uni.es": "Contact...<EMAIL>",
        "请联系ana@uni.es": "请联系<EMAIL>",
        "info@xn--espaa-rta.es": "<EMAIL>",
        "*ana@uni.es*, _ana@uni.es_, __bo@uni.es__": "*<EMAIL>*, <EMAIL>_, <EMAIL>__",
        "re\u0301my@uni.es": "<EMAIL>",
        "שלום ana@uni.es😀": "שלום <EMAIL>😀",
    },
    "iban": {
        "IBAN: ES91 2100 0418 4502 0005 1332.": "IBAN: <IBAN>.",
        "ES9121000418450200051332": "<IBAN>",
        "ES91-2100-0418-4502-0005-1332": "<IBAN>",
        "GB82 WEST 1234 5698 7654 32": "<IBAN>",
        "DE89 3704 0044 0532 0130 00 BIC COBADEFF": "<IBAN> BIC COBADEFF",
        "NO93 8601 1117 947": "<IBAN>",
        "ES91 2100 0418 45 0200051332": "<IBAN>",
        "es91 2100 0418 4502 0005 1332 de la caixa": "<IBAN> de la caixa",
    },
    "phone": {
        "Llame al 612 345 678 o al 93 123 45 67.": "Llame al <PHONE> o al <PHONE>.",
        "612 34 56 78": "<PHONE>",
        "612-345-678": "<PHONE>",
        "971\u00a0123\u00a0456": "<PHONE>",
        "612 345 678 eurocopa": "<PHONE> eurocopa",
        "971\u202f123\u202f456, 971\u2009123\u2009457": "<PHONE>, <PHONE>",
        "(93) 123 45 67": "<PHONE>",
        "93 123 45 67/93 123 45 68": "<PHONE>/<PHONE>",
        "tel:612345678": "tel:<PHONE>",
        "Móvil: 612.345.678": "Móvil: <PHONE>",
        "Llame al 93.123.45.67": "Llame al <PHONE>",
        "+34 612 345 678": "<PHONE>",
        "(+34) 93 123 45 67": "<PHONE>",
        "+34612345678 2026": "<PHONE> 2026",
        "0034 612 345 678": "<PHONE>",
        "+44 20 7946 0958": "<PHONE>",
        "+49 (0)30 901820": "<PHONE>",
        "(212) 555-2368": "<PHONE>",
        "212-555-2368": "<PHONE>",
    },
    "dni": {
        "DNI: 12345678Z": "DNI: <DNI>",
        "12345678-Z": "<DNI>",
        "12.345.678-Z": "<DNI>",
        "12.345.678 Z": "<DNI>",
        "12345678z": "<DNI>",
        "X1234567L": "<DNI>",
        "Y-1234567-X": "<DNI>",
        "X-1.234.567-L": "<DNI>",
    },
    "ip": {
        "desde 83.45.12.200.": "desde <IP>.",
        "http://83.45.12.200:8080/a": "http://<IP>:8080/a",
        "IP:83.45.12.200-83.45.12.210": "IP:<IP>-<IP>",
        "2a00:1450:4003:80a::200e": "<IP>",
        "[2a00:1450:4003:80a::200e]:443": "[<IP>]:443",
        "::ffff:83.45.12.200 - -": "::ffff:<IP> - -",
        "2a00:1450::83.45.12.200": "2a00:1450::<IP>",
        "id=1234:83.45.12.200": "id=1234:<IP>",
    },
}
STAYS = [
    *("Clause 252.227-7013", "10.1111/0081-1750.00098", "+35236450.6", "0069 0307 0300", "v8 to 4.2.77.13"),
    *("logo@2x.png", "git@github.com:owner/name.git", "ana at example dot com", "user@localhost", "npm i pkg@1.2.3"),
    *("a @ b.com", "@user", "3 @ 4.50"),
    *("ES91 2100 0418 4502 0005 1333", "XX91 2100 0418 4502 0005 1332", "ES91 2100 0418 4502", "AB12 CDEF GHIJ KLMN"),
    *(
        "746 119 000 habitantes",
        "612.345.678 euros",
        "612 345 678 €",
        "612 345 678 EUR",
        "USD 612 345 678",
        "912 345 678 habitantes",
        "$ 612 345 678",
        "612 345 678,50",
        "10 000 000",
    ),
    *("1 612 345 678", "612 345 678 901", "pedido 612345678", "AB-612 345 678", "https://x.es/612345678", "123456789"),
    *("12-11-2024 10:30", "2024-01-15", "2024 2025 2026", "1914-1918", "12 34 56 78", "3.141592653", "8412345678901"),
    *("ISBN 978-84-376-0494-7", "ISBN 84-376-0494-7", "978 84 376 0494 7", "0034612345678", "+1 234 567 890", "+25"),
    *("12345678A", "12345678", "12.345.678 y otro", "X1234567A", "A12345678Z", "112345678Z", "12.345.678"),
    *("192.168.1.1", "127.0.0.1", "255.255.255.0", "1.2.3.4", "10.15.7.1", "v83.45.12.200", "versión 83.45.12.200"),
    *(
        "Chrome/91.0.1.200",
        "999.1.1.1",
        "1.3.6.1.4.1.311",
        "83.45.12",
        "83.045.12.200",
        "12:30:45",
        "00:1A:2B:3C:4D:5E",
    ),
    *("224.0.0.114", "2001:db8::1", "fe80::1", "::1", "std::vector", "dead::beef", "2024:15:30"),
]


@pytest.mark.parametrize("kind", ALL)
def test_personal_data_becomes_placeholders_and_is_counted(kind: str) -> None:
    for text, expected in FOUND[kind].items():
        edits: Counter[str] = Counter()
        assert open_redaction([kind]).clean(text, edits) == expected
        assert edits == {f"redacted {kind}": expected.count(PLACEHOLDERS[kind])}
    together = "\n".join(FOUND[kind])
    assert open_redaction(ALL).clean(together, Counter()) == "\n".join(FOUND[kind].values())


@pytest.mark.parametrize("text", STAYS)
def test_what_only_looks_like_personal_data_stays(text: str) -> None:
    for surrounded in (text, f"({text})", f"uno {text} dos", f"a\n{text}\nb"):
        edits: Counter[str] = Counter()
        assert open_redaction(ALL).clean(surrounded, edits) == surrounded
        assert not edits


def test_only_the_kinds_that_are_given_are_replaced() -> None:
    text = "ana@uni.es, +34 612 345 678, ES91 2100 0418 4502 0005 1332, 12345678Z, 83.45.12.200"
    redaction = open_redaction(["ip", "email"])
    assert redaction.clean(text, Counter()) == text.replace("ana@uni.es", "<EMAIL>").replace("83.45.12.200", "<IP>")
    assert redaction.settings() == {"kinds": ["email", "ip"], "rules": 2, "versions": {}}
    assert set(open_redaction(ALL).settings()["versions"]) == {"phonenumbers", "python-stdnum"}


@pytest.mark.parametrize("text", ["x@" * 30_000, "a." * 30_000 + "@", "1 " * 30_000, "+1" * 30_000, "AB12" * 15_000])
def test_hard_texts_take_no_time_that_grows_with_their_square(text: str) -> None:
    assert (
        open_redaction(ALL).clean(text, Counter()) == text
    )  # a pattern that tries again from each place takes minutes


def test_a_long_row_of_numbers_takes_little_memory_and_hides_none() -> None:
    redaction = open_redaction(ALL)
    for count in range(3_990, 4_060, 3):
        text = f"{'7' * count}; 612 345 678; 12345678Z; {'7 ' * 4_500}; +34 93 123 45 67; {'1' * count}"
        expected = text.replace("+34 93 123 45 67", "<PHONE>").replace("612 345 678", "<PHONE>")
        assert redaction.clean(text, Counter()) == expected.replace("12345678Z", "<DNI>")
    text = "1234567890 " * 50_000
    tracemalloc.start()
    assert redaction.clean(text, Counter()) == text
    assert tracemalloc.get_traced_memory()[1] < 20 << 20
    tracemalloc.stop()


def test_a_missing_package_is_one_line_that_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "phonenumbers", None)
    with pytest.raises(
        InputError, match=r"^--redact phone needs phonenumbers; run pip install 'fabric-train\[cleaning\]'$"
    ):
        open_redaction(["email", "phone"])
    assert open_redaction(["email", "ip"]).kinds == ("email", "ip")


def test_the_dataset_and_its_ledger_have_the_placeholders(tmp_path: Path, tiny_model_dir: Path) -> None:
    texts = ["Ana: ana@uni.es, bo@uni.es", "Nothing here", "Call +34 612 345 678"]
    source = write_jsonl(tmp_path / "a.jsonl", texts)
    rows = tokenize(tmp_path / "out", tiny_model_dir, source, redact="email,phone", validation_split=0, max_length=4)
    documents = documents_in(rows["train"], tmp_path / "out")
    assert documents[:2] == ["Ana: <EMAIL>, <EMAIL>", "Nothing here"]
    manifest = manifest_of(tmp_path / "out")
    assert manifest.ledger.edits == {"redacted email": 2, "redacted phone": 1}
    assert manifest.cleaning["redact"]["kinds"] == ["email", "phone"]


def test_every_format_of_chats_is_redacted_before_the_template(tmp_path: Path, chatml_dir: Path) -> None:
    call = {"function": {"name": "call", "arguments": json.dumps({"to": "ana@uni.es", "phone": 612345678})}}
    rows: dict[str, list[dict[str, object]]] = {
        "messages": [
            {"messages": [{"role": "user", "content": "I am ana@uni.es"}, {"role": "assistant", "content": "Hi"}]},
            {
                "messages": [
                    {"role": "user", "content": [{"type": "text", "text": "Call ana@uni.es"}]},
                    {"role": "assistant", "tool_calls": [call], "content": "Calling ana@uni.es"},
                ]
            },
        ],
        "conversations": [
            {"conversations": [{"from": "human", "value": "ana@uni.es?"}, {"from": "gpt", "value": "Yes, bo@uni.es"}]}
        ],
        "alpaca": [{"instruction": "Write to ana@uni.es", "input": "of bo@uni.es", "output": "Dear ana@uni.es"}],
        "prompt_completion": [{"prompt": "ana@uni.es and", "completion": "bo@uni.es", "id": "not-read@uni.es"}],
    }
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}"
        "{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}<|im_end|>\n{% endfor %}"
    )
    (tmp_path / "template.jinja").write_text(template)
    sources = []
    for name, lines in rows.items():
        sources.append(tmp_path / f"{name}.jsonl")
        sources[-1].write_text("".join(json.dumps(line) + "\n" for line in lines))
    options = {"redact": "email", "chat_template": tmp_path / "template.jinja", "validation_split": 0}
    dataset_rows = tokenize(tmp_path / "out", chatml_dir, *sources, max_length=256, **options)["train"]
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out" / "tokenizer")
    text = "".join(str(tokenizer.decode(row)) for row in dataset_rows)
    assert "uni.es" not in text
    assert '{"to": "<EMAIL>", "phone": 612345678}' in text
    assert "user\nWrite to <EMAIL>\n\nof <EMAIL>" in text
    assert manifest_of(tmp_path / "out").ledger.edits == {"redacted email": 11}
