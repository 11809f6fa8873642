"""Continued pretraining on one page: the idea of Fabric Train in plain PyTorch and FSDP2.

Read it from top to bottom. It trains a causal language model on the packed rows of a token dataset, with the losses of
the program to 1e-6 (tests/programs/test_minimal.py). The program does the same and survives.

    python tokenize_dataset.py --dataset text.jsonl --tokenizer_name MODEL --max_length 512 --output_dir tokens
    torchrun --nproc-per-node 2 examples/minimal.py --model_name MODEL --train_data_dir tokens --output_dir run

Plain `python` runs one process. The same command again continues from the newest checkpoint, on any number of them.
"""

import argparse
import math
import os
import shutil
from pathlib import Path

import datasets
import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.distributed.checkpoint import state_dict as dcp_state
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM

IGNORED = -100  # the label of a token that nobody has to predict
parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model_name", required=True, help="Hugging Face folder or name")
parser.add_argument("--train_data_dir", required=True, help="token dataset, from tokenize_dataset.py")
parser.add_argument("--output_dir", required=True, type=Path)
parser.add_argument("--max_step", type=int, default=100, help="number of optimizer steps")
parser.add_argument("--total_batch_size", type=int, default=8, help="rows of one optimizer step, on all ranks together")
parser.add_argument("--micro_batch_size", type=int, default=1, help="rows of one forward pass on one rank")
parser.add_argument("--lr", type=float, default=2e-5, help="peak learning rate")
parser.add_argument("--warmup_steps", type=int, default=0)
parser.add_argument("--weight_decay", type=float, default=0.01)
parser.add_argument("--grad_clip", type=float, default=1.0, help="largest norm of the gradient")
parser.add_argument("--save_step_interval", type=int, default=50)
parser.add_argument("--seed", type=int, default=0)
arguments = parser.parse_args()

# ---- processes and devices; torchrun sets these variables, a process that was started alone is rank 0 of 1 -----------
alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}
for name, value in alone.items():
    os.environ.setdefault(name, value)
has_gpu = torch.cuda.is_available()
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if has_gpu else torch.device("cpu")
if has_gpu:
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if has_gpu else "gloo")
rank = dist.get_rank()
world_size = dist.get_world_size()

# ---- model: every decoder layer is a unit whose weights are divided among the ranks ----------------------------------
# Weights stay fp32. On a GPU the layers compute in bf16: with bf16 weights, updates below 1/256 of a weight are lost.
model = AutoModelForCausalLM.from_pretrained(arguments.model_name, dtype=torch.float32)
model.config.use_cache = False  # with a cache, transformers ignores document borders: documents would see each other
model.to(device)  # type: ignore[arg-type]
model.train()
mesh = init_device_mesh(device.type, (world_size,))
precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if has_gpu else None, reduce_dtype=torch.float32)
for layer in model.model.layers:
    # gathers the layer's weights before its forward and backward pass, and averages its gradient over the ranks
    fully_shard(layer, mesh=mesh, mp_policy=precision)
fully_shard(model, mesh=mesh, mp_policy=precision)  # what is left: embedding, last norm, head

# ---- optimizer: after sharding, so that its states are sharded too ---------------------------------------------------
matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
vectors = [parameter for parameter in model.parameters() if parameter.dim() == 1]  # norms, which do not decay
groups = [{"params": matrices, "weight_decay": arguments.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
optimizer = torch.optim.AdamW(groups, lr=arguments.lr, betas=(0.9, 0.95))


def learning_rate(step: int) -> float:
    """Rise linearly to the peak, then fall along a cosine; it would be 0 one step after the last."""
    if step <= arguments.warmup_steps:
        return arguments.lr * (step / arguments.warmup_steps)
    last_warmup_step = max(arguments.warmup_steps, 1)
    progress = (step - last_warmup_step) / (arguments.max_step + 1 - last_warmup_step)
    return arguments.lr * 0.5 * (1 + math.cos(math.pi * progress))


# ---- data: everything is a function of the step, so there is no position to save -------------------------------------
rows = datasets.load_from_disk(arguments.train_data_dir)["train"]
steps_per_epoch = math.ceil(len(rows) / arguments.total_batch_size)


def rows_of_step(step: int) -> np.ndarray:
    """Return the row numbers of an optimizer step over all ranks; the last step of an epoch may have fewer."""
    epoch, step_in_epoch = divmod(step - 1, steps_per_epoch)
    order = np.arange(len(rows))
    np.random.default_rng([arguments.seed, epoch]).shuffle(order)
    first = step_in_epoch * arguments.total_batch_size
    return order[first : first + arguments.total_batch_size]


def read_row(row_number: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the token ids, labels and positions of a packed row, each int64 [length]."""
    row = rows[row_number]
    input_ids = torch.tensor(row["input_ids"])
    labels = torch.tensor(row["labels"]) if "labels" in row else input_ids.clone()
    positions = torch.arange(len(input_ids))
    labels[0] = IGNORED  # no token before it predicts it
    for start in row["document_starts"]:
        labels[start] = IGNORED  # only another document's last token would predict it
        # positions that begin again at 0 tell transformers where attention must not look across
        positions[start:] = torch.arange(len(input_ids) - start)
    return input_ids, labels, positions


def micro_batches(step: int) -> list[list[torch.Tensor]]:
    """Return this rank's micro-batches of a step, each a list of ids, labels and positions, int64 [rows, length]."""
    window = rows_of_step(step)
    rows_per_pass = arguments.micro_batch_size * world_size
    batches = []
    for pass_start in range(0, len(window), rows_per_pass):
        first = pass_start + rank * arguments.micro_batch_size
        examples = [read_row(int(row)) for row in window[first : first + arguments.micro_batch_size]]
        if not examples:
            # At the end of an epoch a rank may have no row left. The others need its shards: it takes part.
            input_ids, labels, positions = read_row(int(window[0]))
            examples = [(input_ids, torch.full_like(labels, IGNORED), positions)]
        batch = [
            pad_sequence([row[0] for row in examples], batch_first=True),
            pad_sequence([row[1] for row in examples], batch_first=True, padding_value=IGNORED),
            pad_sequence([row[2] for row in examples], batch_first=True),
        ]
        batches.append([tensor.to(device) for tensor in batch])
    return batches


# ---- checkpoints: complete or absent ---------------------------------------------------------------------------------
def save(step: int) -> None:
    """Write weights and optimizer states, each rank its shards; the folder gets its name when all of it is there."""
    temporary = arguments.output_dir / f".step-{step:08d}"
    model_state, optimizer_state = dcp_state.get_state_dict(model, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=temporary)  # waits for all ranks
    if rank == 0:
        temporary.rename(arguments.output_dir / f"step-{step:08d}")
    dist.barrier()


if rank == 0:
    arguments.output_dir.mkdir(parents=True, exist_ok=True)
    for unfinished in arguments.output_dir.glob(".step-*"):
        shutil.rmtree(unfinished)
dist.barrier()
checkpoints = sorted(arguments.output_dir.glob("step-*"))
first_step = int(checkpoints[-1].name.removeprefix("step-")) + 1 if checkpoints else 1
if checkpoints:
    model_state, optimizer_state = dcp_state.get_state_dict(model, optimizer)
    dcp.load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=checkpoints[-1])  # in place
    dcp_state.set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)

# ---- the loop --------------------------------------------------------------------------------------------------------
for step in range(first_step, arguments.max_step + 1):
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(step)
    batches = micro_batches(step)

    # The loss of a step is the mean over all its supervised tokens on all ranks. They are counted first: a mean of
    # the means of micro-batches would depend on the number of ranks.
    num_tokens = torch.stack([(labels != IGNORED).sum() for _, labels, _ in batches]).sum()
    dist.all_reduce(num_tokens)

    loss_sum = torch.zeros((), device=device, dtype=torch.float64)
    for index, (input_ids, labels, positions) in enumerate(batches):
        is_last = index == len(batches) - 1
        model.set_requires_gradient_sync(is_last)  # type: ignore[operator]  # gradients travel once a step
        logits = model(input_ids=input_ids, position_ids=positions).logits  # [rows, length, vocabulary]
        predictions = logits[:, :-1].flatten(0, 1).float()  # the logits at a token predict the next one
        loss = F.cross_entropy(predictions, labels[:, 1:].flatten(), ignore_index=IGNORED, reduction="sum")
        # FSDP averages gradients over the ranks, but a sum is wanted: hence the factor
        (loss * (world_size / num_tokens)).backward()
        loss_sum += loss.detach()
    dist.all_reduce(loss_sum)

    # Clip after all gradients are summed. The norm is a DTensor: full_tensor() adds what the ranks have of it.
    grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), arguments.grad_clip)
    grad_norm = grad_norm.full_tensor()  # type: ignore[attr-defined]
    optimizer.step()
    optimizer.zero_grad()

    mean_loss = (loss_sum / num_tokens).item()  # the host waits for the device here, once a step
    if rank == 0:
        print(f"step {step} loss {mean_loss:.8f} lr {learning_rate(step):.3e} grad {grad_norm.item():.4f}", flush=True)
    if step % arguments.save_step_interval == 0 or step == arguments.max_step:
        save(step)

# ---- a model that everybody can load: whole weights on rank 0, in Hugging Face format --------------------------------
options = dcp_state.StateDictOptions(full_state_dict=True, cpu_offload=True)
weights = dcp_state.get_model_state_dict(model, options=options)
if rank == 0:
    model.save_pretrained(arguments.output_dir / "model", state_dict=weights)
    shutil.copytree(f"{arguments.train_data_dir}/tokenizer", arguments.output_dir / "model", dirs_exist_ok=True)
dist.destroy_process_group()
