"""The sentence of a verdict, from what happened and what the manifest says."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
from render_jobs import job_of

from embark.kubernetes.failure_policies import PodEnd
from embark.rehearse.controller import Fault, Outcome, Progress, Resume
from embark.rehearse.manifest import read_texts
from embark.rehearse.training import PreparedTraining, prepare_training
from embark.rehearse.verdict import Case, judge_outcome
from embark.render.targets.kubernetes import render_job


@cache
def prepared() -> PreparedTraining:
    texts = {"job.yaml": render_job(job_of("p4d.24xlarge"))[0].text}
    return prepare_training(texts, read_texts(texts))


def ended(index: int, code: int, **how: bool) -> PodEnd:
    return PodEnd(prepared().workload.pods[index], code, at_s=3.0, **how)


GOOD = Progress(world_sizes=[4], num_steps=100, step=100, saved=[50, 100], losses={100: 0.5}, is_done=True)


def case(progress: Progress = GOOD, *, finish: str = "succeeded", ends=(), tails=None, running=(), done=(),
         left=()) -> Case:
    outcome = Outcome(finish, "the controller's word", progress, tuple(ends), tuple(running), tails or {}, tuple(done),
                      tuple(left), 12.0)
    return Case(prepared().workload, outcome, prepared().run, 2)


def test_all_of_it_must_hold():
    verdict = judge_outcome(case())
    assert verdict.is_ok
    assert verdict.sentence == "2 pods of 2 processes met, trained 100 steps and saved, in 12.0 s"
    assert {check.name for check in verdict.checks} == {"controller", "rendezvous", "trained", "checkpoint"}
    assert verdict.final_loss == 0.5


@pytest.mark.parametrize(("progress", "wrong"), [
    (replace(GOOD, world_sizes=[]), "rendezvous"),
    (replace(GOOD, world_sizes=[4, 3]), "rendezvous"),
    (replace(GOOD, is_done=False, step=40), "trained"),
    (replace(GOOD, saved=[]), "checkpoint"),
])
def test_one_that_does_not_hold_is_enough(progress, wrong):
    verdict = judge_outcome(case(progress))
    assert not verdict.is_ok
    assert wrong in {check.name for check in verdict.checks if not check.is_ok}


def test_after_a_lost_pod_the_run_must_have_resumed():
    lost = (Fault("kill", 1, 5.0),)
    assert not judge_outcome(case(done=lost)).is_ok
    verdict = judge_outcome(case(replace(GOOD, resumes=[Resume(40, 7)]), done=lost))
    assert verdict.is_ok
    assert "resumed from step 40 with 7 steps lost" in verdict.sentence
    assert verdict.lost_steps == 7


def test_a_fault_that_was_never_done_is_no_rehearsal_of_it():
    verdict = judge_outcome(case(left=(Fault("lose", 1, 60.0),)))
    assert verdict.sentence == "the run ended after 12.0 s, before --lose 1@60s: that fault was not rehearsed"


def test_a_run_that_was_too_slow_says_how_far_it_came():
    late = replace(GOOD, step=40, is_done=False)
    verdict = judge_outcome(case(late, finish="too long", running=("dlrm-0", "dlrm-1")))
    assert verdict.sentence == ("the run was at step 40 of 100 at the time limit, and dlrm-0 and dlrm-1 had not "
                                "ended")


def test_a_spec_that_the_run_refuses_is_reported_in_its_words():
    tails = {"dlrm-0": ("error: 1 mistake in the spec", "  spec.toml:3: train.batch = 5", "    no such field")}
    ends = [ended(0, 64)]
    verdict = judge_outcome(case(Progress(), finish="failed", ends=ends, tails=tails))
    assert "1 mistake in the spec; spec.toml:3: train.batch = 5; no such field" in verdict.sentence
    assert "image is older than the spec" in verdict.fix


def test_what_diagnose_knows_it_says():
    tails = {"dlrm-1": ("RuntimeError: CUDA error: out of memory", "torch.OutOfMemoryError: CUDA out of memory. Tried")}
    verdict = judge_outcome(case(Progress(), finish="failed", ends=[ended(1, 1)], tails=tails))
    assert "memory" in verdict.sentence
    assert verdict.evidence


@pytest.mark.parametrize(("end", "is_reported"), [
    (ended(0, 137), True),
    (ended(0, 137, is_preempted=True), False),
    (ended(0, 137, is_deleted=True), False),
    (ended(0, 1), False),
])
def test_a_pod_that_nobody_killed_and_is_killed_was_out_of_memory(end, is_reported):
    one = case(replace(GOOD, is_done=False), finish="failed", ends=[end])
    verdict = judge_outcome(one)
    assert (verdict.sentence == "dlrm-0 was killed without notice (exit code 137): it exceeded this machine's "
                                "memory") == is_reported
    assert ("embark plan" in verdict.fix) == is_reported


def test_what_nobody_knows_is_the_controllers_word_and_the_last_line():
    tails = {"dlrm-0": ("first", "it went wrong somehow")}
    verdict = judge_outcome(case(Progress(), finish="failed", ends=[ended(0, 1)], tails=tails))
    assert (verdict.sentence, verdict.evidence) == ("the controller's word", "it went wrong somehow")
