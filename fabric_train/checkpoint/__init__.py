"""Save, find, check and restore checkpoints. A folder with its final name is a complete checkpoint.

Open ``manager.py`` first for how a checkpoint is written, and ``discovery.py`` for how one is chosen. The files are:

step-00000500/
  trainer.json                          counters, losses, the identity of the data order, arguments, versions, lineage
  checksums.json                        size and hashes of every other file
  config.json  generation_config.json   of the model
  tokenizer/  manifest.json             of the token dataset; for a stream, only the tokenizer
  LICENSE  NOTICE  USE_POLICY.md        of the base model, if it has them
  stream.json                           the position of every lane of a stream
  model.safetensors  optimizer/         full: one file each, which all ranks write together
  adapter_model.safetensors             instead of the weights if an adapter trains, in peft's format with
  adapter_config.json                   its configuration; trainer.json names the base model
  model/  optimizer/                    sharded: one safetensors file per rank, and the index shards.json
"""

# ruff: noqa: F401 - what the other subpackages import from here; the other modules here import models, which is slow
from fabric_train.checkpoint.discovery import (
    Damages,
    best_checkpoint,
    branch_point,
    check_exists,
    check_model_exists,
    checkpoint_from,
    checkpoints_of_all,
    choose_checkpoint,
    deciding_loss,
    describe_choice,
    describe_damaged,
    find_checkpoint,
    find_whole_checkpoint,
    is_short_name,
    means_all,
    means_checkpoint,
    newest_checkpoint,
    read_best,
    saved_checkpoints,
    split_branch,
    whole_checkpoints,
    wrong_content,
)
from fabric_train.checkpoint.losses import (
    Evaluation,
    LossProgress,
    TokenLoss,
    compare_evaluations,
    name_loss,
    perplexity,
)
from fabric_train.checkpoint.trainer_json import (
    OWN_RUN,
    BranchPoint,
    Description,
    PhaseParts,
    PhaseSchedule,
    TrainerJson,
    TrainerState,
    data_starts_after,
    read_trainer_json,
    run_of,
)
