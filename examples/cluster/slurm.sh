#!/bin/bash
# A run on two nodes of four GPUs; sbatch examples/cluster/slurm.sh
# The tasks of the step are the processes of the run: torchrun is not needed. A requeued job continues
# from its last checkpoint.
#SBATCH --job-name=regimes
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --gpus-per-task=1
#SBATCH --cpus-per-task=8
#SBATCH --time=08:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=regimes-%j.out
set -euo pipefail
source .venv/bin/activate
export OMP_NUM_THREADS="$SLURM_CPUS_PER_TASK"
resume=()
if [ "${SLURM_RESTART_COUNT:-0}" -gt 0 ]; then resume=(--resume); fi
srun python -m regimes run paper-resnet18-cifar100 --workers 8 --set data.download=true \
  --out "runs/paper-resnet18-$SLURM_JOB_ID" "${resume[@]}"
