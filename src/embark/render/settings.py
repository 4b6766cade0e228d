"""The environment of training processes, per fabric, and how long they live after a notice.

The values and their reasons stand in settings.toml; here is how they meet a job.
"""

from collections.abc import Iterator
from dataclasses import fields
from functools import cache

from embark.catalog.pricing import POD_GRACE_S
from embark.values import JsonDict, JsonMap, frozen, read_table
from .job import Job, Setting
from .shell_text import render_template

MAX_THREADS = 16
TOPOLOGY_PATH = "/etc/embark/topology.xml"


@frozen
class FabricNeeds:
    """The requirements of a fabric on the pod that uses it, besides settings."""

    hugepages_2mi: str = ""
    ipc_lock: bool = False
    networks: tuple[tuple[str, str], ...] = ()
    """Interface in the pod and network of the cluster, for those beside the default."""
    daemon: str = ""  # The name of the container that goes with it; empty where none does.
    daemon_image: str = ""
    env_script: str = ""  # Script that a shell sources before the ranks start.
    why: str = ""


def settings_of(job: Job, *, is_pod: bool = True, has_fabric: bool = True) -> tuple[Setting, ...]:
    """Return all settings, in order; of two with one name the fabric's counts. `has_fabric` is false if someone else
    sets it up."""
    table = _table()
    found = [_setting(row) for row in table["every"]]
    found += _computed(job)
    if job.num_nodes > 1:
        found += [_setting(row) for row in table["several"] if "name" in row]
        if is_pod:
            found += [_setting(pod) for row in table["several"] for pod in row.get("pod", ())]
        found += [_setting(row) for row in _fabric(job).get("settings", ())] if has_fabric else []
        if has_fabric and topology_xml(job):
            found.append(Setting("NCCL_TOPO_FILE", TOPOLOGY_PATH,
                                 "which adapter is beside which GPU, which a virtual machine hides from NCCL"))
    return tuple({setting.name: setting for setting in found}.values())


def fabric_needs(job: Job) -> FabricNeeds:
    """Return the requirements of the fabric; none for one machine, which does not use it."""
    row = _fabric(job) if job.num_nodes > 1 else {}
    first = row.get("first_interface", 1)
    # A4X has four cards and half the networks of its kin.
    networks = row.get("networks", ())[:job.machine.num_fabric_devices or None]
    named = tuple((f"eth{first + i}", name) for i, name in enumerate(networks))
    known = {field.name: row[field.name] for field in fields(FabricNeeds) if field.name in row}
    return FabricNeeds(**known | {"networks": named})


def grace_s(job: Job) -> int:
    """Return the seconds from SIGTERM to SIGKILL: what the spec says, else what the cloud gives."""
    row = _table()["grace"][job.cloud]
    given = int(POD_GRACE_S[job.cloud] if job.is_spot else row["on_demand_s"])
    asked = job.place.grace_s
    if asked is None:
        return given
    return max(1, min(int(asked), int(row["max_spot_s"]))) if job.is_spot else max(1, int(asked))


def grace_reason(job: Job) -> str:
    return str(_table()["grace"][job.cloud]["spot_why"]) if job.is_spot else \
        "to save after a notice; a drained node waits as long"


def topology_xml(job: Job) -> str:
    """Return the file of NCCL_TOPO_FILE; empty if the machine shows its topology, or it is not known."""
    rows = [row for row in _table()["topology"].values() if job.machine.name in row["machines"]]
    return render_template("topology.xml.j2", row=rows[0]) if rows and job.num_nodes > 1 else ""


def _computed(job: Job) -> Iterator[Setting]:
    grace = grace_s(job)
    yield Setting("EMBARK_GRACE_S", str(grace), "how long there is to save after a notice; torchrun waits as long")
    price = job.usd_per_hour
    if price is not None:
        yield Setting("EMBARK_USD_PER_HOUR", f"{price:g}",
                      "of all machines, as the catalog has it: the run says what it cost, and keeps place.budget_usd")
    if job.num_cpus is not None:
        threads = max(1, min(MAX_THREADS, job.num_cpus // max(1, job.num_processes)))
        yield Setting("OMP_NUM_THREADS", str(threads), "each rank's share of the processors; torchrun would say 1")


def _fabric(job: Job) -> JsonMap:
    has_rdma = any(amount.startswith("rdma/") for amount in job.place.resources)
    name = "infiniband" if has_rdma else job.machine.fabric.name
    row: JsonMap = _table()["fabric"].get(name, {})
    return row


def _setting(row: JsonMap) -> Setting:
    return Setting(row["name"], row["value"], row["why"])


@cache
def _table() -> JsonDict:
    return read_table(__file__, "settings.toml")
