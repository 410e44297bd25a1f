#!/bin/bash
#SBATCH --job-name=digits
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=4
#SBATCH --time=04:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=TERM@120
# One run on several machines. Whatever follows the script's name is handed on: sbatch docs/slurm_run.sh --num-steps 2000.
# On GPUs: #SBATCH --ntasks-per-node=4 --gpus-per-node=4, one process a GPU. Not --gpus-per-task: each process picks its
# GPU among those of the machine.

SCRIPT=${SCRIPT:-experiments/digits_mlp.py}
RUN_DIR=${RUN_DIR:-runs/digits-$SLURM_JOB_ID}

# A job that is back from the queue has its number still, and continues its run.
if [ -e "$RUN_DIR/record.json" ]; then where=--resume; else where=--run-dir; fi

# srun hands it to all tasks, which know each other by it.
JAXNN_CLUSTER_SECRET=$(head -c 32 /dev/urandom | base64)
export JAXNN_CLUSTER_SECRET

# Since SLURM 22.05 sbatch does not tell srun how many cores a task has.
srun --cpus-per-task="$SLURM_CPUS_PER_TASK" python "$SCRIPT" --distributed "$where" "$RUN_DIR" "$@"
status=$?

# 75: all tasks were stopped by the signal two minutes before the time limit, and saved. Where one of them was killed srun
# gives 137, for that one, though the others end with 75: whether to go on then is for who knows why it was.
if [ "$status" -eq 75 ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
