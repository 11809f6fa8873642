# shellcheck shell=bash disable=SC2034
# Settings for Slurm: the only file you need to edit. submit.sh copies it into every job, so later changes do not affect jobs
# that are already submitted. FABRIC_TRAIN_SETTINGS=FILE selects another file.

NODES=1            # nodes of a training job
TASKS_PER_NODE=8   # processes per node: one per GPU
SAVE_SECONDS=300   # seconds before the time limit at which a job saves and requeues. Slurm may signal 60 s early
MAX_RESTARTS=100   # a job is not requeued after this many restarts

JOB_OPTIONS=(      # sbatch options for all jobs
  # --partition=gpu
  # --account=my-project
  # --qos=normal
  # --exclude=node7,node9      # nodes that have failed
)
TRAIN_OPTIONS=(    # for training, per node or per process ("task")
  --time=24:00:00
  --exclusive
  --mem=0          # all memory of the node
  --gpus-per-node=8    # must equal TASKS_PER_NODE; leave it out on CPUs
  --cpus-per-task=8
)
EACH_OPTIONS=(     # for "submit.sh each": one process per job, unless you add --ntasks-per-node
  --time=04:00:00
  --mem=64G
  --gpus-per-node=1
  --cpus-per-task=8
)
EACH_AT_ONCE=8     # maximum number of an array's jobs that run at the same time

PYTHON=python      # Python of the virtual environment, such as /shared/fabric-train/.venv/bin/python, or of the container
LOGS=logs          # log folder: one file for a job and all its restarts, and one for each job of an array

# Compute nodes usually have no internet access. Download models on the login node first (fabric-train download), and upload
# Weights & Biases runs later (wandb sync).
export HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1 WANDB_MODE=offline
# export HF_HOME=/shared/huggingface
# export NCCL_SOCKET_IFNAME=ib0 GLOO_SOCKET_IFNAME=ib0    # the network between nodes, if ranks cannot connect
# AWS: EFA between nodes needs the plugin aws-ofi-nccl where torch runs. The log then shows "Selected Provider is efa".
# export FI_PROVIDER=efa FI_EFA_FORK_SAFE=1 NCCL_DEBUG=INFO
# export FI_EFA_USE_DEVICE_RDMA=1    # p4d: RDMA between GPUs; leave it out on g5
# module load cuda

CONTAINER=         # pyxis, apptainer, docker or podman; empty: run without a container
IMAGE=             # pyxis: a .sqsh file or REGISTRY#NAME:TAG; apptainer: a .sif file; docker and podman: NAME:TAG
MOUNTS=()          # folders to mount at the same path: data, models, runs, caches. The project's folder is always mounted
