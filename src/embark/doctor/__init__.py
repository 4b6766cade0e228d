"""Is this machine ready to train? Looks, changes nothing, and loads no torch itself: a child process does."""

from __future__ import annotations

import datetime
from collections.abc import Iterator

from embark.doctor.check import Check, of_finding
from embark.doctor.here import Here
from embark.stack import versions as stack

__all__ = ["Check", "Here", "examine"]


def examine(here: Here | None = None, today: datetime.date | None = None) -> Iterator[Check]:
    """Everything looked at, in the order it should be mended, each as soon as it is known."""
    from embark.doctor.credentials import credentials
    from embark.doctor.disk import disk
    from embark.doctor.gpus import driver_for, gpus, list_gpus
    from embark.doctor.machine import host
    from embark.doctor.network import network
    from embark.doctor.prices import prices
    from embark.doctor.ranks import Facts, Probe, ranks

    here = here or Here()
    packages = stack.installed()
    # Torch takes seconds to load, and the rest does not wait for it.
    probe = Probe(here) if packages["torch"] else None
    try:
        found = list_gpus(here)
        yield from host(here)
        yield from map(of_finding, stack.check(packages, gpu=bool(found)))
        yield from gpus(here, found, packages)
        yield from network(here)
        yield from disk(here)
        yield from credentials(here)
        yield from prices(today or datetime.date.today())
        facts = probe.facts() if probe else Facts()
        yield from driver_for(here, facts.cuda, facts.arches, found)
        if probe:
            yield from ranks(facts, len(found))
    finally:
        if probe:
            probe.end()
