#!/bin/bash
#SBATCH --job-name=digits_sweep
#SBATCH --array=1-8
#SBATCH --cpus-per-task=4
#SBATCH --time=04:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=TERM@120
# Each job trains its part of the members into RUN_DIR, which all of them see. Whatever follows the script's name is
# handed on: sbatch docs/slurm_sweep.sh --num-steps 2000. On GPUs add #SBATCH --gpus-per-task=1.

RUN_DIR=${RUN_DIR:-runs/digits_sweep}

# Since SLURM 22.05 sbatch does not tell srun how many cores a task has.
srun --cpus-per-task="$SLURM_CPUS_PER_TASK" python experiments/digits_mlp.py sweep \
    --learning-rate 1e-3 3e-3 1e-2 3e-2 --seed 0 1 2 3 \
    --resume "$RUN_DIR" --shard "$SLURM_ARRAY_TASK_ID/$SLURM_ARRAY_TASK_COUNT" "$@"
status=$?

# 75: stopped by the signal two minutes before the time limit, and saved. The job goes back to the queue, and on from there.
if [ "$status" -eq 75 ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
