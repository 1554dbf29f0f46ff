#!/usr/bin/env bash
# Reinforcement learning on the nodes of a Slurm job: a Ray cluster on all nodes, then `afm rl` on the first node.
# Usage, in the checkout: sbatch --nodes=8 examples/cluster/slurm_rl.sh my_run.yaml [key=value ...]
# VENV names the environment (.venv-rl). Tested with stand-ins for srun and scontrol, never under Slurm.
# --cpus-per-task is the number of cores of a node. Without it, Slurm may give each node's processes a single core.
#SBATCH --job-name=afm-rl
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=64
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --output=slurm-%x-%j.log
set -euo pipefail
export SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:?start this script with sbatch --cpus-per-task=N}  # srun does not inherit it
cd "${SLURM_SUBMIT_DIR:?start this script with sbatch}"
CONFIG=${1:?name the YAML of the training run, for example my_run.yaml}
export PATH="${VENV:-$PWD/.venv-rl}/bin:$PATH" PORT=${PORT:-6379} RAY_AUTH_MODE=token
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
first=${nodes[0]}
on() { srun --overlap --nodes=1 --ntasks=1 --nodelist="$1" "${@:2}"; }
trap 'kill $(jobs -p) 2>/dev/null || true' EXIT

# Other nodes cannot reach 127.0.0.1 or 127.0.1.1, to which some distributions map a host's own name.
addresses=$(on "$first" hostname --ip-address; on "$first" hostname --all-ip-addresses)
address=$(tr ' ' '\n' <<<"$addresses" | awk '/^[0-9.]+$/ && !/^127[.]/ && !n++') && [[ -n $address ]] ||
    { echo "error: $first has only the addresses ${addresses//$'\n'/ }; expected an IPv4 address that the other nodes reach" >&2; exit 1; }
on "$first" env NODE_IP="$address" train/ray_cluster.sh head &
on "$first" train/ray_cluster.sh wait 1
for node in "${nodes[@]:1}"; do on "$node" env HEAD="$address:$PORT" train/ray_cluster.sh node & done
on "$first" train/ray_cluster.sh wait "${#nodes[@]}"
on "$first" afm rl "$CONFIG" "ray_address=$address:$PORT" "verl.trainer.nnodes=${#nodes[@]}" "${@:2}"
