"""Checkpoints: save, find, restore, prune. A folder under its final name is complete; everything else is a function
of the step.

step-00000500/
  trainer.json                          counters, losses, the data order's identity, arguments, versions
  checksums.json                        of every other file the size and the hashes of its pieces
  config.json  generation_config.json   of the model
  tokenizer/  manifest.json             of the token dataset; of a stream only the tokenizer
  stream.json                           where every lane of a stream goes on
  model.safetensors  optimizer/         full: one file each, in which every rank has written its part
  model/  optimizer/                    sharded: one safetensors file a rank, each knowing its offsets
"""

from fabric_train.checkpoint.discovery import (
    Damages,
    choose_checkpoint,
    describe_damaged,
    find_checkpoint,
    find_whole_checkpoint,
    newest_checkpoint,
    wrong_content,
)
from fabric_train.checkpoint.manager import Checkpoints, SaveError
from fabric_train.checkpoint.optimizer_state import restore_optimizer
from fabric_train.checkpoint.trainer_state import (
    FORMAT,
    DataOrder,
    Description,
    StreamOrder,
    TrainerState,
    faults_of_data,
    read_cursors,
    read_stream_order,
    read_trainer_json,
    read_trainer_state,
)

__all__ = [
    "FORMAT",
    "Checkpoints",
    "Damages",
    "DataOrder",
    "Description",
    "SaveError",
    "StreamOrder",
    "TrainerState",
    "choose_checkpoint",
    "describe_damaged",
    "faults_of_data",
    "find_checkpoint",
    "find_whole_checkpoint",
    "newest_checkpoint",
    "read_cursors",
    "read_stream_order",
    "read_trainer_json",
    "read_trainer_state",
    "restore_optimizer",
    "wrong_content",
]
