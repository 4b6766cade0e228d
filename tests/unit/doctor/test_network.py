"""EFA and InfiniBand are judged by /sys, /dev and what NCCL would find."""

from __future__ import annotations

import resource

import pytest

from embark.doctor.network import check_network, devices

UNLIMITED = resource.RLIM_INFINITY
FI_INFO = "provider: efa\n    fabric: efa\n    domain: rdmap0s6-rdm\n    version: 122.0\n    type: FI_EP_RDM\n"


def infiniband(machine, name: str = "mlx5_0", state: str = "4: ACTIVE", layer: str = "InfiniBand",
               rate: str = "400 Gb/sec (4X NDR)") -> None:
    base = f"/sys/class/infiniband/{name}/ports/1"
    for file, text in (("state", state), ("link_layer", layer), ("rate", rate)):
        machine.has(f"{base}/{file}", f"{text}\n")


def efa(machine, name: str = "rdmap16s27") -> None:
    machine.has(f"/sys/class/infiniband/{name}/device/vendor", "0x1d0f\n")
    machine.has(f"/sys/class/infiniband/{name}/ports/1/link_layer", "Unspecified\n")
    machine.has(f"/sys/class/infiniband/{name}/ports/1/state", "4: ACTIVE\n")


def verbs(machine) -> None:
    machine.has("/dev/infiniband/uverbs0")


def looked_at(machine) -> dict[str, tuple[str, str, str]]:
    return {check.name: (check.verdict, check.found, check.fix) for check in check_network(machine.host)}


def test_a_machine_without_a_fabric_is_well_and_reports_it(machine):
    found = looked_at(machine)
    assert found["fabric"][0] == "ok"
    assert "TCP" in found["fabric"][1]
    assert list(found) == ["fabric", "locked memory"]


def test_eight_ports_of_infiniband_are_counted_with_their_rate(machine, with_limits):
    with_limits(UNLIMITED, UNLIMITED)
    verbs(machine)
    for number in range(8):
        infiniband(machine, f"mlx5_{number}")
    assert looked_at(machine)["fabric"][:2] == ("ok", "8 x InfiniBand 400 Gb/sec")


def test_a_port_that_is_down_is_named(machine, with_limits):
    with_limits(UNLIMITED, UNLIMITED)
    verbs(machine)
    infiniband(machine, "mlx5_0")
    infiniband(machine, "mlx5_1", state="1: DOWN")
    verdict, found, _ = looked_at(machine)["fabric"]
    assert verdict == "warning"
    assert found.endswith("down: mlx5_1")


def test_ethernet_under_rdma_is_called_so(machine):
    infiniband(machine, layer="Ethernet", rate="200 Gb/sec (4X HDR)")
    (port,) = devices(machine.host)
    assert (port.kind, port.rate) == ("RoCE", "200 Gb/sec")


def test_devices_that_the_container_was_not_given_are_wrong(machine, with_limits):
    with_limits(UNLIMITED, UNLIMITED)
    infiniband(machine)
    verdict, _, fix = looked_at(machine)["fabric"]
    assert verdict == "wrong"
    assert "rdma/ib" in fix


def test_efa_wants_libfabric_and_a_plugin(machine, with_limits):
    with_limits(UNLIMITED, UNLIMITED)
    verbs(machine)
    efa(machine)
    found = looked_at(machine)
    assert found["fabric"][:2] == ("ok", "1 x EFA")
    assert found["libfabric"][0] == "wrong"
    assert found["nccl plugin"][0] == "wrong"
    assert "TCP" in found["nccl plugin"][2]
    machine.runs("fi_info", ("-p efa", FI_INFO))
    machine.has("/opt/amazon/ofi-nccl/lib/x86_64-linux-gnu/libnccl-net.so")
    found = looked_at(machine)
    assert found["libfabric"][0] == "ok"
    assert found["nccl plugin"][0] == "ok"


def test_a_plugin_on_the_library_path_is_found(machine, with_limits):
    with_limits(UNLIMITED, UNLIMITED)
    verbs(machine)
    efa(machine)
    machine.env["LD_LIBRARY_PATH"] = "/mine/lib:/other"
    machine.has("/mine/lib/libnccl-net-ofi.so.0")
    assert looked_at(machine)["nccl plugin"][0] == "ok"


@pytest.mark.parametrize(("has_device", "soft", "verdict"), [
    (False, 65536, "ok"), (True, 65536, "wrong"), (True, UNLIMITED, "ok"),
])
def test_memory_must_be_lockable_where_there_is_rdma(machine, with_limits, has_device: bool, soft: int, verdict: str):
    with_limits(soft, soft)
    if has_device:
        infiniband(machine)
        verbs(machine)
    assert looked_at(machine)["locked memory"][0] == verdict
