"""torchrun's own launcher, with the exit codes of its ranks, and final codes that are not restarted."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from torch.distributed import DistError
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous.api import RendezvousError
from torch.distributed.launcher import api as launcher
from torch.distributed.run import parse_args, run

from embark.errors import ExitCode


@dataclass(frozen=True, slots=True)
class RanksResult:
    """How the ranks of this machine ended."""

    codes: tuple[int, ...] = ()
    """Those that are not 0; negative ones are signals."""
    signal: int = 0
    """The signal that stopped this process."""
    message: str = ""


def launch(arguments: Sequence[str], *, final: Collection[int]) -> RanksResult:
    """Run torchrun with these arguments in this process. Ranks that exit with a `final` code are not restarted."""
    agents: list[LocalElasticAgent] = []

    class Agent(LocalElasticAgent):
        """Does not restart what a restart cannot fix."""

        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            agents.append(self)

        def _monitor_workers(self, worker_group: Any) -> Any:
            result = super()._monitor_workers(worker_group)
            if any(failure.exitcode in final for failure in result.failures.values()):
                self._remaining_restarts = 0
            return result

    # launch_agent takes the class from its module's namespace; there is no other way to pass one.
    original, launcher.LocalElasticAgent = launcher.LocalElasticAgent, Agent
    try:
        run(parse_args(list(arguments)))
    except ChildFailedError as error:
        codes = {rank: failure.exitcode for rank, failure in sorted(error.failures.items())}
        by_rank = ", ".join(f"rank {rank} with {code}" for rank, code in codes.items())
        return RanksResult(tuple(codes.values()), message=f"the ranks of this machine exited: {by_rank}")
    except SignalException as error:
        return RanksResult(_codes(agents), error.sigval.value, f"stopped by {error.sigval.name}")
    except (RendezvousError, DistError) as error:
        return RanksResult((ExitCode.FAULT,), message=f"rendezvous failed: {error}")
    finally:
        launcher.LocalElasticAgent = original
    return RanksResult()


def _codes(agents: Sequence[LocalElasticAgent]) -> tuple[int, ...]:
    """Of ranks that exited after a signal, when torchrun no longer collects them."""
    context = agents[-1]._pcontext if agents else None
    handlers = getattr(context, "subprocess_handlers", {})
    codes = [handler.proc.poll() for handler in handlers.values()]
    return tuple(code for code in codes if code)
