"""Rank 0 tells of all ranks: the one that waits for its data is seen as such, and the losses are not touched."""

import pytest

from embark.diagnose.report import diagnose
from embark.diagnose.source import sources_of

pytestmark = pytest.mark.slow


def test_rank_that_waits_for_data_is_named_and_losses_are_unchanged(ranks):
    result = ranks(3, "train.num_steps=24", "watch.system_every_s=0.01", "watch.phases_every_s=0.01", name="told",
                 hook="integration.ranks.hooks:late")
    silent = ranks(3, "train.num_steps=24", "watch.system_every_s=0", "watch.phases_every_s=0", name="silent")
    assert (result.code, silent.code) == (0, 0), result.output + silent.output
    assert result.losses() == silent.losses()
    assert silent.events("ranks") == silent.events("phases") == []

    rows = result.events("ranks")[2:]
    assert {len(row["step_s"]) for row in rows} == {len(row["input_s"]) for row in rows} == {3}
    fast, late, other = (sum(row["input_s"][rank] for row in rows) / len(rows) for rank in range(3))
    assert late > 0.1
    assert late > 3 * max(fast, other)
    assert [machine["rank"] for machine in rows[-1]["systems"]] == [0]

    looks = result.events("phases")
    assert len(looks) >= 3
    own = [sum(look["own_s"][rank] for look in looks) / len(looks) for rank in range(3)]
    assert own[1] > 1.3 * max(own[0], own[2]), own

    found = {one.name: one for one in diagnose(sources_of([str(result.run_dir / "events.jsonl")]).sources).diagnoses}
    assert {"straggler", "slow-loader"} & set(found)
