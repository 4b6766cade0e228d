"""What torch raises, as errors of our own tree."""

import torch
import torch.distributed as dist

from embark.errors import EmbarkError, Fault, UserError

LOST_PEER = ("connection closed by peer", "connection reset by peer", "gloo", "nccl", "timed out waiting")


def explain(error: RuntimeError) -> EmbarkError | None:
    """The error as one of ours; None if it is unknown."""
    text = str(error)
    if isinstance(error, torch.OutOfMemoryError):
        return UserError(f"out of GPU memory: {text.splitlines()[0]}",
                         fix='a smaller train.batch_size, train.table_dtype = "fp16", or more ranks')
    if isinstance(error, dist.DistError) or any(sign in text.lower() for sign in LOST_PEER):
        return Fault(f"a rank was lost: {text.splitlines()[0]}",
                     fix="start the run again: it resumes from its last checkpoint")
    return None
