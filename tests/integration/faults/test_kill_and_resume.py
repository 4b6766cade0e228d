"""A run of one rank that is killed in a save and between saves resumes and gives the losses of one that was not."""

from __future__ import annotations

import signal

from integration.faults.conftest import Run

HOOKS = "integration.faults.hooks"
SETS = ("data.num_eval_samples=0",)


def test_a_run_killed_in_a_save_and_between_saves_gives_the_same_losses(zygote, run, tmp_path_factory):
    undisturbed = Run(zygote, tmp_path_factory.mktemp("undisturbed"), sets=SETS)
    assert undisturbed.ends(1) == [0], undisturbed.output()
    run.sets = SETS

    assert run.ends(1, hook=f"{HOOKS}:die_writing", victim=0, word="rank-00000") == [-signal.SIGKILL], run.output()
    assert (run.committed(), run.unfinished()) == ([], [5])
    between = {"hook": f"{HOOKS}:die_at_step", "victim": 0, "step": 7, "word": "step-000000005/commit.json"}
    assert run.ends(1, **between) == [-signal.SIGKILL], run.output()
    assert (run.committed(), run.unfinished()) == ([5], [])
    assert run.ends(1) == [0], run.output()

    assert [event["step"] for event in run.events("resume")] == [5]
    values = {step: set(map(repr, losses)) for step, losses in run.losses().items()}
    assert values == {step: set(map(repr, losses)) for step, losses in undisturbed.losses().items()}
    assert sorted(values) == list(range(1, 13))
    assert run.committed() == undisturbed.committed()
