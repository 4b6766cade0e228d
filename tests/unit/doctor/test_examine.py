"""The whole examination: of this machine for real, of prices, and of ranks that reach each other or do not."""

from __future__ import annotations

import datetime
import json
import subprocess
import sys
from pathlib import Path

import pytest
from limits import HANG_S

from embark.catalog import load_catalog
from embark.doctor.host import Host
from embark.doctor.machine import FRESH_DAYS, check_host, check_prices, check_versions
from embark.doctor.network import Facts, Probe, check_ranks


def test_this_machine_is_examined_for_real(tmp_path: Path):
    checks = list(check_host(Host(run_dir=tmp_path)))
    names = [check.name for check in checks]
    assert len(set(names)) == len(names)
    assert {"python", "system", "container", "torch", "torchrec", "gpu", "cpu bf16", "cores", "memory", "/dev/shm",
            "free disk", "disk speed", "open files", "processes", "c++ compiler", "clock", "fabric", "locked memory",
            "credentials", "prices"} <= set(names)
    for check in checks:
        assert bool(check.fix) == (check.verdict != "ok"), check
    reached = next(check for check in checks if check.name in ("gloo", "nccl"))
    assert reached.verdict == "ok", reached
    assert "all-reduce over" in reached.found


def test_the_machine_is_examined_without_loading_torch_here():
    code = ("import sys; from embark.doctor.machine import check_host; checks = check_host(); "
            "[next(checks) for _ in range(12)]; checks.close(); sys.exit('torch' in sys.modules)")
    assert subprocess.run([sys.executable, "-c", code], timeout=HANG_S, check=False).returncode == 0


@pytest.mark.parametrize(("days", "verdict"), [(0, "ok"), (FRESH_DAYS, "ok"), (FRESH_DAYS + 1, "warning")])
def test_prices_grow_old(days: int, verdict: str):
    catalog = load_catalog()
    dates = sorted(price.origin.date for price in catalog.prices.values())
    usual = datetime.date.fromisoformat(dates[len(dates) // 2])
    check = check_prices(usual + datetime.timedelta(days=days), catalog)
    assert check.verdict == verdict
    assert f"{days} days old" in check.found
    assert ("embark catalog refresh" in check.fix) == (verdict == "warning")


@pytest.mark.parametrize(("today", "verdict"), [
    ("2026-11-18", "ok"), ("2027-01-25", "ok"), ("2027-01-26", "warning"), ("2027-04-01", "warning")])
def test_versions_in_rendered_files_come_to_their_end(today: str, verdict: str):
    check = check_versions(datetime.date.fromisoformat(today))
    assert check.verdict == verdict
    assert "Kubernetes 1.35 on EKS" in check.found
    assert ("$0.60 an hour" in check.found) == (verdict == "warning")


def probe_command(**values: object) -> list[str]:
    facts = {"torch": "2.13.0", "cuda": None, "num_gpus": 0, "arches": [], "nccl": "", "trouble": "",
             "reduce": {"backend": "gloo", "num_ranks": 2, "error": "", "bytes_per_s": 2e9}, **values}
    return [sys.executable, "-c", f"import sys; print('hello'); open(sys.argv[1], 'w').write({json.dumps(facts)!r})"]


def facts_of(command: list[str], limit_s: float = HANG_S) -> Facts:
    probe = Probe(Host(), command)
    try:
        return probe.facts(limit_s)
    finally:
        probe.end()


def test_what_torch_reported_is_read_past_what_else_was_printed():
    facts = facts_of(probe_command(cuda="13.0", nccl="2.28.3", num_gpus=8, arches=["sm_90"]))
    assert (facts.cuda, facts.nccl, facts.num_gpus, facts.arches) == ("13.0", "2.28.3", 8, ["sm_90"])


def test_gpus_that_reduce_are_reported_with_their_speed():
    facts = facts_of(probe_command(cuda="13.0", nccl="2.28.3", num_gpus=8,
                       reduce={"backend": "nccl", "num_ranks": 8, "error": "", "bytes_per_s": 4.1e11}))
    (check,) = check_ranks(facts, 8)
    assert (check.name, check.verdict) == ("nccl", "ok")
    assert check.found == "NCCL 2.28.3, all-reduce over 8 GPUs at 410 GB/s"


@pytest.mark.parametrize(("error", "verdict", "words"), [
    ("", "ok", "NCCL 2.28.3 starts on the one GPU"),
    ("ncclSystemError: System call failed", "wrong", "ncclSystemError: System call failed"),
])
def test_nccl_is_tried_on_one_gpu_too(error: str, verdict: str, words: str):
    alone = {"backend": "gloo", "num_ranks": 2, "error": "", "bytes_per_s": 2e9, "nccl_error": error}
    gloo, nccl = check_ranks(facts_of(probe_command(cuda="13.0", nccl="2.28.3", num_gpus=1, reduce=alone)), 1)
    assert (gloo.name, gloo.verdict) == ("gloo", "ok")
    assert (nccl.name, nccl.verdict, nccl.found) == ("nccl", verdict, words)


def test_ranks_that_do_not_reach_each_other_are_wrong():
    broken = {"backend": "gloo", "num_ranks": 2, "error": "Gloo connectFullMesh failed", "bytes_per_s": 0.0}
    (check,) = check_ranks(facts_of(probe_command(reduce=broken)), 0)
    assert check.verdict == "wrong"
    assert "connectFullMesh" in check.found
    assert "GLOO_SOCKET_IFNAME" in check.fix


def test_gpus_that_torch_does_not_see_are_wrong():
    first, _ = check_ranks(facts_of(probe_command(cuda="13.0", num_gpus=2)), 8)
    assert (first.verdict, first.found) == ("wrong", "torch sees 2 of 8 GPUs")


def test_a_torch_that_does_not_load_is_wrong_with_its_own_last_line():
    command = [sys.executable, "-c", "raise ImportError('libcudart.so.13: cannot open shared object file')"]
    (check,) = check_ranks(facts_of(command), 0)
    assert check.verdict == "wrong"
    assert "libcudart.so.13" in check.found
    assert "embark.stack.versions install" in check.fix


def test_a_torch_that_hangs_is_ended():
    probe = Probe(Host(), [sys.executable, "-c", "import time; time.sleep(600)"])
    facts = probe.facts(0.3)
    assert "did not answer" in facts.trouble
    assert probe._process.poll() is not None
