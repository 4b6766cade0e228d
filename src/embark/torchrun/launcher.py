"""`python -m embark.torchrun …` is torchrun with exit codes: it exits with what its ranks' codes mean.

torchrun exits with 1 whatever its ranks exited with, so no job controller could tell a preempted run from a wrong spec.
It restarts ranks that failed because the spec is wrong, kills them 30 seconds after a SIGTERM, saved or not, and mixes
their output. All arguments and all `PET_…` variables are torchrun's own:

    python -m embark.torchrun --nnodes=2 --nproc-per-node=8 --rdzv-backend=c10d … -m embark train spec.toml
"""

import math
import os
import signal
import sys
import tempfile
from collections.abc import Iterable, MutableMapping, Sequence

from embark.errors import EmbarkError, ExitCode

FINAL = (ExitCode.BAD_INPUT, ExitCode.PREEMPTED)
"""Codes after which ranks are not restarted here: a wrong spec stays wrong, and a preempted machine cannot run them."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the ranks of this machine; the code is for `sys.exit`."""
    # As process 1 of a container Python ignores SIGTERM, and torch takes seconds to load.
    signal.signal(signal.SIGTERM, lambda *_: os._exit(ExitCode.PREEMPTED))
    set_shutdown_timeout(os.environ)
    prefix_output(os.environ)
    from embark.cli.console import Console
    from embark.torchrun.agent import launch

    result = launch(list(sys.argv[1:] if arguments is None else arguments), final=FINAL)
    code = exit_code(result.codes, result.signal)
    if result.message:
        Console().error(EmbarkError(result.message))
    return code


def exit_code(codes: Iterable[int], stopped_by: int = 0) -> int:
    """One code for all ranks of a machine: the one most useful to a controller.

    `codes` are those that differ from 0, negative ones being signals; `stopped_by` is the signal this process received.
    """
    ended = set(codes)
    if ExitCode.BAD_INPUT in ended:
        return ExitCode.BAD_INPUT
    if stopped_by == signal.SIGINT:
        return ExitCode.INTERRUPTED
    if stopped_by:
        # Whatever the ranks managed to do, the machine is preempted: resume elsewhere from the last checkpoint.
        return ExitCode.PREEMPTED
    # When one rank has exited, torchrun stops the others, some of them before they handle signals.
    faults = ended - {int(ExitCode.PREEMPTED), -int(signal.SIGTERM)}
    if not faults:
        if ExitCode.PREEMPTED in ended:
            return ExitCode.PREEMPTED
        return ExitCode.FAULT if ended else ExitCode.DONE
    if any(code < 0 or code == ExitCode.FAULT for code in faults):
        return ExitCode.FAULT
    return max(faults)


def set_shutdown_timeout(environ: MutableMapping[str, str]) -> None:
    """After a SIGTERM, torchrun waits for its ranks for the grace period, less a second for itself."""
    text = environ.get("EMBARK_GRACE_S", "")
    try:
        grace_s = float(text)
    except ValueError:
        return  # the ranks refuse it, with a better message
    if math.isfinite(grace_s) and grace_s > 0:
        environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(max(1, int(grace_s) - 1)))


def prefix_output(environ: MutableMapping[str, str]) -> None:
    """Every line of a rank's output begins with its global rank, as torch's own errors do."""
    try:
        tempfile.gettempdir()
    except FileNotFoundError:  # no writable directory: torchrun passes lines through files
        return
    environ.setdefault("PET_TEE", "3")
    environ.setdefault("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE", "[rank${rank}]:")
    environ.setdefault("PYTHONUNBUFFERED", "1")  # torchrun reads their lines from files, which Python fills in blocks
