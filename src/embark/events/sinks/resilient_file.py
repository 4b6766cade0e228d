"""A file that survives a full disk: what cannot be written now is written once there is space."""

import os
from pathlib import Path

from embark.errors import Fault


class ResilientFile:
    """A failed write raises only at `close`, if it still fails then: training matters more than its log."""

    def __init__(self, path: Path, mode: str) -> None:
        self._path = path
        self._file = path.open(mode, buffering=0)
        self._waiting = bytearray()
        self._error: OSError | None = None

    @property
    def closed(self) -> bool:
        return self._file.closed

    def write(self, data: bytes) -> int:
        self._waiting += data
        return len(data)

    def flush(self) -> None:
        self._error = None
        try:
            while self._waiting:
                del self._waiting[: self._file.write(self._waiting)]
        except OSError as error:
            self._error = error

    def close(self) -> None:
        if self.closed:
            return
        self.flush()
        self._file.close()
        if self._error:
            cause = os.strerror(self._error.errno or 0).lower()
            raise Fault(f"could not write the end of {self._path}: {cause}",
                        fix="free some space, then run the same command to resume")
