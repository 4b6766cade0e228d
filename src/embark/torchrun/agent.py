"""torchrun's own launcher, asked for the exit codes of its ranks and told which of them are final."""

from __future__ import annotations

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
class Ended:
    """How the ranks of this machine ended."""

    codes: tuple[int, ...] = ()
    """Those that are not 0; negative ones are signals."""
    signal: int = 0
    """What this process itself was told to stop by."""
    what: str = ""


def launch(words: Sequence[str], *, final: Collection[int]) -> Ended:
    """Run torchrun with these words, in this process. Ranks that end with a `final` code are not started again."""
    agents: list[LocalElasticAgent] = []

    class Agent(LocalElasticAgent):
        """Does not restart what a restart cannot cure."""

        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            agents.append(self)

        def _monitor_workers(self, worker_group: Any) -> Any:
            result = super()._monitor_workers(worker_group)
            if any(failure.exitcode in final for failure in result.failures.values()):
                self._remaining_restarts = 0
            return result

    # launch_agent takes the class from its module's names, and nothing else can be handed in.
    original, launcher.LocalElasticAgent = launcher.LocalElasticAgent, Agent
    try:
        run(parse_args(list(words)))
    except ChildFailedError as error:
        codes = {rank: failure.exitcode for rank, failure in sorted(error.failures.items())}
        told = ", ".join(f"rank {rank} with {code}" for rank, code in codes.items())
        return Ended(tuple(codes.values()), what=f"the ranks of this machine ended: {told}")
    except SignalException as error:
        return Ended(_codes(agents), error.sigval.value, f"stopped by {error.sigval.name}")
    except (RendezvousError, DistError) as error:
        return Ended((ExitCode.FAULT,), what=f"the machines did not meet: {error}")
    finally:
        launcher.LocalElasticAgent = original
    return Ended()


def _codes(agents: Sequence[LocalElasticAgent]) -> tuple[int, ...]:
    """Of ranks that ended after a signal, when torchrun no longer asks."""
    context = agents[-1]._pcontext if agents else None
    handlers = getattr(context, "subprocess_handlers", {})
    codes = [handler.proc.poll() for handler in handlers.values()]
    return tuple(code for code in codes if code)
