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
from collections.abc import Collection, Iterable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any

from embark.errors import EmbarkError, ExitCode
from embark.values import frozen

FINAL = (ExitCode.BAD_INPUT, ExitCode.PREEMPTED)
"""Codes after which ranks are not restarted here: a wrong spec stays wrong, and a preempted machine cannot run them."""
FINAL_IF_ELASTIC = (ExitCode.BAD_INPUT,)
"""Final codes if torchrun may continue with other machines: ranks also save and end when one leaves or comes."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the ranks of this machine and return the code for `sys.exit`."""
    # As process 1 of a container Python ignores SIGTERM, and torch takes seconds to load.
    signal.signal(signal.SIGTERM, lambda *_: os._exit(ExitCode.PREEMPTED))
    # A parent that ignores it, as Ray's workers do where the raylet reaps, hands that on: every rank would end with 0.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    set_shutdown_timeout(os.environ)
    prefix_output(os.environ)
    from embark.cli.console import Console

    result = launch(list(sys.argv[1:] if arguments is None else arguments))
    code = exit_code(result.codes, result.signal)
    if result.message:
        Console().error(EmbarkError(result.message))
    return code


@frozen
class RanksResult:
    """The exit codes of the ranks of this machine."""

    codes: tuple[int, ...] = ()  # Exit codes other than 0; negative ones are signals.
    signal: int = 0  # The signal that stopped this process.
    message: str = ""


def launch(arguments: Sequence[str]) -> RanksResult:
    """Run torchrun with these arguments in this process. Ranks that exit with a final code are not restarted."""
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous
    from torch.distributed.launcher import api as launcher
    from torch.distributed.run import parse_args

    dynamic_rendezvous.get_method_name = method_name
    agents: list[Any] = []
    options = parse_args(list(arguments))
    is_elastic = is_range(str(options.nnodes))
    final: Collection[int] = FINAL_IF_ELASTIC if is_elastic else FINAL
    if is_elastic:  # ranks start again and again, and would find the addresses of the dead (pytorch#135712)
        os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")

    class Agent(LocalElasticAgent):
        """Does not restart what a restart cannot fix."""

        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            agents.append(self)

        def _monitor_workers(self, worker_group: Any) -> Any:
            result = super()._monitor_workers(worker_group)
            codes = {failure.exitcode for failure in result.failures.values()}
            if codes & set(final):
                self._remaining_restarts = 0
            elif is_elastic and codes and codes <= {ExitCode.PREEMPTED, -signal.SIGTERM}:
                # They saved because a machine left or came. torchrun counts no change of membership that it sees
                # first, and neither does this.
                self._remaining_restarts += 1
            return result

    # launch_agent takes the class from its module's namespace; there is no other way to pass one.
    original, launcher.LocalElasticAgent = launcher.LocalElasticAgent, Agent
    try:
        result = _run(options)
        # torch's handlers remain, and would end this process with a traceback while it says how its ranks ended.
        _ignore_signals()
    except SignalException as error:
        _ignore_signals()
        result = RanksResult(_codes(agents), error.sigval.value, f"stopped by {error.sigval.name}")
    finally:
        launcher.LocalElasticAgent = original
    return result


def _run(options: Any) -> RanksResult:
    from torch.distributed import DistError
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous.api import RendezvousError
    from torch.distributed.run import run

    try:
        with log_folder(options):
            run(options)
    except ChildFailedError as error:
        codes = {rank: failure.exitcode for rank, failure in sorted(error.failures.items())}
        by_rank = ", ".join(f"rank {rank} with {code}" for rank, code in codes.items())
        return RanksResult(tuple(codes.values()), message=f"the ranks of this machine exited: {by_rank}")
    except (RendezvousError, DistError) as error:
        return RanksResult((ExitCode.FAULT,), message=f"rendezvous failed: {error}")
    return RanksResult()


def _ignore_signals() -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)


@contextmanager
def log_folder(options: Any) -> Iterator[None]:
    """Give torchrun a temporary folder for its ranks' lines: it does not remove the one that it makes itself."""
    if options.log_dir is not None or not _has_temporary_files():
        yield
        return
    with tempfile.TemporaryDirectory(prefix="embark-torchrun-", ignore_cleanup_errors=True) as options.log_dir:
        yield


def _has_temporary_files() -> bool:
    try:
        tempfile.gettempdir()
    except FileNotFoundError:  # no writable directory
        return False
    return True


def method_name(depth: int = 2) -> str:
    """Name the caller's caller, for an event of the rendezvous. torch's own function reads the sources of the complete
    stack for it, looking through all modules for each frame: a second of CPU time at every start."""
    return sys._getframe(depth).f_code.co_name


def is_range(nnodes: str) -> bool:
    """Return whether torchrun continues with fewer machines and takes others in, as with `2:3`."""
    low, _, high = nnodes.partition(":")
    return bool(high) and low != high


def _codes(agents: Sequence[Any]) -> tuple[int, ...]:
    """Exit codes of ranks that ended after a signal, when torchrun no longer collects them."""
    context = agents[-1]._pcontext if agents else None
    handlers = getattr(context, "subprocess_handlers", {})
    codes = [handler.proc.poll() for handler in handlers.values()]
    return tuple(code for code in codes if code)


def exit_code(codes: Iterable[int], stopped_by: int = 0) -> int:
    """Return one code for all ranks of a machine: the one most useful to a controller.

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
    """Let torchrun wait for its ranks after a SIGTERM for the grace period, less a second for itself."""
    text = environ.get("EMBARK_GRACE_S", "")
    try:
        grace_s = float(text)
    except ValueError:
        return  # the ranks refuse it, with a better message
    if math.isfinite(grace_s) and grace_s > 0:
        environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(max(1, int(grace_s) - 1)))


def prefix_output(environ: MutableMapping[str, str]) -> None:
    """Begin every line of a rank's output with its global rank, as torch's own errors do."""
    if not _has_temporary_files():  # torchrun passes lines through files
        return
    environ.setdefault("PET_TEE", "3")
    environ.setdefault("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE", "[rank${rank}]:")
    environ.setdefault("PYTHONUNBUFFERED", "1")  # torchrun reads their lines from files, which Python fills in blocks
