#!/bin/bash
# Your own DistributedDataParallel script with the hook, one torchrun per node;
# sbatch examples/cluster/slurm_ddp.sh
#SBATCH --job-name=regimes-ddp
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=32
#SBATCH --time=08:00:00
#SBATCH --requeue
#SBATCH --output=regimes-ddp-%j.out
set -euo pipefail
source .venv/bin/activate
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 # else a restart reads old addresses (torch 2.13)
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun torchrun --nnodes "$SLURM_JOB_NUM_NODES" --nproc-per-node 4 --max-restarts 3 \
  --rdzv-backend c10d --rdzv-id "$SLURM_JOB_ID" --rdzv-endpoint "$head:29500" \
  examples/mnist_ddp.py --out "runs/ddp-$SLURM_JOB_ID"
