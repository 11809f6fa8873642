"""Test that benchmarks give every system the same texts and read its output correctly."""

import importlib
import json
import math
import re
import shlex
import struct
import subprocess
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from safetensors.torch import save_file
from transformers import LlamaConfig

from benchmarks import (
    distillation,
    export,
    gpu,
    large_checkpoint,
    long_rows,
    packages,
    plan,
    precision,
    preference,
    report,
    rollout_steps,
    vocabulary,
)
from benchmarks.corpora import DOCUMENT_CHARACTERS, Corpus, cut_documents, write_corpus
from benchmarks.measure import ROOT, Command, Spread, interleave
from benchmarks.peers import export_step, train_by_cpu_time, train_without_saving
from benchmarks.token_rows import read_datatrove, read_litdata
from benchmarks.tokenization_systems import PEERS, our_command, peer_command
from fabric_train.arguments import TrainArguments, parse
from fabric_train.cli.code_commit import checked_out_commit, installed_commit
from fabric_train.cli.parser import parse_arguments
from fabric_train.export.model_comparison import compare
from fabric_train.export.source import ExportSource
from fabric_train.inspection.__main__ import InspectArguments
from fabric_train.model.weight_files import open_weights
from fabric_train.sample_data import real_data
from fabric_train.tokenization.arguments import TokenizeArguments


def test_our_tokenization_command_is_valid() -> None:
    words = our_command(Path("documents.jsonl"), Path("tokenizer"), Path("tokens")).words
    assert words[:2] == ("python", "tokenize_dataset.py")
    arguments = parse_arguments(TokenizeArguments, list(words[2:]))
    assert (arguments.max_length, arguments.num_proc, arguments.validation_split) == (2048, 2, 0)


def test_books_are_consecutive_text_of_the_given_lengths() -> None:
    text = "".join(map(str, range(100_000)))
    books = list(long_rows.cut_books(text, 20_000_000))
    assert 20_000_000 <= sum(map(len, books)) < 30_000_000
    assert all(long_rows.SHORTEST <= len(book) <= long_rows.LONGEST for book in books)
    assert all(book[-1000:] in text + text for book in books)
    assert len(set(books)) == len(books)


@pytest.mark.usefixtures("llama3_tokenizer_model")
def test_commands_of_long_rows_are_valid() -> None:
    words = long_rows.tokenize_command(Path("books.jsonl"), "best_fit", 131_072, Path("tokens")).words
    arguments = parse_arguments(TokenizeArguments, list(words[2:]))
    assert (arguments.packing, arguments.max_length) == ("best_fit", 131_072)
    inspected = parse_arguments(InspectArguments, list(long_rows.inspect_command(Path("tokens")).words[3:]))
    assert (inspected.dataset_dir, inspected.html) == ("tokens", "tokens.html")


@pytest.mark.usefixtures("llama3_tokenizer_model")
@pytest.mark.parametrize("name", PEERS)
def test_peer_command_has_exactly_the_options_of_its_script(name: str) -> None:
    corpus = Corpus(ROOT / "documents.jsonl", ROOT / "parts", 0, 0)
    words = peer_command(name, corpus, Path("tokenizer"), Path("work"), {}).words
    script = (ROOT / words[1]).read_text(encoding="utf-8")
    given_options = {word for word in words if word.startswith("--")}
    assert given_options == set(re.findall(r'"(--\w+)"', script))


@pytest.mark.parametrize("result", sorted(report.RESULTS.glob("*.json")), ids=lambda path: path.stem)
def test_commands_in_results_have_no_absolute_paths(result: Path) -> None:
    commands = json.loads(result.read_text(encoding="utf-8"))["commands"].values()
    assert [word for command in commands for word in shlex.split(command) if word.startswith("/")] == []


def test_commit_is_dirty_only_if_code_differs_from_it(tmp_path: Path) -> None:
    def git(*words: str) -> None:
        subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b.c", *words], cwd=tmp_path, check=True)

    assert checked_out_commit(tmp_path) is None
    files = [tmp_path / name for name in ("benchmarks/results/memory.json", "docs/memory.md", "benchmarks/memory.py")]
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("1")
    git("init", "-q")
    git("add", "-A")
    git("commit", "-qm", "one")
    for file in files[:2]:
        file.write_text("2")
    commit = checked_out_commit(tmp_path)
    assert commit is not None
    assert not commit.endswith("-dirty")
    files[2].write_text("2")
    assert checked_out_commit(tmp_path) == f"{commit}-dirty"


@pytest.mark.parametrize(
    ("origin", "commit"),
    [
        (
            {"url": "https://host/it.git", "vcs_info": {"vcs": "git", "commit_id": "0123456789ab" + "c" * 28}},
            "0123456789ab",
        ),
        ({"url": "file:///home/me/it", "dir_info": {}}, None),
    ],
)
def test_an_installation_knows_the_commit_that_pip_took(
    origin: dict[str, object], commit: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = tmp_path / "fabric_train_there-1.dist-info"
    record.mkdir()
    (record / "METADATA").write_text("Metadata-Version: 2.1\nName: fabric-train-there\nVersion: 1\n")
    (record / "direct_url.json").write_text(json.dumps(origin))
    monkeypatch.syspath_prepend(tmp_path)
    assert installed_commit("fabric-train-there") == commit
    assert installed_commit("nobody-installed-this") is None


@given(st.integers(DOCUMENT_CHARACTERS, 4 * DOCUMENT_CHARACTERS), st.integers(1, 12))
def test_split_documents_are_all_different_and_lose_no_text(length: int, copies: int) -> None:
    text = " ".join(map(str, range(DOCUMENT_CHARACTERS)))[:length]
    documents = list(cut_documents([text], copies))
    assert len(set(documents)) == len(documents)
    assert "".join(documents) == text * copies


def test_parts_of_a_corpus_have_its_documents_in_order(tmp_path: Path) -> None:
    texts = ["é" * length for length in (50, 1, 300, 7, 90)]
    corpus = write_corpus(tmp_path / "set", texts, num_parts=2)
    parts = [part.read_text(encoding="utf-8") for part in sorted(corpus.parts.iterdir())]
    assert [json.loads(line)["text"] for line in corpus.file.read_text(encoding="utf-8").splitlines()] == texts
    assert "".join(parts) == corpus.file.read_text(encoding="utf-8")
    assert [len(part.splitlines()) for part in parts] == [3, 2]
    assert (corpus.num_documents, corpus.num_characters) == (5, 448)


def test_rows_are_read_from_files_of_datatrove(tmp_path: Path) -> None:
    np.arange(7, dtype=np.uint32).tofile(tmp_path / "00000_unshuffled.ds")
    np.arange(7, 12, dtype=np.uint32).tofile(tmp_path / "00001_unshuffled.ds")
    rows = read_datatrove(tmp_path, 3)
    assert (rows.num_rows, rows.num_tokens) == (3, 9)
    assert rows.first.tolist() == [[0, 1, 2], [3, 4, 5]]


def test_rows_are_read_from_chunks_of_litdata(tmp_path: Path) -> None:
    two_documents = struct.pack("<4I", 2, 16, 28, 36) + struct.pack("<3i", 10, 11, 12) + struct.pack("<2i", 20, 21)
    (tmp_path / "chunk-0-0.bin").write_bytes(two_documents)
    rows = read_litdata(tmp_path, 2)
    assert (rows.num_rows, rows.num_tokens, rows.first.tolist()) == (2, 4, [[10, 11], [12, 20]])


def test_peer_that_cannot_be_installed_is_one_line_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "requirements").mkdir()
    (tmp_path / "requirements" / "datatrove.txt").write_text(f"{tmp_path}/no-such-package.whl\n")
    monkeypatch.setattr(packages, "_REQUIREMENTS", tmp_path / "requirements")
    monkeypatch.setattr(real_data, "CACHE", tmp_path / "cache")
    with pytest.raises(ChildProcessError, match=r"^datatrove cannot be installed: .*no-such-package") as raised:
        packages.install_packages("datatrove")
    assert len(str(raised.value).splitlines()) == 1
    assert not (tmp_path / "cache").exists()


def test_commands_of_precisions_differ_only_in_the_precision() -> None:
    paths = [Path("model"), Path("tokens"), Path("run")]
    parsed = [
        parse(TrainArguments, list(precision.command(options, 3e-5, *paths).words[3:]))
        for options in precision.VARIANTS.values()
    ]
    precisions = [(arguments.model.precision, arguments.training.stochastic_rounding) for arguments in parsed]
    assert precisions == [("32-true", True), ("bf16-mixed", True), ("bf16-true", False), ("bf16-true", True)]
    steps_and_rates = {(arguments.training.lr, arguments.training.max_step) for arguments in parsed}
    assert steps_and_rates == {(3e-5, precision.STEPS)}


def test_the_share_of_moved_weights_counts_from_half_a_step_of_bf16(tmp_path: Path) -> None:
    start = torch.tensor([1.0, 1.0, 1.0, -0.02], dtype=torch.bfloat16)
    step_of_one = 2**-7  # between 1 and 2, neighbours in bf16 are 2^-7 apart
    step_of_fiftieth = 2**-13  # between 1/64 and 1/32
    moves = torch.tensor([0.0, 0.49 * step_of_one, -0.51 * step_of_one, 0.51 * step_of_fiftieth])
    save_file({"weight": start}, tmp_path / "start.safetensors")
    save_file({"weight": start.float() + moves}, tmp_path / "end.safetensors")
    assert precision.moved_share(tmp_path / "start.safetensors", tmp_path / "end.safetensors") == 0.5


def test_variants_of_a_vocabulary_train_alike_and_losses_are_read_by_model(tmp_path: Path) -> None:
    work, model, tokens, run = map(Path, ("work", "model", "tokens", "run"))
    given = [
        parse(TrainArguments, list(vocabulary.training_command(variant, work, model, tokens, run).words[3:]))
        for variant in vocabulary.VARIANTS
    ]
    assert [each.data.phases for each in given] == [None, None, "work/phases.yaml"]
    assert len({(each.training, each.save) for each in given}) == 1
    file = tmp_path / "documents.jsonl"
    losses = [("a", "ca", 2.0, 4), ("a", "ca", 4.0, 8), ("a", "ca-guide", 1.0, 1), ("a", "en-guide", 1.0, 2)]
    keys = ("model", "source", "nats", "bytes")
    file.write_text("".join(json.dumps(dict(zip(keys, one, strict=True), tokens=3)) + "\n" for one in losses))
    (read,) = vocabulary.read_losses(file).values()
    catalan = read.sources["ca"]
    assert catalan.bits_per_byte == pytest.approx(0.5 / math.log(2))
    assert (catalan.tokens, catalan.bytes) == (6, 12)
    made = vocabulary.report_of(dict.fromkeys(["before", *vocabulary.VARIANTS], read), {})
    written = json.loads(report.write_report(made, report.this_machine(), None, tmp_path).read_text())
    assert written["runs"]["before"] == [{"sources": {name: vars(one) for name, one in read.sources.items()}}]
    assert vocabulary.table(made).row_count == 4


@pytest.mark.parametrize(
    "options", ["", "--objective distill --teacher model", "--objective distill --teacher_states s"]
)
def test_every_distillation_command_is_valid(options: str) -> None:
    words = distillation.our_command(Path("model"), Path("rows"), Path("run"), options).words
    given = parse(TrainArguments, list(words[3:]))
    assert given.preference.objective == ("distill" if options else "sft")
    assert given.training.max_step == distillation.NUM_STEPS


@pytest.mark.parametrize("loss", preference.LOSSES)
def test_every_preference_training_command_is_valid(loss: str) -> None:
    words = preference.our_command(Path("model"), Path("rows"), Path("run"), 2, 3, loss).words
    given = parse(TrainArguments, list(words[3:]))
    assert (given.preference.dpo_beta, given.training.max_step) == (preference.LOSSES[loss][0], 3)


@pytest.mark.parametrize("name", gpu.WAYS)
def test_every_gpu_training_command_is_valid(name: str) -> None:
    preset, options = gpu.WAYS[name]
    given = parse(TrainArguments, list(gpu.our_command(preset, options, Path("rows"), Path("run")).words[3:]))
    compiled = ", compiled" * (given.fsdp.compile is True)
    float8 = ", float8" * given.model.float8
    assert name == f"{preset}, {given.fsdp.parallelism}{compiled}{float8}"
    assert given.model.family == "llama"


@pytest.mark.parametrize("name", gpu.REINFORCED)
def test_every_gpu_rollout_command_is_valid(name: str) -> None:
    command = gpu.rollout_command(gpu.REINFORCED[name], Path("prompts.jsonl"), Path("base"), Path("run"))
    arguments = parse(TrainArguments, list(command.words[3:]))
    assert arguments.rollouts.sampler == ("vllm" if "vLLM" in name else "in_process")
    assert gpu.PROMPT_WORDS + gpu.COMPLETION_TOKENS < gpu.LENGTH


def test_the_parts_of_a_step_add_up_to_its_time(tmp_path: Path) -> None:
    table = "step,step_time,sampling_time,rewards_time,weights_time\n1,10,5,1,0.5\n2,8,4,1,0\n"
    (tmp_path / "metrics.csv").write_text(table)
    steps = rollout_steps.read_steps(tmp_path)
    assert steps == [
        rollout_steps.StepSeconds(sampling=5, rewards=1, weights=0.5, training=3.5),
        rollout_steps.StepSeconds(sampling=4, rewards=1, weights=0, training=3),
    ]
    assert [step.total for step in steps] == [10, 8]


def test_systems_that_sample_different_numbers_of_tokens_are_not_compared() -> None:
    num_tokens = len(rollout_steps.QUESTIONS) * rollout_steps.GROUP_SIZE * rollout_steps.MAX_NEW_TOKENS
    whole = rollout_steps.RolloutStepRun([], [num_tokens] * rollout_steps.STEPS, 136, 0)
    rollout_steps.check_tokens({"fabric_train": [whole], "trl": [whole]})
    shorter = replace(whole, num_tokens=[num_tokens - 1] * rollout_steps.STEPS)
    with pytest.raises(ChildProcessError, match="trl sampled"):
        rollout_steps.check_tokens({"fabric_train": [whole], "trl": [shorter]})
    with pytest.raises(ChildProcessError, match="different numbers"):
        rollout_steps.check_tokens({"fabric_train": [whole], "trl": [replace(whole, num_prompt_tokens=120)]})


@pytest.mark.parametrize("name", gpu.ADAPTED)
def test_both_commands_for_an_adapter_on_a_gpu_are_valid(name: str) -> None:
    commands = gpu.adapter_commands(Path("rows"), Path("base"), Path("run"))
    given = parse(TrainArguments, list(commands[name].words[3:]))
    assert (given.model.model_name, given.model.family, given.adapter.lora_rank) == ("base", None, 16)
    assert (given.adapter.base_weights == "nf4") == ("QLoRA" in name)
    words = commands[f"{name}{gpu.OF_PEFT}"].words
    script = (ROOT / "benchmarks" / "peers" / "huggingface_gpu.py").read_text(encoding="utf-8")
    assert {word for word in words if word.startswith("--")} <= set(re.findall(r'"(--\w+)"', script))
    assert ("--nf4" in words) == ("QLoRA" in name)


@pytest.mark.parametrize("name", gpu.PAIRED)
def test_both_commands_for_pairs_on_a_gpu_are_valid_and_read_the_same_rows(name: str) -> None:
    order = list(range(1000))
    models = {gpu.MIDDLE: Path("base"), gpu.SMALL: Path("config")}
    commands = gpu.pair_commands(Path("pairs"), models, Path("run"), order)
    given = parse(TrainArguments, list(commands[name].words[3:]))
    assert (given.preference.objective, given.adapter.is_given) == ("dpo", "LoRA" in name)
    (peer,) = (command.words for other, command in commands.items() if other.startswith(f"{name}{gpu.OF_TRL}"))
    script = (ROOT / "benchmarks" / "peers" / "trl_preference.py").read_text(encoding="utf-8")
    assert {word for word in peer if word.startswith("--")} <= set(re.findall(r'"(--\w+)"', script))
    assert given.training.max_step == gpu.STEPS
    rows = gpu.STEPS * given.training.micro_batch_size * gpu.ACCUMULATION
    assert len(peer[peer.index("--rows") + 1].split(",")) == rows


def test_a_peer_on_a_gpu_that_takes_too_few_steps_is_left_out_with_the_reason() -> None:
    printed = json.dumps({"tokens_per_second": [1.0] * gpu.WARM_UP_STEPS, "peak_device_bytes": 1})
    left_out: dict[str, str] = {}
    system = partial(gpu._run_peer, Command(("python", "-c", f"print('{printed}')")))
    assert interleave({"a peer": system}, {"a peer": 1}, "gpu", left_out) == {}
    assert left_out == {"a peer": "it took 4 steps, and 4 of them are not counted"}


def test_gpu_without_a_known_peak_has_speeds_and_no_mfu(tmp_path: Path) -> None:
    (tmp_path / "metrics.csv").write_text("tokens_per_second,mfu,peak_memory_gb\n" + "100,,1.5\n" * gpu.STEPS)
    ours = gpu.read_run(tmp_path)
    peer = gpu.GpuRun([50.0] * gpu.STEPS, None, 1)
    name = next(iter(gpu.WAYS))
    peer_name = next(iter(gpu.PEERS))
    summary = gpu.summarize({name: [ours], peer_name: [peer]}, {}, "a GPU of tomorrow")
    assert summary.ways[name] == gpu.WaySummary(Spread(100, 100, 100), None, Spread(*[1_500_000_000] * 3))
    assert summary.ways[peer_name].mfu is None
    console = Console(width=200)
    with console.capture() as captured:
        console.print(gpu.table(report.Report("gpu", {"repetitions": 1}, {}, {}, summary)))
    assert "no MFU: the peak of this device is not in fabric_train/model/flops.py" in captured.get()
    full = f"{gpu.MIDDLE}, single"
    lora = next(iter(gpu.ADAPTED))
    measured = {full: gpu.GpuRun([10.0] * 10, [0.4] * 10, 1), lora: gpu.GpuRun([10.0] * 10, [0.3] * 10, 1)}
    peers = {f"{lora}{gpu.OF_PEFT}": gpu.GpuRun([20.0] * 10, None, 1)}
    ways = gpu.summarize({name: [run] for name, run in {**measured, **peers}.items()}, {}, "a GPU").ways
    assert [way.mfu for way in ways.values()] == pytest.approx([0.4, 0.3, 0.6])  # the model's that trains
    with pytest.raises(ChildProcessError, match="out of memory"):
        gpu.summarize({peer_name: [peer]}, {name: "out of memory"}, "a GPU of tomorrow")


@pytest.mark.parametrize(("default_end", "learns"), [(2.009, True), (1.991, True), (2.011, False), (1.98, False)])
def test_precision_learns_if_its_last_held_out_loss_is_near_fp32(default_end: float, learns: bool) -> None:
    ends = {"32-true": 2.0, "bf16-mixed": 2.0, "bf16-true, to the nearest": 2.5, "bf16-true": default_end}
    runs = {}
    for learning_rate in precision.LEARNING_RATES:
        for variant, end in ends.items():
            steps = [precision.EARLY_STEP // 2, precision.EARLY_STEP, precision.STEPS]
            held_out = [8.0, end**2, end]  # the excess over fp32 is another one at each step
            runs[precision.run_name(learning_rate, variant)] = precision.PrecisionRun([3.0, 2.5], steps, held_out, 0.25)
    summary = precision.summarize(runs)
    nearest = precision.run_name(precision.LEARNING_RATES[0], "bf16-true, to the nearest")
    assert summary.held_out[nearest] == 2.5
    assert summary.above_fp32[nearest] == pytest.approx(0.25)
    assert summary.above_fp32_early[nearest] == pytest.approx(2.5**2 / 2**2 - 1)
    assert summary.moved[nearest] == 0.25
    assert summary.default_learns is learns


def test_functions_that_benchmarks_replace_exist() -> None:
    (module,) = re.findall(r"(\S+) as program", plan.RETURN_FREED)
    (name,) = re.findall(r"^program\.(\w+) =", plan.RETURN_FREED, re.MULTILINE)
    assert callable(getattr(importlib.import_module(module), name))
    assert callable(getattr(train_without_saving.plan, train_without_saving.MEMORY_CHECK))
    assert all(vars(module)["time"] is time for module in train_by_cpu_time.TIMED_MODULES)


@pytest.mark.parametrize("sharded", [False, True])
def test_large_checkpoint_of_the_export_benchmark_is_exported(
    sharded: bool, tmp_path: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = {"vocab_size": 1000, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "head_dim": 4}
    config = LlamaConfig(**export.LLAMA_8B.to_dict() | small | {"num_attention_heads": 4, "num_key_value_heads": 2})
    monkeypatch.setattr(large_checkpoint, "_POOL", 1009)
    checkpoint = tmp_path / "step-00000001"
    num_bytes = large_checkpoint.write_checkpoint(checkpoint, config, tiny_model_dir, sharded)
    weights = open_weights(checkpoint)
    assert len(list(checkpoint.rglob("*.safetensors"))) == (large_checkpoint.NUM_SHARDS if sharded else 1)
    assert 0 < num_bytes - sum(2 * weights.shape(name).numel() for name in weights) < 20_000 * (8 if sharded else 1)
    assert torch.equal(weights.read("model.embed_tokens.weight").flatten()[:1009], large_checkpoint.random_pool(config))
    for step in ("copy", "ours"):
        monkeypatch.setattr("sys.argv", ["export_step", step, str(checkpoint), str(tmp_path / step)])
        export_step.main()
    source = ExportSource(checkpoint)
    assert compare(tmp_path / "ours", source, torch.bfloat16).faults == []


def test_export_table_has_the_speed_over_that_of_a_copy() -> None:
    seconds = {"full, copy": 10.0, "full, ours": 16.0, "full, verification": 40.0, "full, transformers": 20.0}
    seconds |= {"sharded, copy": 10.0, "sharded, ours": 20.0, "sharded, verification": 40.0}
    runs = {name: [export.ExportRun(taken, 2_000_000_000, 500_000_000)] for name, taken in seconds.items()}
    summary = export.summarize(runs, 16_000_000_000, "layer by layer", {})
    assert summary.speed == {"full": 0.625, "sharded": 0.5}
    console = Console(width=200)
    with console.capture() as captured:
        console.print(export.table(report.Report("export", {}, {}, runs, summary)))
    printed = " ".join(captured.get().split())
    assert "verified layer by layer; our speed of writing over a copy's: 0.62 (full), 0.50 (sharded)" in printed
    assert "sharded, ours 20 800 2.00 0.50" in printed
