"""Teach a model with preference pairs to continue in Spanish: ``python -m demo.preference``.

In each pair, the prompt is the beginning of a chapter of the Spanish Bible, the chosen answer is the text that follows,
and the rejected answer is lines of Shakespeare. This takes about 15 minutes on two cores. docs/preference.md shows
the results.
"""

import shutil

from demo.stages import ROOT, exit_on_failure, run_stage
from fabric_train.sample_data import real_data

FOLDER = "demo_run/preference"
TOKENS, RUN, RESULTS = (f"{FOLDER}/{name}" for name in ("tokens", "run", "evaluation"))
PROMPT = "Continúa el texto: En el principio era el Verbo, y el Verbo era con Dios,"


def run_stages() -> None:
    """Run the stages in turn."""
    model, pairs = (path.relative_to(ROOT) for path in (real_data.smollm2(), real_data.pairs()))
    shutil.rmtree(ROOT / FOLDER, ignore_errors=True)
    rows = ["--tokenizer_name", model, "--max_length", 768, "--validation_split", 0.2, "--output_dir", TOKENS]
    run_stage("tokenization", "python", "tokenize_dataset.py", "--dataset", pairs, *rows)
    generate = ["python", "generate.py", "--prompt", PROMPT, "--chat", "true", "--num_tokens", 40, "--model_name"]
    run_stage("the answer before", *generate, model)
    train = ["fabric", "run", "fabric_train", "--devices", 2, "--accelerator", "cpu", "--precision", "32-true"]
    train += ["--objective", "dpo", "--model_name", model, "--train_data_dir", TOKENS, "--output_dir", RUN]
    train += ["--number_epochs", 1, "--micro_batch_size", 1, "--total_batch_size", 4, "--lr", 1e-5]
    train += ["--eval_step_interval", 10, "--loggers", "csv"]
    run_stage("training", *train)
    run_stage("the answer after", *generate, RUN)
    models = ["--models", model, RUN, "--pairs", f"verses={TOKENS}", "--output_dir", RESULTS]
    run_stage("the evaluation", "python", "evaluate.py", *models)


if __name__ == "__main__":
    with exit_on_failure():
        run_stages()
