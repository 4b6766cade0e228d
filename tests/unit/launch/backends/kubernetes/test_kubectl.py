"""What kubectl says when something is wrong, as its versions write it, and what is made of it."""

from __future__ import annotations

import pytest

from embark.errors import Fault, UserError
from embark.launch.backends.kubernetes.kubectl import Cluster, NoSuchKind, classify_error
from embark.launch.shell import CommandResult

CASES = [
    ("The connection to the server 10.0.0.1:443 was refused - did you specify the right host or port?", "away"),
    ("Unable to connect to the server: dial tcp: lookup x.eks.amazonaws.com: no such host", "away"),
    ("Unable to connect to the server: net/http: TLS handshake timeout", "away"),
    ("Unable to connect to the server: EOF", "away"),
    ("Error from server (ServiceUnavailable): the server is currently unable to handle the request", "away"),
    ("Error from server: etcdserver: request timed out", "away"),
    ("Error from server (TooManyRequests): the server has received too many requests", "away"),
    ("error: You must be logged in to the server (Unauthorized)", "token"),
    ("error: You must be logged in to the server (the server has asked for the client to provide credentials)",
     "token"),
    ("An error occurred (ExpiredToken) when calling the GetCallerIdentity operation\n"
     "Unable to connect to the server: getting credentials: exec: executable aws failed with exit code 255", "token"),
    ('error: the server doesn\'t have a resource type "jobset"', "no such kind"),
    ('error: unable to recognize "STDIN": no matches for kind "TrainJob" in version "trainer.kubeflow.org/v1alpha1"',
     "no such kind"),
    ('Error from server (Forbidden): jobs.batch is forbidden: User "me" cannot create resource "jobs"', "forbidden"),
    ('Error from server (NotFound): jobs.batch "dlrm" not found', "not found"),
    ('error: context "gone" does not exist', "no cluster"),
    ("The connection to the server localhost:8080 was refused - did you specify the right host or port?", "no cluster"),
    ('Error from server: admission webhook "validator.pytorchjob" denied the request: no container pytorch', "other"),
]


@pytest.mark.parametrize(("result", "error"), CASES)
def test_each_error_is_told_apart(result, error):
    assert classify_error(CommandResult(1, err=result)) == error


def test_one_that_does_not_answer_in_time_is_unavailable():
    assert classify_error(CommandResult(-15, has_timed_out=True)) == "away"


def test_the_fix_is_the_cloud_s_own():
    for cloud, command in (("aws", "aws eks"), ("azure", "az aks"), ("gcp", "gcloud container")):
        error = Cluster("c", cloud=cloud).error(CommandResult(1, err="Unauthorized"))
        assert isinstance(error, UserError)
        assert command in error.fix


def test_an_operator_that_is_missing_is_named_with_its_command():
    for result, fix in (('no matches for kind "TrainJob"', "trainer.git/manifests/overlays/manager?ref=v2.3"),
                      ('doesn\'t have a resource type "jobset" in group', "JobSet"),
                      ('no matches for kind "PyTorchJob"', "v1.9.4")):
        error = Cluster().error(CommandResult(1, err=result))
        assert isinstance(error, NoSuchKind)
        assert fix in error.fix


def test_the_tries_at_discovery_are_left_out_of_the_sentence():
    noise = 'E1115 09:27:02.213523    6981 memcache.go:381] "Couldn\'t get current server API group list"\n' * 5
    error = Cluster("east").error(CommandResult(1, err=f"{noise}The connection to the server 10.0.0.1 was refused"))
    assert isinstance(error, Fault)
    assert error.what == "the cluster east does not answer: The connection to the server 10.0.0.1 was refused"


def test_the_commands_for_a_person_can_be_pasted():
    line = Cluster("my context", "/a b/config").line("delete", "namespace", "embark")
    assert line == "kubectl '--kubeconfig=/a b/config' '--context=my context' delete namespace embark"
