"""python -m fabric_train.vocabulary extend: old texts keep their ids, all libraries read the folder alike, rows begin
where they should, and old weights keep their bits.
"""

import hashlib
import json
import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentencepiece
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from fabric_train.cli.errors import InputError
from fabric_train.cli.parser import parse_arguments
from fabric_train.data.token_dataset import open_dataset
from fabric_train.evaluation.arguments import EvaluateArguments
from fabric_train.evaluation.compare_models import compare_models
from fabric_train.export.hub_format import BLOCK_BYTES
from fabric_train.model.hf_model import read_shape
from fabric_train.model.weight_files import open_weights
from fabric_train.preflight import dataset_check
from fabric_train.preflight.dataset_check import note_on_added_tokens
from fabric_train.sample_data import real_data
from fabric_train.tokenization.tokenizers.text_encoder import open_encoder
from fabric_train.tokenization.tokenizers.tokenizer import load_tokenizer
from fabric_train.vocabulary.__main__ import main
from fabric_train.vocabulary.extendable_tokenizer import KEPT_TEXTS, ExtendableTokenizer, NewTokens
from fabric_train.vocabulary.extended_tensors import ExtendedMatrix
from fabric_train.vocabulary.verify import load_verified_tokenizer
from tests.support.token_datasets import tokenize

LANGUAGES = ("cs", "de", "el", "en", "es", "fr", "ja", "ko", "ru", "vi", "zh_CN")
WIDTH = 32


def pages(language: str, number: int = 8) -> list[str]:
    """Return the first 3,000 characters of pages of a guide."""
    lines = real_data.guide(language).read_text(encoding="utf-8").splitlines()[:number]
    return [json.loads(line)["text"][:3000] for line in lines]


def ids_of(tokenizer: Tokenizer, texts: Sequence[str]) -> list[list[int]]:
    return [encoding.ids for encoding in tokenizer.encode_batch(list(texts), add_special_tokens=False)]


def write_llama(folder: Path, rows: int, *, tied: bool, max_shard_size: str = "5GB") -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=rows,
        hidden_size=WIDTH,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        tie_word_embeddings=tied,
        bos_token_id=1,
        eos_token_id=2,
    )
    model: Any = LlamaForCausalLM(config)
    model.to(torch.bfloat16).save_pretrained(folder, max_shard_size=max_shard_size)


@pytest.fixture(scope="module")
def catalan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("catalan") / "ca.jsonl"
    file.write_text("\n".join(json.dumps({"text": page}) for page in pages("ca", 30)), encoding="utf-8")
    return file


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory, chatml_dir: Path) -> Path:
    """A model of 2,000 tokens whose head is not tied, in three shards, with a chat template and a licence."""
    folder = Path(shutil.copytree(chatml_dir, tmp_path_factory.mktemp("base") / "base"))
    write_llama(folder, 2000, tied=False, max_shard_size="150KB")
    (folder / "LICENSE").write_text("a licence")
    return folder


@pytest.fixture(scope="module")
def extended(tmp_path_factory: pytest.TempPathFactory, base: Path, catalan: Path) -> Path:
    """That model with 150 learned tokens, two given ones and a special one."""
    folder = tmp_path_factory.mktemp("extended")
    (folder / "tokens.txt").write_text("ChIJ-42\nfoo bar\n", encoding="utf-8")
    (folder / "special.txt").write_text("<|turn|>\n", encoding="utf-8")
    words = f"--model {base} --texts ca={catalan} --num_tokens 150 --output_dir {folder / 'out'}"
    words += f" --tokens {folder / 'tokens.txt'} --special_tokens {folder / 'special.txt'} --max_shard_size 150KB"
    main(["extend", *words.split()])
    return folder / "out"


# -------------------------------------------------------------------------------------------------------- tokenizers


@pytest.mark.parametrize("name", ["smollm2_dir", "llama3_tokenizer_model", "spm_tokenizer_model"])
def test_texts_of_eleven_languages_keep_their_ids_unless_they_have_a_new_token(
    name: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    source = request.getfixturevalue(name)
    sentencepiece_model = source if name.startswith("spm") else None
    tokenizer = ExtendableTokenizer(load_tokenizer(str(source)), tmp_path, sentencepiece_model)
    learned = tokenizer.learn(pages("ca", 30), 200)
    new = NewTokens(tokenizer.first_id, learned)
    tokenizer.write(new)
    extended = load_verified_tokenizer(tokenizer.fast, tmp_path, new, documents=[])
    num_kept = 0  # lines
    for language in LANGUAGES:
        lines = [line for page in pages(language) for line in page.splitlines()]
        for old_ids, new_ids in zip(ids_of(tokenizer.fast, lines), ids_of(extended, lines), strict=True):
            has_new_token = max(new_ids, default=0) >= tokenizer.first_id
            if not has_new_token:
                assert new_ids == old_ids
                num_kept += 1
    assert num_kept > 300
    texts = pages("ca", 40)
    num_old_tokens = sum(map(len, ids_of(tokenizer.fast, texts)))
    num_tokens = sum(map(len, ids_of(extended, texts)))
    assert num_tokens < 0.9 * num_old_tokens
    if sentencepiece_model is None:
        assert ids_of(extended, ["".join(KEPT_TEXTS)]) == ids_of(tokenizer.fast, ["".join(KEPT_TEXTS)])
        return
    library = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model"))
    texts_of_three_languages = [*texts, *pages("es"), *pages("ko")]
    assert library.encode(texts_of_three_languages) == ids_of(extended, texts_of_three_languages)
    assert library.vocab_size() == tokenizer.first_id + 200


def test_new_letters_become_pieces_of_a_sentencepiece_model(tmp_path: Path, small_spm_dir: Path) -> None:
    tokenizer = ExtendableTokenizer(load_tokenizer(str(small_spm_dir)), tmp_path, small_spm_dir / "tokenizer.model")
    new = NewTokens(tokenizer.first_id, tokenizer.learn(pages("ru"), 120), ("Costa Brava",), ("<|turn|>",))
    assert {"и", "▁и"} <= set(new.texts)
    assert new.learned.pieces[new.texts.index("и")] == tokenizer.pieces_of("и")[1:]  # its bytes, after the space
    tokenizer.write(new)
    extended = load_verified_tokenizer(tokenizer.fast, tmp_path, new, documents=pages("ru"))
    library = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model"))
    assert library.encode(pages("ru")) == ids_of(extended, pages("ru"))
    listed_tokens = json.loads((tmp_path / "tokenizer_config.json").read_text())["added_tokens_decoder"]
    given_id = tokenizer.first_id + 120  # after the learned tokens
    assert library.id_to_piece(given_id) == "Costa▁Brava"
    assert not library.is_control(given_id)
    assert listed_tokens[str(given_id)]["content"] == "Costa Brava"
    assert not listed_tokens[str(given_id)]["special"]
    special_id = given_id + 1
    assert library.id_to_piece(special_id) == "<|turn|>"
    assert library.is_control(special_id)
    assert listed_tokens[str(special_id)]["content"] == "<|turn|>"
    assert listed_tokens[str(special_id)]["special"]
    assert load_tokenizer(str(tmp_path)).source == tmp_path  # read without transformers, so its files agree


def test_a_learned_token_is_the_pair_that_comes_most(tmp_path: Path, chatml_dir: Path) -> None:
    tokenizer = ExtendableTokenizer(load_tokenizer(str(chatml_dir)), tmp_path, None)
    (before,) = ids_of(tokenizer.fast, [" zqx"])
    learned = tokenizer.learn([" zqx zqx zqx zqx and"], len(before) - 1)
    assert learned.tokens[-1] == "Ġzqx"
    assert learned.pieces[-1] == tuple(before)
    with pytest.raises(InputError, match=r"only .* new tokens that occur 2 times; give a lower number, or more text"):
        tokenizer.learn([" zqx zqx"], 1000)


def test_transformers_and_gigatoken_read_the_folder_as_tokenizers_does(extended: Path, base: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(extended)
    fast, old = (Tokenizer.from_file(str(folder / "tokenizer.json")) for folder in (extended, base))
    encoder, name = open_encoder(extended / "tokenizer.json", special_text_is_plain=False)
    texts = [*pages("ca"), *pages("en"), "a ChIJ-42<|turn|>foo bar", "<|im_start|>user\nhola<|im_end|>"]
    assert name == "gigatoken"
    assert ids_of(fast, texts) == [ids.tolist() for ids in encoder.encode_batch(texts)]
    assert ids_of(fast, texts) == tokenizer(texts, add_special_tokens=False)["input_ids"]
    assert tokenizer.convert_tokens_to_ids(["ChIJ-42", "foo bar", "<|turn|>"]) == [2150, 2151, 2152]
    assert tokenizer.decode(tokenizer.encode(texts[0])) == texts[0]
    assert tokenizer.decode([2150, 2152], skip_special_tokens=True) == "ChIJ-42"
    assert tokenizer.chat_template == AutoTokenizer.from_pretrained(base).chat_template
    for token in ("<|im_start|>", "<|im_end|>"):
        assert fast.token_to_id(token) == old.token_to_id(token)


# ------------------------------------------------------------------------------------------------------------- models


def test_new_rows_are_means_of_their_pieces_and_all_else_keeps_its_bits(extended: Path, base: Path) -> None:
    old = open_weights(base)
    new = open_weights(extended)
    added = json.loads((extended / "vocabulary.json").read_text())
    before = Tokenizer.from_file(str(base / "tokenizer.json"))
    after = Tokenizer.from_file(str(extended / "tokenizer.json"))
    assert set(old) == set(new)
    assert (added["first_id"], added["num_rows"], len(added["tokens"])) == (2000, 2176, 153)
    assert json.loads((extended / "config.json").read_text())["vocab_size"] == 2176 == 34 * 64
    for name in old:
        old_tensor = old.read(name)
        new_tensor = new.read(name)
        if name not in ("model.embed_tokens.weight", "lm_head.weight"):
            assert torch.equal(old_tensor, new_tensor)
            continue
        assert torch.equal(old_tensor, new_tensor[:2000])
        for token_id in (2000, 2100, 2149, 2150, 2152):
            text = after.decode([token_id], skip_special_tokens=False)
            pieces = before.encode(text, add_special_tokens=False).ids
            assert torch.equal(new_tensor[token_id], old_tensor[pieces].double().mean(dim=0).to(torch.bfloat16))
        mean_row = old_tensor.double().mean(dim=0).to(torch.bfloat16)
        torch.testing.assert_close(new_tensor[2153:], mean_row.expand(23, -1), rtol=0.02, atol=1e-4)
    assert len(list(extended.glob("model-*.safetensors"))) > 2
    assert (extended / "LICENSE").read_text() == "a licence"


def test_transformers_gives_old_tokens_the_logits_of_the_old_model(extended: Path, base: Path) -> None:
    ids = torch.tensor([Tokenizer.from_file(str(base / "tokenizer.json")).encode(pages("en")[0]).ids[:50]])
    with torch.no_grad():
        before, after = (AutoModelForCausalLM.from_pretrained(folder)(ids).logits for folder in (base, extended))
    assert after.shape[-1] == 2176
    torch.testing.assert_close(after[..., :2000], before, rtol=0.01, atol=1e-3)


def test_a_tied_model_stays_tied(tmp_path: Path, chatml_dir: Path, catalan: Path) -> None:
    base = Path(shutil.copytree(chatml_dir, tmp_path / "base"))
    write_llama(base, 2048, tied=True)
    words = f"--model {base} --texts ca={catalan} --num_tokens 20 --output_dir {tmp_path / 'out'} --init normal"
    main(["extend", *words.split()])
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert "lm_head.weight" not in tensors
    assert tensors["model.embed_tokens.weight"].shape == (2048, WIDTH)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    main(["extend", *words.replace(f"{tmp_path / 'out'}", f"{tmp_path / 'again'}").split()])
    again = load_file(tmp_path / "again" / "model.safetensors")
    assert all(torch.equal(again[name], tensor) for name, tensor in tensors.items())


@pytest.mark.parametrize("init", ["mean", "normal"])
def test_only_rows_that_get_a_token_change(
    tmp_path: Path, chatml_dir: Path, capsys: pytest.CaptureFixture[str], init: str
) -> None:
    base = Path(shutil.copytree(chatml_dir, tmp_path / "base"))
    write_llama(base, 2064, tied=False)  # 64 rows after the tokenizer's last id
    (tmp_path / "tokens.txt").write_text("qqzx\nxzqq\n")
    words = f"--model {base} --tokens {tmp_path / 'tokens.txt'} --init {init} --output_dir {tmp_path / 'out'}"
    main(["extend", *words.split()])
    old = load_file(base / "model.safetensors")
    new = load_file(tmp_path / "out" / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        is_equal = (old[name] == new[name][:2064]).all(dim=1)
        assert torch.nonzero(~is_equal).flatten().tolist() == [2000, 2001]
        assert new[name].shape == (2112, WIDTH)
    said = f"{capsys.readouterr().out} {(tmp_path / 'out' / 'README.md').read_text()}"
    assert "the new tokens use 2 of 64 stored rows without a token" in said
    assert "2 of them use rows of the base model that had no token" in said


@pytest.mark.parametrize("stores_head", [False, True])
def test_a_plan_counts_the_rows_that_are_taken_and_a_tied_matrix_once(
    tmp_path: Path, chatml_dir: Path, capsys: pytest.CaptureFixture[str], stores_head: bool
) -> None:
    base = Path(shutil.copytree(chatml_dir, tmp_path / "base"))
    write_llama(base, 2064, tied=True)  # 64 rows after the tokenizer's last id
    if stores_head:  # as other programs save a tied model
        tensors = load_file(base / "model.safetensors")
        head = tensors["model.embed_tokens.weight"].clone()
        save_file({**tensors, "lm_head.weight": head}, base / "model.safetensors", {"format": "pt"})
    (tmp_path / "tokens.txt").write_text("".join(f"qqzx{number}\n" for number in range(70)))
    words = f"--model {base} --tokens {tmp_path / 'tokens.txt'} --output_dir {tmp_path / 'out'} --plan true"
    main(["extend", *words.split()])
    printed = capsys.readouterr().out
    assert "the new tokens use 64 of 64 stored rows without a token" in printed
    row = load_file(base / "model.safetensors")["model.embed_tokens.weight"][0]
    assert f"{2112 * row.nbytes / 1e6:.1f} MB\n" in printed.partition("in the embedding, tied with the head: ")[2]


def test_a_record_of_other_added_tokens_does_not_go_on(extended: Path, catalan: Path, tmp_path: Path) -> None:
    """Another program has added tokens since."""
    base = Path(shutil.copytree(extended, tmp_path / "base"))
    record = json.loads((base / "vocabulary.json").read_text())
    (base / "vocabulary.json").write_text(json.dumps(record | {"tokens": record["tokens"][:-1]}))
    words = f"--model {base} --texts ca={catalan} --num_tokens 3 --output_dir {tmp_path / 'out'}"
    main(["extend", *words.split()])
    added = json.loads((tmp_path / "out" / "vocabulary.json").read_text())
    assert (added["first_id"], len(added["tokens"])) == (2000 + len(record["tokens"]), 3)


@pytest.mark.parametrize("num_without_token", [0, 2000])
def test_normal_rows_have_the_mean_and_the_covariance_of_the_old_ones(tmp_path: Path, num_without_token: int) -> None:
    mixing = torch.randn(16, 16, generator=torch.Generator().manual_seed(0))
    rows = torch.randn(4000, 16, generator=torch.Generator().manual_seed(1)) @ mixing + 3
    stored = torch.cat([rows, torch.zeros(num_without_token, 16)])
    save_file({"w": stored}, tmp_path / "model.safetensors")
    matrix = ExtendedMatrix(open_weights(tmp_path), "w", 4000, [()] * 4000, 8000, (7, 0))
    drawn = matrix.read_block((4000, 0), (4000, 16))
    scale = float(torch.cov(rows.T).diagonal().mean())
    torch.testing.assert_close(drawn.mean(dim=0), rows.mean(dim=0), rtol=0, atol=0.08 * scale**0.5)
    torch.testing.assert_close(torch.cov(drawn.T), torch.cov(rows.T), rtol=0, atol=0.12 * scale)
    norms = matrix.norms()
    assert norms.new == pytest.approx(norms.old, rel=0.02)


def test_no_more_than_a_block_of_rows_is_read_at_once(tmp_path: Path) -> None:
    """A 70B's matrix of 128,256 rows takes 2 GB, and 4 GB in fp32."""
    save_file({"w": torch.zeros(2000, 4096, dtype=torch.bfloat16)}, tmp_path / "model.safetensors")

    class Recorder:
        """Tensors that keep the largest number of elements that was read at once."""

        largest = 0

        def __init__(self) -> None:
            self._tensors = open_weights(tmp_path)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._tensors, name)

        def read_block(self, name: str, offsets: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
            self.largest = max(self.largest, int(np.prod(shape)))
            return self._tensors.read_block(name, offsets, shape)

    recorder: Any = Recorder()
    matrix = ExtendedMatrix(recorder, "w", 2000, [(1, 2)] * 40, 2048, None)
    matrix.read_block((1990, 0), (50, 4096))
    matrix.norms()
    assert recorder.largest * 4 <= BLOCK_BYTES


# -------------------------------------------------------------------------------------------------------- the program


def test_a_plan_says_what_the_tokens_save_and_cost_and_writes_nothing(
    base: Path, catalan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = f"--model {base} --texts ca={catalan} --num_tokens 150 --output_dir {tmp_path / 'out'} --plan true"
    main(["extend", *words.split()])
    printed = capsys.readouterr().out
    assert "tokens per word on the held-out" in printed
    assert "tokens     2,000 → 2,150: 150 learned, 0 given, 0 special\n" in printed
    assert "rows       2,000 → 2,176 (vocab_size in config.json), padded to a multiple of 64\n" in printed
    assert f"costs      {176 * WIDTH * 2 * 2 / 1e6:.1f} MB more in embedding and head" in printed
    assert list(tmp_path.iterdir()) == []


def test_a_model_can_be_extended_again(extended: Path, catalan: Path, tmp_path: Path) -> None:
    words = f"--model {extended} --texts ca={catalan} --num_tokens 40 --output_dir {tmp_path / 'out'} --init normal"
    main(["extend", *words.split()])
    added = json.loads((tmp_path / "out" / "vocabulary.json").read_text())
    assert (added["first_id"], len(added["tokens"]), added["num_rows"]) == (2000, 193, 2240)
    old = open_weights(extended)
    new = open_weights(tmp_path / "out")
    assert all(torch.equal(old.read(name)[:2153], new.read(name)[:2153]) for name in old)


def test_a_given_token_is_not_learned_too(tmp_path: Path, chatml_dir: Path) -> None:
    tokenizer = ExtendableTokenizer(load_tokenizer(str(chatml_dir)), tmp_path, None)
    assert "zqx" in tokenizer.learn(["zqx\n" * 9], 2).tokens
    assert "zqx" not in tokenizer.learn(["zqx\n" * 9], 1, ["zqx"]).tokens


def digest(folder: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.iterdir()}


@pytest.mark.parametrize(
    "words, fault",
    [
        ("--num_tokens 10", "--texts and --num_tokens need each other"),
        ("", "no tokens to add; give --texts with --num_tokens, --tokens or --special_tokens"),
        ("--tokens nothing.txt", "--tokens nothing.txt: cannot be read"),
        ("--tokens KNOWN", "' the' is already a token; leave it out|'Ġthe' is already a token; leave it out"),
        ("--texts ca=CA --num_tokens 900000", "new tokens that occur 2 times; give a lower number, or more text"),
        ("--texts ca=CA --num_tokens 5 --max_shard_size big", "--max_shard_size: expected a size"),
        ("--texts ca=CA --num_tokens 5 --output_dir MODEL/in", "is complete and is never changed"),
    ],
)
def test_bad_input_is_refused_and_the_model_stays(
    words: str, fault: str, base: Path, catalan: Path, tmp_path: Path
) -> None:
    (tmp_path / "known.txt").write_text("Ġthe\n", encoding="utf-8")
    before = digest(base)
    names = {"CA": catalan, "KNOWN": tmp_path / "known.txt", "MODEL": base}
    for name, path in names.items():
        words = words.replace(name, str(path))
    with pytest.raises(InputError, match=fault):
        main(["extend", "--model", str(base), "--output_dir", str(tmp_path / "out"), *words.split()])
    assert digest(base) == before
    assert not (tmp_path / "out").exists()


def test_a_model_that_does_not_fit_its_tokenizer_is_refused(base: Path, catalan: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(base, tmp_path / "small"))
    for file in folder.glob("model*"):
        file.unlink()
    write_llama(folder, 1500, tied=False)
    words = f"--model {folder} --texts ca={catalan} --num_tokens 5 --output_dir {tmp_path / 'out'}"
    with pytest.raises(InputError, match="its tokenizer has 2,000 ids, but its embedding has 1,500 rows"):
        main(["extend", *words.split()])
    shutil.copytree(folder, tmp_path / "step-1")
    (tmp_path / "step-1" / "trainer.json").write_text("{}")
    (tmp_path / "step-1" / "optimizer").mkdir()
    with pytest.raises(InputError, match=r"convert it with fabric-train convert first"):
        main(["extend", *words.replace(str(folder), str(tmp_path / "step-1")).split()])


# ---------------------------------------------------------------------------------------------- training and evaluation


def test_bits_per_byte_compare_the_models_before_and_after(extended: Path, base: Path, tmp_path: Path) -> None:
    texts = tmp_path / "ca.jsonl"
    texts.write_text("\n".join(json.dumps({"text": page[:400]}) for page in pages("ca", 12)), encoding="utf-8")
    words = ["--models", str(base), str(extended), "--texts", f"ca={texts}", "--output_dir", str(tmp_path / "out")]
    compare_models(parse_arguments(EvaluateArguments, words))
    results_by_model = json.loads((tmp_path / "out" / "evaluation.json").read_text())
    before, after = (results["ca"] for results in results_by_model.values())
    assert before["bytes"] == after["bytes"] == sum(len(page[:400].encode()) for page in pages("ca", 12))
    assert after["tokens"] < 0.9 * before["tokens"]
    for result in (before, after):
        bits = result["loss"] * result["tokens"] / math.log(2)
        assert result["bits_per_byte"] == pytest.approx(bits / result["bytes"])
    # both guess at random among about 2,000 tokens: the loss of a token is the same, and fewer tokens cost fewer bits
    assert after["loss"] == pytest.approx(before["loss"], rel=0.03)
    assert after["bits_per_byte"] < 0.95 * before["bits_per_byte"]
    difference = after["difference"]
    assert difference["of"] == "bits_per_byte"
    assert difference["value"] == pytest.approx(after["bits_per_byte"] - before["bits_per_byte"])


def test_training_names_added_tokens_that_its_rows_lack(
    extended: Path, base: Path, catalan: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenize(tmp_path / "tokens", extended, catalan, max_length=32, validation_split=0.1)
    dataset = open_dataset(str(tmp_path / "tokens"))
    ids = np.concatenate(dataset.train.split.with_format("numpy")["input_ids"])
    seen = set((ids[ids >= 2000] - 2000).tolist())  # positions among the added tokens
    note = note_on_added_tokens(read_shape(str(extended)), [dataset])
    assert note is not None
    missing = f"{153 - len(seen)} of 153 tokens that were added to {extended} do not occur in the {len(ids):,} tokens"
    assert note.startswith(missing)
    assert note_on_added_tokens(read_shape(str(base)), [dataset]) is None
    # a record of two tokens that both come in the rows
    with_two_tokens = Path(shutil.copytree(extended, tmp_path / "two"))
    added = json.loads((extended / "vocabulary.json").read_text())
    first = next(position for position in range(150) if {position, position + 1} <= seen)
    two_tokens = {**added, "first_id": 2000 + first, "tokens": added["tokens"][first : first + 2]}
    (with_two_tokens / "vocabulary.json").write_text(json.dumps(two_tokens))
    assert note_on_added_tokens(read_shape(str(with_two_tokens)), [dataset]) is None
    monkeypatch.setattr(dataset_check, "_MOST_TOKENS", 32)
    monkeypatch.setattr(dataset_check, "_ROWS_AT_ONCE", 1)
    assert "do not occur in the 32 tokens" in str(note_on_added_tokens(read_shape(str(extended)), [dataset]))
