"""The curves for TensorBoard."""

import os
import struct
import time
from pathlib import Path
from typing import Any

from embark.errors import MissingPackage
from embark.events.events import Event, ResilientFile
from embark.events.metrics import Reading, readings

GROUPS = {"step": "train", "eval": "eval", "ranks": "ranks", "phases": "phases"}
"""What tags begin with, by kind of event."""
STEPS = frozenset({"last_step"})  # TensorBoard's own axis.


class TensorBoardSink:
    """Scalars named for the list of metrics, such as `train/loss`, `eval/auc` and `ranks/cpu_percent/<host>`, in one
    event file, flushed point by point.

    The messages are TensorBoard's, the file is ours: its `EventFileWriter` writes from a thread, so a killed run loses
    its last points, and its `RecordWriter` imports boto3 and fsspec where they are installed.
    """

    def __init__(self, directory: Path) -> None:
        try:
            from tensorboard.compat.proto import event_pb2, summary_pb2
        except ImportError as error:
            raise MissingPackage(
                "TensorBoard curves need the tensorboard package, which is not installed",
                'pip install "embark-rec[tensorboard]", or set watch.tensorboard = false'
            ) from error
        self._events: Any = event_pb2
        self._summaries: Any = summary_pb2
        directory.mkdir(parents=True, exist_ok=True)
        # TensorBoard reads a directory's files in the order of their names: the time comes first.
        name = f"events.out.tfevents.{time.time():017.6f}.{os.uname().nodename}.{os.getpid()}"
        self._records = ResilientFile(directory / name, "wb")
        self._write(event_pb2.Event(wall_time=time.time(), file_version="brain.Event:2"))

    def emit(self, event: Event) -> None:
        if event.kind in GROUPS:
            self._scalars(event)
        elif event.kind == "resume":
            self._drop_after(event)

    def close(self) -> None:
        self._records.close()

    def _scalars(self, event: Event) -> None:
        summary = self._summaries.Summary()
        for reading in readings(event):
            if reading.metric.name not in STEPS and event.values.get("step") is not None:
                summary.value.add(tag=tag_of(event.kind, reading), simple_value=reading.value)
        if summary.value:
            step = int(event.values["step"])
            self._write(self._events.Event(wall_time=event.time_s, step=step, summary=summary))

    def _drop_after(self, event: Event) -> None:
        """Make TensorBoard drop what a killed run wrote after the checkpoint that this one resumes from."""
        log = self._events.SessionLog(status=self._events.SessionLog.START)
        step = int(event.values["step"]) + 1
        self._write(self._events.Event(wall_time=event.time_s, step=step, session_log=log))

    def _write(self, message: Any) -> None:
        self._records.write(record_of(message.SerializeToString()))
        self._records.flush()


def tag_of(kind: str, reading: Reading) -> str:
    """Return the tag of a reading: `train/auc`, `ranks/rank_step_s/3`, `ranks/gpu_power_w/node-0/7`."""
    own = [value for name, value in reading.labels if name != "split"]
    return "/".join([GROUPS[kind], reading.metric.name, *own])


def record_of(data: bytes) -> bytes:
    """Make a TFRecord: the length of the data and the data, each with its checksum."""
    length = struct.pack("<Q", len(data))
    return b"".join([length, masked_crc32c(length), data, masked_crc32c(data)])


def masked_crc32c(data: bytes) -> bytes:
    """Return the CRC-32C, rotated and shifted for TFRecords."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = CRC32C[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF)


def _crc32c_of(byte: int) -> int:
    for _ in range(8):
        byte = (byte >> 1) ^ (0x82F63B78 if byte & 1 else 0)
    return byte


CRC32C = tuple(_crc32c_of(byte) for byte in range(256))
