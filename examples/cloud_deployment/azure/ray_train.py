# Trains dlrm on 2 machines with Ray Train.
# Written by `embark render`. Change the spec and run it again: --diff shows what would change; files edited by
# hand are kept unless --force is given.
"""Trains with Ray Train: one worker on each machine, which starts a rank for each of its accelerators."""

import ctypes
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time

os.environ.setdefault("RAY_TRAIN_V2_ENABLED", "1")
# For machines that are slow to start: Ray Train gives up after one minute, and begins anew.
os.environ.setdefault("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", "600")
# Every line of every rank as it was, once for each.
os.environ.setdefault("RAY_DEDUP_LOGS", "0")
os.environ.setdefault("RAY_COLOR_PREFIX", "0")

import ray  # noqa: E402
import ray.train  # noqa: E402
from ray.train import FailureConfig, RunConfig, ScalingConfig  # noqa: E402
from ray.train.collective import broadcast_from_rank_zero  # noqa: E402
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer  # noqa: E402
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy  # noqa: E402

NAME = 'dlrm'
SPEC = '/etc/embark/spec.toml'
NUM_MACHINES = 2
NUM_PROCESSES = 8
NUM_CPUS = 92
USE_GPU = True
MAX_FAILURES = 20
# Of Ray Train's own process group, which is not the ranks'.
NOT_FOR_RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT")
# Exit codes of the ranks: the same spec is wrong again; saved before the end.
BAD_INPUT, PREEMPTED = 64, 75


class Notice:
    """What every machine asks for: is the run to stop? And a code that another start would not change."""

    def __init__(self) -> None:
        self.is_stopping = False
        self.code = 0
        self.machines = set()

    def stop(self, code: int) -> int:
        """How many machines there are to wait for."""
        self.is_stopping, self.code = True, self.code or code
        return len(self.machines)

    def enter(self, machine: int) -> bool:
        if not self.is_stopping:
            self.machines.add(machine)
        return not self.is_stopping

    def read(self) -> tuple[bool, int]:
        return self.is_stopping, self.code


def train_machine(config: dict) -> None:
    """Start this machine's ranks and wait for them."""
    notice, machine = config["notice"], ray.train.get_context().get_world_rank()
    host, port = broadcast_from_rank_zero(free_address())
    if not ray.get(notice.enter.remote(machine)):
        return
    environ = {name: value for name, value in os.environ.items() if name not in NOT_FOR_RANKS}
    environ["TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"] = "[rank ${rank}]:"
    libc = ctypes.CDLL(None)
    # Ray ignores it where its raylet reaps what workers leave, and then every exit code reads 0. None is SIG_DFL;
    # Python's own function works in the main thread alone.
    libc.signal(signal.SIGCHLD, None)
    with tempfile.TemporaryDirectory(prefix="embark-ranks-", ignore_cleanup_errors=True) as folder:
        spec = os.path.join(folder, "spec.toml")
        with open(spec, "w", encoding="utf-8") as file:
            file.write(config["spec"])
        command = [
            sys.executable, "-m", "embark.torchrun",
            f"--nnodes={NUM_MACHINES}", f"--nproc-per-node={NUM_PROCESSES}", f"--node-rank={machine}",
            f"--master-addr={host}", f"--master-port={port}", f"--log-dir={folder}", "--tee=3",
            "-m", "embark", "train", spec,
        ]
        ranks = subprocess.Popen(
            command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            # Ranks do not outlive a Ray worker that is killed: 1 is PR_SET_PDEATHSIG.
            preexec_fn=lambda: libc.prctl(1, signal.SIGTERM),
        )
        threading.Thread(target=pass_on, args=(notice, ranks), daemon=True).start()
        for line in ranks.stdout:
            say(machine, line.decode(errors="replace").rstrip())
        code = ranks.wait()
    if code == BAD_INPUT:
        ray.get(notice.stop.remote(code))
    elif code and not ray.get(notice.read.remote())[0]:
        # Ray Train starts all workers again, and the run resumes from its last checkpoint.
        raise RuntimeError(f"the ranks of machine {machine} ended with {code}")


def say(machine: int, line: str) -> None:
    """With its time, and with who said it."""
    now_ns = time.time_ns()
    stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now_ns // 10**9)) + f".{now_ns % 10**9 // 1000:06d}Z"
    print(f"{stamp} {line}" if line.startswith("[rank ") else f"{stamp} [machine {machine}]:{line}", flush=True)


def pass_on(notice: "ray.actor.ActorHandle", ranks: subprocess.Popen) -> None:
    """Tell the ranks to save and end, once the run is to stop."""
    while ranks.poll() is None:
        if ray.get(notice.read.remote())[0]:
            ranks.terminate()
            return
        time.sleep(1.0)


def free_address() -> tuple[str, int]:
    """Where the ranks can meet, if this worker is the first."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return ray.util.get_node_ip_address(), probe.getsockname()[1]


def stop_on_signal(notice: "ray.actor.ActorHandle") -> None:
    """On SIGTERM the ranks save and end; where none has begun, there is nothing to wait for."""
    stop_requested = threading.Event()

    def stop() -> None:
        stop_requested.wait()
        if not ray.get(notice.stop.remote(PREEMPTED)):
            os._exit(PREEMPTED)

    threading.Thread(target=stop, daemon=True).start()
    signal.signal(signal.SIGTERM, lambda *_: stop_requested.set())


def main() -> None:
    ray.init()
    # Beside this process: with it alone the run ends.
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    notice = ray.remote(num_cpus=0)(Notice).options(scheduling_strategy=here).remote()
    stop_on_signal(notice)
    resources = {"CPU": NUM_CPUS, **({"GPU": NUM_PROCESSES} if USE_GPU else {})}
    with open(os.path.join(os.path.dirname(os.path.abspath(__file__)), SPEC), encoding="utf-8") as file:
        spec = file.read()
    # Not TorchTrainer: its own group of torch processes is of no use to torchrun's ranks, and takes time and memory.
    trainer = DataParallelTrainer(
        train_machine,
        train_loop_config={"notice": notice, "spec": spec},
        scaling_config=ScalingConfig(
            num_workers=NUM_MACHINES, use_gpu=USE_GPU, resources_per_worker=resources,
            placement_strategy="STRICT_SPREAD" if NUM_MACHINES > 1 else "PACK",
        ),
        run_config=RunConfig(name=NAME, failure_config=FailureConfig(max_failures=MAX_FAILURES)),
    )
    trainer.fit()
    sys.exit(ray.get(notice.read.remote())[1])


if __name__ == "__main__":
    main()
