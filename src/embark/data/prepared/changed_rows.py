"""Table rows that have another owner than in the earlier data whose ids were kept: what a model learned there is not
theirs."""

import hashlib
import io
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from embark.data.prepared.layout import REPAIR
from embark.data.prepared.manifest import IDS, Manifest
from embark.errors import DataError
from embark.store import open_store
from embark.store.atomic_file import scratch_for


def write_changed_rows(out: Path, table: str, rows: NDArray[np.int64]) -> dict[str, str]:
    """Beside the table's id map; returns what the manifest says of it."""
    text = io.BytesIO()
    np.save(text, rows.astype("<i4"))
    file = f"{IDS}/{table}.changed.npy"
    with scratch_for(out / file) as scratch:
        scratch.write_bytes(text.getbuffer())
    return {"changed": file, "changed_sha256": hashlib.sha256(text.getbuffer()).hexdigest()}


def read_changed_rows(path: str, manifest: Manifest) -> dict[str, NDArray[np.int32]]:
    """By table, of the data at `path`, a folder or a URI."""
    store, found = open_store(path), {}
    maps: dict[str, dict[str, Any]] = manifest.settings.get("id_maps", {})
    for table, about in maps.items():
        if "changed" in about:
            text = store.read(about["changed"])
            if hashlib.sha256(text).hexdigest() != about.get("changed_sha256"):
                raise DataError(f"{store.where(about['changed'])}: is not what the manifest says", fix=REPAIR)
            found[table] = np.load(io.BytesIO(text))
    return found
