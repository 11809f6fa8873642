"""Tokenizers of each kind give the ids of the library they come from, also after saving and loading."""

import base64
import gc
import json
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import tiktoken
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from fabric_train.cli.errors import InputError
from fabric_train.tokenization.tokenizers.fast_tokenizer import load_fast
from fabric_train.tokenization.tokenizers.llama3_ranks import SPECIAL_TOKENS, SPLIT_PATTERN, read_ranks
from fabric_train.tokenization.tokenizers.parity_check import Reference, find_difference
from fabric_train.tokenization.tokenizers.sentencepiece_model import CONVERSION_TEXTS
from fabric_train.tokenization.tokenizers.text_encoder import open_encoder
from fabric_train.tokenization.tokenizers.tokenizer import load_tokenizer
from fabric_train.tokenization.tokenizers.tokenizer_folder import CorpusTokenizer, read_plain_folder


@pytest.fixture(scope="module", autouse=True)
def _free_large_tokenizers() -> Iterator[None]:
    """Free what the fixtures below have loaded, which later files would keep in memory."""
    yield
    gc.unfreeze()  # tokenizing has frozen what there was
    gc.collect()


@pytest.fixture(scope="module")
def real_texts(shakespeare_jsonl: Path) -> list[str]:
    """Every twentieth work of Shakespeare, in parts of 5,000 characters."""
    with shakespeare_jsonl.open(encoding="utf-8") as lines:
        works = [json.loads(line)["text"] for line in lines][::20]
    return [work[start : start + 5000] for work in works for start in range(0, len(work), 5000)]


@pytest.fixture(scope="module")
def made_up_texts() -> list[str]:
    """Random sequences of strings that overlap, repeat or are not letters."""
    parts = [
        "er",
        "e",
        "re",
        "an",
        "a",
        "na",
        "t",
        "ing",
        " ",
        "  ",
        "\n",
        "ab",
        "ь",
        "р",
        "=",
        "\t",
        "😀",
        "é",
        "▁",
        "\x00",
    ]
    draw = random.Random(0)
    return ["".join(draw.choices(parts, k=draw.randint(1, 14))) for _ in range(2000)]


def ids_in_documents(tokenizer: CorpusTokenizer, folder: Path, texts: list[str]) -> list[list[int]]:
    """Return the ids that ``tokenizer``, which was saved in ``folder``, gives texts in documents."""
    fast = load_fast(folder / "tokenizer.json", tokenizer.special_text_is_plain)
    return [encoding.ids for encoding in fast.encode_batch_fast(texts, add_special_tokens=False)]


def saved_and_loaded(tokenizer: CorpusTokenizer, folder: Path) -> Any:
    tokenizer.save(folder)
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def llama3_loaded(llama3_dir: Path) -> Any:
    return AutoTokenizer.from_pretrained(llama3_dir)


@pytest.fixture(scope="module")
def spm_loaded(spm_dir: Path) -> Any:
    return AutoTokenizer.from_pretrained(spm_dir)


def train_sentencepiece(folder: Path, texts: list[str], **options: Any) -> Path:
    (folder / "corpus.txt").write_text("\n".join(texts[:60]), encoding="utf-8")
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "corpus.txt"),
        model_prefix=str(folder / "tokenizer"),
        vocab_size=1000,
        minloglevel=2,
        **options,
    )
    return folder / "tokenizer.model"


@pytest.mark.slow
def test_sentencepiece_ids_equal_the_librarys_on_real_and_hard_text(
    spm_tokenizer: CorpusTokenizer,
    spm_dir: Path,
    spm_tokenizer_model: Path,
    real_texts: list[str],
    made_up_texts: list[str],
) -> None:
    library = sentencepiece.SentencePieceProcessor(model_file=str(spm_tokenizer_model))
    texts = [*real_texts, *made_up_texts, *CONVERSION_TEXTS]
    for text, ids in zip(texts, ids_in_documents(spm_tokenizer, spm_dir, texts), strict=True):
        assert ids == library.encode(text), text


def test_sentencepiece_tokenizer_has_the_models_own_bos_and_eos(spm_tokenizer: CorpusTokenizer) -> None:
    assert (spm_tokenizer.bos_token_id, spm_tokenizer.eos_token_id, spm_tokenizer.vocab_size) == (1, 2, 32000)
    assert (spm_tokenizer.bos_token, spm_tokenizer.eos_token) == ("<s>", "</s>")


SETTINGS = {
    "llama": {"normalization_rule_name": "identity", "remove_extra_whitespaces": False, "byte_fallback": True},
    "no dummy prefix": {
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "add_dummy_prefix": False,
    },
    "sentencepiece defaults": {},
    "no BOS": {"normalization_rule_name": "identity", "remove_extra_whitespaces": False, "bos_id": -1},
}


@pytest.mark.parametrize("kind", SETTINGS)
def test_sentencepiece_model_with_other_settings_has_the_librarys_ids(
    tmp_path: Path, real_texts: list[str], made_up_texts: list[str], kind: str
) -> None:
    model = train_sentencepiece(tmp_path, real_texts, model_type="bpe", **SETTINGS[kind])
    library = sentencepiece.SentencePieceProcessor(model_file=str(model))
    tokenizer = load_tokenizer(str(model))
    tokenizer.save(tmp_path / "saved")
    texts = [*real_texts[60:70], *made_up_texts, *CONVERSION_TEXTS]
    assert ids_in_documents(tokenizer, tmp_path / "saved", texts) == [library.encode(text) for text in texts]
    assert tokenizer.bos_token_id == (None if kind == "no BOS" else library.bos_id())


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"model_type": "unigram"}, "not a BPE model"),
        ({"model_type": "bpe", "treat_whitespace_as_suffix": True}, "suffixes"),
        ({"model_type": "bpe", "user_defined_symbols": ["<sep>"]}, "gets different ones"),
    ],
)
def test_sentencepiece_model_whose_ids_would_differ_is_refused(
    tmp_path: Path, real_texts: list[str], options: dict[str, object], reason: str
) -> None:
    with pytest.raises(InputError, match=reason):
        load_tokenizer(str(train_sentencepiece(tmp_path, real_texts, **options)))


@pytest.mark.slow
def test_llama3_ranks_have_tiktokens_ids(
    llama3_tokenizer: CorpusTokenizer,
    llama3_dir: Path,
    llama3_tokenizer_model: Path,
    real_texts: list[str],
    made_up_texts: list[str],
) -> None:
    special = {token: 128_000 + index for index, token in enumerate(SPECIAL_TOKENS)}
    ranks = read_ranks(llama3_tokenizer_model)
    library = tiktoken.Encoding("llama3", pat_str=SPLIT_PATTERN, mergeable_ranks=ranks, special_tokens=special)
    texts = [*real_texts, *made_up_texts, *CONVERSION_TEXTS, *special]
    expected = [library.encode(text, allowed_special="all") for text in texts]
    assert ids_in_documents(llama3_tokenizer, llama3_dir, texts) == expected


@pytest.mark.parametrize("kind", ["llama3", "smollm2", "spm"])
def test_gigatoken_gives_the_ids_of_published_tokenizers(
    request: pytest.FixtureRequest, kind: str, real_texts: list[str]
) -> None:
    file = request.getfixturevalue(f"{kind}_dir") / "tokenizer.json"
    plain = kind == "spm"
    encoder, used = open_encoder(file, plain)
    assert used == "gigatoken"
    reference = Reference(file, plain)
    texts = [*reference.hard_strings(), *real_texts[:4]]
    assert find_difference(texts, reference.encode(texts), encoder.encode_batch(texts)) is None


def test_llama3_ranks_get_llama3s_special_tokens(llama3_tokenizer: CorpusTokenizer, llama3_loaded: Any) -> None:
    assert (llama3_tokenizer.bos_token_id, llama3_tokenizer.eos_token_id) == (128_000, 128_001)
    assert llama3_tokenizer.vocab_size == 128_256
    known = {"<|finetune_right_pad_id|>": 128_004, "<|start_header_id|>": 128_006, "<|end_header_id|>": 128_007}
    known |= {"<|eom_id|>": 128_008, "<|eot_id|>": 128_009, "<|python_tag|>": 128_010}
    known |= {"<|reserved_special_token_247|>": 128_255}
    assert llama3_loaded.convert_tokens_to_ids(list(known)) == list(known.values())


@pytest.mark.parametrize("kind", ["llama3", "spm"])
def test_saved_tokenizer_has_the_same_ids_and_adds_bos_once(
    kind: str, request: pytest.FixtureRequest, real_texts: list[str]
) -> None:
    tokenizer, folder, loaded = (request.getfixturevalue(f"{kind}_{name}") for name in ("tokenizer", "dir", "loaded"))
    texts = [*real_texts[:20], *(text for text in CONVERSION_TEXTS if "s>" not in text and "<unk>" not in text)]
    without = ids_in_documents(tokenizer, folder, texts)
    assert loaded(texts, add_special_tokens=False)["input_ids"] == without
    assert loaded(texts)["input_ids"] == [[tokenizer.bos_token_id, *ids] for ids in without]
    assert loaded.decode(without[0]) == texts[0]
    assert (loaded.bos_token_id, loaded.eos_token_id) == (tokenizer.bos_token_id, tokenizer.eos_token_id)


def test_tokenizer_json_is_used_unchanged_with_its_chat_template(smollm2_dir: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(smollm2_dir))
    assert tokenizer.vocab_size == 49_152
    loaded = saved_and_loaded(tokenizer, tmp_path)
    assert loaded.chat_template == (smollm2_dir / "chat_template.jinja").read_text(encoding="utf-8")


def test_plain_folder_is_loaded_and_saved_without_transformers(smollm2_dir: Path, tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path\n"
        "from fabric_train.tokenization.tokenizers.tokenizer import load_tokenizer\n"
        f"load_tokenizer({str(smollm2_dir)!r}).save(Path({str(tmp_path / 'saved')!r})); "
        "print(*sorted({'transformers', 'tokenizers', 'torch'} & sys.modules.keys()))"
    )
    finished = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert finished.stdout.strip() == ""
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (tmp_path / "saved" / name).read_bytes() == (smollm2_dir / name).read_bytes()


def token(content: str, **properties: object) -> dict[str, object]:
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {"content": content, **plain, **properties}


# the other files of a folder with tokenizer.json, and whether they leave its tokens unchanged
END = "<|im_end|>"
BEGIN = "<|im_start|>"
SMALL_VOCAB_SIZE = 2000  # of chatml_dir
CONFIGURATIONS: dict[str, tuple[dict[str, dict[str, object]], bool]] = {
    "names": (
        {"tokenizer_config.json": {"bos_token": BEGIN, "eos_token": END, "pad_token": token(END, __type="AddedToken")}},
        True,
    ),
    "the same tokens again": (
        {"tokenizer_config.json": {"eos_token": END, "added_tokens_decoder": {"2": token(END), "1": token(BEGIN)}}},
        True,
    ),
    "another model's class": ({"tokenizer_config.json": {"eos_token": END, "tokenizer_class": "LlamaTokenizer"}}, True),
    "a map of special tokens": (
        {
            "tokenizer_config.json": {"eos_token": BEGIN, "model_max_length": 99},
            "special_tokens_map.json": {"eos_token": token(END), "bos_token": BEGIN},
        },
        True,
    ),
    "a map that a list of tokens overrides": (
        {
            "tokenizer_config.json": {"eos_token": BEGIN, "added_tokens_decoder": {"1": token(BEGIN)}},
            "special_tokens_map.json": {"eos_token": END},
        },
        True,
    ),
    "one more token": (
        {"tokenizer_config.json": {"eos_token": END, "added_tokens_decoder": {str(SMALL_VOCAB_SIZE): token("the")}}},
        False,
    ),
    "one more token, in an older file": (
        {"tokenizer_config.json": {"eos_token": END}, "added_tokens.json": {"<new>": SMALL_VOCAB_SIZE}},
        False,
    ),
    "a token that includes whitespace": (
        {"tokenizer_config.json": {"eos_token": END, "added_tokens_decoder": {"2": token(END, lstrip=True)}}},
        False,
    ),
    "a name for a token that is not special": ({"tokenizer_config.json": {"eos_token": "the"}}, False),
    "an extra token": ({"tokenizer_config.json": {"eos_token": END, "extra_special_tokens": ["king"]}}, False),
    "an option of its own": ({"tokenizer_config.json": {"eos_token": END, "image_token": "the"}}, False),
    "special tokens as text": ({"tokenizer_config.json": {"eos_token": END, "split_special_tokens": True}}, False),
    "several templates": (
        {"tokenizer_config.json": {"eos_token": END, "chat_template": [{"name": "default", "template": "{{ x }}"}]}},
        False,
    ),
}


@pytest.mark.parametrize("case", CONFIGURATIONS)
def test_folder_is_read_as_transformers_reads_it(case: str, chatml_dir: Path, tmp_path: Path) -> None:
    files, is_plain = CONFIGURATIONS[case]
    folder = tmp_path / "given"
    saved = tmp_path / "saved"
    folder.mkdir()
    shutil.copy(chatml_dir / "tokenizer.json", folder)
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    assert (read_plain_folder(folder, "any") is not None) == is_plain
    ours = load_tokenizer(str(folder))
    theirs = PreTrainedTokenizerFast.from_pretrained(folder)
    ours.save(saved)
    assert (ours.bos_token_id, ours.eos_token_id, ours.pad_token_id) == (
        theirs.bos_token_id,
        theirs.eos_token_id,
        theirs.pad_token_id,
    )
    assert (ours.bos_token, ours.eos_token) == (theirs.bos_token, theirs.eos_token)
    assert ours.vocab_size == max(theirs.get_vocab().values()) + 1
    assert ours.chat_template == ("{{ x }}" if case == "several templates" else theirs.chat_template)
    text = f"the king {END} and{END}  the<new>  {BEGIN}the"
    for loaded in (AutoTokenizer.from_pretrained(saved), PreTrainedTokenizerFast.from_pretrained(saved)):
        assert loaded(text)["input_ids"] == theirs(text)["input_ids"]
        assert (loaded.bos_token, loaded.eos_token, loaded.pad_token) == (
            theirs.bos_token,
            theirs.eos_token,
            theirs.pad_token,
        )


@pytest.mark.parametrize("role", ["eos_token", "bos_token", "pad_token"])
def test_a_named_token_outside_the_vocabulary_is_refused(chatml_dir: Path, tmp_path: Path, role: str) -> None:
    shutil.copy(chatml_dir / "tokenizer.json", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": END, role: "<|nowhere|>"}))
    with pytest.raises(InputError) as error:
        load_tokenizer(str(tmp_path))
    (fault,) = error.value.faults
    assert f"its {role} '<|nowhere|>' is not in its vocabulary; name one of its tokens in" in fault


@pytest.fixture(scope="module")
def small_spm_model(tmp_path_factory: pytest.TempPathFactory, real_texts: list[str]) -> Path:
    """A SentencePiece model of 1,000 pieces with the settings of Llama-2's."""
    return train_sentencepiece(tmp_path_factory.mktemp("small"), real_texts, model_type="bpe", **SETTINGS["llama"])


def test_chat_template_next_to_tokenizer_model_is_kept(small_spm_model: Path, tmp_path: Path) -> None:
    shutil.copy(small_spm_model, tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
    loaded = saved_and_loaded(load_tokenizer(str(tmp_path)), tmp_path / "saved")
    assert loaded.chat_template == "{{ messages }}"


def without_special_tokens(source: Path, folder: Path, **kept: str) -> None:
    shutil.copy(source / "tokenizer.json", folder)
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **kept}))


def test_a_tokenizer_with_dropout_is_refused(smollm2_dir: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(smollm2_dir, tmp_path / "dropout", ignore=shutil.ignore_patterns("*.safetensors")))
    content = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    content["model"]["dropout"] = 0.1
    (folder / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(
        InputError, match=r"with dropout 0\.1, a text gets different ids each time; set dropout to null in it"
    ):
        load_tokenizer(str(folder))


def test_tokenizer_without_bos_is_accepted_and_without_eos_refused(chatml_dir: Path, tmp_path: Path) -> None:
    without_special_tokens(chatml_dir, tmp_path, eos_token="<|im_end|>")
    assert load_tokenizer(str(tmp_path)).bos_token_id is None
    without_special_tokens(chatml_dir, tmp_path, bos_token="<|im_start|>")
    with pytest.raises(InputError, match="no EOS token, so"):
        load_tokenizer(str(tmp_path))
    without_special_tokens(chatml_dir, tmp_path)
    with pytest.raises(InputError, match="no EOS token and no BOS token"):
        load_tokenizer(str(tmp_path))


def rank_lines(count: int) -> bytes:
    tokens = [bytes([byte]) for byte in range(256)] + [b"%06d" % number for number in range(count - 256)]
    return b"".join(base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(tokens))


DAMAGED = {
    "tokenizer.json": [
        (b"{", "is not a tokenizer"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0", "git lfs pull"),
    ],
    "tokenizer.model": [
        (b"", "neither"),
        (b"PK\x03\x04 some archive", "neither"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0", "git lfs pull"),
        (rank_lines(300), "300 ranks"),
        (rank_lines(300) + b"no rank here\n", "line 301"),
    ],
    "model.safetensors": [(b"weights", "it has neither tokenizer.json nor tokenizer.model")],
}


@pytest.mark.parametrize(
    ("file", "content", "message"), [(file, *case) for file, cases in DAMAGED.items() for case in cases]
)
def test_damaged_tokenizer_is_reported_in_one_line(tmp_path: Path, file: str, content: bytes, message: str) -> None:
    (tmp_path / file).write_bytes(content)
    with pytest.raises(InputError, match=message) as caught:
        load_tokenizer(str(tmp_path))
    (fault,) = caught.value.faults
    assert str(tmp_path) in fault
    assert "\n" not in fault


@pytest.mark.parametrize(
    ("name", "message"),
    [("no/such/folder", "no such file or folder"), ("owner/name", "hub cannot be reached"), ("./here", "no such file")],
)
def test_missing_tokenizer_is_reported_in_one_line(name: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        load_tokenizer(name)


def test_tokens_added_to_a_tokenizer_model_are_not_dropped_silently(small_spm_model: Path, tmp_path: Path) -> None:
    shutil.copy(small_spm_model, tmp_path)
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<pad>": 1000, "<s>": 1}))
    with pytest.raises(InputError, match="adds <pad> to"):
        load_tokenizer(str(tmp_path))
