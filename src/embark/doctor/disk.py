"""The disk that runs write to: free space, and measured speed."""

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from embark.doctor.check import GIB, Check, check, size_text
from embark.doctor.host import Host

MIN_DISK_BYTES = 10 * GIB
MAX_PROBE_BYTES = 256 << 20
PROBE_S = 1.0
"""For writing, and again for reading."""
_PIECE_BYTES = 4 << 20
SLOW_BYTES_PER_S = 100e6
"""A 10 GB checkpoint then takes minutes, longer than the notice of a spot machine."""


@dataclass(frozen=True, slots=True)
class Speed:
    """Of bytes written to the disk, and of bytes read back past the page cache."""

    num_bytes: int
    write_bytes_per_s: float
    read_bytes_per_s: float


def check_disk(host: Host) -> Iterator[Check]:
    where = _nearest(host.run_dir)
    yield _free_space(where)
    try:
        speed = measure(where)
    except OSError as error:
        yield Check("disk speed", "wrong", f"{where}: {error.strerror or error}", "a writable folder",
                    "set store.root to one")
        return
    found = (f"writes {speed.write_bytes_per_s / 1e6:,.0f} MB/s, reads {speed.read_bytes_per_s / 1e6:,.0f} MB/s "
             f"({size_text(speed.num_bytes)} in {where})")
    yield check("disk speed", speed.write_bytes_per_s >= SLOW_BYTES_PER_S, found,
                 f"writes at least {SLOW_BYTES_PER_S / 1e6:.0f} MB/s",
                 "set store.root to a faster disk or an object store: a checkpoint waits for it", bad="warning")


def measure(where: Path, max_bytes: int = MAX_PROBE_BYTES, limit_s: float = PROBE_S) -> Speed:
    """Write a temporary file of at most this size for at most this long, and read it back."""
    max_bytes = min(max_bytes, shutil.disk_usage(where).free // 10)
    piece = os.urandom(_PIECE_BYTES)  # incompressible
    with tempfile.TemporaryFile(dir=where, prefix=".embark-doctor-", buffering=0) as file:
        number, num_bytes, began_s = file.fileno(), 0, time.perf_counter()
        while True:
            num_bytes += os.write(number, piece)
            # In pieces, so that a very slow disk is left early.
            os.fdatasync(number)
            write_s = time.perf_counter() - began_s
            if num_bytes + _PIECE_BYTES > max_bytes or write_s >= limit_s:
                break
        os.posix_fadvise(number, 0, 0, os.POSIX_FADV_DONTNEED)
        os.lseek(number, 0, os.SEEK_SET)
        num_read, began_s, read_s = 0, time.perf_counter(), 0.0
        while read_s < limit_s and (got := len(os.read(number, _PIECE_BYTES))):
            num_read += got
            read_s = time.perf_counter() - began_s
    return Speed(num_bytes, num_bytes / max(write_s, 1e-9), num_read / max(read_s, 1e-9))


def _free_space(where: Path) -> Check:
    free = shutil.disk_usage(where).free
    fix = "free some space, or set store.root to a larger disk: checkpoints go there"
    return check("free disk", free >= MIN_DISK_BYTES, size_text(free), f"at least {MIN_DISK_BYTES / GIB:.0f} GiB", fix)


def _nearest(run_dir: Path) -> Path:
    """The folder itself, or its nearest existing parent."""
    folder = run_dir.expanduser().absolute()
    while not folder.is_dir() and folder != folder.parent:
        folder = folder.parent
    return folder
