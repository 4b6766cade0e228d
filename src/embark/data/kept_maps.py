"""What a run keeps of its prepared data, or of a log that it read, in `RUN/data/FINGERPRINT`: the manifest and the id
maps, but no rows. With them it is exported, and evaluated on raw rows, where its data is not: a laptop does not see the
volume that pods mount.

All id maps are kept, however large: a value takes 12 bytes there, its row in a checkpoint at least 4 for each number of
its vector and for the optimizer, and a run writes its maps once.
"""

import io
from collections.abc import Mapping

import numpy as np

from embark.features.arrays import Array
from embark.spec import RunSpec
from embark.store import normalize_path, open_store
from embark.store.transfer import CopyItem, Transfer
from embark.values import frozen
from . import LOOK
from .prepared import MANIFEST, Manifest
from .prepared.cache import find_manifest, read_manifest

FOLDER = "data"  # A folder of a run's directory.


@frozen
class FoundMaps:
    """Where the id maps of a run's data can be read."""

    path: str
    manifest: Manifest | None  # None if they cannot be read anywhere.
    why: str = ""
    fix: str = ""


@frozen
class LogMaps:
    """The id map of a log whose items are words, as prepared data has it: the manifest, and arrays by file."""

    manifest: Manifest
    arrays: Mapping[str, Array]


def keep_id_maps(run_uri: str, path: str) -> None:
    """Copy the manifest and the id maps of the prepared data at `path` to a run's directory, unless they are there."""
    manifest, source = read_manifest(path), open_store(path)
    target = open_store(_kept_uri(run_uri, manifest.fingerprint()))
    if target.exists(MANIFEST):
        return
    records = (manifest.settings.get("id_maps") or {}).values()
    files = [normalize_path(record[name]) for record in records for name in ("keys", "ids", "counts") if name in record]
    transfer = Transfer(source, target, [CopyItem(file, source.size(file)) for file in (*files, MANIFEST)],
                        mark=manifest.fingerprint())
    transfer.run(transfer.plan([MANIFEST]), verify=False)


def keep_log_maps(run_uri: str, log: LogMaps) -> None:
    """Write the id map of a log that was read into memory to a run's directory, unless it is there."""
    target = open_store(_kept_uri(run_uri, log.manifest.fingerprint()))
    if target.exists(MANIFEST):
        return
    for name, array in log.arrays.items():
        data = io.BytesIO()
        np.save(data, array)
        target.write(name, data.getvalue())
    target.write(MANIFEST, log.manifest.to_text().encode())


def find_id_maps(run_uri: str, spec: RunSpec, fingerprint: str) -> FoundMaps:
    """Find the manifest and the id maps of the prepared data with this fingerprint: at `data.path`, or kept with the
    run."""
    path = spec.data.path
    manifest, why = find_manifest(path, LOOK) if spec.data.kind == "prepared" else (None, "it is a log")
    if manifest is not None and fingerprint in ("", manifest.fingerprint()):
        return FoundMaps(path, manifest)
    why = why or "it was changed or prepared again since"
    if not run_uri or not fingerprint:
        return FoundMaps(path, None, why, "put the run's data back, or run this where it is")
    kept_uri = _kept_uri(run_uri, fingerprint)
    kept, why_not_kept = find_manifest(kept_uri, LOOK)
    if kept is not None and kept.fingerprint() == fingerprint:
        return FoundMaps(kept_uri, kept)
    return FoundMaps(path, None, f"{why}; nor are they in {kept_uri}: {why_not_kept or 'they are those of other data'}",
                     f"run this where the data is, or copy its {MANIFEST} and ids/ to {kept_uri}")


def _kept_uri(run_uri: str, fingerprint: str) -> str:
    return f"{run_uri.rstrip('/')}/{FOLDER}/{fingerprint[:16]}"
