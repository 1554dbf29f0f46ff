#!/usr/bin/env bash
# Fine-tuning on the nodes of a Slurm job: the same `afm sft` on each node, which starts one process per GPU.
# Usage, in the checkout: sbatch --nodes=2 examples/cluster/slurm_sft.sh my_sft.yaml [key=value ...]
# VENV names the environment (.venv-sft). Tested with stand-ins for srun and scontrol, never under Slurm.
# --cpus-per-task is the number of cores of a node. Without it, Slurm may give each node's processes a single core.
#SBATCH --job-name=afm-sft
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=64
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --output=slurm-%x-%j.log
set -euo pipefail
export SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:?start this script with sbatch --cpus-per-task=N}  # srun does not inherit it
cd "${SLURM_SUBMIT_DIR:?start this script with sbatch}"
CONFIG=${1:?name the YAML of the training run, for example my_sft.yaml}
export PATH="${VENV:-$PWD/.venv-sft}/bin:$PATH"
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
export MASTER_ADDR=${nodes[0]} MASTER_PORT=${MASTER_PORT:-29500} NNODES=$SLURM_JOB_NUM_NODES
# shellcheck disable=SC2016  # each node has its own SLURM_NODEID
exec srun --kill-on-bad-exit=1 bash -c 'NODE_RANK=$SLURM_NODEID exec afm sft "$@"' afm "$CONFIG" "${@:2}"
