"""A pod's end is judged by the manifest's own policy."""

from __future__ import annotations

import pytest
from render_jobs import job_of

from embark.kubernetes.failure_policies import FailurePolicy, PodEnd
from embark.rehearse.manifest import find_training_job, read_texts
from embark.rehearse.workload import Workload, make_workload
from embark.render.targets.kubernetes import render_job, render_jobset, render_pytorchjob, render_trainjob

ELASTIC = {"nodes": {"min": 2, "max": 3}}


def made(render, old: str = "", new: str = "", **place) -> tuple[Workload, FailurePolicy]:
    text = render(job_of("p4d.24xlarge", **place))[0].text
    assert old in text
    objects = read_texts({"a.yaml": text.replace(old, new)})
    return make_workload(find_training_job(objects, "a.yaml"), objects)


def test_a_job_is_complete_when_every_index_is():
    workload, policy = made(render_job)
    first, second = workload.pods
    assert policy.decide(PodEnd(first, 0)).action == "done"
    assert policy.decide(PodEnd(second, 0)).action == "succeed"


@pytest.mark.parametrize(("code", "is_preempted", "action", "words"), [
    (75, False, "replace", "not counted, by rule 2"),
    (137, True, "replace", "was preempted: not counted, by rule 0"),
    (64, False, "fail", "failed with exit code 64 matching FailJob rule at index 1"),
    (70, False, "replace", "failure 1 of the 6"),
    (1, False, "replace", "failure 1 of the 6"),
])
def test_the_rendered_policy_tells_the_exit_codes_apart(code, is_preempted, action, words):
    workload, policy = made(render_job)
    decision = policy.decide(PodEnd(workload.pods[0], code, is_preempted))
    assert decision.action == action
    assert words in decision.text


def test_failures_are_counted_up_to_the_limit_and_preemptions_are_not():
    workload, policy = made(render_job)
    pod = workload.pods[0]
    for _ in range(20):
        assert policy.decide(PodEnd(pod, 143, True)).action == "replace"
    assert [policy.decide(PodEnd(pod, 70)).action for _ in range(7)] == ["replace"] * 6 + ["fail"]


def test_a_rule_of_another_container_does_not_count():
    workload, policy = made(render_job, "containerName: trainer", "containerName: other")
    assert policy.decide(PodEnd(workload.pods[0], 64)).action == "replace"


def test_not_in_matches_the_codes_that_are_not_listed():
    values = "\n        values:\n        - "
    workload, policy = made(render_job, f"operator: In{values}64", f"operator: NotIn{values}70")
    assert policy.decide(PodEnd(workload.pods[0], 3)).action == "fail"
    assert policy.decide(PodEnd(workload.pods[0], 70)).action == "replace"


def test_without_a_limit_a_job_has_kubernetes_own_of_six():
    workload, policy = made(render_job, "  backoffLimit: 6\n", "")
    assert [policy.decide(PodEnd(workload.pods[0], 1)).action for _ in range(7)] == ["replace"] * 6 + ["fail"]


def test_a_jobset_starts_all_again_and_a_preemption_costs_no_restart():
    workload, policy = made(render_jobset)
    pod = workload.pods[1]
    for _ in range(10):
        assert policy.decide(PodEnd(pod, 143, True)).action == "restart all"
        assert policy.decide(PodEnd(pod, 75)).action == "restart all"
    assert [policy.decide(PodEnd(pod, 70)).action for _ in range(4)] == ["restart all"] * 3 + ["fail"]


def test_a_jobset_does_not_try_a_wrong_spec_again():
    workload, policy = made(render_jobset)
    decision = policy.decide(PodEnd(workload.pods[0], 64))
    assert decision.action == "fail"
    assert "by its rule 'wrong'" in decision.text


def test_a_jobset_is_complete_when_its_jobs_are():
    workload, policy = made(render_jobset)
    assert [policy.decide(PodEnd(pod, 0)).action for pod in workload.pods] == ["done", "succeed"]


def test_a_jobset_that_began_again_needs_every_pod_again():
    workload, policy = made(render_jobset)
    first, second = workload.pods
    policy.decide(PodEnd(first, 0))
    policy.decide(PodEnd(second, 70))
    assert [policy.decide(PodEnd(pod, 0)).action for pod in (second, first)] == ["done", "succeed"]


def test_a_trainjob_replaces_one_pod_as_its_runtime_says():
    workload, policy = made(render_trainjob)
    assert policy.decide(PodEnd(workload.pods[0], 75)).action == "replace"
    assert policy.decide(PodEnd(workload.pods[0], 64)).action == "fail"


def test_a_pytorchjob_counts_every_restart():
    workload, policy = made(render_pytorchjob)
    pod = workload.pods[0]
    ends = [policy.decide(PodEnd(pod, 75, number % 2 == 0)).action for number in range(21)]
    assert ends == ["replace"] * 20 + ["fail"]


@pytest.mark.parametrize(("policy", "code", "action"), [
    ("Never", 1, "fail"), ("ExitCode", 1, "fail"), ("ExitCode", 143, "replace"), ("OnFailure", 1, "replace"),
])
def test_a_pytorchjob_restarts_as_its_replicas_say(policy, code, action):
    workload, policy = made(render_pytorchjob, "restartPolicy: OnFailure", f"restartPolicy: {policy}")
    assert policy.decide(PodEnd(workload.pods[0], code)).action == action


def test_an_elastic_job_is_complete_with_its_first_index_and_no_other():
    workload, policy = made(render_job, **ELASTIC)
    assert policy.decide(PodEnd(workload.pods[1], 0)).action == "done"
    assert policy.decide(PodEnd(workload.pods[0], 0)).action == "succeed"


@pytest.mark.parametrize(("rule", "succeeded", "action"), [
    ("succeededIndexes: '1-2'", (1,), "done"), ("succeededIndexes: '1-2'", (1, 2), "succeed"),
    ("succeededCount: 2", (2,), "done"), ("succeededCount: 2", (0, 2), "succeed"),
    ("{succeededIndexes: '0,2', succeededCount: 1}", (1,), "done"),
    ("{succeededIndexes: '0,2', succeededCount: 1}", (2,), "succeed"),
])
def test_a_job_s_success_policy_counts_as_it_says(rule, succeeded, action):
    workload, policy = made(render_job, "succeededIndexes: '0'", rule, **ELASTIC)
    assert [policy.decide(PodEnd(workload.pods[index], 0)).action for index in succeeded][-1] == action


def test_the_first_worker_of_an_elastic_pytorchjob_that_is_done_ends_it():
    workload, policy = made(render_pytorchjob, **ELASTIC)
    assert len(workload.pods) == 3
    assert policy.decide(PodEnd(workload.pods[1], 0)).action == "succeed"
