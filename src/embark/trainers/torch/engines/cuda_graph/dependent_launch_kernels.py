"""Programmatic dependent launch: a kernel is on its way to the multiprocessors before the one in front of it has
ended, and waits there. From compute capability 9.0 on."""

import torch
import triton
import triton.language as tl
import triton.language.extra.cuda

CAN_WAIT = tl.constexpr(torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0))
EARLY = {"launch_pdl": True} if CAN_WAIT.value else {}
"""How a kernel that begins with `wait_for_inputs` is launched."""


@triton.jit
def wait_for_inputs():
    """Until the kernels in front have ended; before it, nothing may be read or written."""
    if CAN_WAIT:
        tl.extra.cuda.gdc_wait()
