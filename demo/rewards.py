"""Teach a model with rewards alone to answer Spanish questions in Spanish: ``python -m demo.rewards``.

SmolLM2-135M-Instruct trains on questions about 16 things and is evaluated on questions about 16 others. docs/rl.md
shows the result.
"""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

from demo.stages import ROOT, exit_on_failure, run_stage
from fabric_train.sample_data import real_data

FOLDER = "demo_run/rewards"
PROMPTS, HELD_OUT, REWARDS, RUN = (
    f"{FOLDER}/{name}" for name in ("prompts.jsonl", "held_out.jsonl", "rewards.py", "run")
)
QUESTIONS = ("¿Qué sabes de {}?", "¿Por qué es importante {}?", "Explica qué es {}.", "¿Dónde se encuentra {}?")
TRAINED = (
    "el mar",
    "el pan",
    "la luna",
    "el fútbol",
    "la música",
    "el café",
    "el perro",
    "la lluvia",
    "el tren",
    "la escuela",
    "el vino",
    "la nieve",
    "el arroz",
    "la madera",
    "el hierro",
    "la paz",
)
NEW = (
    "el sol",
    "la leche",
    "el caballo",
    "la playa",
    "el teatro",
    "la sal",
    "el oro",
    "la rosa",
    "el invierno",
    "la radio",
    "el papel",
    "la miel",
    "el pez",
    "la torre",
    "el río",
    "la fiesta",
)
NO_QUESTION = '''
def no_question(completions, prompts, **columns):
    """Return 1 for completions without a Spanish question: repeating the question is no answer to it."""
    return [float("¿" not in text) for text in completions]
'''


def write_prompts(file: Path, subjects: Sequence[str]) -> None:
    """Write each question about each subject, as a chat."""
    lines = []
    for subject in subjects:
        for question in QUESTIONS:
            prompt = [{"role": "user", "content": question.format(subject)}]
            lines.append(json.dumps({"prompt": prompt}, ensure_ascii=False) + "\n")
    file.write_text("".join(lines), encoding="utf-8")


def run_stages() -> None:
    """Run the stages in turn."""
    model = real_data.smollm2().relative_to(ROOT)
    shutil.rmtree(ROOT / FOLDER, ignore_errors=True)
    (ROOT / FOLDER).mkdir(parents=True)
    write_prompts(ROOT / PROMPTS, TRAINED)
    write_prompts(ROOT / HELD_OUT, NEW)
    (ROOT / REWARDS).write_text(NO_QUESTION.lstrip(), encoding="utf-8")

    train = ["fabric", "run", "fabric_train", "--devices", 1, "--accelerator", "cpu", "--precision", "32-true"]
    train += ["--model_name", model, "--objective", "rl", "--prompts", PROMPTS, "--validation_prompts", HELD_OUT]
    train += ["--rewards", "language", f"{REWARDS}:no_question", "--reward_settings", "{language: {language: es}}"]
    train += ["--prompts_per_step", 8, "--group_size", 4, "--max_new_tokens", 12, "--max_length", 256]
    train += ["--micro_batch_size", 4, "--lr", 1e-4, "--warmup_steps", 0, "--number_epochs", 2]
    run_stage("training", *train, "--eval_step_interval", 4, "--output_dir", RUN)
    run_stage("the rewards of all steps", "fabric-train", "rollouts", RUN)
    run_stage("a group of the last step", "fabric-train", "rollouts", RUN, "--step", 16, "--group", 0)
    print(f"\nrewards: {RUN}/loss_curves.png, {RUN}/report.html")


if __name__ == "__main__":
    with exit_on_failure():
        run_stages()
