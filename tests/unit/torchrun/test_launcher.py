"""Which one code stands for the codes of all ranks of a machine."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest
from limits import HANG_S

from embark.render.job import EXITS
from embark.torchrun import launcher
from embark.torchrun.launcher import RanksResult, exit_code, is_range, prefix_output, set_shutdown_timeout


@pytest.mark.parametrize(("codes", "stopped_by", "expected"), [
    ([], 0, 0),
    ([75, 75], 0, 75),
    ([64, 70, -9], 0, 64),
    ([75, 70], 0, 70),
    ([75, -9], 0, 70),
    ([75, -15], 0, 75),
    ([75, -15, 70], 0, 70),
    ([-15], 0, 70),
    ([1, 75], 0, 1),
    ([1, -15], 0, 1),
    ([1, -11], 0, 70),
    ([75, 75], signal.SIGTERM, 75),
    ([-9, 75], signal.SIGTERM, 75),
    ([], signal.SIGTERM, 75),
    ([64], signal.SIGTERM, 64),
    ([130], signal.SIGINT, 130),
])
def test_the_code_that_tells_a_controller_most(codes, stopped_by, expected):
    assert exit_code(codes, stopped_by) == expected


def test_every_code_of_the_table_comes_through_alone():
    assert [exit_code([row.code]) for row in EXITS] == [row.code for row in EXITS]


@pytest.mark.parametrize(("grace", "expected"), [("120", "119"), ("15.5", "14"), ("1", "1"), ("", None), ("x", None),
                                                 ("inf", None)])
def test_torchrun_waits_as_long_as_the_cloud_gives(grace, expected):
    environ = {"EMBARK_GRACE_S": grace}
    set_shutdown_timeout(environ)
    assert environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT") == expected


def test_lines_begin_with_their_rank_unless_the_environment_differs():
    environ = {"PET_TEE": "0"}
    prefix_output(environ)
    assert environ["PET_TEE"] == "0"
    assert environ["TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"] == "[rank${rank}]:"
    assert environ["PYTHONUNBUFFERED"] == "1"


@pytest.mark.parametrize(("nnodes", "expected"), [("2", False), ("2:2", False), ("1:1", False), ("2:3", True)])
def test_only_a_range_of_machines_is_elastic(nnodes, expected):
    assert is_range(nnodes) is expected


def test_a_parent_that_ignores_sigchld_does_not_hide_how_ranks_ended(monkeypatch):
    """Ignored, it is inherited by programs, and `wait` reads 0 for every child: Ray's workers are such parents."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGCHLD, signal.SIGTERM)}
    environment = dict.fromkeys(("PET_TEE", "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE", "PYTHONUNBUFFERED"), "1")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    code_of_child: list[int] = []

    def launch(arguments: list[str]) -> RanksResult:
        code_of_child.append(subprocess.run(["sh", "-c", "exit 64"], check=False).returncode)
        return RanksResult(tuple(code_of_child))

    monkeypatch.setattr(launcher, "launch", launch)
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        assert launcher.main([]) == 64
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def test_a_signal_after_the_end_of_the_ranks_does_not_change_the_exit_code(tmp_path):
    rank = tmp_path / "rank.py"
    rank.write_text("raise SystemExit(75)")
    program = f"""
import os, signal, sys
from embark.torchrun import launcher

def signalled(*codes, original=launcher.exit_code):
    os.kill(os.getpid(), signal.SIGTERM)
    return original(*codes)

launcher.exit_code = signalled
sys.exit(launcher.main(["--standalone", "--nproc-per-node", "1", {str(rank)!r}]))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=HANG_S, check=False)
    assert done.returncode == 75, done.stderr


def test_events_of_the_rendezvous_name_who_recorded_them_as_torch_does():
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous

    def recorded(method_name):
        return method_name()

    def joins(method_name):
        return recorded(method_name)

    assert joins(launcher.method_name) == joins(dynamic_rendezvous.get_method_name) == "joins"
