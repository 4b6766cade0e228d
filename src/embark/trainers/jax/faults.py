"""What JAX raises, as errors of our own tree; and what a run holds of its devices."""

from __future__ import annotations

from pathlib import Path

from embark.errors import EmbarkError, Fault, UserError
from embark.trainers.jax.world import World

LOST_PEER = ("connection reset", "connection closed", "deadline_exceeded", "unavailable:", "gloo", "nccl", "heartbeat")


def explain(error: RuntimeError) -> EmbarkError | None:
    """The error in our words; None where it is none that we know."""
    text = str(error)
    line = text.splitlines()[0] if text else ""
    if "RESOURCE_EXHAUSTED" in text:
        return UserError(f"out of device memory: {line}",
                         fix='a smaller train.batch_size, train.table_dtype = "fp16", or more devices; '
                             "embark plan SPEC --tpu-compile v5e:2x4 asks the compiler beforehand")
    if any(sign in text.lower() for sign in LOST_PEER):
        return Fault(f"a process was lost: {line}",
                     fix="start the run again: it goes on from its last checkpoint")
    return None


def peak_bytes(world: World) -> int:
    """The most that one device has held; on a CPU, the most that this process has."""
    devices = [device for _, device in world.local_devices]
    if world.kind == "cpu":
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    held = [(device.memory_stats() or {}).get("peak_bytes_in_use", 0) for device in devices]
    return max(held, default=0)
