"""Wrong input to all programs: exit code 2 (1 for a failure while running), one clear line for each fault, printed on
standard error by rank 0 only, no traceback, and nothing written.
"""

import importlib
import os
import re
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from stat import S_ISREG

import pytest
import torch

from fabric_train.arguments import TrainArguments, parse
from fabric_train.cli.errors import InputError
from fabric_train.preflight.prepare import prepare
from tests.support.bad_input_folder import MODULES, make_folder
from tests.support.forked_runs import ForkedRun, ForkedRuns

pytestmark = pytest.mark.slow

GOOD = {
    "train": "--train_data_dir tokens --model_name model --output_dir OUT --accelerator cpu --max_step 1",
    "tokenize": "--dataset texts.jsonl --tokenizer_name model --output_dir OUT --num_proc 1 --max_length 32",
    "convert": "--checkpoint runs/good --output_dir OUT",
    "generate": "--model_name model --prompt Hello",
    "inspect": "",
    "merge": "--output_dir OUT",
}
LONG = "x" * 300
ROOM_AT_FIRST = """
from fabric_train.files import requirements
requirements.free_bytes = lambda folder: 10**9
"""
# without its capabilities, root has only the permissions of a user
AS_A_USER = """
import ctypes
header, none = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
assert ctypes.CDLL(None).capset(header, none) == 0
"""


@dataclass(frozen=True)
class Case:
    """A wrong command line and the faults that the program must print.

    ``words`` are added to the program's good command line; ``-name`` removes ``--name`` from it. ``…`` in a fault
    stands for any text. Exit code 1 is a failure while running. ``before`` is Python source that the process executes
    first. ``process``: the whole program runs, and not only its checks.
    """

    program: str
    words: str
    faults: str | list[str]
    code: int = 2
    num_ranks: int = 1
    before: str = ""
    env: dict[str, str] = field(default_factory=dict)
    process: bool = False

    @property
    def needs_process(self) -> bool:
        """Whether the claim is about more than the checks in one process."""
        return self.process or self.code != 2 or self.num_ranks > 1 or bool(self.before or self.env)

    def line(self, output_dir: str) -> list[str]:
        """Return the whole command line."""
        line = GOOD[self.program].split()
        words = shlex.split(self.words)
        for name in (re.sub("^-(?=[a-z])", "--", word).partition("=")[0] for word in words):
            if name.startswith("--") and name in line:
                place = line.index(name)
                del line[place : place + 2]
        words = [word for word in words if not re.match("-[a-z]", word)]
        return [output_dir if word == "OUT" else word for word in (*line, *words)]


STREAM = "-train_data_dir --max_length 32 --total_batch_size 1 --streaming_dataset"
READABLE = "supported formats: .txt, .md, .csv, .json, .jsonl, .parquet (all except parquet also with .gz or .zst)"
DISTILL = "--objective distill --teacher"
TRAINER = "runs/{}/checkpoints/step-00000007"

CASES: dict[str, Case] = {
    # ------------------------------------------------------------------------------------------ types of arguments
    "text for a number": Case("train", "--lr fast", "--lr: expected a number above 0, got 'fast'", process=True),
    "a negative number": Case("train", "--lr -1", "--lr: expected a number above 0, got '-1'"),
    "zero": Case("train", "--micro_batch_size 0", "--micro_batch_size: expected a whole number above 0, got '0'"),
    "a fraction": Case("train", "--max_step 1.5", "--max_step: expected a whole number above 0 or null, got '1.5'"),
    "a decay as long as the run": Case(
        "train",
        "--max_step 3 --lr_schedule wsd --decay_steps 3",
        "--decay_steps 3: the run has 3 steps, of which 1 is needed to reach --lr; give at most 2 decay steps",
    ),
    "infinite": Case("train", "--grad_clip .inf", "--grad_clip: expected a number, 0 or more, got '.inf'"),
    "not a number": Case("train", "--weight_decay .nan", "--weight_decay: expected a number, 0 or more, got '.nan'"),
    "not true or false": Case("train", "--resume maybe", "--resume: expected true or false, got 'maybe'"),
    "not a choice": Case(
        "train",
        "--precision fp16",
        "--precision: expected one of auto, bf16-true, …, got 'fp16'; here it is 16-mixed",
    ),
    "several values for one argument": Case(
        "train", "--lr 1 2", "--lr: expected …, got '1 2'; put a value with spaces in quotes"
    ),
    "no value": Case("train", "--project", "--project: expected text, got nothing"),
    "a wrong value given last": Case("train", "--lr 1 --lr x", "--lr: expected a number above 0, got 'x'"),
    "a timeout for ever": Case(
        "train", "--rank_timeout 1e300", "--rank_timeout: expected at most 100,000,000, got '1e300'"
    ),
    "rows beyond any model": Case(
        "tokenize", "--max_length 3000000000", "--max_length: expected at most 16,777,216, …"
    ),
    "weights that overflow": Case(
        "tokenize", "--weights 1.7e308 1.7e308", "--weights: expected a list, each at most 1,000,000,000 or null, …"
    ),
    "a number of 5,000 digits": Case("train", f"--seed {'9' * 5000}", "--seed: expected a whole number, …, got '999…"),
    "help about nothing": Case("train", "--help xyzzy", "--help xyzzy: no argument's name or help text contains it; …"),
    "a word without an argument": Case(
        "generate",
        "-model_name -prompt stray",
        ["'stray' does not belong to an argument; write …", "--model_name is required"],
        process=True,
    ),
    "a misspelt argument": Case(
        "train", "--micro_batch_sise 2", "…: no such argument; did you mean --micro_batch_size?"
    ),
    "an argument by its long name": Case(
        "train", "--learning_rate 1", "…: no such argument; here it is --lr", process=True
    ),
    "an unknown argument": Case("tokenize", "--zzz 1", "--zzz: no such argument; --help lists them", process=True),
    "a wrong value of debug": Case(
        "inspect", "tokens --debug so", "--debug: expected true or false, got 'so'", process=True
    ),
    "required arguments left out": Case(
        "train",
        "-train_data_dir",
        "--train_data_dir, --streaming_dataset or --prompts is required",
    ),
    # ------------------------------------------------------------------------------------------------- the YAML file
    "no config": Case(
        "train", "--config nowhere.yaml", "--config nowhere.yaml: No such file or directory", process=True
    ),
    "a folder as config": Case("tokenize", "--config full", "--config full: a folder, not a YAML file"),
    "a config in a loop of links": Case(
        "merge", "a b --config circle", "--config circle: Too many levels of symbolic links"
    ),
    "a list as config": Case(
        "train",
        "--config configs/list.yaml",
        "--config configs/list.yaml: expected lines of the form 'argument: value'",
    ),
    "a config that is not YAML": Case(
        "train", "--config configs/broken.yaml", "--config configs/broken.yaml: not a YAML file: …", process=True
    ),
    "a config that runs code": Case(
        "train",
        "--config configs/code.yaml",
        "--config configs/code.yaml: line 1: the tag … is not supported; …",
        process=True,
    ),
    "a config of another encoding": Case(
        "train",
        "--config configs/latin-1.yaml",
        "--config configs/latin-1.yaml: byte 10 is not UTF-8 (0xfc); save the file as UTF-8",
    ),
    "an argument twice in a config": Case(
        "train", "--config configs/twice.yaml", "--config configs/twice.yaml: line 2: lr is given twice"
    ),
    "a config that is a pipe": Case("train", "--config configs/pipe", "--config configs/pipe: a pipe or a device, …"),
    "a config nested 3,000 deep": Case(
        "train", "--config configs/deep.yaml", "--config configs/deep.yaml: line 1: nested more than 20 levels deep"
    ),
    "a huge config": Case(
        "train", "--config configs/huge.yaml", "--config configs/huge.yaml: it is larger than 100,000 bytes, so …"
    ),
    "a number of 5,000 digits in a config": Case(
        "train", "--config configs/digits.yaml", "--config configs/digits.yaml: line 2: a number of 5,000 digits"
    ),
    "unknown arguments in a config": Case(
        "train",
        "--config configs/unknown.yaml",
        [
            "configs/unknown.yaml: learning_rate: no such argument; here it is --lr",
            "configs/unknown.yaml: micro_batch_sise: no such argument; did you mean --micro_batch_size?",
        ],
        process=True,
    ),
    "wrong types in a config": Case(
        "train",
        "-output_dir --config configs/types.yaml",
        [
            "configs/types.yaml: lr: expected a number above 0, got 'fast'",
            "configs/types.yaml: micro_batch_size: expected a whole number above 0, got [1, 2]",
            "configs/types.yaml: resume: expected true or false, got 'maybe'",
            "configs/types.yaml: output_dir: expected text, got 7; put it in quotes",
        ],
    ),
    "a zero byte in a config": Case(
        "generate",
        "-model_name --config configs/null-byte.yaml",
        "configs/null-byte.yaml: model_name: expected text, got …",
    ),
    # -------------------------------------------------------------------------------------- combinations and devices
    "a batch that does not divide": Case(
        "train",
        "--micro_batch_size 2 --total_batch_size 3",
        "--total_batch_size 3 is not a multiple of 2 (--micro_batch_size 2 on 1 devices); give 2 or 4",
    ),
    "a batch too small for the devices": Case(
        "train",
        "--micro_batch_size 4 --total_batch_size 3",
        "--total_batch_size 3 is not a multiple of 4 (--micro_batch_size 4 on 1 devices); give 4",
    ),
    "one device and several": Case(
        "train",
        "--parallelism single --devices 2",
        "--parallelism single only works with one device, not 2; use fsdp, fsdp2 or ddp",
        process=True,
    ),
    "min_lr above lr": Case("train", "--lr 1e-5 --min_lr 1e-4", "--min_lr 0.0001 is above --lr 1e-05"),
    "more warm-up than steps": Case("train", "--warmup_steps 6", "--warmup_steps 6 is more than --max_step 1"),
    "weights only without a checkpoint": Case("train", "--weights_only", "--weights_only true needs --checkpoint; …"),
    "fp16 on CPU": Case("train", "--precision 16-mixed", "--precision 16-mixed does not work on CPU; use bf16-mixed"),
    "flash-attention on CPU": Case(
        "train",
        "--attention flash_attention_2",
        "--attention flash_attention_2 needs a GPU; use --attention sdpa without one",
    ),
    "training with flex attention on CPU": Case(
        "train",
        "--attention flex_attention",
        "--attention flex_attention cannot train without a GPU: …; use --attention sdpa",
    ),
    "offloading from CPU": Case(
        "train",
        "--cpu_offload true",
        "--cpu_offload true has nothing to offload on CPU; leave it out",
    ),
    "a layer class that the model does not have": Case(
        "train",
        "--auto_wrap_policy LamaDecoderLayer",
        "--auto_wrap_policy LamaDecoderLayer: model has no layer of this class; its decoder layers are "
        "LlamaDecoderLayer",
    ),
    "evaluation without validation rows": Case(
        "train",
        "--eval_only true --train_data_dir datasets/no-validation",
        "--eval_only true: datasets/no-validation has no validation split; tokenize with --validation_split above 0",
    ),
    "no device": Case("train", "--devices 0", "--devices: expected auto, a number above 0, or indices …; got 0"),
    "a TPU and a CPU": Case(
        "train", "--tpu true", "--tpu true and --accelerator cpu contradict each other; give only one of them"
    ),
    "a TPU without torch-xla": Case(
        "train",
        "-accelerator --tpu true",
        "--accelerator tpu: torch-xla is not installed in this environment; run make install-xla …",
    ),
    "XLA on a CPU": Case(
        "train",
        "--parallelism xla",
        "--parallelism xla: xla only works with --accelerator tpu, and --accelerator tpu only with xla; change "
        "one of them",
    ),
    "too many processes": Case("train", "--devices 5000", "--devices 5000 is too many for …; give …"),
    "several machines without a launcher": Case(
        "train", "--num_nodes 2", "--num_nodes 2: start the run on every machine, with torchrun --nnodes 2, srun, or …"
    ),
    "devices and the launcher's": Case(
        "train",
        "--devices 4",
        "--devices 4 contradicts torchrun --nproc-per-node 2; leave one of them out",
        num_ranks=2,
    ),
    "precision and the launcher's": Case(
        "train",
        "--precision bf16-true",
        "--precision bf16-true contradicts fabric run --precision 32-true; leave one of them out",
        env={"LT_CLI_USED": "1", "LT_PRECISION": "32-true"},
    ),
    "a launcher's variables without it": Case(
        "train",
        "",
        "the environment sets LT_DEVICES, but fabric run did not start this process; unset LT_DEVICES",
        env={"LT_DEVICES": "2"},
    ),
    "rows without a token to predict": Case(
        "tokenize", "--max_length 1", "--max_length 1 leaves no token to predict; give 2 or more"
    ),
    "all documents for validation": Case(
        "tokenize", "--validation_split 1", "--validation_split 1 leaves nothing to train on; …"
    ),
    "weights for other sources": Case(
        "tokenize", "--weights 1 2", "--weights has 2 numbers for 1 source in --dataset; give one for each"
    ),
    "not a size": Case(
        "convert", "--max_shard_size big", "--max_shard_size: expected a size such as 5GB or 500MB, got 'big'"
    ),
    "a push to a wrong name": Case(
        "convert", "--push_to_hub name", "--push_to_hub: expected OWNER/NAME, got 'name'", process=True
    ),
    "a push without login": Case(
        "convert",
        "--push_to_hub a/b",
        "--push_to_hub needs a Hugging Face token with write access; …",
        before="import huggingface_hub; huggingface_hub.constants.HF_TOKEN_PATH = 'nowhere'",
        env={"HF_TOKEN": ""},
    ),
    "no prompt": Case("generate", "--prompt=", "--prompt: expected text or null, got nothing"),
    "nothing to sample": Case(
        "generate", "--top_p 0", "--top_p 0 leaves no token to choose from; give a number above 0"
    ),
    "temperature below 0": Case(
        "generate", "--temperature -1", "--temperature: expected a number, 0 or more, got '-1'", process=True
    ),
    "more tokens than positions": Case(
        "generate",
        "--num_tokens 256",
        "the prompt has … tokens, which with --num_tokens 256 exceeds the model's 256 positions; …",
    ),
    "a slice that there is not": Case(
        "tokenize", "--shard 5/4", "--shard: expected I/N such as 3/64, from 1/64 to 64/64, got '5/4'"
    ),
    "a slice of what every task would download": Case(
        "tokenize",
        "--shard 1/4 --dataset https://example.org/a.jsonl",
        "--shard: every task would download https://example.org/a.jsonl; download it once, and give its path",
    ),
    "a slice and itself": Case(
        "merge", "slice slice", "--dataset_dirs: slice is given twice; give it once", process=True
    ),
    "lines in no documents": Case(
        "tokenize", "--boilerplate 0", "--boilerplate 0: expected a whole number of 2 or more"
    ),
    "one token dataset to merge": Case(
        "merge", "tokens", "--dataset_dirs: expected two token datasets or more", process=True
    ),
    "a token dataset and itself": Case(
        "merge", "tokens ./tokens", "--dataset_dirs: tokens is given twice, also as ./tokens; give it once"
    ),
    "a row beyond the last": Case(
        "inspect", "tokens --start 10000", "--start 10000: train has … rows, numbered from 0"
    ),
    "a page in a folder that does not exist": Case(
        "inspect", "tokens --html no/p.html", "--html no/p.html: expected a file in an existing folder, …"
    ),
    # ---------------------------------------------------------------------------------------------------- the model
    "a model that is not there": Case("train", "--model_name ./nowhere", "--model_name ./nowhere: no such folder"),
    "a model that is not on the hub": Case(
        "generate",
        "--model_name nobody/nothing",
        "--model_name nobody/nothing: no such folder, and the hub does not provide it: …; check the name …",
        process=True,
    ),
    "a model without config.json": Case(
        "train",
        "--model_name models/no-config",
        "--model_name models/no-config: the folder has no config.json; give a Hugging Face model folder",
    ),
    "an empty config.json": Case(
        "train", "--model_name models/empty-config", "models/empty-config/config.json: damaged (…); give …"
    ),
    "a config.json that is not an object": Case(
        "train", "--model_name models/list-config", "models/list-config/config.json: damaged (no JSON object); give …"
    ),
    "a config.json of wrong types": Case(
        "train",
        "--model_name models/text-for-number",
        "--model_name models/text-for-number: its config.json is invalid: … 'hidden_size' expected int, …; give …",
        process=True,
    ),
    "a config.json that makes no model": Case(
        "generate",
        "--model_name models/heads",
        "… The hidden size (64) is not a multiple of the number of attention heads (7).; give a …",
    ),
    "a model of an unknown family": Case(
        "train",
        "--model_name models/unknown",
        "--model_name models/unknown: … model type `x` but Transformers does not …",
    ),
    "a model that is not a language model": Case(
        "train",
        "--model_name models/vision",
        "--model_name models/vision: a vit is not a causal language model; give a causal language model",
    ),
    "a model without layers": Case(
        "train",
        "--model_name models/negative-layers",
        "--model_name models/negative-layers: it has no decoder layers; give another model",
    ),
    "a model without weights": Case(
        "train",
        "--model_name models/no-weights",
        "models/no-weights: it has no weights (model.safetensors); download the model again",
        num_ranks=2,
    ),
    "truncated weights": Case(
        "train",
        "--model_name models/cut-weights",
        "models/cut-weights/model.safetensors: not a complete safetensors file (…); download the model again",
        process=True,
    ),
    "an empty file of weights": Case(
        "generate",
        "--model_name models/empty-weights",
        "models/empty-weights/model.safetensors: not a complete safetensors file (…); download the model again",
    ),
    "weights that are a Git LFS pointer": Case(
        "train",
        "--model_name models/pointer-weights",
        "models/pointer-weights/model.safetensors is a Git LFS pointer, not the file itself; run `git lfs pull` …",
    ),
    "a lost shard": Case(
        "train",
        "--model_name models/lost-shard",
        "models/lost-shard/model-00001-of-00002.safetensors: the file is missing; download the model again",
    ),
    "a damaged index": Case(
        "train",
        "--model_name models/bad-index",
        "models/bad-index/model.safetensors.index.json: damaged (…); download the folder again",
    ),
    "weights of another model": Case(
        "generate",
        "--model_name models/deeper",
        "--model_name models/deeper: 9 weights are missing or do not have the shape in config.json, such as …; …",
        process=True,
    ),
    # ------------------------------------------------------------------------------------------------ token datasets
    "no token dataset": Case(
        "train",
        "--train_data_dir nowhere",
        "--train_data_dir nowhere: no such folder; write a token dataset with fabric-train tokenize --output_dir "
        "nowhere",
        num_ranks=2,
    ),
    "a file as token dataset": Case(
        "train", "--train_data_dir file", "--train_data_dir file: a file, not a folder; write …"
    ),
    "a folder that is not a token dataset": Case(
        "train",
        "--train_data_dir model",
        "--train_data_dir model: the folder has no dataset_dict.json; write a token dataset with fabric-train "
        "tokenize --output_dir model",
    ),
    "no train split": Case("train", "--train_data_dir datasets/no-train", "… no train split, only test; write …"),
    "an empty training set": Case(
        "train", "--train_data_dir datasets/no-rows", "… a split has no rows; remove the split or …"
    ),
    "rows of one token": Case(
        "train",
        "--train_data_dir datasets/short-rows",
        "datasets/short-rows: rows of train have 1 tokens, which leaves none to predict; …",
    ),
    "texts as token dataset": Case(
        "train",
        "--train_data_dir datasets/texts",
        "--train_data_dir datasets/texts: train has no column input_ids, only text; tokenize again with …",
    ),
    "nulls in the rows": Case(
        "train", "--train_data_dir datasets/nulls", "… train has nulls in its column input_ids; …"
    ),
    "fewer labels than tokens": Case(
        "train",
        "--train_data_dir datasets/fewer-labels",
        "… with a different number of labels than input_ids, first in row 0; …",
    ),
    "labels that are not tokens": Case(
        "train",
        "--train_data_dir datasets/other-labels",
        "datasets/other-labels: train has label 5000, but model has 1000 tokens; use token ids as labels, …",
    ),
    "documents that start outside their row": Case(
        "train",
        "--train_data_dir datasets/starts-beyond",
        "… document_starts that are not in ascending order, …",
    ),
    # ------------------------------------------------------------------------------------------------------- teachers
    "a teacher that the objective does not use": Case(
        "train", "--teacher model", "--teacher only applies to --objective distill, not sft; leave out --teacher"
    ),
    "no teacher": Case("train", "--objective distill", "--objective distill needs --teacher; give the model whose …"),
    "no such teacher": Case("train", f"{DISTILL} nowhere", "--teacher nowhere: …"),
    "no such teacher, by its path": Case(
        "train", f"{DISTILL} /no/where", "--teacher /no/where: no such folder; give …"
    ),
    "a teacher with another tokenizer": Case(
        "train",
        f"{DISTILL} models/swapped-tokens",
        "--teacher …models/swapped-tokens: it has a different tokenizer: id 998 is '…', but '…' in the student's; …",
        num_ranks=2,
    ),
    "a teacher without weights": Case(
        "train", f"{DISTILL} models/no-weights", "…models/no-weights: it has no weights (model.safetensors); …"
    ),
    "a teacher with damaged weights": Case(
        "train",
        f"{DISTILL} models/cut-weights",
        "…models/cut-weights/model.safetensors: not a complete safetensors file (…); …",
    ),
    "a checkpoint with damaged weights as teacher": Case(
        "train",
        f"{DISTILL} runs/cut-weights",
        "runs/cut-weights/checkpoints/step-00000007 is damaged: model.safetensors has …; use another checkpoint",
        process=True,
    ),
    "a folder that is no model as teacher": Case("train", f"{DISTILL} full", "--teacher …full…"),
    "a divergence that is not at a side": Case(
        "train",
        f"{DISTILL} model --divergence jsd --jsd_beta 0",
        "--jsd_beta must be between 0 and 1; give --divergence forward_kl for 0, or reverse_kl for 1",
    ),
    "distillation in fp16": Case(
        "train",
        f"{DISTILL} model -accelerator --precision 16-mixed --plan true --device_memory 80GB --devices 1",
        "--objective distill does not work with --precision 16-mixed; give bf16-mixed or bf16-true",
    ),
    "distillation with split rows": Case(
        "train",
        f"{DISTILL} model --parallelism fsdp2 --devices 2 --context_parallel_size 2",
        "--objective distill does not work with --context_parallel_size; leave out --context_parallel_size",
        num_ranks=2,
    ),
    "ids outside the vocabulary": Case(
        "train",
        "--train_data_dir datasets/other-vocabulary",
        [
            "datasets/other-vocabulary: train holds token id 5000, but model has 1000 tokens; "
            "tokenize with the model's own tokenizer (docs/reference/errors.md#vocabulary)",
            "datasets/other-vocabulary: validation holds token id 1000, but model has 1000 tokens; "
            "tokenize with the model's own tokenizer (docs/reference/errors.md#vocabulary)",
        ],
        num_ranks=2,
    ),
    "padding that is not a token": Case(
        "train",
        "--train_data_dir datasets/negative",
        "datasets/negative: train holds token id -100, which is invalid; pad with a token of the model and mask it "
        "in labels",
    ),
    "rows longer than the positions, and another fault": Case(
        "train",
        "--train_data_dir datasets/long --total_batch_size 3 --micro_batch_size 2",
        [
            "datasets/long: rows of train have 300 tokens, but model has 256 positions; tokenize with --max_length "
            "256 or less, or extend the positions: --rope_scaling llama3:2 (docs/long_rows.md)",
            "--total_batch_size 3 is not a multiple of 2 (--micro_batch_size 2 on 1 devices); give 2 or 4",
        ],
    ),
    "another model's tokenizer": Case(
        "train",
        "--model_name models/renamed-token",
        "tokens: not tokenized with the tokenizer of models/renamed-token: token …; tokenize with --tokenizer_name …",
    ),
    "a truncated arrow file": Case(
        "train",
        "--train_data_dir datasets/cut-arrow",
        "--train_data_dir datasets/cut-arrow: damaged, …; tokenize again",
        process=True,
    ),
    "a lost arrow file": Case(
        "inspect",
        "datasets/lost-arrow",
        "datasets/lost-arrow/train/data-00000-of-00001.arrow: the file is missing; tokenize again",
        process=True,
    ),
    "an empty dataset_dict.json": Case(
        "merge",
        "tokens datasets/empty-listing",
        "datasets/empty-listing/dataset_dict.json: damaged (…); tokenize again",
    ),
    "a damaged state.json": Case(
        "train",
        "--train_data_dir datasets/bad-state",
        "datasets/bad-state/train/state.json: damaged (…); tokenize again",
    ),
    "a dataset_info.json that is not an object": Case(
        "inspect", "datasets/list-info", "datasets/list-info/train/dataset_info.json: damaged (…); tokenize again"
    ),
    "a damaged manifest": Case(
        "train",
        "--train_data_dir datasets/bad-manifest",
        "datasets/bad-manifest/manifest.json: damaged (…); tokenize again",
    ),
    "a manifest of another format": Case(
        "inspect",
        "datasets/old-manifest",
        "…manifest.json has format 1, but this version reads 2; …",
    ),
    "a ledger that does not balance": Case(
        "merge",
        "tokens datasets/unbalanced",
        "…manifest.json is damaged: tokens in rows of train: … is not 64; …",
        process=True,
    ),
    "merging a token dataset without a manifest": Case(
        "merge",
        "tokens datasets/no-manifest",
        "datasets/no-manifest: it has no manifest.json, so its tokenizer is unknown; …",
    ),
    "an edited tokenizer": Case(
        "merge",
        "tokens datasets/edited-tokenizer",
        "…tokenizer.json does not match tokenizer.sha256 in manifest.json: …",
    ),
    "a lost tokenizer": Case(
        "train",
        "--train_data_dir datasets/no-tokenizer",
        "…tokenizer.json is missing, but manifest.json lists it in …; tokenize again",
    ),
    # -------------------------------------------------------------------------------------------------- texts, sources
    "no texts": Case(
        "tokenize", "--dataset no.jsonl", "--dataset no.jsonl: no such file or folder; give a path that …"
    ),
    "a link to no texts": Case(
        "tokenize", "--dataset ./broken-link", "broken-link: a link to nowhere, which does not exist; …"
    ),
    "two sources that do not exist": Case(
        "tokenize",
        "--dataset a.txt b.csv",
        ["--dataset a.txt: no such file or folder; …", "--dataset b.csv: no such …"],
        process=True,
    ),
    "texts of an unknown kind": Case(
        "tokenize", "--dataset texts/a.docx", f"--dataset texts/a.docx: cannot read .docx; {READABLE}"
    ),
    "a folder without texts": Case("tokenize", "--dataset no-texts", "… no readable file in this folder; …"),
    "an empty file": Case("tokenize", "--dataset texts/empty.jsonl", "texts/empty.jsonl: no document with text"),
    "less text than a row": Case(
        "tokenize",
        "--dataset texts/short.txt --validation_split 0",
        "train has 3 tokens in 1 documents, less than one row of 32; give more documents, a smaller --max_length",
    ),
    "a truncated line": Case(
        "tokenize", "--dataset texts/bad-line.jsonl", "texts/bad-line.jsonl, line 41: not JSON: …; …", process=True
    ),
    "numbers instead of texts": Case(
        "tokenize",
        "--dataset texts/numbers.parquet",
        "texts/numbers.parquet: column 'text' holds double, not text; choose another with --text_column",
    ),
    "no column with texts": Case(
        "tokenize", "--dataset texts/other-column.jsonl", "… line 1: no column 'text'; it has body; …"
    ),
    "texts of another encoding": Case(
        "tokenize",
        "--dataset texts/latin-1.jsonl",
        "texts/latin-1.jsonl: byte 11 is not UTF-8 (0xfc); convert the file …",
    ),
    "a column that comes twice": Case(
        "tokenize", "--dataset texts/twice.csv", "texts/twice.csv: 2 columns are named 'text'; rename …"
    ),
    "a pipe among the texts": Case(
        "tokenize", "--dataset piped", "piped/a.jsonl: a pipe, not a file; write its content to a file, …"
    ),
    "a part of a folder that is not there": Case(
        "tokenize", "--dataset saved::dev", "--dataset saved::dev: no split 'dev'; it has train"
    ),
    "a revision of a folder": Case(
        "tokenize", "--dataset saved@main", "--dataset saved@main: a folder has no revisions; leave out @main"
    ),
    "an archive named as text": Case(
        "tokenize",
        "--dataset texts/zip.jsonl",
        "texts/zip.jsonl: its content is a zip archive, not .jsonl text in UTF-8; …",
    ),
    "truncated gzip": Case(
        "tokenize", "--dataset texts/cut.jsonl.gz", "texts/cut.jsonl.gz: incomplete gzip file: …; download it again"
    ),
    "truncated parquet": Case(
        "tokenize",
        "--dataset texts/cut.parquet",
        "texts/cut.parquet: incomplete parquet file: …; download it again",
        process=True,
    ),
    "csv with unequal rows": Case(
        "tokenize", "--dataset texts/ragged.csv", "texts/ragged.csv, line 3: 1 fields, but the header has 2; …"
    ),
    "truncated json": Case(
        "tokenize", "--dataset texts/bad.json", "texts/bad.json: not JSON: Expecting value at column 10; …"
    ),
    "json nested too deeply": Case(
        "tokenize", "--dataset texts/deep.jsonl", "texts/deep.jsonl, line 1: cannot read JSON: …"
    ),
    "a truncated saved dataset": Case(
        "tokenize", "--dataset saved-cut", "--dataset saved-cut: incomplete save_to_disk folder: …; …"
    ),
    "a stream without text": Case(
        "train", f"{STREAM} texts/blank.txt", "--streaming_dataset has no documents with text; give other sources"
    ),
    "a stream of binary data": Case(
        "train",
        f"{STREAM} texts/binary.txt",
        "texts/binary.txt: byte 1 is zero, so it is binary data, not text; …",
    ),
    "a stream from a URL": Case(
        "train", f"{STREAM} https://a/b.txt", "--streaming_dataset https://a/b.txt: cannot stream …"
    ),
    "a stream without end": Case(
        "train",
        f"{STREAM} texts.jsonl -max_step",
        "--streaming_dataset has no known length; give --max_step",
    ),
    "an unknown protocol": Case("tokenize", "--dataset gopher://a/b.txt", "--dataset gopher://a/b.txt: …"),
    # ------------------------------------------------------------------------------------------------ the tokenizer
    "no tokenizer": Case(
        "tokenize", "--tokenizer_name ./nowhere", "--tokenizer_name ./nowhere: no such file or folder; …"
    ),
    "a folder without tokenizer": Case(
        "tokenize",
        "--tokenizer_name full",
        "--tokenizer_name full: it has neither tokenizer.json nor tokenizer.model; give another folder",
    ),
    "a truncated tokenizer": Case(
        "tokenize",
        "--tokenizer_name tokenizers/cut-json",
        "…tokenizer.json is not a tokenizer: …; download the file again",
    ),
    "a tokenizer that is a Git LFS pointer": Case(
        "tokenize", "--tokenizer_name tokenizers/pointer", "…tokenizer.json is a Git LFS pointer, …"
    ),
    "a tokenizer_config.json that is not an object": Case(
        "tokenize",
        "--tokenizer_name tokenizers/config-list",
        "tokenizers/config-list/tokenizer_config.json: damaged (no JSON object); download the file again",
    ),
    "a tokenizer without EOS": Case(
        "tokenize", "--tokenizer_name tokenizers/no-eos", "… it has no EOS token, …", process=True
    ),
    "a tokenizer.model of random bytes": Case(
        "tokenize",
        "--tokenizer_name tokenizers/garbage.model",
        "… is neither a SentencePiece model nor Llama-3's list of ranks; …",
    ),
    # -------------------------------------------------------------------------------------------------- checkpoints
    "no checkpoint": Case(
        "train", "--checkpoint nowhere", "nowhere: no such folder; checkpoints are RUN/checkpoints/step-... …"
    ),
    "a checkpoint without trainer.json": Case(
        "convert",
        "--checkpoint runs/no-trainer",
        "…step-00000007 is damaged: trainer.json is missing; the run has no intact checkpoint; use another checkpoint",
        process=True,
    ),
    "a truncated trainer.json": Case(
        "convert", "--checkpoint runs/cut-trainer", "… is damaged: trainer.json has 11 bytes instead of …"
    ),
    "a trainer.json that is not an object": Case(
        "train", "--checkpoint runs/list-trainer", "… is damaged: trainer.json: damaged (no JSON object); the run …"
    ),
    "a trainer.json without most values": Case(
        "train", "--checkpoint runs/bare-trainer", "… is damaged: trainer.json: damaged (…: Field required); the run …"
    ),
    "a checkpoint of another format": Case(
        "convert", "--checkpoint runs/format", "… has format 99, but this version reads format …"
    ),
    "truncated weights of a checkpoint": Case(
        "generate", "--model_name runs/cut-weights", "… is damaged: model.safetensors has … bytes instead of …"
    ),
    "a truncated config.json of a checkpoint": Case(
        "convert", "--checkpoint runs/cut-config", "…/config.json: damaged (…); use another checkpoint"
    ),
    "a pickle as checkpoint": Case(
        "train", "--checkpoint pickled.pt", "pickled.pt: a file, not a folder; checkpoints are …", process=True
    ),
    "a pickle as model": Case(
        "generate", "--model_name pickled.ckpt", "--model_name pickled.ckpt: this is a file; give the folder …"
    ),
    "a pickle as text": Case(
        "tokenize", "--dataset pickled.pt", "--dataset pickled.pt: cannot read .pt; supported formats: …"
    ),
    "a pickle as tokenizer": Case(
        "tokenize", "--tokenizer_name pickled.pt", "pickled.pt is neither a SentencePiece model …", process=True
    ),
    "two checkpoints with the same name": Case(
        "convert", "--checkpoint runs/good runs/cut-config", "… have the same name; convert them one at a time"
    ),
    # --------------------------------------------------------------------------------------------- places to write to
    "a folder with a run": Case(
        "train",
        "--output_dir runs/good",
        "--output_dir runs/good already has a run up to step-00000007; give --resume true …, …",
        process=True,
    ),
    "a folder with a run that has saved nothing": Case(
        "train",
        "--output_dir runs/unsaved",
        "--output_dir runs/unsaved already has a run, which has not saved a checkpoint; give --resume true …, …",
    ),
    "a folder that is not empty": Case(
        "tokenize",
        "--output_dir full",
        "full already exists and is not empty; choose another folder or remove it",
        process=True,
    ),
    "a file instead of a folder": Case(
        "convert", "--output_dir file", "file already exists and is a file; choose another name …", process=True
    ),
    "a file above the folder": Case(
        "train", "--output_dir file/run", "--output_dir file/run: … is a file; give another folder"
    ),
    "the root of the file system": Case(
        "train", "--output_dir /", "--output_dir / is the root of the file system; give a folder for the run"
    ),
    "a file where checkpoints go": Case(
        "train",
        "--output_dir runs/file-checkpoints",
        "runs/file-checkpoints/checkpoints is not a folder, …; remove or …",
    ),
    "a folder where metrics go": Case(
        "train",
        "--output_dir runs/folder-metrics",
        "runs/folder-metrics/metrics.csv is a folder, not a file; remove it",
    ),
    "a folder where trainer.json was": Case(
        "train",
        f"--model_name {TRAINER.format('folder-trainer')}",
        "…/step-00000007 is damaged: trainer.json is not a file; use another checkpoint",
    ),
    "a dead link": Case(
        "merge", "tokens saved --output_dir broken-link", "cannot write to broken-link: … is a link to nowhere, …"
    ),
    "a link to itself": Case(
        "train", "--output_dir circle/run", "cannot write to circle/run: circle is a link to circle, …"
    ),
    "a name too long": Case(
        "train", f"--output_dir {LONG}", "File name too long: …; give a shorter name", process=True
    ),
    "a source's name too long": Case(
        "tokenize", f"--dataset {LONG}", "File name too long: …; give a shorter name", process=True
    ),
    "a run in a token dataset": Case(
        "train", "--output_dir tokens/run", "cannot write to tokens/run: tokens is complete …", process=True
    ),
    "an export in its checkpoint": Case(
        "convert",
        f"--output_dir {TRAINER.format('good')}/hf",
        "cannot write to …: … is complete and is never changed; …",
        process=True,
    ),
    "a run in a read-only folder": Case(
        "train",
        "--output_dir read-only/run",
        "--output_dir read-only/run: … is not writable; give another folder",
        before=AS_A_USER,
    ),
    "tokens in a read-only folder": Case(
        "tokenize",
        "--output_dir read-only/new/tokens",
        "cannot write to …read-only: no permission; choose …",
        before=AS_A_USER,
    ),
    "texts without permission to read": Case(
        "tokenize", "--dataset secret.jsonl", "Permission denied: secret.jsonl; give …", code=1, before=AS_A_USER
    ),
    "a full disk for tokens": Case("tokenize", "--output_dir disk-1/tokens", "…the smallest token dataset needs …"),
    "a disk that becomes full": Case(
        "tokenize", "--output_dir disk-1/tokens", "…No space left on device…", code=1, before=ROOM_AT_FIRST
    ),
    "a full disk for an export": Case("convert", "--output_dir disk-2/export", "…the export needs …"),
    "a full disk for a page": Case(
        "inspect", "tokens --html /dev/full", "No space left on device…; free some space …", code=1
    ),
}

PROCESSES = [name for name, case in CASES.items() if case.needs_process]
CHECKS = [name for name, case in CASES.items() if not case.needs_process]


def check(program: str, argv: list[str]) -> None:
    """Run a program in this process; of training, what precedes the launch."""
    if program == "train":
        prepare(parse(TrainArguments, argv))
    else:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", [program, *argv])
            importlib.import_module(MODULES[program]).main()


@pytest.fixture(scope="module")
def there(tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path, tiny_tokens_dir: Path) -> Iterator[Path]:
    """The folder in which all cases run, with two small disks in it, since two cases may run at a time."""
    folder = make_folder(tmp_path_factory.mktemp("bad-input") / "there", tiny_model_dir, tiny_tokens_dir)
    mounted = []
    for disk in (folder / "disk-1", folder / "disk-2"):
        disk.mkdir()
        mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(disk)]
        if subprocess.run(mount, capture_output=True, check=False).returncode == 0:
            mounted.append(disk)
    yield folder
    for disk in mounted:
        subprocess.run(["umount", str(disk)], check=True)


def snapshot(folder: Path) -> dict[str, tuple[int, int]]:
    """Return every path below a folder, with size and time of the last change for files."""
    status = {str(path.relative_to(folder)): path.lstat() for path in folder.rglob("*")}
    return {path: (one.st_size, one.st_mtime_ns) if S_ISREG(one.st_mode) else (0, 0) for path, one in status.items()}


@pytest.fixture(scope="module")
def before(there: Path) -> dict[str, tuple[int, int]]:
    """The folder's content before anything has run."""
    return snapshot(there)


@pytest.fixture(scope="module")
def ends(there: Path, before: dict, forked_runs: ForkedRuns) -> dict[str, ForkedRun]:
    """The runs of the cases that need a process, after rank 0 has ended; as many at a time as there are cores."""
    ended: dict[str, ForkedRun] = {}
    waiting = list(PROCESSES)
    running: dict[str, ForkedRun] = {}
    while waiting or running:
        while waiting and len(running) < (os.cpu_count() or 1):
            name = waiting.pop(0)
            case = CASES[name]
            argv = case.line(f"out-{len(waiting)}")
            running[name] = forked_runs.start(
                argv, case.num_ranks, cwd=there, before=case.before, env=case.env, program=MODULES[case.program]
            )
        for name, run in list(running.items()):
            if run.codes()[0] is not None:
                run.kill()  # as a launcher does when rank 0 has ended
                ended[name] = running.pop(name)
        time.sleep(0.005)
    return ended


def matches(fault: str, line: str) -> bool:
    return re.fullmatch(".*".join(map(re.escape, fault.split("…"))), line) is not None


def check_faults(case: Case, faults: Sequence[str]) -> None:
    expected = [case.faults] if isinstance(case.faults, str) else case.faults
    assert len(faults) == len(expected), faults
    assert all(map(matches, expected, faults)), faults


@pytest.mark.parametrize("name", CHECKS)
def test_checks_find_each_fault_and_name_its_place(
    there: Path, before: dict, name: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    case = CASES[name]
    monkeypatch.chdir(there)
    with pytest.raises(InputError) as caught:
        check(case.program, case.line("out"))
    check_faults(case, caught.value.faults)
    assert not any("\n" in fault for fault in caught.value.faults)
    assert capfd.readouterr().out == ""


@pytest.mark.parametrize("name", PROCESSES)
def test_each_fault_is_one_line_and_the_exit_code_says_whose(ends: dict[str, ForkedRun], name: str) -> None:
    case = CASES[name]
    run = ends[name]
    printed = run.stderr()
    check_faults(case, [line.removeprefix("error: ") for line in printed.splitlines() if line.startswith("error: ")])
    assert run.codes()[0] == case.code, printed
    assert ("Traceback" in printed) == ("--debug" in case.words)
    if case.code == 2:
        assert run.stdout() == ""
    for rank in range(1, case.num_ranks):
        assert run.stdout(rank) + run.stderr(rank) == ""


def test_nothing_has_been_written(there: Path, before: dict[str, tuple[int, int]], ends: dict) -> None:
    assert snapshot(there) == before


# -------------------------------------------------------------------------------------------------- real launches


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_missing_gpus_are_refused(there: Path, forked_runs: ForkedRuns) -> None:
    untouched = snapshot(there)
    run = forked_runs.start(Case("train", "--accelerator cuda --devices 8", "").line("out"), 1, cwd=there)
    fault = "error: --accelerator cuda: torch finds no GPU here; use --accelerator cpu, or check the driver\n"
    assert run.wait() == [2]
    assert (run.stdout(), run.stderr()) == ("", fault)
    assert snapshot(there) == untouched


def test_a_port_in_use_is_reported_in_one_line(there: Path, forked_runs: ForkedRuns) -> None:
    untouched = snapshot(there)
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        port = busy.getsockname()[1]
        line = Case("train", "", "").line("out")
        run = forked_runs.start(line, num_ranks=2, cwd=there, env={"MASTER_PORT": str(port)})
        assert run.wait_until(lambda: run.codes()[0] is not None)
        run.kill()
    fault = f"error: port {port}, which the ranks use to connect, is in use on this machine; set MASTER_PORT to a …"
    assert matches(fault, run.stderr().strip())
    assert run.codes()[0] == 1  # the same command may work a minute later
    assert run.stderr(1) == ""
    assert snapshot(there) == untouched


# ------------------------------------------------------------------------------------------- unexpected failures


def failing(forked_runs: ForkedRuns, folder: Path, error: str, *more: str) -> tuple[int | None, str]:
    """Let a program fail where no check expects it; return its exit code and standard error."""
    before = f"import {MODULES['inspect']} as program\ndef fail(_): raise {error}\nprogram._examine = fail"
    run = forked_runs.start(["tokens", *more], 1, cwd=folder, before=before, program=MODULES["inspect"])
    return run.wait()[0], run.stderr()


def test_an_unexpected_failure_is_one_line_that_names_its_place(there: Path, forked_runs: ForkedRuns) -> None:
    code, printed = failing(forked_runs, there, "KeyError('rows')")
    assert code == 1
    assert matches("error: KeyError: 'rows' in fail (<string>, line 2); …; --debug shows the traceback\n", printed)


def test_memory_that_ran_out_is_reported_with_a_fix(there: Path, forked_runs: ForkedRuns) -> None:
    code, printed = failing(forked_runs, there, "MemoryError('9 GB wanted')")
    assert code == 1
    assert matches("error: out of memory: 9 GB wanted; use a machine with more memory, …\n", printed)


@pytest.mark.parametrize("switch", [["--debug"], ["--debug", "true"], ["--debug=true"]])
def test_debug_shows_the_traceback_and_the_line(there: Path, forked_runs: ForkedRuns, switch: list[str]) -> None:
    code, printed = failing(forked_runs, there, "KeyError('rows')", *switch)
    assert code == 1
    assert printed.startswith("Traceback (most recent call last):\n")
    assert printed.splitlines()[-1].startswith("error: KeyError: 'rows' in fail")


def test_debug_false_shows_no_traceback(there: Path, forked_runs: ForkedRuns) -> None:
    _, printed = failing(forked_runs, there, "KeyError('rows')", "--debug", "false")
    assert "Traceback" not in printed
