"""An AWS account, asked by the AWS CLI of moto's server: identity, quotas, machines in use, zones, budgets, bucket."""

from __future__ import annotations

import json
import os
import sys
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from uuid import uuid4

import boto3
import pytest
from http_servers import HttpHandler, HttpServer
from integration.cloud import emulators
from integration.cloud.emulators import SECRET, Emulator
from warm_python import warm_python

from embark.__main__ import run
from embark.doctor.account import check_account, counts_to, families_of, need_of
from embark.doctor.host import Check
from embark.launch.shell import Shell
from embark.spec import RunSpec, load_spec

MOTO_ACCOUNT = "123456789012"


@pytest.fixture(scope="module")
def account():
    """A server that answers as an account would."""
    program = str(Path(__file__).with_name("moto_account.py"))
    with emulators._server(lambda port: [sys.executable, program, "-H", "127.0.0.1", "-p", str(port)]) as port:
        emulators._call("PUT", f"http://127.0.0.1:{port}/models")
        yield Emulator("s3://models", port, emulators.s3_env(port))


@pytest.fixture(scope="module")
def forked_cli():
    """A folder with the AWS CLI of this environment, forked from a process that has imported it."""
    program = Path(sys.executable).with_name("aws")
    with (TemporaryDirectory(prefix="embark-warm-") as folder,
          warm_python(Path(folder), str(program), modules=("awscli.clidriver", "awscli.handlers")) as python):
        cli = Path(folder, "bin", "aws")
        cli.parent.mkdir()
        data = Path(str(find_spec("awscli").origin)).with_name("data")  # awscli says so as it is imported
        cli.write_text(f'#!/bin/sh\nAWS_DATA_PATH="{data}" exec "{python}" "{program}" "$@"\n')
        cli.chmod(0o755)
        yield cli.parent


@pytest.fixture(autouse=True)
def _aws_cli(monkeypatch, forked_cli):
    monkeypatch.setenv("PATH", f"{forked_cli}{os.pathsep}{os.environ['PATH']}")


@pytest.fixture
def aws(account, environment):
    """The variables of an account that answers."""
    environment(account.env)
    return account


def checks_of(*sets: str) -> dict[str, Check]:
    spec: RunSpec = load_spec("quickstart", sets)
    return {check.name.split()[0]: check for check in check_account(need_of(spec), Shell())}


def check_of(name: str, *sets: str) -> Check:
    """Return one check, without those behind it, each of which starts the AWS CLI."""
    return next(check for check in check_account(need_of(load_spec("quickstart", sets)), Shell())
                if check.name.split()[0] == name)


def test_an_account_is_named_and_each_thing_is_looked_at(aws):
    found = checks_of("place.machine=g5.12xlarge", "place.region=us-east-1", f"store.root={aws.uri}/runs")
    assert list(found) == ["account", "machine", "quota", "cluster", "budgets", "bucket"]
    assert found["account"].verdict == "ok"
    assert MOTO_ACCOUNT in found["account"].found
    assert found["machine"].verdict == "ok"
    assert "us-east-1a" in found["machine"].found
    assert found["cluster"].found == "not created yet"


def test_another_account_than_the_spec_names_is_wrong(aws):
    found = checks_of("place.machine=g5.12xlarge", 'place.account="210987654321"')
    assert found["account"].verdict == "wrong"
    assert list(found) == ["account"]


def test_a_quota_too_small_says_the_command_that_raises_it(aws):
    found = check_of("quota", "place.machine=p5.48xlarge", "place.region=us-east-1", "place.nodes=4")
    assert (found.verdict, found.found) == ("wrong", "384 vCPUs, 0 in use; the run takes 768")
    assert found.fix.startswith("aws service-quotas request-service-quota-increase --service-code ec2 --quota-code "
                                "L-417A185B --desired-value 768 --region us-east-1")


def test_machines_that_run_already_count(aws):
    region = "eu-central-1"
    ec2 = boto3.client("ec2", region_name=region)
    image = ec2.describe_images()["Images"][0]["ImageId"]
    started = ec2.run_instances(ImageId=image, InstanceType="g5.xlarge", MinCount=2, MaxCount=2)["Instances"]
    other = ec2.run_instances(ImageId=image, InstanceType="t3.micro", MinCount=1, MaxCount=1)["Instances"]
    try:
        on_demand = check_of("quota", "place.machine=g5.12xlarge", f"place.region={region}", "place.nodes=2")
        spot = check_of("quota", "place.machine=g5.12xlarge", f"place.region={region}", "place.spot=true")
    finally:
        ec2.terminate_instances(InstanceIds=[one["InstanceId"] for one in [*started, *other]])
    # Of AWS's default: nobody has raised it. Both machines would fit if none ran.
    assert (on_demand.verdict, on_demand.found) == ("wrong", "96 vCPUs, 8 in use; the run takes 96")
    assert (spot.verdict, spot.found) == ("ok", "64 vCPUs, 0 in use; the run takes 48")


def test_machine_absent_from_a_region_is_reported_with_other_regions(aws):
    found = check_of("machine", "place.machine=p5.48xlarge", "place.region=af-south-1")
    assert found.verdict == "wrong"
    assert "no p5.48xlarge in af-south-1" in found.found
    assert "ap-northeast-1" in found.fix


def test_a_zone_that_lacks_the_machine_is_reported_with_those_that_have_it(aws):
    found = check_of("machine", "place.machine=g5.12xlarge", "place.region=us-east-1", "place.zone=us-east-1z")
    assert found.verdict == "wrong"
    assert "us-east-1a" in found.fix


def test_no_budget_is_a_warning_and_those_there_are_are_named(aws):
    client = boto3.client("budgets", region_name="us-east-1")
    name = f"embark-{uuid4().hex[:6]}"
    assert check_of("budgets", "place.machine=g5.12xlarge").verdict == "warning"
    client.create_budget(AccountId=MOTO_ACCOUNT, Budget={
        "BudgetName": name, "BudgetType": "COST", "TimeUnit": "MONTHLY",
        "BudgetLimit": {"Amount": "500", "Unit": "USD"}})
    try:
        found = check_of("budgets", "place.machine=g5.12xlarge")
        assert (found.verdict, found.found) == ("ok", f"{name}: $0 of $500")
    finally:
        client.delete_budget(AccountId=MOTO_ACCOUNT, BudgetName=name)


def test_the_bucket_is_written_and_left_as_it_was(aws):
    s3 = boto3.client("s3", region_name="us-east-1")
    bucket = f"doctor-{uuid4().hex[:8]}"
    s3.create_bucket(Bucket=bucket)
    found = check_of("bucket", "place.machine=g5.12xlarge", f"store.root=s3://{bucket}/runs")
    assert found.verdict == "ok"
    assert s3.list_objects_v2(Bucket=bucket)["KeyCount"] == 0


def test_a_bucket_that_is_not_there_is_wrong(aws):
    found = check_of("bucket", "place.machine=g5.12xlarge", f"store.root=s3://no-such-{uuid4().hex[:8]}/runs")
    assert found.verdict == "wrong"
    assert "does not exist" in found.found


def test_a_quota_that_the_catalog_does_not_know_is_reported_to_be_unknown(aws):
    found = check_of("quota", "place.machine=p6-b200.48xlarge", "place.region=us-east-1", "place.spot=true")
    assert found.verdict == "warning"
    assert "is not known" in found.found


def test_doctor_exits_with_1_on_a_finding_and_prints_no_secret(aws, capsys):
    code = run(["doctor", "--cloud", "--machine", "p5.48xlarge", "--set", "place.nodes=64", "--set",
                "place.region=us-east-1", "--json"])
    out, err = capsys.readouterr()
    rows = json.loads(out)
    assert {row["name"]: row["verdict"] for row in rows}["account"] == "ok"
    assert code == (1 if any(row["verdict"] == "wrong" for row in rows) else 0)
    assert any(row["name"].startswith("quota Running On-Demand P") and row["verdict"] == "wrong" for row in rows)
    assert SECRET not in out + err


def test_no_credentials_are_one_sentence(environment, account):
    environment({"AWS_ENDPOINT_URL": account.env["AWS_ENDPOINT_URL"]})
    found = checks_of("place.machine=g5.12xlarge", "place.region=us-east-1")
    assert list(found) == ["account"]
    assert found["account"].found == "no credentials for AWS were found"
    assert "aws sso login" in found["account"].fix


def test_a_profile_that_is_not_there_is_one_sentence(aws, monkeypatch):
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    found = checks_of("place.machine=g5.12xlarge")
    assert found["account"].verdict == "wrong"
    assert "nobody" in found["account"].found


def test_a_server_that_is_unavailable_is_one_sentence(environment, account):
    environment({**account.env, "AWS_ENDPOINT_URL": "http://127.0.0.1:9"})
    found = check_of("account", "place.machine=g5.12xlarge")
    assert (found.verdict, found.found.partition(":")[0]) == ("wrong", "AWS cannot be reached")


class Refusing(HttpHandler):
    """Says no to everything but the first question, as AWS does in STS's and EC2's XML and the others' JSON."""

    code, allows_identity = "", False

    def do_POST(self):  # noqa: N802
        body = self.body().decode()
        if self.allows_identity and "GetCallerIdentity" in body:
            self._send(200, "text/xml", "<GetCallerIdentityResponse><GetCallerIdentityResult>"
                       "<Arn>arn:aws:iam::111122223333:user/a</Arn><UserId>u</UserId><Account>111122223333</Account></GetCallerIdentityResult>"
                       "</GetCallerIdentityResponse>")
        elif "json" in self.headers.get("Content-Type", ""):
            self._send(400, "application/x-amz-json-1.1", json.dumps({"__type": self.code, "message": "no"}))
        elif "GetCallerIdentity" in body:
            self._send(403, "text/xml", f"<ErrorResponse><Error><Code>{self.code}</Code><Message>no</Message></Error>"
                       "</ErrorResponse>")
        else:
            self._send(403, "text/xml", f"<Response><Errors><Error><Code>{self.code}</Code><Message>no</Message>"
                       "</Error></Errors></Response>")

    def _send(self, status, kind, text):
        self.answer(status, text, kind)


@pytest.fixture
def refusing(environment, account):
    """A function that starts an AWS which answers every question with this code."""
    servers = []

    def start(code: str, *, allows_identity: bool = False) -> None:
        handler = type("Handler", (Refusing,), {"code": code, "allows_identity": allows_identity})
        servers.append(HttpServer(handler))
        environment({**account.env, "AWS_ENDPOINT_URL": servers[-1].url})

    yield start
    for server in servers:
        server.down()


@pytest.mark.parametrize(("code", "words"), [
    ("ExpiredToken", "have expired"), ("ExpiredTokenException", "have expired"),
    ("InvalidClientTokenId", "does not know this access key"), ("SignatureDoesNotMatch", "the secret key is another"),
])
def test_refused_credentials_are_one_sentence(refusing, code, words):
    refusing(code)
    found = checks_of("place.machine=g5.12xlarge", "place.region=us-east-1")
    assert list(found) == ["account"]
    assert found["account"].verdict == "wrong"
    assert words in found["account"].found
    assert "aws sso login" in found["account"].fix


@pytest.mark.parametrize("code", ["AccessDeniedException", "UnauthorizedOperation"])
def test_what_an_identity_may_not_ask_is_reported_with_the_permission(refusing, code):
    refusing(code, allows_identity=True)
    found = checks_of("place.machine=g5.12xlarge", "place.region=us-east-1")
    assert found["account"].verdict == "ok"
    for name, action in (("machine", "ec2:DescribeInstanceTypeOfferings"), ("quota", "servicequotas:GetServiceQuota"),
                         ("budgets", "budgets:ViewBudget")):
        assert found[name].verdict == "warning", found[name]
        assert "may not ask" in found[name].found
        assert action in found[name].fix


@pytest.mark.parametrize(("quota", "families"), [
    ("Running On-Demand P instances", ("p",)),
    ("Running On-Demand G and VT instances", ("g", "vt")),
    ("All P4, P3 and P2 Spot Instance Requests", ("p4", "p3", "p2")),
    ("All P5 Spot Instance Requests", ("p5",)),
])
def test_a_quotas_name_says_whose_it_is(quota, families):
    assert families_of(quota) == families


@pytest.mark.parametrize(("machine", "families", "counts"), [
    ("p5.48xlarge", ("p",), True), ("p4de.24xlarge", ("p4", "p3", "p2"), True), ("p5en.48xlarge", ("p5",), True),
    ("p5.48xlarge", ("p4", "p3", "p2"), False), ("g5.xlarge", ("p",), False), ("vt1.3xlarge", ("g", "vt"), True),
    ("gr6.4xlarge", ("g", "vt"), False), ("t3.micro", ("g", "vt"), False),
])
def test_machines_count_towards_their_own_quota(machine, families, counts):
    assert counts_to(machine, families) == counts
