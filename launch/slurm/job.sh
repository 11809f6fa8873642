# shellcheck shell=bash disable=SC2154
# Runs on the job's first node: starts one process per task, and decides what the exit code means. submit.sh prepends the
# settings. Arguments: the project's folder, the number of items, the items, the command.
set -u
project=$1 num_items=$2
items=("${@:3:num_items}")
command=("${@:3+num_items}")
restarts=${SLURM_RESTART_COUNT:-0}

say() {
  printf '%(%Y-%m-%d %H:%M:%S)T slurm: %s\n' -1 "$*"
}

unusable() { # print those of the given nodes that Slurm does not use, with state and reason
  sinfo --noheader --Node --nodes="$1" --format='%N is %T (%E)' | sort -u | grep -E ' is ([a-z]*\*|down|drain|fail|error|unk)'
}

silent() { # print the nodes of this job on which no process can be started
  local node
  for node in $(scontrol show hostnames "$SLURM_JOB_NODELIST"); do
    timeout 90 srun --overlap --nodes=1 --ntasks=1 --cpus-per-task=1 --nodelist="$node" true 2> /dev/null || echo "$node" &
  done
  wait
}

log=$(readlink /proc/$$/fd/1)
before=$(grep -a -o "slurm: job $SLURM_JOB_ID, restart .*, on .*" "$log" | tail -n 1)
say "job $SLURM_JOB_ID, restart $restarts, on $SLURM_JOB_NODELIST"
if [[ -n $before ]]; then
  unusable "${before##*, on }" | while read -r line; do
    say "a node of the last start has failed: $line; this start is without it. Tell the administrators if they do not know"
  done
fi

if ((num_items)); then
  item=${items[SLURM_ARRAY_TASK_ID]}
  command=("${command[@]//\{\}/"$item"}")
  command=("${command[@]//\{\/\}/"$(basename "$item")"}")
fi

first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
MASTER_ADDR=$(scontrol show node "$first" | sed -n 's/.* NodeAddr=\([^ ]*\).*/\1/p') # a node's name may not resolve
export MASTER_ADDR
export MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))
export SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:-1} # srun no longer inherits it from sbatch

# Slurm sends TERM to the ranks too. This script outlives them. Slurm itself requeues a job that is preempted or loses a node
is_ended=0
# shellcheck disable=SC2317  # the trap calls it
stop() {
  is_ended=1
  say "SIGTERM from Slurm, for the reason that slurmstepd gives; the ranks save if KillWait leaves them enough time"
  unusable "$SLURM_JOB_NODELIST" | while read -r line; do
    say "error: $line"
  done
}
trap stop TERM

in_container=()
options=(--kill-on-bad-exit=0 --wait=600)
case $CONTAINER in
  '') ;;
  pyxis)
    mounts=$project:$project
    for folder in "${MOUNTS[@]}"; do
      mounts+=,$folder:$folder
    done
    options+=(--container-image="$IMAGE" --container-mounts="$mounts" --container-workdir="$PWD")
    ;;
  *) in_container=("$project/launch/slurm/container.sh" "$CONTAINER" "$IMAGE" "$project" "${MOUNTS[@]}" --) ;;
esac

srun "${options[@]}" "${in_container[@]}" "${command[@]}" &
step=$!
wait "$step"
code=$?
if ((is_ended)); then # a signal interrupts "wait"
  wait "$step"
  exit
fi

requeue() {
  if ((restarts >= MAX_RESTARTS)); then
    say "error: this job has restarted $restarts times, which is MAX_RESTARTS; submit it again if it makes progress"
    exit 1
  fi
  trap '' TERM # Slurm now ends this script
  if scontrol requeue "$SLURM_JOB_ID"; then
    say "queued again, to continue"
  else
    say "error: not queued again (Requeue=0?); to continue, submit the same command again"
  fi
  exit "$code"
}

case $code in
  0)
    say "done"
    exit
    ;;
  75 | 138) # 138: USR1 ended a program that cannot save
    say "stopped (exit code $code)"
    requeue
    ;;
  2)
    say "error: invalid input, see above; fix it and submit again"
    exit 2
    ;;
esac
lost=$(silent | paste -s -d ' ')
((is_ended)) && exit "$code" # the signal arrived just after the end
if [[ -n $lost ]]; then
  timeout=$(scontrol show config | sed -n 's/^SlurmdTimeout *= *\([0-9]*\).*/\1/p')
  say "error: $lost: no answer. Slurm starts the job again without it when it has noticed, after about $timeout s"
  sleep "$((${timeout:-300} + 60))" &
  wait $!
  ((is_ended)) && exit "$code"
  say "Slurm still uses $lost"
  requeue
fi
say "error: exit code $code on $SLURM_JOB_NODELIST, where all nodes answer. The error: lines above give the reason, the rank and the" \
  "node. To continue, submit the same command again; to exclude a node, add --exclude=NODE to JOB_OPTIONS"
exit "$code"
