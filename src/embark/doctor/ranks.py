"""Can ranks of this machine reach each other? Torch answers in a child process."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from embark.doctor.check import Check, check
from embark.doctor.host import Host

MODULE = "embark.trainers.torch.probe"
LIMIT_S = 120.0


@dataclass(frozen=True, slots=True)
class Facts:
    """Torch's answers."""

    cuda: str | None = None
    """The version that torch was built for."""
    nccl: str = ""
    num_gpus: int = 0
    arches: list[str] = field(default_factory=list)
    trouble: str = ""
    """Why it failed, or CUDA's error."""
    reduce: dict[str, Any] = field(default_factory=dict)


class Probe:
    """The child process; other checks run meanwhile."""

    def __init__(self, host: Host, command: list[str] | None = None) -> None:
        command = command or [sys.executable, "-P", "-m", MODULE]
        self._folder = tempfile.TemporaryDirectory(prefix="embark-doctor-")
        self._answer = Path(self._folder.name, "answer.json")
        self._process = subprocess.Popen([*command, str(self._answer)], stdin=subprocess.DEVNULL,
                                         stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=dict(host.env),
                                         start_new_session=True)

    def facts(self, limit_s: float = LIMIT_S) -> Facts:
        """Wait for it; kill it if it takes too long."""
        try:
            _, err = self._process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            self.end()
            return Facts(trouble=f"it did not answer within {limit_s:.0f} s")
        try:
            answer = json.loads(self._answer.read_text(encoding="utf-8"))
            return Facts(answer["cuda"], answer["nccl"], int(answer["num_gpus"]), list(answer["arches"]),
                         answer["trouble"], dict(answer["reduce"]))
        except (OSError, ValueError, KeyError, TypeError):
            lines = err.decode(errors="replace").strip().splitlines()
            return Facts(trouble=lines[-1] if lines else f"it ended with {self._process.returncode}")

    def end(self) -> None:
        """With its ranks, which are in its session."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()
        self._folder.cleanup()


def check_ranks(facts: Facts, num_gpus: int) -> Iterator[Check]:
    """`num_gpus` as the driver sees them."""
    if facts.trouble and not facts.reduce:
        yield Check("torch runs", "wrong", facts.trouble, "import torch works",
                    f"{sys.executable} -m embark.stack.versions install installs a matched torch, torchrec and fbgemm")
        return
    if facts.trouble or (num_gpus and facts.num_gpus < num_gpus):
        found = facts.trouble or f"torch sees {facts.num_gpus} of {num_gpus} GPUs"
        yield Check("torch runs", "wrong" if facts.cuda else "ok", found, "torch sees every GPU",
                    "CUDA_VISIBLE_DEVICES hides some, or the driver and the build do not match" if facts.cuda else "")
    yield _reduced(facts)
    if (said := facts.reduce.get("nccl_error")) is not None:
        yield check("nccl", not said, said or f"NCCL {facts.nccl} starts on the one GPU", "it starts",
                     "NCCL_DEBUG=INFO says why; embark diagnose reads its log")


def _reduced(facts: Facts) -> Check:
    reduce = facts.reduce
    backend, num_ranks = str(reduce.get("backend", "")), int(reduce.get("num_ranks", 0))
    name = "nccl" if backend == "nccl" else "gloo"
    over = f"{num_ranks} GPUs" if backend == "nccl" else f"{num_ranks} processes"
    if reduce.get("error"):
        fix = ("NCCL_DEBUG=INFO says why; embark diagnose reads its log" if backend == "nccl" else
               "does this machine's own name resolve? GLOO_SOCKET_IFNAME=lo tries the loopback device")
        return Check(name, "wrong", f"no all-reduce over {over}: {reduce['error']}", "an all-reduce", fix)
    version = f"NCCL {facts.nccl}, " if backend == "nccl" and facts.nccl else ""
    speed = float(reduce.get("bytes_per_s", 0.0)) / 1e9
    return Check(name, "ok", f"{version}all-reduce over {over} at {speed:,.3g} GB/s", "an all-reduce")
