#!/bin/bash
# Start one rank in a container: container.sh apptainer|docker|podman IMAGE FOLDER… -- COMMAND. srun runs this once per task.
# The folders and the current folder have the same path in the container.
set -euo pipefail
kind=$1 image=$2
shift 2
folders=("$PWD")
while [[ $1 != -- ]]; do
  folders+=("$1")
  shift
done
shift
mapfile -t folders < <(printf '%s\n' "${folders[@]}" | sort -u) # for a duplicate folder, Apptainer warns and Docker fails

# pass on only the variables that ranks need; the image sets its own values for all others
mapfile -t variables < <(compgen -e | grep -E '^(SLURMD?|MASTER|HF|WANDB|NCCL|FI|GLOO|OMP|TORCH|PYTORCH|TRITON|FABRIC_TRAIN)_')
mounts=()
for folder in "${folders[@]}"; do
  mounts+=(--volume "$folder:$folder")
done

# NCCL and the watchdog expect a node's ranks to share memory and see each other's process ids
shared=(--rm --network host --ipc host --pid host --workdir "$PWD")
gpus=${SLURM_STEP_GPUS:-${SLURM_JOB_GPUS:-}} # indices of all the job's GPUs on this node
name=fabric-train-$SLURM_JOB_ID-$SLURM_PROCID
case $kind in
  apptainer)
    for variable in "${variables[@]}"; do
      export "APPTAINERENV_$variable=${!variable}" # --env would split a value at commas
    done
    exec apptainer exec --nv --pwd "$PWD" "${folders[@]/#/--bind=}" "$image" "$@"
    ;;
  docker)
    [[ -z $gpus ]] || shared+=(--gpus "\"device=$gpus\"")
    docker rm --force "$name" > /dev/null 2>&1 || true # left behind if Slurm killed "docker run": Docker's daemon owns the container
    exec docker run --name "$name" --ulimit memlock=-1 --ulimit stack=67108864 --user "$(id -u):$(id -g)" --env HOME=/tmp "${shared[@]}" "${mounts[@]}" "${variables[@]/#/--env=}" \
      --entrypoint "" "$image" "$@"
    ;;
  podman)
    for gpu in ${gpus//,/ }; do
      shared+=(--device "nvidia.com/gpu=$gpu")
    done
    ((EUID == 0)) || shared+=(--userns keep-id)
    exec podman run --replace --name "$name" --ulimit host --env HOME=/tmp "${shared[@]}" "${mounts[@]}" "${variables[@]/#/--env=}" --entrypoint "" "$image" "$@"
    ;;
esac
