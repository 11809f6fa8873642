#!/bin/bash
# Check a job and submit it to Slurm, with the settings in settings.sh:
#   launch/slurm/submit.sh train --config run.yaml                      a training run on NODES nodes
#   launch/slurm/submit.sh each ITEM ITEM … -- COMMAND                  a job array: runs COMMAND for each item, where {} is the
#                                                                       item and {/} its name without folders
#   launch/slurm/submit.sh each runs/1/checkpoints/step-* -- fabric-train convert --checkpoint {} --output_dir exports/{/}
#   launch/slurm/submit.sh each 1 2 3 4 -- fabric-train evaluate --watch runs/1 --tasks tasks.yaml --wait false
#   launch/slurm/submit.sh --print train --config run.yaml              check and print the job; works without Slurm
set -euo pipefail

fail() {
  echo "error: $1" >&2
  exit 2
}

if [[ ${1:-} =~ ^(-h|--help)$ ]]; then
  sed -n '/^# /s/^# //p;/^set /q' "$0"
  exit
fi
prints=0
if [[ ${1:-} == --print ]]; then
  prints=1
  shift
fi
folder=$(cd "$(dirname "$0")" && pwd)
project=$(cd "$folder/../.." && pwd)
settings=${FABRIC_TRAIN_SETTINGS:-$folder/settings.sh}
[[ -r $settings ]] || fail "$settings: no such file; set FABRIC_TRAIN_SETTINGS to your settings, or unset it to use launch/slurm/settings.sh"
# shellcheck source=launch/slurm/settings.sh
source "$settings"
if ! ((prints)) && ! command -v sbatch > /dev/null; then
  fail "there is no sbatch here; submit on a machine with Slurm's commands, usually the login node; --print shows the job without Slurm"
fi
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

check_each() { # check the arguments of this project's programs; for others, only that they exist
  local program=() known word
  while (($#)) && [[ $1 != --* ]]; do
    [[ $1 != *.py || -e $1 ]] || fail "$1: no such file"
    program+=("$1")
    shift
  done
  [[ ${program[*]} =~ (tokenize_dataset|convert_to_hf|generate|evaluate|download_model)\.py|-m\ fabric_train|(^|/)fabric-train\  ]] || return 0
  known=$("${inside[@]}" "${program[@]}" --help) || fail "${program[*]} --help does not work, see above"
  for word; do
    [[ $word == --* ]] || continue
    word=--$(sed 's/^--//; s/=.*//' <<< "$word" | tr - _)
    grep -Eq -- "(^|[^a-z_-])$word([^a-z_]|\$)" <<< "$known" || fail "$word: no such argument; ${program[*]} --help lists them"
  done
}

gpus_per_node() { # print the number of GPUs per node that these sbatch options request; the last option applies
  local number='' option='' word
  for word; do
    [[ $option =~ ^--(gpus-per-node|gres)$ ]] && word=$option=$word # written as two words
    if [[ $word =~ ^(--gpus-per-node=|--gres=([^,]*,)*gpu:)([^,:=]+:)?([0-9]+)(,|$) ]]; then
      number=${BASH_REMATCH[4]}
    fi
    option=$word
  done
  echo "$number"
}

if [[ $kind == train ]]; then
  gpus=$(gpus_per_node "${options[@]}" "${JOB_OPTIONS[@]}")
  if [[ -n $gpus && $gpus != "$TASKS_PER_NODE" ]]; then
    fail "$settings: TASKS_PER_NODE=$TASKS_PER_NODE, but the job requests $gpus GPUs per node (--gpus-per-node or --gres); each process uses one GPU, so make the numbers equal, or leave the option out for CPUs"
  fi
fi

# report errors now, not after the job has waited in the queue
for mount in "${MOUNTS[@]}"; do
  [[ -e $mount ]] || fail "$settings: MOUNTS contains $mount, which does not exist"
done
if [[ $CONTAINER == apptainer && $IMAGE != *://* || $CONTAINER == pyxis && $IMAGE == *.sqsh ]] && [[ ! -e $IMAGE ]]; then
  fail "$settings: IMAGE=$IMAGE: no such file"
fi
inside=()
if [[ -z $CONTAINER ]]; then
  command -v "${command[0]}" > /dev/null || fail "${command[0]}: no such program here; $settings has PYTHON=$PYTHON for training"
elif command -v "$CONTAINER" > /dev/null; then
  [[ $CONTAINER == apptainer ]] || "$CONTAINER" image inspect "$IMAGE" > /dev/null 2>&1 \
    || fail "$settings: IMAGE=$IMAGE: $CONTAINER has no such image here"
  inside=(env SLURM_JOB_ID=check SLURM_PROCID=0 "$folder/container.sh" "$CONTAINER" "$IMAGE" "$project" "${MOUNTS[@]}" --)
else
  kind=unchecked
fi
case $kind in
  train) "${inside[@]}" "${command[@]}" --plan check >&2 || exit 2 ;;
  each) check_each "${command[@]}" ;;
  unchecked) echo "note: the arguments are not checked, because $CONTAINER cannot start a container here" >&2 ;;
esac

# Slurm keeps a copy of the script, so the job is self-contained. USR1 goes to the ranks, not to the script.
options=(--job-name="$name" --output="$LOGS/$log" --open-mode=append --requeue --signal="USR1@$SAVE_SECONDS"
  "${options[@]}" "${JOB_OPTIONS[@]}")
arguments=("$project" "${#items[@]}" "${items[@]}" "${command[@]}")
job() {
  echo "#!/bin/bash"
  cat "$settings" "$folder/job.sh"
}
if ((prints)); then
  job
  printf '# sbatch%s SCRIPT%s\n' "$(printf ' %q' "${options[@]}")" "$(printf ' %q' "${arguments[@]}")"
  exit
fi
mkdir -p "$LOGS"
exec sbatch "${options[@]}" <(job) "${arguments[@]}"
