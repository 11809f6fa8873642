"""A teacher's values are stored once, exactly, in any cut, and read only for the rows that they belong to."""

import csv
import resource
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Gemma2Config, Gemma2ForCausalLM, Lfm2Config, Lfm2ForCausalLM, LlamaConfig

from fabric_train.arguments import TrainArguments, parse
from fabric_train.cli.errors import InputError, RunError
from fabric_train.cli.parser import parse_arguments
from fabric_train.data.batch import Batch, find_targets
from fabric_train.data.joined_rows import JoinedRows
from fabric_train.data.teacher_states import HiddenStates, TopStates
from fabric_train.data.token_dataset import TokenDataset, open_dataset
from fabric_train.model.divergence_loss import ABSENT_LOGIT, DivergenceLoss, FullRows, NamedIds, TeacherHead, TopRows
from fabric_train.model.divergences import DIVERGENCES
from fabric_train.preflight.prepare import prepare
from fabric_train.teacher_states import teach as teach_module
from fabric_train.teacher_states.__main__ import TeachArguments
from fabric_train.teacher_states.blocks import BlockContent, write_block
from fabric_train.teacher_states.record import FILE_NAME
from fabric_train.teacher_states.stored import open_states
from fabric_train.teacher_states.teach import teach
from fabric_train.teacher_states.teacher import LoadedTeacher, describe_teacher, top_states
from tests.support.bad_input_folder import edit_json
from tests.support.forked_runs import ForkedRuns
from tests.support.plain_distillation import write_adapter
from tests.support.programs import option_words
from tests.support.short_runs import argv, at_point, metrics
from tests.support.tiny_model import random_llama, write_tiny_model
from tests.support.token_datasets import TEXTS, tokenize, write_jsonl

ROW_LENGTH = 32
BLOCK_BYTES = 4000
"""So few that a block has the two rows of a forward pass."""
NUM_IDS = 327
NUM_PADDING = 9
"""The rows of the teacher's head that no token names."""
KILLED_AT_BLOCK = """
import os, signal
from functools import partial
from fabric_train.teacher_states import teach as module

def write_block(file, content, original=module.write_block):
    if file.name == "000003.safetensors":
        os.kill(os.getpid(), signal.SIGKILL)
    original(file, content)

module.write_block = write_block
module.teach = partial(module.teach, block_bytes=4000)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A student, a teacher of another width with a padded head, and two token datasets."""
    folder = tmp_path_factory.mktemp("teach")
    write_tiny_model(folder / "student", TEXTS)
    config = LlamaConfig(
        vocab_size=NUM_IDS + NUM_PADDING,
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=64,
        initializer_range=0.3,  # so that distributions are not flat
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=1,
        dtype="float32",
    )
    random_llama(config).save_pretrained(folder / "teacher")
    for file in (folder / "student").glob("tokenizer*"):
        shutil.copy(file, folder / "teacher")
    for name, texts in (("tokens", TEXTS), ("others", [text.upper() for text in TEXTS])):
        source = write_jsonl(folder / f"{name}.jsonl", texts)
        tokenize(folder / name, folder / "student", source, max_length=ROW_LENGTH, validation_split=0.2)
    return folder


def arguments_of(folder: Path, name: str, **options: object) -> TeachArguments:
    arguments = TeachArguments(
        teacher=str(folder / "teacher"),
        train_data_dir=str(folder / "tokens"),
        output_dir=str(folder / name),
        precision="32-true",
        batch_tokens=2 * ROW_LENGTH,
    )
    return replace(arguments, **options)  # type: ignore[arg-type]


def stored(folder: Path, name: str, **options: object) -> Path:
    """Return a folder of stored values, which is written if it does not exist yet."""
    if not (folder / name / FILE_NAME).is_file():
        teach(arguments_of(folder, name, **options), BLOCK_BYTES)
    return folder / name


def batch_of(dataset: TokenDataset, states: Path, rows: list[int]) -> Batch:
    dataset.train.use_teacher(open_states(states).reader("train"))
    return dataset.train.__getitems__(rows)


def load_teacher(folder: Path) -> LoadedTeacher:
    teacher = describe_teacher(
        str(folder / "teacher"), dtype=torch.float32, attention="sdpa", longest_row=ROW_LENGTH, isolates=True
    )
    return LoadedTeacher(teacher, named_ids())


def named_ids() -> NamedIds:
    return NamedIds(NUM_IDS, torch.zeros(0, dtype=torch.int64))


def divergence_of(rows: FullRows | TopRows, divergence: str, num_targets: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the divergences of a random student from a teacher, fp32 [N], and their gradients, fp32 [N, ids]."""
    generator = torch.Generator().manual_seed(1)
    logits = 3 * torch.randn(num_targets, NUM_IDS, generator=generator)
    loss = DivergenceLoss(rows, torch.zeros(num_targets, dtype=torch.int64), named_ids(), divergence)
    values = loss.compute(logits, slice(0, num_targets), needs_gradient=True)
    return values[0], logits


def test_hidden_states_are_those_of_the_teacher_rounded_once(folder: Path) -> None:
    states = batch_of(open_dataset(str(folder / "tokens")), stored(folder, "hidden", hidden=True), [5, 2, 9])
    teacher = load_teacher(folder)
    live = teacher.compute_hidden(states)
    assert isinstance(states.teacher, HiddenStates)
    # the rows are in other forward passes, so sums of 48 products in fp32 may round otherwise, and then to bf16
    stored_hidden = states.teacher.bits.view(torch.bfloat16).float()
    live_hidden = live.bits.view(torch.bfloat16).float()
    torch.testing.assert_close(stored_hidden, live_hidden, rtol=2**-7, atol=1e-5)
    is_equal = states.teacher.bits == live.bits
    assert is_equal.float().mean() > 0.99
    head = open_states(folder / "hidden").read_head(torch.device("cpu"))
    assert torch.equal(head.weight, teacher.head.weight)


@pytest.mark.parametrize("divergence", list(DIVERGENCES))
def test_all_tokens_give_the_full_divergence(folder: Path, divergence: str) -> None:
    batch = batch_of(open_dataset(str(folder / "tokens")), stored(folder, "all", top_k=NUM_IDS), [0, 7])
    states = batch.teacher
    assert isinstance(states, TopStates)
    assert torch.equal(states.log_probabilities[:, -1], torch.full((len(states.ids),), ABSENT_LOGIT))
    teacher = load_teacher(folder)
    full = FullRows(teacher._hidden(batch), teacher.head)
    values, gradient = divergence_of(full, divergence, len(states.ids))
    top_values, top_gradient = divergence_of(
        TopRows(states.ids.long(), states.log_probabilities), divergence, len(states.ids)
    )
    # sums of 327 products in fp32, of numbers up to about 20
    torch.testing.assert_close(top_values, values, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(top_gradient, gradient, rtol=1e-5, atol=1e-5)


def test_the_rest_is_the_sum_of_all_others(folder: Path) -> None:
    torch.manual_seed(0)
    head = TeacherHead(torch.randn(NUM_IDS + NUM_PADDING, 48), None)
    hidden = torch.randn(11, 48)
    states = top_states(hidden, head, named_ids(), 5, temperature=2.0)
    probabilities = torch.softmax((hidden @ head.weight.T)[:, :NUM_IDS].double() / 2, dim=1)
    likeliest = probabilities.sort(dim=1, descending=True)
    assert torch.equal(states.ids.long(), likeliest.indices[:, :5])
    expected = torch.cat([likeliest.values[:, :5], likeliest.values[:, 5:].sum(dim=1, keepdim=True)], dim=1)
    # the logits are sums of 48 products in fp32 of size 20, whose error the exponential takes over
    torch.testing.assert_close(states.log_probabilities.double().exp(), expected, rtol=1e-4, atol=0)


@pytest.mark.parametrize("kind", ["peft", "peft with a head", "checkpoint"])
def test_an_adapter_teaches_what_peft_computes(
    folder: Path, forked_runs: ForkedRuns, tmp_path: Path, kind: str
) -> None:
    """The live teacher is compared with peft in ``tests/training/test_distillation.py``."""
    settings = {"modules_to_save": ["lm_head"]} if kind == "peft with a head" else {}
    adapter = write_adapter(tmp_path / "adapter", folder / "teacher", **settings)
    teacher = adapter
    if kind == "checkpoint":
        options = {"init_adapter": adapter, "adapter": "lora", "max_step": 1}
        forked_runs.start(argv(folder / "teacher", folder / "tokens", tmp_path / "run", **options), 1).finish()
        teacher = tmp_path / "run"
        adapter = tmp_path / "run" / "checkpoints" / "step-00000001"
    # rows without borders of documents: each is one text for peft
    whole_rows: dict[str, Any] = {"isolate_documents": False, "distill_on": "all"}
    states_dir = tmp_path / "states"
    teach(
        arguments_of(
            tmp_path, "states", teacher=str(teacher), train_data_dir=str(folder / "tokens"), top_k=NUM_IDS, **whole_rows
        ),
        BLOCK_BYTES,
    )

    dataset = open_dataset(str(folder / "tokens"), isolate_documents=False)
    dataset.train.predicts_all = True
    batch = batch_of(dataset, states_dir, [0, 7])
    states = batch.teacher
    assert isinstance(states, TopStates)
    model = peft.AutoPeftModelForCausalLM.from_pretrained(adapter, dtype=torch.float32).eval()
    with torch.no_grad():
        logits = model(batch.input_ids).logits[:, :-1, :NUM_IDS].flatten(0, 1)
    expected = logits.log_softmax(dim=1).gather(1, states.ids.long())
    # logits are sums of 48 products in fp32, of size 20
    torch.testing.assert_close(states.log_probabilities[:, :-1], expected, rtol=0, atol=1e-4)


def test_a_rest_that_is_left_out_changes_the_loss(folder: Path) -> None:
    batch = batch_of(open_dataset(str(folder / "tokens")), stored(folder, "top", top_k=8), [0, 7])
    states = batch.teacher
    assert isinstance(states, TopStates)
    with_rest, _ = divergence_of(TopRows(states.ids.long(), states.log_probabilities), "forward_kl", len(states.ids))
    top = states.log_probabilities[:, :-1].log_softmax(dim=1)
    cut = torch.cat([top, torch.full_like(top[:, :1], ABSENT_LOGIT)], dim=1)
    without_rest, _ = divergence_of(TopRows(states.ids.long(), cut), "forward_kl", len(states.ids))
    assert (with_rest - without_rest).abs().mean() > 0.1


def test_a_killed_command_continues_bit_for_bit(folder: Path, forked_runs: ForkedRuns) -> None:
    whole = stored(folder, "top", top_k=8)
    words = [f"--{name}={folder / name}" for name in ("teacher",)]
    words += [f"--train_data_dir={folder / 'tokens'}", f"--output_dir={folder / 'killed'}", "--precision=32-true"]
    words += [f"--batch_tokens={2 * ROW_LENGTH}", "--top_k=8"]
    run = forked_runs.start(words, 1, program="fabric_train.teacher_states.__main__", before=KILLED_AT_BLOCK)
    assert run.wait() == [-9], run.report()
    unfinished = folder / ".killed.unfinished"
    finished = {file: file.stat().st_mtime_ns for file in unfinished.rglob("*.safetensors")}
    assert len(finished) == 3
    assert not (folder / "killed").exists()

    # another form is refused, and the same one continues after the finished blocks
    with pytest.raises(InputError, match=r"its --top_k is 8, but this command has 9"):
        teach(arguments_of(folder, "killed", top_k=9), BLOCK_BYTES)
    written: list[Path] = []
    original = teach_module.write_block

    def write_block(file: Path, content: BlockContent) -> None:
        written.append(file)
        original(file, content)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(teach_module, "write_block", write_block)
        teach(arguments_of(folder, "killed", top_k=8), BLOCK_BYTES)
    assert not set(written) & set(finished)
    assert contents(folder / "killed") == contents(whole)
    assert not unfinished.exists()


def contents(folder: Path) -> dict[str, bytes]:
    return {file.relative_to(folder).as_posix(): file.read_bytes() for file in folder.rglob("*.safetensors")}


def test_shards_are_the_blocks_of_one_run(folder: Path) -> None:
    whole = stored(folder, "top", top_k=8)
    for number in (1, 2, 3):
        if number > 1:
            with pytest.raises(InputError, match=r"shards are missing; run fabric-train teach with --shard"):
                open_states(folder / "shards")
        teach(arguments_of(folder, "shards", top_k=8, shard=f"{number}/3"), BLOCK_BYTES)
    joined: dict[str, bytes] = {}
    for shard_dir in (folder / "shards").iterdir():
        joined |= contents(shard_dir)
    assert joined == contents(whole)
    assert open_states(folder / "shards").reader("train").files != open_states(whole).reader("train").files
    teach(arguments_of(folder, "shards", top_k=8, shard="2/3"), BLOCK_BYTES)  # it is complete

    # a shard of another teacher
    record = folder / "shards" / "shard-0002-of-0003" / FILE_NAME
    record.write_text(record.read_text().replace('"temperature": 1.0', '"temperature": 2.0'))
    with pytest.raises(InputError, match=r"its --distill_temperature is 2\.0, but 1\.0 in"):
        open_states(folder / "shards")


@pytest.mark.parametrize(
    ("record", "value", "message"),
    [
        ("content", {"rows_per_block": 0}, r"damaged \(content.rows_per_block: Input should be greater than 0"),
        ("content", {"named_ids": {"end": NUM_IDS, "gaps": [NUM_IDS]}}, "an id without a token is not below 327"),
        ("shard", {"count": 0}, r"damaged \(shard.count: Input should be greater than 0"),
        ("splits", {"train": {"num_rows": 2, "num_targets": 2}}, "it lacks values of train rows"),
    ],
)
def test_a_damaged_record_is_refused(folder: Path, tmp_path: Path, record: str, value: object, message: str) -> None:
    states = Path(shutil.copytree(stored(folder, "top", top_k=8), tmp_path / "states"))
    edit_json(states / FILE_NAME, lambda content: content[record].update(value))
    words = argv(folder / "student", folder / "tokens", tmp_path / "run", objective="distill", teacher_states=states)
    with pytest.raises(InputError, match=message):
        prepare(parse(TrainArguments, words, {}))


def test_a_full_disk_is_an_error_of_the_system(tmp_path: Path) -> None:
    content = BlockContent([1], [1000], HiddenStates(torch.zeros(1000, 4, dtype=torch.int16)))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4000, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):  # what a full disk gives, but for the number
            write_block(tmp_path / "train" / "000000.safetensors", content)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not list(tmp_path.rglob("0*.safetensors"))


def test_a_mixture_reads_each_row_from_its_own_values(folder: Path) -> None:
    datasets = [open_dataset(str(folder / name)) for name in ("tokens", "others")]
    for dataset, name in zip(datasets, ("tokens", "others"), strict=True):
        states = stored(folder, f"top-{name}", top_k=4, train_data_dir=str(folder / name))
        dataset.train.use_teacher(open_states(states).reader("train"))
    rows = JoinedRows([dataset.train for dataset in datasets])
    num_rows = len(datasets[0].train)
    joined = rows.__getitems__([num_rows + 3, 2])
    expected = [datasets[1].train.__getitems__([3]).teacher, datasets[0].train.__getitems__([2]).teacher]
    assert isinstance(joined.teacher, TopStates)
    assert torch.equal(joined.teacher.ids, torch.cat([states.ids for states in expected]))  # type: ignore[union-attr]
    assert len(joined.teacher.ids) == len(find_targets(joined.labels).ids)


def test_values_of_another_order_of_rows_are_refused(folder: Path) -> None:
    shutil.copytree(stored(folder, "top", top_k=8), folder / "permuted")
    file = folder / "permuted" / "train" / "000000.safetensors"
    tensors = load_file(file)
    # two rows with equally many targets change places, with all that is known of them
    middle = int(tensors["offsets"][1])
    assert int(tensors["offsets"][2]) == 2 * middle
    order = torch.cat([torch.arange(middle, 2 * middle), torch.arange(middle)])
    for name in ("ids", "log_probabilities"):
        tensors[name] = tensors[name][order]
    for name in ("row_hashes", "checksums"):
        tensors[name] = tensors[name].flip(0)
    save_file(tensors, file)
    with pytest.raises(RunError, match="row 1 of this block was computed for another row of tokens"):
        batch_of(open_dataset(str(folder / "tokens")), folder / "permuted", [1])


def test_a_changed_value_is_found_when_its_row_is_read(folder: Path) -> None:
    shutil.copytree(stored(folder, "top", top_k=8), folder / "changed")
    file = folder / "changed" / "train" / "000002.safetensors"
    tensors = load_file(file)
    tensors["log_probabilities"][0, 3] += 1
    save_file(tensors, file)
    dataset = open_dataset(str(folder / "tokens"))
    batch_of(dataset, folder / "changed", [5, 6])
    with pytest.raises(RunError, match="row 0 of this block has changed since it was written"):
        batch_of(dataset, folder / "changed", [4])


def test_an_incomplete_folder_is_refused(folder: Path) -> None:
    shutil.copytree(stored(folder, "top", top_k=8), folder / "incomplete")
    file = folder / "incomplete" / "train" / "000001.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(InputError, match=r"damaged \(it has 4,"):
        open_states(folder / "incomplete")
    file.unlink()
    with pytest.raises(InputError, match="No such file"):
        open_states(folder / "incomplete")
    with pytest.raises(InputError, match="it has no stored values of a teacher"):
        open_states(folder / "teacher")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"top_k": NUM_IDS + 1}, "the tokenizer has only 327 tokens"),
        ({"shard": "1/20"}, "the rows make only 10 blocks"),
        ({"teacher": "no/such/model"}, "no/such/model"),
    ],
)
def test_what_cannot_be_stored_is_refused_and_leaves_nothing(
    folder: Path, options: dict[str, object], message: str
) -> None:
    before = sorted(folder.iterdir())
    with pytest.raises(InputError, match=message):
        teach(arguments_of(folder, "refused", **options), BLOCK_BYTES)
    assert sorted(folder.iterdir()) == before


def test_a_teacher_without_a_tokenizer_is_refused(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "teacher", tmp_path / "bare", ignore=shutil.ignore_patterns("tokenizer*"))
    with pytest.raises(InputError, match=r"bare: its tokenizer cannot be loaded: the folder has no tokenizer\.json;"):
        teach(arguments_of(folder, "refused", teacher=str(tmp_path / "bare")))


def test_a_temperature_that_overflows_is_refused() -> None:
    words = option_words({"teacher": "t", "train_data_dir": "d", "output_dir": "o", "distill_temperature": 1e-30})
    with pytest.raises(InputError, match=r"--distill_temperature: expected a number, 0\.01 or more"):
        parse_arguments(TeachArguments, words)


def test_a_teacher_that_does_not_fit_the_rows_is_refused(folder: Path, tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "long.jsonl")
    tokenize(tmp_path / "long", folder / "student", source, max_length=128, validation_split=0)
    with pytest.raises(InputError, match="it has 64 positions, but the rows have 128 tokens"):
        teach(arguments_of(folder, "refused", train_data_dir=str(tmp_path / "long")))
    write_tiny_model(tmp_path / "model", [text.lower()[5:] for text in TEXTS])
    with pytest.raises(InputError, match=r"it has a different tokenizer: id \d+ is"):
        teach(arguments_of(folder, "refused", teacher=str(tmp_path / "model")))


def test_a_teacher_that_mixes_documents_is_refused(folder: Path, tmp_path: Path) -> None:
    config = Lfm2Config(
        vocab_size=NUM_IDS,
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        layer_types=["conv", "full_attention"],
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        Lfm2ForCausalLM(config).save_pretrained(tmp_path / "leaks")
    for file in (folder / "student").glob("tokenizer*"):
        shutil.copy(file, tmp_path / "leaks")
    arguments = arguments_of(folder, "leaking", teacher=str(tmp_path / "leaks"))
    with pytest.raises(InputError, match="cannot isolate the documents of a row"):
        teach(arguments, BLOCK_BYTES)
    assert not list(folder.glob("*leaking*"))
    teach(replace(arguments, isolate_documents=False), BLOCK_BYTES)


def test_a_teacher_with_a_capped_head_is_refused(folder: Path, tmp_path: Path) -> None:
    config = Gemma2Config(
        vocab_size=NUM_IDS,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
    )
    Gemma2ForCausalLM(config).save_pretrained(tmp_path / "capped")
    with pytest.raises(InputError, match="but a gemma2 changes the head's output"):
        teach(arguments_of(folder, "refused", teacher=str(tmp_path / "capped"), attention="eager"), BLOCK_BYTES)


def test_a_plan_prints_the_exact_size(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    teach(arguments_of(folder, "planned", top_k=8, plan=True), BLOCK_BYTES)
    printed = capsys.readouterr().out
    assert "top 8 of 327 tokens and the rest, temperature 1; 68 bytes per target" in printed
    assert "in 10 blocks" in printed
    assert not (folder / "planned").exists()


def test_too_little_disk_is_found_before_the_teacher_is_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fabric_train.files.requirements.free_bytes", lambda folder: 10_000)
    monkeypatch.setattr(teach_module, "LoadedTeacher", None)
    with pytest.raises(InputError, match=r"the teacher's values needs 0\.1 MB, but"):
        teach(arguments_of(folder, "large", top_k=8), BLOCK_BYTES)
    assert not (folder / "large").exists()


def losses(run: Path, column: str) -> list[float]:
    with (run / "metrics.csv").open(newline="", encoding="utf-8") as lines:
        return [float(row[column]) for row in csv.DictReader(lines) if row[column]]


def train(forked_runs: ForkedRuns, folder: Path, name: str, num_ranks: int = 1, **options: object) -> Path:
    words = argv(folder / "student", folder / "tokens", folder / name, objective="distill", **options)
    forked_runs.start(words, num_ranks).finish()
    return folder / name


def test_a_run_learns_from_stored_values_as_from_the_live_teacher(folder: Path, forked_runs: ForkedRuns) -> None:
    settings: dict[str, Any] = {"max_step": 4, "sft_weight": 0.5, "lr": 1e-4}
    live = train(forked_runs, folder, "run-live", teacher=folder / "teacher", **settings)
    full = train(forked_runs, folder, "run-all", teacher_states=stored(folder, "all", top_k=NUM_IDS), **settings)
    shards = train(
        forked_runs,
        folder,
        "run-ranks",
        2,
        teacher_states=full_shards(folder),
        num_workers=1,
        micro_batch_size=1,
        **settings,
    )
    for run in (full, shards):
        for column in ("train_loss", "val_loss", "train_divergence", "val_agreement"):
            # fp32 sums of a few hundred terms, after three updates of 1e-4
            assert losses(run, column) == pytest.approx(losses(live, column), rel=1e-5, abs=1e-6)
    record = (folder / "run-all" / "checkpoints" / "step-00000004" / "trainer.json").read_text()
    assert "top 327 of 327 tokens and the rest, temperature 1" in record


def full_shards(folder: Path) -> Path:
    """Return the values of all tokens in two shards."""
    for number in (1, 2):
        teach(arguments_of(folder, "all-shards", top_k=NUM_IDS, shard=f"{number}/2"), BLOCK_BYTES)
    return folder / "all-shards"


def test_bfloat16_states_give_the_bits_of_the_live_teacher(folder: Path, forked_runs: ForkedRuns) -> None:
    settings: dict[str, Any] = {"max_step": 4, "precision": "bf16-true"}
    states = stored(folder, "hidden-bf16", hidden=True, precision="bf16-true")
    live = train(forked_runs, folder, "run-bf16-live", teacher=folder / "teacher", **settings)
    from_states = train(forked_runs, folder, "run-bf16", teacher_states=states, **settings)
    assert metrics(from_states) == metrics(live)


def test_a_mixture_learns_from_the_values_of_each_token_dataset(folder: Path, forked_runs: ForkedRuns) -> None:
    settings: dict[str, Any] = {
        "max_step": 2,
        "lr": 1e-4,
        "train_data_dir": [folder / "tokens", folder / "others"],
    }
    others = stored(folder, "all-others", top_k=NUM_IDS, train_data_dir=str(folder / "others"))
    states = [others, stored(folder, "all", top_k=NUM_IDS)]
    live = train(forked_runs, folder, "mixture-live", teacher=folder / "teacher", **settings)
    from_states = train(forked_runs, folder, "mixture", 2, teacher_states=states, num_workers=1, **settings)
    for column in ("train_loss", "val_loss"):
        # fp32 sums of a few hundred terms, after an update of 1e-4
        assert losses(from_states, column) == pytest.approx(losses(live, column), rel=1e-5)


def test_a_killed_run_resumes_exactly(folder: Path, forked_runs: ForkedRuns) -> None:
    states = stored(folder, "top", top_k=8)
    options = {"teacher_states": states, "save_step_interval": 2, "async_save": "false", "max_step": 4}
    whole = train(forked_runs, folder, "run-whole", 2, **options)
    words = argv(folder / "student", folder / "tokens", folder / "run-killed", objective="distill", **options)
    kill = at_point("os.kill(os.getpid(), signal.SIGKILL)", step=3, phase="OPTIMIZER")
    killed = forked_runs.start(words, 2, before=kill)
    assert -9 in killed.wait()
    forked_runs.start([*words, "--resume=true"], 2).finish()
    assert metrics(folder / "run-killed") == metrics(whole)

    # other values than those of the run are refused
    other = argv(
        folder / "student",
        folder / "tokens",
        folder / "run-killed",
        objective="distill",
        **{
            **options,
            "teacher_states": stored(folder, "all", top_k=NUM_IDS),
            "number_epochs": 4,
            "max_step": 6,
            "resume": "true",
        },
    )
    refused = forked_runs.start(other, 1)
    assert refused.wait() == [2]
    assert "the run now learns from top 327" in refused.stderr()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"distill_temperature": 2.0}, "another --distill_temperature: 1.0, but the run has 2.0"),
        ({"distill_on": "all"}, "another --distill_on: supervised, but the run has all"),
        ({"precision": "bf16-true"}, "another dtype: float32, but the run has bfloat16"),
        ({"train_data_dir": "others"}, "no values for the rows of"),
        ({"self_check": "true"}, "no values for the shortened rows of --self_check true"),
        ({"teacher": "teacher"}, "--teacher and --teacher_states exclude each other"),
    ],
)
def test_foreign_states_are_refused_by_name(
    folder: Path, forked_runs: ForkedRuns, options: dict[str, object], message: str
) -> None:
    for name in ("train_data_dir", "teacher"):
        if name in options:
            options = {**options, name: folder / str(options[name])}
    words = argv(
        folder / "student",
        folder / "tokens",
        folder / "run-refused",
        **{"objective": "distill", "teacher_states": stored(folder, "top", top_k=8), **options},
    )
    run = forked_runs.start(words, 1)
    assert run.wait() == [2]
    assert message in run.stderr()
    assert not (folder / "run-refused").exists()


def test_folders_of_two_forms_are_refused_even_if_a_run_reads_one(folder: Path) -> None:
    """A later phase may read the other one, with the same head and record."""
    states = [stored(folder, "top", top_k=8), stored(folder, "hidden", hidden=True)]
    words = argv(
        folder / "student", folder / "tokens", folder / "run-refused", objective="distill", teacher_states=states
    )
    with pytest.raises(InputError, match=r"its --top_k is absent \(hidden states\), but 8 in"):
        prepare(parse(TrainArguments, words, {}))


def test_the_next_command_has_the_settings_of_the_values(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    teach(arguments_of(folder, "next", top_k=2, distill_temperature=1.2345678, distill_on="all"), BLOCK_BYTES)
    assert "--distill_temperature 1.2345678 --distill_on all --precision 32-true" in capsys.readouterr().out


def test_the_likeliest_of_equal_tokens_is_that_of_argmax() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 0.0, 3.0], [2.0, 2.0, 1.0, 2.0, 0.0], [5.0, 1.0, 2.0, 3.0, 4.0]])
    head = TeacherHead(logits.T.contiguous(), None)
    states = top_states(torch.eye(3), head, NamedIds(5, torch.tensor([], dtype=torch.int64)), 3, 1.0)
    assert states.ids.tolist() == [[1, 2, 4], [0, 1, 3], [0, 4, 3]]
