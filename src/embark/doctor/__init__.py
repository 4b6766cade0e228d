"""Checks whether this machine, or with `account` the cloud account, is ready to train; every check has its fix. Changes
nothing, and loads torch only in a child process. May import diagnose and below."""

import datetime
from collections.abc import Iterator

from embark.doctor.check import Check, Host, check
from embark.stack import versions as stack

__all__ = ["Check", "Host", "check_host"]


def check_host(host: Host | None = None, today: datetime.date | None = None) -> Iterator[Check]:
    """All checks of a machine, in the order to fix them, each as soon as it is known."""
    from embark.doctor.credentials import check_credentials
    from embark.doctor.gpus import check_driver, check_gpus, list_gpus
    from embark.doctor.machine import check_disk, check_machine, check_prices
    from embark.doctor.network import Facts, Probe, check_network, check_ranks

    host = host or Host()
    packages = stack.installed()
    # Torch takes seconds to load, and the rest does not wait for it.
    probe = Probe(host) if packages["torch"] else None
    try:
        found = list_gpus(host)
        yield from check_machine(host)
        for one in stack.check(packages, gpu=bool(found)):
            yield check(one.name, one.ok, one.found or "missing", one.expected, one.fix)
        yield from check_gpus(host, found, packages)
        yield from check_network(host)
        yield from check_disk(host)
        yield from check_credentials(host)
        yield check_prices(today or datetime.date.today())
        facts = probe.facts() if probe else Facts()
        yield from check_driver(host, facts.cuda, facts.arches, found)
        if probe:
            yield from check_ranks(facts, len(found))
    finally:
        if probe:
            probe.end()
