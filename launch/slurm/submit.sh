#!/bin/bash
# Submit a job to Slurm, with the settings of settings.sh:
#   launch/slurm/submit.sh train --config run.yaml                      a training run on NODES nodes
#   launch/slurm/submit.sh each ITEM ITEM … -- COMMAND                  a job array: COMMAND once for each item, where {} is the
#                                                                       item and {/} its name without folders
#   launch/slurm/submit.sh each runs/1/checkpoints/step-* -- python convert_to_hf.py --checkpoint {} --output_dir exports/{/}
#   launch/slurm/submit.sh each 1 2 3 4 -- python evaluate.py --watch runs/1 --tasks tasks.yaml --wait false
set -euo pipefail

fail() {
  echo "error: $1" >&2
  exit 2
}

if [[ ${1:-} =~ ^(-h|--help)$ ]]; then
  sed -n '/^# /s/^# //p;/^set /q' "$0"
  exit
fi
folder=$(cd "$(dirname "$0")" && pwd)
project=$(cd "$folder/../.." && pwd)
settings=${FABRIC_TRAIN_SETTINGS:-$folder/settings.sh}
[[ -r $settings ]] || fail "$settings: no such file; FABRIC_TRAIN_SETTINGS names the settings, launch/slurm/settings.sh if it is unset"
# shellcheck source=launch/slurm/settings.sh
source "$settings"
command -v sbatch > /dev/null || fail "no sbatch here; submit on a machine with Slurm's commands, usually the login node"
[[ $CONTAINER =~ ^(|pyxis|apptainer|docker|podman)$ ]] || fail "$settings: CONTAINER=$CONTAINER; give pyxis, apptainer, docker, podman or nothing"
[[ -z $CONTAINER || -n $IMAGE ]] || fail "$settings: CONTAINER=$CONTAINER needs an IMAGE"

kind=${1:-}
shift || true
items=()
case $kind in
  train)
    name=train
    log=%x-%j.log
    command=("$PYTHON" -m fabric_train --resume true --num_nodes "$NODES" --devices "$TASKS_PER_NODE" "$@")
    options=(--nodes="$NODES" --ntasks-per-node="$TASKS_PER_NODE" "${TRAIN_OPTIONS[@]}")
    ;;
  each)
    while (($#)) && [[ $1 != -- ]]; do
      items+=("$1")
      shift
    done
    (($# > 1 && ${#items[@]})) || fail "each needs items, -- and a command: launch/slurm/submit.sh each ITEM … -- COMMAND"
    shift
    name=each
    log=%x-%A_%a.log
    command=("$@")
    options=(--nodes=1 --ntasks-per-node=1 --array="0-$((${#items[@]} - 1))%$EACH_AT_ONCE" "${EACH_OPTIONS[@]}")
    ;;
  *) fail "give train or each: launch/slurm/submit.sh train --config run.yaml; launch/slurm/submit.sh --help shows both" ;;
esac

mkdir -p "$LOGS"
# Slurm keeps a copy of the script, so the job is complete in itself. USR1 goes to the ranks, not to the script.
exec sbatch --job-name="$name" --output="$LOGS/$log" --open-mode=append --requeue --signal="USR1@$SAVE_SECONDS" \
  "${options[@]}" "${JOB_OPTIONS[@]}" <(echo "#!/bin/bash"; cat "$settings" "$folder/job.sh") \
  "$project" "${#items[@]}" "${items[@]}" "${command[@]}"
