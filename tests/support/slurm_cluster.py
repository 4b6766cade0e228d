"""A cluster of Debian's Slurm on this machine: its controller and several nodes, all in one folder, on free ports."""

from __future__ import annotations

import contextlib
import getpass
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from limits import HANG_S

CONF = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=5
SlurmUser={user}
SlurmdUser={user}
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SchedulerParameters=sched_min_interval=100000,bf_interval=1,batch_sched_delay=1
SchedulerTimeSlice=5
ReturnToService=2
SlurmdTimeout=5
SlurmctldTimeout=10
KillWait=20
InactiveLimit=0
MinJobAge=600
JobRequeue=1
MpiDefault=none
GresTypes=gpu
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
SlurmdDebug=info
{nodes}
PartitionName=main Nodes={names} Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=120
PartitionName=urgent Nodes={names} MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
"""


@dataclass
class SlurmCluster:
    """A running cluster: `environment` is what its commands need."""

    folder: Path
    names: tuple[str, ...]
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    user = getpass.getuser()

    @property
    def environment(self) -> dict[str, str]:
        return {"SLURM_CONF": str(self.folder / "slurm.conf")}

    def ask(self, *words: str) -> str:
        """The output of one of Slurm's commands, which must succeed."""
        done = subprocess.run(words, env={**os.environ, **self.environment}, capture_output=True, text=True,
                              timeout=HANG_S)
        assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
        return done.stdout.strip()

    def job(self, job_id: str) -> dict[str, str]:
        """What the controller says of a job."""
        words = self.ask("scontrol", "--oneliner", "show", "job", job_id).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait_for(self, what: str, is_so: Callable[[], object]) -> None:
        until_s = time.monotonic() + HANG_S
        while not is_so():
            assert time.monotonic() < until_s, f"not within {HANG_S} s: {what}\n{self.report()}"
            time.sleep(0.1)

    def start_node(self, name: str) -> None:
        self._start(name, "slurmd", "-D", "-N", name, "-f", str(self.folder / "slurm.conf"))

    def kill_node(self, name: str) -> None:
        """SIGKILL for the node's daemon and for everything that it started, as if the machine lost its power."""
        daemon, tasks = self.processes.pop(name), self.job_processes(name)
        kill_all([daemon.pid, *step_daemons(tasks), *tasks])
        daemon.wait(HANG_S)

    def job_processes(self, node: str = "") -> list[int]:
        """The processes of all jobs, or of those parts that one node runs: they name it in their environment."""
        wanted = f"SLURMD_NODENAME={node}".encode()
        conf = f"SLURM_CONF={self.folder / 'slurm.conf'}".encode()
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                names = path.read_bytes().split(b"\0")
                if conf in names and any(name == wanted or (not node and name.startswith(wanted)) for name in names):
                    found.append(int(path.parent.name))
        return found

    def report(self) -> str:
        parts = [path.read_text(errors="replace")[-3000:] for path in sorted(self.folder.glob("*.log"))]
        shown = subprocess.run(["scontrol", "show", "job"], env={**os.environ, **self.environment},
                               capture_output=True, text=True).stdout
        return "\n".join([*parts, shown])

    def stop(self) -> None:
        tasks = self.job_processes()
        kill_all([*step_daemons(tasks), *tasks, *(process.pid for process in self.processes.values())])
        for process in self.processes.values():
            process.wait(HANG_S)

    def _start(self, name: str, program: str, *words: str) -> None:
        path = shutil.which(program, path=os.environ["PATH"] + ":/usr/sbin:/sbin")
        assert path, program
        with (self.folder / f"{name}.out").open("ab") as out:
            self.processes[name] = subprocess.Popen(
                [path, *words], stdout=out, stderr=out, start_new_session=True, env={**os.environ, **self.environment})


def step_daemons(tasks: list[int]) -> list[int]:
    """The daemons that watch these tasks: they have left the node's own."""
    found = []
    for pid in tasks:
        with contextlib.suppress(OSError):
            parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]
            if "slurmstepd" in Path(f"/proc/{parent}/cmdline").read_text():
                found.append(int(parent))
    return found


def kill_all(pids: list[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@contextlib.contextmanager
def slurm_cluster(folder: Path, num_nodes: int = 3) -> Iterator[SlurmCluster]:
    """Start munge, the controller and the nodes; end all that is left of them and of their jobs."""
    folder.mkdir(parents=True, exist_ok=True)
    names = tuple(f"n{index + 1}" for index in range(num_nodes))
    ports = free_ports(num_nodes + 1)
    host = socket.gethostname().partition(".")[0]
    nodes = "\n".join(f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=1 RealMemory=1000 "
                      "State=UNKNOWN" for name, port in zip(names, ports[1:], strict=True))
    (folder / "slurm.conf").write_text(CONF.format(host=host, port=ports[0], folder=folder, user=getpass.getuser(),
                                                   nodes=nodes, names=",".join(names)))
    munge = folder / "munge"
    munge.mkdir(mode=0o755)
    (munge / "key").write_bytes(os.urandom(128))
    (munge / "key").chmod(0o600)
    (folder / "state").mkdir()
    cluster = SlurmCluster(folder, names)
    try:
        cluster._start("munge", "munged", "--foreground", "--force", f"--socket={munge}/socket",
                       f"--key-file={munge}/key", f"--pid-file={munge}/pid", f"--log-file={munge}/log",
                       f"--seed-file={munge}/seed")
        cluster.wait_for("munge listens", (munge / "socket").exists)
        cluster._start("slurmctld", "slurmctld", "-D", "-f", str(folder / "slurm.conf"))
        for name in names:
            cluster.start_node(name)
        cluster.wait_for("all nodes are idle", lambda: _states(cluster) == ["idle"] * num_nodes)
        yield cluster
    finally:
        cluster.stop()


def _states(cluster: SlurmCluster) -> list[str]:
    done = subprocess.run(["sinfo", "--noheader", "-N", "-p", "main", "-o", "%t"], capture_output=True, text=True,
                          env={**os.environ, **cluster.environment})
    return done.stdout.split()


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports
