"""Check the arguments of a run that samples its rows from --prompts, before its data are opened."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fabric_train.arguments import TrainArguments

_OPTION = "--prompts"


def faults_of_rollouts(arguments: "TrainArguments") -> Iterator[str]:
    """Yield contradictions between --prompts, --objective, and the arguments of completions and rewards."""
    preference = arguments.preference
    rollouts = arguments.rollouts
    if arguments.evaluation.validation_prompts is not None:
        yield from _find_faults_of_validation(arguments)
    if arguments.data.prompts is None:
        if preference.learns_from_rewards:
            yield f"--objective {preference.objective} needs {_OPTION}; give files with a column prompt"
        for name in rollouts.changed_names:
            yield f"--{name} only applies to {_OPTION}; leave out --{name}"
        return

    # what the completions are for
    if not preference.trains_on_completions:
        yield f"{_OPTION} only applies to --objective rl or distill, not {preference.objective}; leave it out"
    if preference.learns_from_rewards:
        yield from _find_faults_of_rewards(arguments)
    if preference.objective == "distill":
        for name in rollouts.changed_reward_names:
            yield f"--{name} only applies to --objective rl: distill learns from the teacher alone; leave it out"
    if preference.teacher_states is not None:
        yield f"--teacher_states has no values for completions that {_OPTION} samples; give --teacher"
    if preference.distill_on == "all":
        yield f"--distill_on all does not work with {_OPTION}: only completions are sampled; leave it out"

    # what does not work with rows that are sampled
    yield from _find_faults_of_rows(arguments)
    if arguments.fsdp.context_parallel_size > 1:
        yield f"{_OPTION} does not work with --context_parallel_size; leave out --context_parallel_size"
    if arguments.device.accelerator == "tpu":
        yield f"{_OPTION} does not work with --accelerator tpu; use a GPU or the CPU"
    if arguments.model.precision == "16-mixed":
        yield f"{_OPTION} does not work with --precision 16-mixed; give bf16-mixed or bf16-true"
    if not arguments.data.isolate_documents:
        yield (
            f"{_OPTION} needs isolated documents, because a row has several completions; leave out "
            "--isolate_documents false"
        )
    if arguments.model.family:
        yield f"{_OPTION} does not work with a new model, whose completions are noise; give --model_name"
    if arguments.data.text_column != type(arguments.data).text_column:
        yield f"--text_column does not apply to {_OPTION}, whose column is called prompt; leave it out"
    for name in ("eval_only", "self_check"):
        if getattr(arguments.evaluation, name):
            yield f"--{name} does not work with {_OPTION}; give a token dataset with --train_data_dir"


def _find_faults_of_rewards(arguments: "TrainArguments") -> Iterator[str]:
    """Yield faults in the arguments with which an objective learns from rewards."""
    rollouts = arguments.rollouts
    if not rollouts.rewards:
        yield "--objective rl needs --rewards; give a built-in reward, or FILE.py:NAME for a function"
    if rollouts.group_size < 2:
        yield "--group_size 1 leaves every advantage at 0, because a reward is compared with its group; give 2 or more"
    if arguments.preference.reference is not None and not rollouts.kl_weight:
        yield "--reference only applies to --kl_weight above 0; give --kl_weight, or leave out --reference"


def _find_faults_of_rows(arguments: "TrainArguments") -> Iterator[str]:
    """Yield faults in the number of rows of a step: of completions, and of a token dataset beside them."""
    training = arguments.training
    if training.gradient_accumulation_steps != type(training).gradient_accumulation_steps:
        yield f"--gradient_accumulation_steps does not apply to {_OPTION}; give --prompts_per_step and --group_size"
    sft_weight = arguments.preference.sft_weight
    if arguments.preference.objective == "distill" and sft_weight:
        yield f"--sft_weight does not work with --objective distill and {_OPTION}: completions are no texts to learn"
        return
    if not sft_weight:
        if arguments.data.data_dirs:
            yield f"--train_data_dir beside {_OPTION} needs --sft_weight above 0; leave it out, or give a weight"
        if training.total_batch_size is not None:
            yield f"--total_batch_size does not apply to {_OPTION}; give --prompts_per_step and --group_size"
        return
    if not arguments.data.data_dirs:
        yield "--sft_weight with --objective rl needs --train_data_dir, the rows whose cross entropy it adds"
    if training.total_batch_size is None:
        yield "--sft_weight with --objective rl needs --total_batch_size, the rows of --train_data_dir in a step"


def _find_faults_of_validation(arguments: "TrainArguments") -> Iterator[str]:
    """Yield what does not work with held-out prompts."""
    evaluation = arguments.evaluation
    if arguments.data.prompts is None:
        yield f"--validation_prompts only applies to {_OPTION}; leave it out"
        return
    if not arguments.preference.learns_from_rewards:
        yield "--validation_prompts only applies to --objective rl: only rewards can judge completions; leave it out"
    if evaluation.eval_iters is not None:
        yield "--eval_iters does not apply to --validation_prompts, which are all completed; give fewer prompts"
    if evaluation.metrics is not None:
        yield "--metrics does not apply to --validation_prompts, whose completions have rewards; leave it out"
