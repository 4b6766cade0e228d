"""The days after the first, in accounts that remember: what the guides' own walks do not have."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from account_shell import ScriptResult, run_shell

from cloudsim.account import Account
from cloudsim.azure.program import Az
from cloudsim.kubernetes import programs
from cloudsim.machine import FunctionProgram
from cloudsim.programs import QUIET_S
from cloudsim.server import open_account
from embark.lint.rendered import render_folder

pytestmark = pytest.mark.slow

PLACES = {
    "aws": ("place.machine=p4d.24xlarge", "place.region=us-west-2", "place.zone=us-west-2b",
            "store.root=s3://own-7/runs", "place.image=123456789012.dkr.ecr.us-west-2.amazonaws.com/embark:1"),
    "azure": ("place.machine=Standard_ND96asr_v4", "place.region=eastus", "place.zone=1", "store.root=az://own-7/runs",
              "place.storage_account=own7", "place.image=own7registry.azurecr.io/embark:1",
              "place.volume=azure-netapp-ultra", "data.kind=prepared", "data.path=/mnt/data/rows"),
    "gcp": ("place.machine=a2-highgpu-8g", "place.region=us-central1", "place.zone=us-central1-a",
            "store.root=gs://own-7/runs", "place.image=us-central1-docker.pkg.dev/your-project/embark/embark:1",
            "place.volume=filestore-zonal", "data.kind=prepared", "data.path=/mnt/data/rows"),
}
SETUPS = {
    "aws": r"""
aws ecr create-repository --repository-name embark --region us-west-2
aws ecr get-login-password --region us-west-2 |
  docker login --username AWS --password-stdin 123456789012.dkr.ecr.us-west-2.amazonaws.com
IMAGE=123456789012.dkr.ecr.us-west-2.amazonaws.com/embark
""",
    "azure": r"""
az group create --name embark --location eastus
az acr create --name own7registry --resource-group embark --sku Standard
az acr login --name own7registry
IMAGE=own7registry.azurecr.io/embark
./storage.sh buckets
mkdir rows && printf 0 >rows/part-0.bin
export AZURE_STORAGE_ACCOUNT_NAME=own7
embark data copy rows "$(grep -o 'az://[^ ]*' data_copy_job.yaml | head -1)"
""",
    "gcp": r"""
gcloud components install gke-gcloud-auth-plugin kubectl alpha beta
gcloud config set project your-project
gcloud services enable compute.googleapis.com artifactregistry.googleapis.com
gcloud artifacts repositories create embark --repository-format=docker --location=us-central1
gcloud auth configure-docker us-central1-docker.pkg.dev --quiet
IMAGE=us-central1-docker.pkg.dev/your-project/embark/embark
./storage.sh buckets
mkdir rows && printf 0 >rows/part-0.bin
embark data copy rows "$(grep -o 'gs://[^ ]*' data_copy_job.yaml | head -1)"
""",
}
PUSH = "docker build --tag $IMAGE:{0} . && docker push $IMAGE:{0}\n"
MACHINES = {"aws": "p4d", "azure": "gpu", "gcp": "a2-highgpu"}


class Walk:
    """A folder rendered for one cloud, and an account in which its scripts run."""

    def __init__(self, cloud: str, root: Path) -> None:
        self.cloud, self.folder = cloud, root / "run"
        (root / "account").mkdir()
        self.account: Account = open_account(cloud, root / "account")

    def render(self, *settings: str) -> None:
        """Render the first spec, or change the folder's own."""
        mine = self.folder / "run.toml"
        first = (*PLACES[self.cloud], "name=dlrm", "place.nodes=2", "place.target=job")
        render_folder(str(mine) if mine.exists() else "quickstart", [*(() if mine.exists() else first), *settings],
                      out=self.folder)

    def push(self, tag: int = 1) -> None:
        done = self.sh(SETUPS[self.cloud] + PUSH.format(tag))
        assert done.code == 0, done.output

    def sh(self, text: str) -> ScriptResult:
        return run_shell(self.account, f"set -e\n{text}", self.folder, {"PROJECT": "your-project"})

    def train(self, *words: str) -> ScriptResult:
        return self.sh(f"./train_dlrm_{self.cloud}.sh --yes {' '.join(words)}")

    @property
    def gpu_machines(self) -> list[str]:
        """The GPU machines that are paid now."""
        return [one for one in self.account.paid() if MACHINES[self.cloud] in one]

    def num_starts(self) -> int:
        """Return how often GPU machines were started on EKS."""
        return sum(one.words[:2] == ("scale", "nodegroup") and "0" not in one.words for one in self.account.records)


@pytest.fixture
def walk_of(tmp_path: Path):
    made: list[Walk] = []

    def make(cloud: str) -> Walk:
        made.append(Walk(cloud, tmp_path))
        return made[-1]

    yield make
    for one in made:
        one.account.close()


@pytest.fixture
def trains_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answer the training itself at once: the guides' walks train."""
    monkeypatch.setattr(programs, "_train", lambda cluster, job: programs.Outcome(True, ""))


def test_keep_leaves_the_machines_and_says_what_they_cost(walk_of, trains_at_once):
    walk = walk_of("aws")
    walk.render()
    walk.push()
    kept = walk.train("--keep")
    assert kept.code == 0, kept.output[-3000:]
    assert len(walk.gpu_machines) == 2
    assert "The GPU machines are paid until ./train_dlrm_aws.sh clean ends them. 2 x p4d" in kept.output
    before = walk.num_starts()
    again = walk.train("--keep")
    assert again.code == 0, again.output[-3000:]
    assert "done: this spec is trained already" in again.output
    assert walk.num_starts() == before, "what is trained needs no machine"
    assert walk.sh("./train_dlrm_aws.sh clean").code == 0
    assert walk.gpu_machines == []


def test_a_run_that_kueue_does_not_admit_pays_no_machine(walk_of, trains_at_once):
    walk = walk_of("aws")
    walk.render("place.queue=ml")
    walk.push()
    queue = walk.folder / "kueue.yaml"
    text = queue.read_text()
    queue.write_text(text.replace("nominalQuota: 16", "nominalQuota: 8"))
    assert queue.read_text() != text
    (limit,) = re.findall(r"QUEUE_LIMIT_S:-(\d+)", (walk.folder / "train_dlrm_aws.sh").read_text())
    assert int(limit) < QUIET_S, "the script gives up before the account does"
    held = walk.sh("QUEUE_LIMIT_S=600 ./train_dlrm_aws.sh --yes")
    assert held.code == 70, held.output[-3000:]
    assert "Kueue has not admitted the job for 600 seconds: couldn't assign flavors" in held.output
    assert walk.num_starts() == 0
    assert walk.gpu_machines == []
    queue.write_text(text)
    done = walk.train()
    assert done.code == 0, done.output[-3000:]
    assert walk.num_starts() == 1
    assert walk.gpu_machines == []


LOGINS = {"aws": "aws sso login", "azure": "az login", "gcp": "gcloud auth login"}


@pytest.mark.parametrize("cloud", LOGINS)
def test_an_expired_login_is_one_sentence_with_the_command(cloud: str, walk_of):
    walk = walk_of(cloud)
    walk.render()
    walk.account.has_login = False
    for line in (f"./train_dlrm_{cloud}.sh --yes", "./storage.sh buckets", "./budget.sh quota"):
        done = walk.sh(line)
        assert done.code == 64, (line, done.output)
        assert f"or the login has expired: {LOGINS[cloud]}" in done.output.splitlines()[-1], (line, done.output)
    assert walk.account.paid() == []
    walk.account.programs["session-manager-plugin"] = FunctionProgram("session-manager-plugin", lambda call: "1.2")
    launched = walk.sh("SUBNET_ID=subnet-1 embark launch run.toml --yes --set place.target=vm --set place.volume= "
                       "--set data.kind=synthetic --set data.path=")
    assert launched.code == 64, launched.output
    assert LOGINS[cloud] in launched.output


# The file that names a version of Kubernetes, its text, that of a version past its date, and both refusals.
OLD_VERSIONS = {
    "aws": ("eks_cluster.yaml", 'version: "1.35"', 'version: "1.30"', "invalid version, 1.30 is not supported",
            "a cluster of eks-1.30 cannot be created any more"),
    "azure": ("aks_cluster.sh", "--nodepool-name", "--kubernetes-version 1.33 --nodepool-name",
              "on version 1.33, which is not supported", "a cluster of aks-1.33 cannot be created any more"),
}  # GKE's scripts name none at all.


@pytest.mark.parametrize("cloud", OLD_VERSIONS)
def test_a_cluster_of_a_version_past_its_date_is_refused(cloud: str, walk_of):
    walk = walk_of(cloud)
    walk.render()
    walk.push()
    name, now, before, refusal, finding = OLD_VERSIONS[cloud]
    file = walk.folder / name
    text = file.read_text()
    assert now in text
    file.write_text(text.replace(now, before))
    old = walk.sh("./??s_cluster.sh up --yes")
    assert old.code != 0
    assert refusal in old.output
    assert finding in walk.sh("embark lint . || true").output
    assert walk.sh("embark render run.toml --force").code == 0
    assert file.read_text() == text
    up = walk.sh("./storage.sh buckets && ./??s_cluster.sh up --yes")
    assert up.code == 0, up.output[-3000:]


def test_destroy_leaves_no_logs_and_nothing_paid(walk_of, trains_at_once):
    walk = walk_of("aws")
    walk.render()
    walk.push()
    assert walk.train().code == 0
    # What the cluster's log agent makes.
    logs = walk.account.client("logs", "us-west-2")
    for name in ("/aws/containerinsights/embark/application", "/aws/eks/embark/cluster", "/aws/eks/other/cluster"):
        logs.create_log_group(logGroupName=name)
    done = walk.sh("./train_dlrm_aws.sh destroy --yes")
    assert done.code == 0, done.output[-3000:]
    assert [one["logGroupName"] for one in logs.describe_log_groups()["logGroups"]] == ["/aws/eks/other/cluster"]
    assert [one for one in walk.account.paid() if "bucket" not in one and "ECR" not in one] == []


def test_plain_machines_read_the_bucket_for_nothing_and_leave_nothing(walk_of):
    walk = walk_of("aws")
    walk.render("place.target=vm")
    walk.push()
    up = walk.sh("./vm.sh up --yes")
    assert up.code == 0, up.output[-3000:]
    ec2, iam = walk.account.client("ec2", "us-west-2"), walk.account.client("iam", "us-west-2")
    (endpoint,) = ec2.describe_vpc_endpoints()["VpcEndpoints"]
    assert endpoint["ServiceName"] == "com.amazonaws.us-west-2.s3"
    (table,) = [one for one in ec2.describe_route_tables()["RouteTables"]
                if any(route.get("NatGatewayId") for route in one["Routes"])]
    assert endpoint["RouteTableIds"] == [table["RouteTableId"]], "the machines' own way out goes past the NAT gateway"
    for _ in range(2):
        down = walk.sh("./vm.sh down")
        assert down.code == 0, down.output[-3000:]
    assert [one for one in ec2.describe_vpc_endpoints()["VpcEndpoints"] if one["State"] != "deleted"] == []
    assert [one["GroupName"] for one in ec2.describe_security_groups()["SecurityGroups"]
            if one["GroupName"].startswith("embark")] == []
    assert walk.sh("aws ec2 describe-placement-groups --region us-west-2 --group-names embark-dlrm").code != 0
    assert [one["RoleName"] for one in iam.list_roles()["Roles"] if one["RoleName"].startswith("embark")] == []
    assert iam.list_instance_profiles()["InstanceProfiles"] == []
    assert [one for one in walk.account.paid() if "bucket" not in one and "ECR" not in one] == []


def test_a_service_principal_may_upload_data_too(walk_of):
    walk = walk_of("azure")
    walk.render()
    az = walk.account.programs["az"]
    assert isinstance(az, Az)
    az.subscription.is_service_principal = True
    done = walk.sh("./storage.sh buckets")
    assert done.code == 0, done.output[-3000:]
    granted = next(one.words for one in walk.account.records if one.words[:3] == ("role", "assignment", "create"))
    assert granted[granted.index("--assignee-principal-type") + 1] == "ServicePrincipal"
    assert granted[granted.index("--assignee-object-id") + 1] == az.subscription.user
