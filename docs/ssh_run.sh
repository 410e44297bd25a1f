#!/bin/bash
# One run on machines that ssh reaches without a password, with one file system, where jaxnn is at one place:
#     HOSTS="node1 node2" docs/ssh_run.sh --num-steps 2000
# The first host has process 0, whose lines come as they are; those of the others with their host before them. Ctrl-C ends
# the run after its window, saved.

read -ra hosts <<<"${HOSTS:?the machines, as in HOSTS=\"node1 node2\"}"
FOLDER=${FOLDER:-$PWD}
PYTHON=${PYTHON:-$FOLDER/.venv/bin/python}
SCRIPT=${SCRIPT:-experiments/digits_mlp.py}
RUN_DIR=${RUN_DIR:-runs/digits}
PORT=${PORT:-12345}

if [ -e "$RUN_DIR/record.json" ]; then where=--resume; else where=--run-dir; fi
# Only its owner reads it: the secret by which the processes know each other.
started=$(mktemp -p "$FOLDER" .ssh_run.XXXXXX)
head -c 32 /dev/urandom | base64 >"$started"

line() { # of a rank: the shell writes down its number, which is Python's then
    printf 'cd %q && echo $$ >%q && export JAXNN_CLUSTER_SECRET=$(cat %q) && ' "$FOLDER" "$started.$1" "$started"
    printf 'exec %q %q' "$PYTHON" "$SCRIPT"
    printf ' %q' --coordinator "${hosts[0]}:$PORT" --num-processes "${#hosts[@]}" --process-id "$@"
}

# A stop signal to one process stops all, after the same window.
trap 'ssh -n "${hosts[0]}" "kill -TERM \$(cat $(printf %q "$started.0"))"' INT TERM

for rank in "${!hosts[@]}"; do
    before="${hosts[rank]}: "
    if [ "$rank" -eq 0 ]; then before=""; fi
    (
        ssh -n "${hosts[rank]}" "$(line "$rank" "$where" "$RUN_DIR" "$@")" 2>&1 | sed -u "s/^/$before/"
        exit "${PIPESTATUS[0]}"
    ) &
    processes[rank]=$!
done

# The worst of their statuses. 0: all is done; 75: saved, and the same command continues.
status=0
for process in "${processes[@]}"; do
    wait "$process"
    code=$?
    # The signal ended the wait, not the process.
    while [ "$code" -gt 128 ] && kill -0 "$process" 2>/dev/null; do
        wait "$process"
        code=$?
    done
    if [ "$code" -gt "$status" ]; then status=$code; fi
done
rm -f "$started" "$started".*
exit "$status"
