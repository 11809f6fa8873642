# shellcheck shell=bash disable=SC2034
# Slurm: the one file to edit. submit.sh reads it, and puts it into every job that it submits: a later change does not reach
# jobs that are already submitted. FABRIC_TRAIN_SETTINGS=FILE names another one.

NODES=1            # machines of a training job: 1 or more
TASKS_PER_NODE=8   # processes on each of them: one for each GPU
SAVE_SECONDS=300   # a job is told to save and to start again so long before its time limit. Slurm may be 60 s early
MAX_RESTARTS=100   # a job that Slurm has started again so often is not started once more

JOB_OPTIONS=(      # options of sbatch for all jobs
  # --partition=gpu
  # --account=my-project
  # --qos=normal
  # --exclude=node7,node9      # nodes that have failed
)
TRAIN_OPTIONS=(    # for training, per node or per process ("task")
  --time=24:00:00
  --exclusive
  --mem=0          # all memory of the node
  --gpus-per-node=8    # as many as TASKS_PER_NODE; on CPUs leave it out
  --cpus-per-task=8
)
EACH_OPTIONS=(     # for the jobs of "submit.sh each": one process, unless --ntasks-per-node says more
  --time=04:00:00
  --mem=64G
  --gpus-per-node=1
  --cpus-per-task=8
)
EACH_AT_ONCE=8     # jobs of one array that run at the same time

PYTHON=python      # of the virtual environment, such as /shared/fabric-train/.venv/bin/python, or of the container
LOGS=logs          # folder of the logs, one file for a job and all its restarts, one for each job of an array

# Nodes that compute usually have no internet. Fetch models first, on the login node (fabric-train download), and send the records
# of Weights & Biases later (wandb sync).
export HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1 WANDB_MODE=offline
# export HF_HOME=/shared/huggingface
# export NCCL_SOCKET_IFNAME=ib0 GLOO_SOCKET_IFNAME=ib0    # the network between the nodes, if ranks do not find each other
# On AWS: EFA between the nodes, which needs the plugin aws-ofi-nccl where torch runs. The log says "Selected Provider is efa".
# export FI_PROVIDER=efa FI_EFA_FORK_SAFE=1 NCCL_DEBUG=INFO
# export FI_EFA_USE_DEVICE_RDMA=1    # p4d: GPUs reach each other's memory; leave it out on g5
# module load cuda

CONTAINER=         # pyxis, apptainer, docker or podman; nothing: run without a container
IMAGE=             # pyxis: a .sqsh file or REGISTRY#NAME:TAG; apptainer: a .sif file; docker and podman: NAME:TAG
MOUNTS=()          # folders that have the same path in the container: data, models, runs, caches. This project's is added
