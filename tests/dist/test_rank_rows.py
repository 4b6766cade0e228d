"""Rank 0 tells of all ranks: the one that waits for its data is seen as such, and the losses are not touched."""

import subprocess
import sys

import pytest

from embark.launch.diagnose import diagnose, sources_of
from tests.dist.conftest import Ranks, environment

pytestmark = pytest.mark.slow

SCRIPT = """
import os, sys, time
from embark.data.synthetic import SyntheticSource
from embark.spec import load_spec
from embark.train.loop import train

make = SyntheticSource.train_rows

def slow(*words):
    time.sleep(0.3)
    return make(*words)

if os.environ["RANK"] == "1":
    SyntheticSource.train_rows = slow
train(load_spec(sys.argv[1], sys.argv[2:]))
"""


@pytest.fixture
def slow_ranks(tmp_path, spec_file):
    """Three ranks, of which one gets its batches late."""

    def run(name: str, *sets: str) -> Ranks:
        script = tmp_path / "slow.py"
        script.write_text(SCRIPT)
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=3", str(script),
                   str(spec_file), f"name={name}", f"store.root={tmp_path}", "train.num_steps=26", *sets]
        done = subprocess.run(command, capture_output=True, text=True, env=environment(), cwd=tmp_path, timeout=240,
                              check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return Ranks(done.returncode, done.stdout + done.stderr, tmp_path / name)

    return run


def test_a_rank_that_waits_for_its_data_is_found_and_the_losses_are_those_of_a_run_that_tells_nothing(slow_ranks):
    told = slow_ranks("told", "watch.system_every_s=0.01", "watch.phases_every_s=0.01")
    silent = slow_ranks("silent", "watch.system_every_s=0", "watch.phases_every_s=0")
    assert told.losses() == silent.losses()
    assert silent.events("ranks") == silent.events("phases") == []

    rows = told.events("ranks")[2:]
    assert {len(row["step_s"]) for row in rows} == {len(row["input_s"]) for row in rows} == {3}
    fast, late, other = (sum(row["input_s"][rank] for row in rows) / len(rows) for rank in range(3))
    assert late > 0.1
    assert late > 3 * max(fast, other)
    assert [machine["rank"] for machine in rows[-1]["systems"]] == [0]

    looks = told.events("phases")
    assert len(looks) >= 3
    own = [sum(look["own_s"][rank] for look in looks) / len(looks) for rank in range(3)]
    assert own[1] > 1.3 * max(own[0], own[2]), own

    found = {one.name: one for one in diagnose(sources_of([str(told.run_dir / "events.jsonl")]).sources).diagnoses}
    assert {"straggler", "slow-loader"} & set(found)
