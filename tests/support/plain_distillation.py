"""Compute a distillation's loss in plain PyTorch, and write students, teachers and their tokenizer."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import peft
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

from fabric_train.data.batch import IGNORED_LABEL
from tests.support.plain_training import TokenizedRow, split_documents
from tests.support.tiny_model import random_llama

NUM_IDS = 290
"""One more than the largest id of the tokenizer."""
GAPS = (1, 2)
"""The ids below ``NUM_IDS`` without a token."""
NAMED_IDS = [token_id for token_id in range(NUM_IDS) if token_id not in GAPS]
_STUDENT_ROWS = 300
_TEACHER_ROWS = 320
_INITIALIZER_RANGE = 0.3
"""So large that the distributions are far from uniform, and their divergences far from rounding."""


def write_student(folder: Path, **settings: Any) -> Path:
    """Write a random student of 2 layers with a tokenizer; ``settings`` are fields of ``LlamaConfig``."""
    return _write_model(folder, {"vocab_size": _STUDENT_ROWS, "hidden_size": 32, **settings})


def write_teacher(folder: Path, **settings: Any) -> Path:
    """Write a random teacher with another width, a larger padded head and dropout; return its folder.

    A teacher in training mode would have other distributions.
    """
    return _write_model(folder, {"vocab_size": _TEACHER_ROWS, "hidden_size": 48, "attention_dropout": 0.2, **settings})


def write_adapter(folder: Path, base: Path, **settings: Any) -> Path:
    """Write an adapter with random matrices; ``settings`` are fields of ``LoraConfig``. Return its folder."""
    targets = ["q_proj", "v_proj", "up_proj"]
    config = peft.LoraConfig(**{"task_type": "CAUSAL_LM", "r": 4, "target_modules": targets, **settings})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        adapted: Any = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name or "modules_to_save" in name:
                torch.nn.init.normal_(parameter, std=0.1)
    adapted.save_pretrained(folder)
    return folder


def write_tokenizer(folder: Path, tokens: dict[str, int]) -> None:
    """Write a tokenizer with these tokens and ids, of which the first stands for unknown words."""
    tokenizer = Tokenizer(models.WordLevel(tokens, unk_token=next(iter(tokens))))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=next(iter(tokens))).save_pretrained(folder)


def token_table() -> dict[str, int]:
    """Return the tokens of the tokenizer, with their ids."""
    return {f"token{token_id}": token_id for token_id in NAMED_IDS}


def _write_model(folder: Path, settings: dict[str, Any]) -> Path:
    config = LlamaConfig(
        **{
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 64,
            "initializer_range": _INITIALIZER_RANGE,
            "dtype": "float32",
            **settings,
        }
    )
    random_llama(config).save_pretrained(folder)
    write_tokenizer(folder, token_table())
    return folder


def plain_divergence(name: str, student: torch.Tensor, teacher: torch.Tensor, jsd_beta: float) -> torch.Tensor:
    """Return the divergence of each of N tokens by its formula, [N], from log-probabilities [N, classes]."""
    if name == "forward_kl":
        return F.kl_div(student, teacher, reduction="none", log_target=True).sum(dim=1)
    if name == "reverse_kl":
        return F.kl_div(teacher, student, reduction="none", log_target=True).sum(dim=1)
    mixture = torch.log(jsd_beta * teacher.exp() + (1 - jsd_beta) * student.exp())
    teacher_part = F.kl_div(mixture, teacher, reduction="none", log_target=True).sum(dim=1)
    student_part = F.kl_div(mixture, student, reduction="none", log_target=True).sum(dim=1)
    return jsd_beta * teacher_part + (1 - jsd_beta) * student_part


def coarsen(log_probabilities: torch.Tensor, top: torch.Tensor) -> torch.Tensor:
    """Return the log-probabilities of the classes [N, k + 1]: the ``top`` columns [N, k], and all others together."""
    is_rest = torch.ones_like(log_probabilities, dtype=torch.bool).scatter(1, top, False)
    rest = torch.where(is_rest, log_probabilities, -torch.inf).logsumexp(1, keepdim=True)
    return torch.cat([log_probabilities.gather(1, top), rest], dim=1)


@dataclass
class PlainDistillation:
    """Compute the losses of a row for ``plain_training.train_plainly``: full vocabularies, one document at a time."""

    teacher: Any
    """In evaluation mode."""
    divergence: str = "forward_kl"
    jsd_beta: float = 0.5
    temperature: float = 1.0
    sft_weight: float = 0.0
    distill_on: str = "supervised"
    values: list[torch.Tensor] = field(default_factory=list)
    """The divergence, cross entropy and agreement of each target, [3, N] for each row so far."""

    def __call__(self, model: torch.nn.Module, row: TokenizedRow) -> torch.Tensor:
        """Return the losses of the row's targets, fp32 [N]."""
        losses = []
        values = []
        for document_ids, document_labels in split_documents(row):
            targets = document_labels[1:]
            is_supervised = targets != IGNORED_LABEL
            is_target = is_supervised
            if self.distill_on == "all":
                targets = document_ids[1:]
                is_target = torch.ones_like(is_supervised)
            logits = model(document_ids[None]).logits[0, :-1][is_target]  # [N, rows of the head]
            with torch.no_grad():
                teacher_logits = self.teacher(document_ids[None]).logits[0, :-1][is_target]
            student = F.log_softmax(logits[:, NAMED_IDS] / self.temperature, dim=1)
            teacher = F.log_softmax(teacher_logits[:, NAMED_IDS] / self.temperature, dim=1)
            divergences = plain_divergence(self.divergence, student, teacher, self.jsd_beta)
            cross_entropies = F.cross_entropy(logits, targets[is_target], reduction="none")
            losses.append(divergences + self.sft_weight * is_supervised[is_target] * cross_entropies)
            agreements = student.argmax(dim=1) == teacher.argmax(dim=1)
            values.append(torch.stack([divergences, cross_entropies, agreements.float()]).detach())
        self.values.append(torch.cat(values, dim=1))
        return torch.cat(losses)

    def means(self, rows_per_epoch: int, rows_per_window: int, num_steps: int) -> list[list[float]]:
        """Return the means of the ``values`` of each step; the last window of an epoch may be short."""
        window_sizes: list[int] = []
        for _ in range(num_steps):
            begin = sum(window_sizes) % rows_per_epoch
            window_sizes.append(min(rows_per_window, rows_per_epoch - begin))
        step_means = []
        row_values = iter(self.values)
        for window_size in window_sizes:
            window_values = [next(row_values) for _ in range(window_size)]
            step_means.append(torch.cat(window_values, dim=1).double().mean(dim=1).tolist())
        return step_means
