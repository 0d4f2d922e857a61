# Sourced by train.sbatch on the first node, before srun starts the ranks, which inherit it. Adapt it to your cluster.
# shellcheck shell=bash

# module load cuda/12.8        # what your cluster needs

if [ -f "$TWINKLE_HOME/.venv/bin/activate" ]; then
    # shellcheck disable=SC1091
    source "$TWINKLE_HOME/.venv/bin/activate"
fi

# srun does not take this over from the job since Slurm 22.05.
if [ -n "${SLURM_CPUS_PER_TASK:-}" ]; then
    export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"
    export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$SLURM_CPUS_PER_TASK}"
fi

export PYTHONUNBUFFERED=1            # lines appear in the job's output as they are printed
export TOKENIZERS_PARALLELISM=false

# Compute nodes without internet: put models into the cache on the login node, then
# export HF_HUB_OFFLINE=1 WANDB_MODE=offline
# Where several network interfaces confuse NCCL or gloo:
# export NCCL_SOCKET_IFNAME=ib0 GLOO_SOCKET_IFNAME=ib0
