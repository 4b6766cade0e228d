"""What happens to a simulated account without a command of its user: a machine is lost, a login expires, a disk fills
up, years go by."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from cloudsim.account import Account, Call

FILE = "faults.json"
GPU = "nvidia.com/gpu"
OLD = "1.33"
"""A version of Kubernetes whose standard support has ended."""

Fault = tuple[str, str]
"""The name of one of `FAULTS`, and the beginning of the command before which it happens; empty: the next one."""


def ask_for(folder: Path, faults: Sequence[Fault]) -> None:
    """Let faults happen in the account of this folder, whose process has called `let_faults_happen`."""
    (folder / FILE).write_text(json.dumps(faults))


def pending(folder: Path) -> list[Fault]:
    """Return the faults that have not happened yet."""
    return [tuple(one) for one in json.loads((folder / FILE).read_text())] if (folder / FILE).exists() else []


def let_faults_happen(account: Account) -> None:
    """Before each command, let those of the faults that `ask_for` has written happen whose time has come."""
    run = account.run

    def run_after_faults(call: Call) -> Any:
        if waiting := pending(account.folder):
            command = shlex.join([call.program, *call.words])
            left = [(name, begin) for name, begin in waiting
                    if not (command.startswith(begin) and FAULTS[name](account))]
            ask_for(account.folder, left)
        return run(call)

    account.run = run_after_faults  # type: ignore[method-assign]


def lose_machine(account: Account) -> bool:
    """Lose a machine with GPUs; its pool starts another one."""
    for cluster in account.clusters.values():
        for node in cluster.nodes:
            if GPU in cluster.pools[node.pool].allocatable:
                num_nodes = len(cluster.nodes_of(node.pool))
                cluster.nodes.remove(node)
                cluster.resize_pool(node.pool, num_nodes)
                return True
    return False


def expire_login(account: Account) -> bool:
    account.has_login = False
    return True


def fill_volume(account: Account) -> bool:
    """Fill the volume that the pods mount."""
    for cluster in account.clusters.values():
        cluster.full_paths.add("/mnt/data")
    return True


def age_cluster(account: Account) -> bool:
    """Let the cluster's version of Kubernetes be one whose support has ended."""
    for cluster in account.clusters.values():
        cluster.version = OLD
    if account.cloud == "aws":
        for eks in account.backends("eks").values():  # type: ignore[attr-defined]
            for one in eks.clusters.values():
                one.version = OLD
    for resource in account.resources:
        if "kubernetesVersion" in resource.attributes.get("body", {}):
            resource.attributes["body"]["kubernetesVersion"] = OLD
    return True


FAULTS: dict[str, Callable[[Account], bool]] = {
    "machine lost": lose_machine, "login expired": expire_login, "volume full": fill_volume, "old cluster": age_cluster}
"""Functions that let something happen; False: not yet."""
