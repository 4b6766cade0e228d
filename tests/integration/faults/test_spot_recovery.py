"""A run that is taken away comes back by its controller's rule, and its end says what that cost."""

from __future__ import annotations

import re
import signal

import pytest
from integration.faults.conftest import Ranks, Run

from embark.launch.costs import run_cost
from embark.render.job import EXITS

pytestmark = pytest.mark.slow

PRICE = {"EMBARK_USD_PER_HOUR": "3600"}
"""A dollar a second."""
SLOW = {"hook": "integration.faults.hooks:slow", "method": "embark.trainers.torch.engines.pipeline:PipelineEngine.step",
        "word": "", "seconds": 0.1}


def starts_again(codes: list[int]) -> bool:
    """As the manifests' failure policy has it: a pod that was killed, or one that ended with a code to retry."""
    must = {int(row.code): row.must_retry for row in EXITS}
    return any(codes) and all(code < 0 or must.get(code, False) for code in codes if code)


class Controller:
    """Brings a run back for as long as its rule says so; what happens to each start is the test's."""

    def __init__(self, run: Run, *sets: str) -> None:
        self.run, self.sets, self.codes = run, sets, []

    def goes(self, happens, tmp_path) -> bool:
        ranks = self.run.start(2, *self.sets, env=PRICE, mark=str(tmp_path / "mark"), **SLOW)
        happens(ranks)
        self.codes.append(ranks.codes())
        return starts_again(self.codes[-1])


def test_a_lost_rank_and_a_notice_are_survived_and_their_cost_is_reported(run, undisturbed, tmp_path):
    controller = Controller(run)

    def loses_a_rank(ranks: Ranks) -> None:
        ranks.until(lambda: run.committed() and run.last_step() >= 7)
        ranks.kill(signal.SIGKILL, 1)

    def is_told_to_go(ranks: Ranks) -> None:
        ranks.until(lambda: len(run.events("start")) == 2 and run.events("step")[-1]["step"] >= 8)
        ranks.kill(signal.SIGTERM)

    assert controller.goes(loses_a_rank, tmp_path), run.output()
    assert controller.goes(is_told_to_go, tmp_path), run.output()
    assert not controller.goes(lambda ranks: None, tmp_path), run.output()
    assert controller.codes[1:] == [[75, 75], [0, 0]]

    values = {step: {round(loss, 12) for loss in losses} for step, losses in run.losses().items()}
    assert values == {step: {round(loss, 12) for loss in losses} for step, losses in undisturbed.losses().items()}

    end = run.events("end")[-1]
    first_resume = run.events("resume")[0]["step"]
    stopped = max(e["step"] for e in run.events("step")[: position_of_second_start(run)])
    assert end["num_interruptions"] == 2
    assert end["lost_steps"] == stopped - first_resume > 0  # the second stop saved, and lost none
    assert end["redone_s"] >= 0.1 * end["lost_steps"]
    assert end["waited_s"] > 0
    # Both machines are this one and stay, so all of it is paid: a dollar a second.
    assert end["lost_usd"] == pytest.approx(end["redone_s"] + end["waited_s"])
    starts, last_s = run.events("start"), end["time_s"]
    assert end["spent_usd"] == pytest.approx(last_s - (starts[0]["time_s"] - starts[0]["age_s"]), abs=0.5)
    cost = run_cost(str(run.path), lambda _: None)
    assert cost.spent_usd == pytest.approx(end["spent_usd"], abs=0.5)
    assert (cost.left_s, cost.spending.lost.num) == (0.0, 2)
    assert re.search(rf"interrupted twice; {end['lost_steps']} steps? \([\d.]+ s\) repeated, [\d.]+ s down: "
                     r"\$\d+\.\d\d · \$\d+\.\d\d in all", run.output())


def test_spent_budget_saves_and_ends_the_run_for_good(run, undisturbed, tmp_path):
    """Three starts: one that dies, one that the money ends, and one that is refused; then a larger one finishes."""
    ranks = run.start(2, env=PRICE, mark=str(tmp_path / "mark"), **SLOW)
    ranks.until(lambda: run.last_step() >= 2)
    ranks.kill(signal.SIGKILL)
    ranks.codes()
    start = run.events("start")[0]
    spent = run.events("step")[-1]["time_s"] - (start["time_s"] - start["age_s"])
    budget = f"place.budget_usd={spent + 8}"
    slower = {**SLOW, "seconds": 1.0}
    codes = run.ends(2, budget, env=PRICE, mark=str(tmp_path / "mark"), **slower)
    assert codes == [64, 64], run.output()
    assert not starts_again(codes)
    end = run.events("end")[-1]
    assert end["outcome"] == "budget"
    assert run.committed()[-1] == end["step"] < 12
    refused = Run(run.zygote, run.directory, started=run.started)
    assert refused.ends(2, budget, env=PRICE) == [64, 64]
    assert "of its budget of" in run.output()
    assert len(run.events("start")) == 2
    assert run.ends(2, f"place.budget_usd={spent + 1000}", env=PRICE) == [0, 0], run.output()
    assert run.events("end")[-1]["outcome"] == "done"
    assert {s: set(v) for s, v in run.losses().items()} == {s: set(v) for s, v in undisturbed.losses().items()}


def position_of_second_start(run: Run) -> int:
    """How many steps were told before it."""
    kinds = [e["event"] for e in run.events("start", "step")]
    second = [i for i, kind in enumerate(kinds) if kind == "start"][1]
    return kinds[:second].count("step")
