"""Planted faults are stopped, good versions are not: `bench/gate.py` measures it with many seeds, this with one."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest

from embark.publish.gate import GateSlice, ScoredRows, earlier_gate, judge, to_record
from embark.spec.serve import PublishSpec

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def bench():
    found = importlib.util.spec_from_file_location("bench_gate", ROOT / "bench" / "gate.py")
    module = sys.modules["bench_gate"] = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def test_planted_faults_are_stopped_and_good_versions_are_not(bench):
    found = bench.run_seed(seed=1, num_hours=1, num_rows=20_000, num_gate=30_000)
    assert found["alarms"] == []
    assert len(found["stopped"]) == 3
    assert all(found["stopped"].values()), found


def scored(seed: int, num: int = 20_000, **changes) -> ScoredRows:
    rng = np.random.default_rng(seed)
    logit = rng.normal(-1, 1, num)
    truth = 1 / (1 + np.exp(-logit))
    values = {"label": rng.random(num) < truth, "candidate": truth, "published": truth,
              "slices": [GateSlice("country = de", np.arange(num // 50)), GateSlice("tiny", np.arange(50))]}
    return ScoredRows(**{**values, **{name: change(values) for name, change in changes.items()}})


def test_a_refusal_says_where_by_how_much_and_how_surely():
    def wrong_in_slice(values):
        scores = values["candidate"].copy()
        scores[:400] = 0.9
        return scores

    verdict = judge(scored(0, candidate=wrong_in_slice), PublishSpec(max_loss_increase=0.05, max_auc_drop=0.05))
    assert not verdict.is_passed
    assert {one.on for one in verdict.refusals} == {"country = de"}
    assert "country = de: " in verdict.why
    assert "standard errors beyond; 400 rows)" in verdict.why
    assert all(one.on != "tiny" for one in verdict.refusals)


def test_the_record_of_a_version_is_what_the_next_one_is_compared_with():
    first = judge(scored(0), PublishSpec())
    assert first.is_passed
    earlier = earlier_gate(to_record(first))
    assert earlier.auc.value == first.auc
    again = judge(scored(1, earlier=lambda _: earlier), PublishSpec())
    assert again.is_passed
    assert again.num_tests > first.num_tests
    flipped = judge(scored(1, earlier=lambda _: earlier, label=lambda values: ~values["label"],
                           candidate=lambda values: 1 - values["candidate"]), PublishSpec())
    assert {one.name for one in flipped.refusals} >= {"AUC since publication", "calibration since publication"}
    assert judge(scored(1, label=lambda values: ~values["label"], candidate=lambda values: 1 - values["candidate"]),
                 PublishSpec()).is_passed  # which the published version's record alone shows
    assert earlier_gate({"passed": True}).auc is None
