"""Checkpoints: save, find, restore, prune. A folder under its final name is complete; everything else is a function
of the step.

step-00000500/
  trainer.json                          counters, losses, the data order's identity, arguments, versions
  config.json  generation_config.json   of the model
  tokenizer/  manifest.json             of the token dataset; of a stream only the tokenizer
  stream.json                           where every lane of a stream goes on
  model.safetensors  optimizer/         full: gathered on rank 0
  model/  optimizer/                    sharded: one safetensors file a rank, each knowing its offsets
"""

from fabric_train.checkpoint.finding import (
    choose_checkpoint,
    find_checkpoint,
    is_complete,
    newest_checkpoint,
    prune,
)
from fabric_train.checkpoint.restoring import restore_optimizer
from fabric_train.checkpoint.saving import Checkpoints
from fabric_train.checkpoint.state import (
    FORMAT,
    DataOrder,
    Description,
    StreamOrder,
    TrainerState,
    faults_of_data,
    read_stands,
    read_stream_order,
    read_trainer_json,
    read_trainer_state,
)

__all__ = [
    "FORMAT",
    "Checkpoints",
    "DataOrder",
    "Description",
    "StreamOrder",
    "TrainerState",
    "choose_checkpoint",
    "faults_of_data",
    "find_checkpoint",
    "is_complete",
    "newest_checkpoint",
    "prune",
    "read_stands",
    "read_stream_order",
    "read_trainer_json",
    "read_trainer_state",
    "restore_optimizer",
]
