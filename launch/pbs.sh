#!/bin/bash
# Train under PBS, on one node or several. Edit the lines down to "---", then, in the project's folder:
#   qsub launch/pbs.sh
# Some minutes before the walltime ends, the run saves and the job submits itself again. The new job resumes, as does a job
# that PBS requeues. Set options here: those on qsub's command line are not repeated.
#PBS -N fabric-train
#PBS -l select=2:ncpus=64:ngpus=8
#PBS -l place=scatter
#PBS -l walltime=24:00:00
#PBS -j oe
#PBS -r y
devices=8            # processes per node: equal to ngpus
save_seconds=300     # before the walltime ends; must leave enough time for a save
log=fabric-train.log # all jobs append to this file
arguments=(--config run.yaml --output_dir runs/1)
setup='source .venv/bin/activate' # runs first on each node: load modules, set HF_HOME
# ---
set -u
cd "$PBS_O_WORKDIR" || exit 1
exec >>"$log" 2>&1
conf=${PBS_CONF_FILE:-/etc/pbs.conf}
if [[ -r $conf ]]; then # PBS's commands may not be on a job's path
  PATH=$PATH:$(sed -n 's/^PBS_EXEC=//p' "$conf")/bin
fi

# PBS_NODEFILE has one line per process; pbsdsh counts these lines from 0
mapfile -t places < <(awk '!seen[$0]++ {print NR - 1}' "$PBS_NODEFILE")
number=${PBS_JOBID%%[!0-9]*}

# node_command RANK: print the command for the node with this rank; pbsdsh passes on neither the folder nor variables
node_command() {
  printf 'cd %q && %s && exec ' "$PBS_O_WORKDIR" "$setup"
  printf '%q ' fabric run --num-nodes "${#places[@]}" --node-rank "$1" --devices "$devices" \
    --main-address "$(head -n 1 "$PBS_NODEFILE")" --main-port $((20000 + number % 10000)) \
    fabric_train --resume true "${arguments[@]}"
}

echo "job $PBS_JOBID on $(uniq "$PBS_NODEFILE" | paste -s -d ' ')"

# all ranks agree on the step to stop at, so only this node's ranks need the signal
walltime=$(qstat -f "$PBS_JOBID" | sed -n 's/ *Resource_List.walltime = //p')
IFS=: read -r hours minutes seconds <<<"${walltime:-0:0:0}"
left=$((10#$hours * 3600 + 10#$minutes * 60 + 10#$seconds))
if ((left > 0 && left <= save_seconds)); then
  echo "error: a walltime of $walltime leaves no time to train: save_seconds is $save_seconds; ask for more" >&2
  exit 2
fi
seconds=$((left > 0 ? left - save_seconds : 0)) # 0: no limit
for ((rank = 1; rank < ${#places[@]}; rank++)); do
  pbsdsh -n "${places[rank]}" -- bash -c "$(node_command "$rank")" &
done
timeout --foreground --preserve-status --signal=USR1 "$seconds" bash -c "$(node_command 0)" &
run=$!
is_ended=false # ended by PBS: qdel, preemption
trap 'is_ended=true; kill -TERM "$run"' TERM

while kill -0 "$run" 2>/dev/null; do # the trap interrupts wait
  wait "$run"
done
wait "$run"
code=$?
wait # for the other nodes to end
if [[ $code -eq 75 && $is_ended == false ]]; then
  qsub "$0" || echo "error: this node cannot submit jobs; submit this script again from a login node" >&2
fi
exit "$code"
