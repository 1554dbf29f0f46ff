"""The cluster examples, as far as a machine without Docker, Slurm and GPUs can check them."""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
CLUSTER = ROOT / "examples/cluster"
DOCKERFILE = (CLUSTER / "Dockerfile").read_text(encoding="utf-8")
SRUN = """#!/bin/bash
[[ $SRUN_CPUS_PER_TASK == 48 ]] || { echo "a step with one core" >&2; exit 1; }
nodes=(node1 node2)
while [[ $1 == --* ]]; do
  [[ $1 == --nodelist=* ]] && nodes=("${1#*=}")
  shift
done
for number in "${!nodes[@]}"; do SLURM_NODEID=$number NODE=${nodes[number]} "$@" || exit; done
"""
STAND_INS = {
    "srun": SRUN,
    "scontrol": "#!/bin/bash\necho node1\necho node2\n",
    "hostname": '#!/bin/bash\n[[ $1 != --ip-address ]] || exec echo 127.0.1.1 fe80::1\nexec echo "$ADDRESSES"\n',
    "afm": '#!/bin/bash\necho "afm ${NODE_RANK:-} ${MASTER_ADDR:-} ${NODE:-} $*" >>"$LOG"\n',
    "ray": """#!/bin/bash
case $1 in
start)
  [[ $2 != --head ]] || exec python3 -c "import socket, time
server = socket.create_server(('', $4))
print('ray $*', file=open('$LOG', 'a'), flush=True)
end = time.monotonic() + 250
while time.monotonic() < end and not any(line.startswith('afm ') for line in open('$LOG')): time.sleep(0.05)"
  echo "ray $*" >>"$LOG" ;;
status) grep "^ray start" "$LOG" | sed 's/.*/ 1 node_x/' ;;
esac
""",
}


@pytest.fixture
def slurm_job(tmp_path: Path) -> dict[str, str]:
    """Return the environment of a job on two nodes, with stand-ins for Slurm, Ray and the training run."""
    (tmp_path / "venv/bin").mkdir(parents=True)
    for name, text in STAND_INS.items():
        path = tmp_path / "venv/bin" / name
        path.write_text(text)
        path.chmod(0o755)
    job = {"SLURM_SUBMIT_DIR": str(ROOT), "SLURM_JOB_NODELIST": "node[1-2]", "SLURM_JOB_NUM_NODES": "2"}
    job["SLURM_CPUS_PER_TASK"] = "48"
    places = {"VENV": str(tmp_path / "venv"), "LOG": str(tmp_path / "log"), "HOME": str(tmp_path)}
    (tmp_path / "log").touch()
    return os.environ | job | places


def submit(script: str, job: dict[str, str]) -> list[str]:
    command = ["bash", str(CLUSTER / script), "my run.yaml", "seed=1"]
    done = subprocess.run(command, env=job, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return Path(job["LOG"]).read_text().splitlines()


@pytest.mark.parametrize("script", ["slurm_sft.sh", "slurm_rl.sh"])
def test_a_job_asks_for_the_cores_of_a_node(script: str) -> None:
    assert re.search(r"^#SBATCH --cpus-per-task=\d+$", (CLUSTER / script).read_text("utf-8"), re.MULTILINE)


def test_a_fine_tuning_job_starts_the_same_command_on_every_node(slurm_job: dict[str, str]) -> None:
    ran = submit("slurm_sft.sh", slurm_job)
    assert ran == [f"afm {rank} node1 node{rank + 1} sft my run.yaml seed=1" for rank in (0, 1)]


def test_a_reinforcement_job_trains_when_all_nodes_have_joined(slurm_job: dict[str, str]) -> None:
    port = 20_000 + os.getpid() % 12_000  # below the ports that the kernel gives to connections
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as way:
        way.connect(("192.0.2.1", 9))  # sends nothing
        own = way.getsockname()[0]
    job = slurm_job | {"PORT": str(port), "ADDRESSES": f"127.0.0.1 fe80::1 {own} "}
    head, node, training = submit("slurm_rl.sh", job)
    assert head.startswith(f"ray start --head --port {port}")
    assert head.endswith(f"--node-ip-address {own}")
    assert node.startswith(f"ray start --address {own}:{port}")
    assert training.endswith(f"rl my run.yaml ray_address={own}:{port} verl.trainer.nnodes=2 seed=1")


def test_a_reinforcement_job_refuses_a_first_node_that_others_cannot_reach(slurm_job: dict[str, str]) -> None:
    command = ["bash", str(CLUSTER / "slurm_rl.sh"), "my run.yaml"]
    done = subprocess.run(
        command, env=slurm_job | {"ADDRESSES": "127.0.0.1"}, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1
    assert (
        "error: node1 has only the addresses 127.0.1.1 fe80::1 127.0.0.1; expected an IPv4 address"
        in done.stderr
    )


def test_what_the_image_copies_and_runs_is_there() -> None:
    for line in re.findall(r"^COPY (?!--from)(.+)$", DOCKERFILE, re.MULTILINE):
        for name in line.split()[:-1]:
            assert (ROOT / name).exists(), name
    [lock] = re.findall(r"^ARG LOCK=(.+)$", DOCKERFILE, re.MULTILINE)
    assert (ROOT / f"requirements/{lock}.txt").is_file()
    [cuda] = re.findall(r"^FROM nvidia/cuda:(\d+\.\d+)", DOCKERFILE, re.MULTILINE)
    assert f"cuda-toolkit=={cuda}." in (ROOT / f"requirements/{lock}.txt").read_text()
    assert f"/usr/local/cuda-{cuda} " in DOCKERFILE


@pytest.mark.parametrize(
    ("words", "variables", "status", "message"),
    [
        (["gpu-x"], {}, 2, "got 'gpu-x'"),
        (["gpu-rl-sglang", "v"], {"CUDA_HOME": "/nowhere"}, 1, "/nowhere/bin/nvcc is missing; set CUDA_HOME"),
        (["gpu-sft", "v"], {"PYTHON": "false"}, 1, "is not Python 3.11"),
        (["gpu-sft", "v", "w"], {}, 2, "got 'gpu-sft v w'"),
        (["gpu-rl-vllm", "v"], {"FLASH_ATTN": "x.whl"}, 1, "FLASH_ATTN=x.whl: no such file"),
        (["gpu-rl-vllm", "v"], {"FLASH_ATTN": "2.8.3"}, 1, "FLASH_ATTN=2.8.3: expected a wheel"),
    ],
)
def test_an_environment_for_gpus_is_refused_before_anything_is_installed(
    tmp_path: Path, words: list[str], variables: dict[str, str], status: int, message: str
) -> None:
    env = os.environ | {"PYTHON": sys.executable} | variables
    script = ROOT / "requirements/install-gpu.sh"
    done = subprocess.run([str(script), *words], env=env, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == status
    assert message in done.stderr
    assert list(tmp_path.iterdir()) == []
