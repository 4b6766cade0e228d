"""Whether the run may write where its checkpoints are to go, tried by the very store that it will use."""

from __future__ import annotations

from embark.doctor.check import Check
from embark.errors import EmbarkError
from embark.spec import RunSpec
from embark.store import open_store
from embark.store.retry_policy import RetryPolicy

HASTY = RetryPolicy(max_retries=1, connect_s=5.0, silence_s=15.0, request_s=20.0, give_up_s=20.0)


def bucket_check(spec: RunSpec) -> Check | None:
    """A small file is written, read back and deleted. None where the run writes to no bucket."""
    root = spec.store.root
    if root.partition("://")[0] not in ("s3", "gs", "az"):
        return None
    try:
        store = open_store(root, HASTY)
        store.list("embark-doctor-looks-for-nothing")
        store.check()
    except EmbarkError as error:
        return Check("bucket", "wrong", error.what, f"{root} can be listed, written, read and deleted in", error.fix)
    return Check("bucket", "ok", f"{root}: a small file was written, read back and deleted")
