"""The headline of a failed script is its cause, and not the last probe that failed."""

from __future__ import annotations

from cloudsim.account import Record
from cloudsim.headline import find_headline

PROBE = Record("az", ("aks", "show", "--name", "embark"), "stand-in", 3, "(ResourceNotFound) embark", 0.0)
WAITING = "Job dlrm: dlrm-0 waits: ImagePullBackOff: 403 Forbidden"


def record(error: str, *words: str) -> Record:
    return Record("kubectl", words, "stand-in", 1, error, 0.0)


def test_the_message_that_ended_the_script_is_the_headline():
    refused = record("Could not fetch resource:\n - The network was not found", "apply")
    headline, last = find_headline(f"+ kubectl apply\n{refused.error}\n", [PROBE, refused], [WAITING])
    assert (headline, last) == ("Could not fetch resource: - The network was not found", refused)


def test_a_probe_whose_message_is_thrown_away_does_not_count():
    headline, last = find_headline("creating\nno data in the bucket\n", [PROBE], [])
    assert (headline, last) == ("no data in the bucket", None)


def test_the_controller_explains_a_script_that_waited():
    for said in ("not all pods have started", "initiated scaling of nodegroup"):  # The last words are no reason.
        assert find_headline(f"{said}\n", [PROBE], [WAITING])[0] == WAITING
    said = "tail -f log waits for ever: nothing in the account will end it"
    assert find_headline(f"{said}\n", [], [WAITING])[0] == f"{WAITING} ({said})"
    late = record("error: timed out waiting for the condition", "wait", "job/dlrm")
    headline, last = find_headline(f"{late.error}\n", [late], [WAITING])
    assert (headline, last) == (WAITING, late)


def test_the_first_of_two_failures_is_the_cause():
    first, second = record("no such link", "get"), record("invalid length of an id", "get")
    headline, last = find_headline("no such link\ninvalid length of an id\n", [first, second], [])
    assert (headline, last) == ("no such link", first)


def test_the_fix_belongs_to_the_message_before_it():
    headline, _ = find_headline("error: the wheel is missing\n  fix: embark render run.toml\n", [], [])
    assert headline == "error: the wheel is missing fix: embark render run.toml"


def test_what_a_script_costs_and_goes_on_with_is_not_the_headline():
    said = "the cluster does not answer\nThe job goes on; ./train.sh follows it again\nThe cluster: 0.55 USD an hour\n"
    assert find_headline(said, [], [])[0] == "the cluster does not answer"
    refused = record("The Job is invalid", "apply")
    assert find_headline(f"{refused.error}\n+ eksctl scale\n2 x p4d: 43.92 USD an hour\n", [refused], [])[1] == refused


def test_a_wait_for_one_object_is_explained_by_that_object():
    broker = "StatefulSet dlrm-nats: dlrm-nats-0 waits: ImagePullBackOff: pull access denied"
    late = record("error: timed out waiting for the condition", "rollout", "status", "statefulset/dlrm-nats")
    assert find_headline(f"{late.error}\n", [late], [WAITING, broker])[0] == broker
