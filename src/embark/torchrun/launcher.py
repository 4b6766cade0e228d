"""`python -m embark.torchrun …` is torchrun, except for how it ends: its exit code says what its ranks' codes say.

torchrun ends with 1 whatever its ranks ended with, so no job controller could tell a preempted run from a wrong spec;
it starts ranks again that ended because the spec is wrong; it kills them 30 seconds after a SIGTERM, saved or not; and
nobody could say whose line is whose.
All words and all `PET_…` variables are torchrun's own:

    python -m embark.torchrun --nnodes=2 --nproc-per-node=8 --rdzv-backend=c10d … -m embark train spec.toml
"""

from __future__ import annotations

import math
import os
import signal
import sys
import tempfile
from collections.abc import Iterable, MutableMapping, Sequence

from embark.errors import EmbarkError, ExitCode

FINAL = (ExitCode.BAD_INPUT, ExitCode.PREEMPTED)
"""Codes after which the ranks are not started again here: the same spec is wrong again, and a machine that is taken
away has no use for new ranks."""


def main(words: Sequence[str] | None = None) -> int:
    """Run the ranks of this machine; the code is for `sys.exit`."""
    # As process 1 of a container Python ignores SIGTERM, and torch takes seconds to load.
    signal.signal(signal.SIGTERM, lambda *_: os._exit(ExitCode.PREEMPTED))
    wait_for_ranks(os.environ)
    tell_ranks_apart(os.environ)
    from embark.cli.console import Console
    from embark.torchrun.agent import launch

    ended = launch(list(sys.argv[1:] if words is None else words), final=FINAL)
    code = exit_code(ended.codes, ended.signal)
    if ended.what:
        Console().error(EmbarkError(ended.what))
    return code


def exit_code(codes: Iterable[int], stopped_by: int = 0) -> int:
    """One code for all ranks of a machine: the one that tells a controller most.

    `codes` are those that differ from 0, negative ones being signals; `stopped_by` is the signal that this process got.
    """
    ended = set(codes)
    if ExitCode.BAD_INPUT in ended:
        return ExitCode.BAD_INPUT
    if stopped_by == signal.SIGINT:
        return ExitCode.INTERRUPTED
    if stopped_by:
        # Whatever the ranks managed to do, the machine is going: start again elsewhere, from the last checkpoint.
        return ExitCode.PREEMPTED
    # When one rank has ended, torchrun tells the others to stop, some of them before they could listen.
    faults = ended - {int(ExitCode.PREEMPTED), -int(signal.SIGTERM)}
    if not faults:
        if ExitCode.PREEMPTED in ended:
            return ExitCode.PREEMPTED
        return ExitCode.FAULT if ended else ExitCode.DONE
    if any(code < 0 or code == ExitCode.FAULT for code in faults):
        return ExitCode.FAULT
    return max(faults)


def wait_for_ranks(environ: MutableMapping[str, str]) -> None:
    """torchrun waits so long after a SIGTERM for its ranks to end, less a second to end itself."""
    text = environ.get("EMBARK_GRACE_S", "")
    try:
        grace_s = float(text)
    except ValueError:
        return  # the ranks refuse it, with a better sentence
    if math.isfinite(grace_s) and grace_s > 0:
        environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(max(1, int(grace_s) - 1)))


def tell_ranks_apart(environ: MutableMapping[str, str]) -> None:
    """Every line of a rank begins with its number over all machines, as torch's own errors do."""
    try:
        tempfile.gettempdir()
    except FileNotFoundError:  # nowhere to write: torchrun passes lines through files
        return
    environ.setdefault("PET_TEE", "3")
    environ.setdefault("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE", "[rank${rank}]:")
    environ.setdefault("PYTHONUNBUFFERED", "1")  # torchrun reads their lines from files, which Python fills in blocks
