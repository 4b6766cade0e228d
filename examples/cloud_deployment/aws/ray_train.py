# Trains dlrm on 2 machines with Ray Train.
# Written by `embark render`. Change the spec and run it again: --diff shows what would change, and a file that
# was edited by hand is not overwritten unasked.
"""Trains with Ray Train: one worker on each machine, which starts a rank for each of its accelerators."""

import os
import socket
import subprocess
import sys

os.environ.setdefault("RAY_TRAIN_V2_ENABLED", "1")

import ray.train  # noqa: E402
from ray.train import FailureConfig, RunConfig, ScalingConfig  # noqa: E402
from ray.train.collective import broadcast_from_rank_zero  # noqa: E402
from ray.train.torch import TorchConfig, TorchTrainer  # noqa: E402

NAME = 'dlrm'
SPEC = '/etc/embark/spec.toml'
NUM_MACHINES = 2
NUM_PROCESSES = 8
NUM_CPUS = 92
USE_GPU = True
MAX_FAILURES = 20
# Of Ray Train's own process group, which is not the ranks'.
NOT_FOR_RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT")


def train_machine() -> None:
    """Start this machine's ranks and wait for them."""
    context = ray.train.get_context()
    host, port = broadcast_from_rank_zero(free_address())
    command = [
        sys.executable, "-m", "embark.ranks",
        f"--nnodes={NUM_MACHINES}", f"--nproc-per-node={NUM_PROCESSES}", f"--node-rank={context.get_world_rank()}",
        f"--master-addr={host}", f"--master-port={port}",
        "-m", "embark", "train", SPEC,
    ]
    environ = {name: value for name, value in os.environ.items() if name not in NOT_FOR_RANKS}
    code = subprocess.run(command, env=environ, check=False).returncode
    if code:
        # Ray Train starts all workers again, and the run goes on from its last checkpoint.
        raise RuntimeError(f"the ranks of machine {context.get_world_rank()} ended with {code}")


def free_address() -> tuple[str, int]:
    """Where the ranks can meet, if this worker is the first."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return ray.util.get_node_ip_address(), probe.getsockname()[1]


def main() -> None:
    resources = {"CPU": NUM_CPUS, **({"GPU": NUM_PROCESSES} if USE_GPU else {})}
    trainer = TorchTrainer(
        train_machine,
        # gloo: Ray's own group needs no GPU.
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(
            num_workers=NUM_MACHINES, use_gpu=USE_GPU, resources_per_worker=resources,
            placement_strategy="STRICT_SPREAD" if NUM_MACHINES > 1 else "PACK",
        ),
        run_config=RunConfig(name=NAME, failure_config=FailureConfig(max_failures=MAX_FAILURES)),
    )
    trainer.fit()


if __name__ == "__main__":
    main()
