# The one place for what is particular to your cluster. Sourced on the first node before the ranks start, which inherit
# all that is exported here, and on the login node by `bash slurm/train.sbatch`. A variable that is set already wins.
# shellcheck shell=bash

# --- how jobs are submitted (each of sbatch's options has such a variable: man sbatch, INPUT ENVIRONMENT VARIABLES)
# export SBATCH_ACCOUNT=... SBATCH_PARTITION=... SBATCH_GPUS_PER_NODE=8

# --- software
# module load cuda/12.8
if [ -f "$TWINKLE_HOME/.venv/bin/activate" ]; then
    # shellcheck disable=SC1091
    source "$TWINKLE_HOME/.venv/bin/activate"
fi
PYTHON="${PYTHON:-python}"
# Words before each Python command of the job, for containers: CONTAINER=(apptainer exec --nv /images/twinkle.sif)
CONTAINER=()
# More options for each srun, for pyxis: SRUN_OPTIONS=(--container-image=/images/twinkle.sqsh --container-mounts=/data)
SRUN_OPTIONS=()

# --- the run
# Where runs without run_dir= go: a file system that all nodes see. A relative path is below the folder of submission.
RUN_ROOT="${RUN_ROOT:-runs}"
# srun: each task is a rank. torchrun: one agent on each node, which starts a rank for each GPU, or for each task.
TWINKLE_LAUNCHER="${TWINKLE_LAUNCHER:-srun}"
# How often a job comes back: in all, and without a newer checkpoint than the attempt before.
MAX_REQUEUE="${MAX_REQUEUE:-100}"
MAX_STALLED="${MAX_STALLED:-3}"

# --- what is checked on each node before the ranks start (0: nothing)
PREFLIGHT="${PREFLIGHT:-1}"
PREFLIGHT_SECONDS="${PREFLIGHT_SECONDS:-180}" # a node that has not answered by then has failed
PREFLIGHT_FREE_GB="${PREFLIGHT_FREE_GB:-5}"   # on the file system of the run folder
PREFLIGHT_CLOCK_SECONDS="${PREFLIGHT_CLOCK_SECONDS:-5}"

# --- environment of the ranks
# srun does not take this over from the job since Slurm 22.05.
if [ -n "${SLURM_CPUS_PER_TASK:-}" ]; then
    export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"
    export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$SLURM_CPUS_PER_TASK}"
fi
export PYTHONUNBUFFERED=1 # lines appear in the job's output as they are printed
export TOKENIZERS_PARALLELISM=false

# Compute nodes without internet: put models into the cache on the login node, then
# export HF_HUB_OFFLINE=1 WANDB_MODE=offline
# Where several network interfaces confuse NCCL or gloo:
# export NCCL_SOCKET_IFNAME=ib0 GLOO_SOCKET_IFNAME=ib0
