"""The days after the first: what a user corrects, rebuilds, loses or forgets, in accounts that remember."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from account_shell import ScriptResult, run_shell

from cloudsim.account import Account, Call
from cloudsim.azure.program import Az
from cloudsim.kubernetes import programs
from cloudsim.machine import FunctionProgram
from cloudsim.programs import QUIET_S
from cloudsim.programs.kubectl import Kubectl
from cloudsim.server import open_account
from embark.lint.rendered import render_folder
from embark.rehearse import processes

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
MODEL = """
from torch import nn


class MyModel(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.dense = nn.Linear(model.num_dense, 1)

    def forward(self, dense, pooled):
        return self.dense(dense) + sum(rows.sum(dim=1, keepdim=True) for rows in pooled.values())
"""
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

    def when_followed(self, event: Callable[[], object]) -> None:
        """Let something happen when a script begins to follow the logs of running pods."""
        account = self.account
        before = account.programs["kubectl"]

        class Once(Kubectl):
            def run(self, call: Call) -> str:
                if call.words[0] == "logs":
                    account.programs["kubectl"] = before
                    event()
                return before.run(call)

        account.programs["kubectl"] = Once(account)


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


def test_a_corrected_spec_trains_and_its_machines_end(walk_of, warm_python, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(processes, "sys", SimpleNamespace(executable=warm_python))
    walk = walk_of("aws")
    walk.render()
    walk.push()
    model = walk.folder / "my_model.py"
    model.write_text(MODEL.replace("model.num_dense", "model.num_densse"))
    walk.render("model.kind=my_model:MyModel")
    failed = walk.train()
    assert failed.code == 70, failed.output[-3000:]
    assert "the job failed" in failed.output
    assert walk.gpu_machines == [], "a failed run stops paying by itself"
    model.write_text(MODEL)
    walk.render()
    done = walk.train()
    assert done.code == 0, done.output[-3000:]
    assert "The job of an earlier start has ended (Failed). It is deleted" in done.output
    assert done.output.index("It is deleted") < done.output.index("eksctl scale nodegroup")
    assert "4 steps ·" in done.output, "it is the corrected spec that trains"
    assert walk.gpu_machines == []
    assert "The cluster: 0.55 USD an hour" in done.output.splitlines()[-1]
    before = walk.num_starts()
    again = walk.train()
    assert again.code == 0
    assert "done: this spec is trained already" in again.output
    assert walk.num_starts() == before, "what is trained needs no machine"
    assert walk.gpu_machines == []


def test_keep_leaves_the_machines_and_says_what_they_cost(walk_of, trains_at_once):
    walk = walk_of("aws")
    walk.render()
    walk.push()
    kept = walk.train("--keep")
    assert kept.code == 0, kept.output[-3000:]
    assert len(walk.gpu_machines) == 2
    assert "The GPU machines are paid until ./train_dlrm_aws.sh clean ends them. 2 x p4d" in kept.output
    assert walk.sh("./train_dlrm_aws.sh clean").code == 0
    assert walk.gpu_machines == []


def test_a_rebuilt_image_trains_the_same_day(walk_of, trains_at_once):
    walk = walk_of("gcp")
    walk.render()
    walk.push()
    first = walk.train()
    assert first.code == 0, first.output[-3000:]
    assert walk.gpu_machines == []
    image = PLACES["gcp"][4].removeprefix("place.image=").removesuffix(":1")
    walk.render(f"place.image={image}:2")
    assert walk.sh(f"IMAGE={image}\n{PUSH.format(2)}").code == 0
    again = walk.train()
    assert again.code == 0, again.output[-3000:]
    assert "It is deleted" in again.output
    pods = [one for one in walk.account.records if one.words[:2] == ("apply", "-f") and "copy" in one.words[2]]
    assert [one.code for one in pods] == [0, 0], "the copy's Job has the new image too"


def test_a_run_trains_beside_a_server_of_its_name(walk_of, trains_at_once):
    walk = walk_of("aws")
    walk.render()
    walk.push()
    assert walk.train().code == 0
    # A server whose pods wait for a machine, as one that is being scaled up does.
    render_folder(str(walk.folder / "run.toml"), ["place.target=serve"], out=walk.folder / "serve")
    assert walk.sh("kubectl apply -f serve/serve.yaml").code == 0
    walk.render("train.learning_rate=0.02")
    done = walk.train()
    assert done.code == 0, done.output[-3000:]
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


def test_a_lost_machine_is_replaced_and_the_run_ends_well(walk_of, trains_at_once):
    walk = walk_of("aws")
    walk.render()
    walk.push()

    def lose_a_machine() -> None:
        """Lose a machine; its group starts another one."""
        (cluster,) = walk.account.clusters.values()
        cluster.nodes.remove(next(node for node in cluster.nodes if node.pool.startswith("p4d")))
        cluster.resize_pool("p4d-24xlarge", 2)

    walk.when_followed(lose_a_machine)
    done = walk.train()
    assert done.code == 0, done.output[-3000:]
    (cluster,) = walk.account.clusters.values()
    assert cluster.num_made["p4d-24xlarge"] == 3
    assert "p4d-24xlarge-2" in {pod["spec"].get("nodeName") for pod in cluster.of_kind("Pod")}, "its pod moved there"
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


def test_a_login_that_expires_meanwhile_does_not_end_the_run(walk_of, trains_at_once):
    walk = walk_of("aws")
    walk.render()
    walk.push()
    walk.when_followed(lambda: setattr(walk.account, "has_login", False))
    left = walk.train()
    assert left.code == 64, left.output[-3000:]
    assert "The job goes on" in left.output
    assert "The GPU machines are paid until" in left.output
    assert "aws sso login" in left.output.splitlines()[-1]
    assert len(walk.gpu_machines) == 2, "a healthy run is not stopped because its watcher cannot see it"
    assert walk.sh("aws sso login").code == 0
    done = walk.train()
    assert done.code == 0, done.output[-3000:]
    assert walk.gpu_machines == []


def test_a_full_volume_is_said_before_machines_start(walk_of):
    walk = walk_of("gcp")
    walk.render()
    walk.push()
    for line in ("./gke_cluster.sh up --yes", "./storage.sh volume"):
        assert walk.sh(line).code == 0
    (cluster,) = walk.account.clusters.values()
    cluster.full_paths.add("/mnt/data")
    full = walk.train()
    assert full.code == 70, full.output[-3000:]
    assert "No space left on device" in full.output
    assert "the data was not copied" in full.output
    assert walk.gpu_machines == []


@pytest.mark.parametrize("cloud", ["azure", "gcp"])
def test_the_second_day_in_one_account(cloud: str, walk_of, monkeypatch: pytest.MonkeyPatch):
    """What the tests above walk on one cloud each, on the others; the training itself is answered at once."""
    outcomes = [programs.Outcome(False, "train.learning_rate is too large", codes={"dlrm-0": 64, "dlrm-1": 64})]
    monkeypatch.setattr(programs, "_train",
                        lambda cluster, job: outcomes.pop() if outcomes else programs.Outcome(True, ""))
    walk = walk_of(cloud)
    walk.render()
    walk.push()
    failed = walk.train()
    assert failed.code == 70, failed.output[-3000:]
    (cluster,) = walk.account.clusters.values()

    def ends_well(*settings: str) -> str:
        """Render again, train, and pay for no GPU machine afterwards."""
        walk.render(*settings)
        done = walk.train()
        assert done.code == 0, (settings, done.output[-3000:])
        assert walk.gpu_machines == [], settings
        return done.output

    assert "the job failed" in failed.output
    assert walk.gpu_machines == [], "a failed run stops paying by itself"
    assert "has ended (Failed). It is deleted" in ends_well("train.learning_rate=0.01"), "the corrected spec"

    image = PLACES[cloud][5 if cloud == "azure" else 4].removeprefix("place.image=").removesuffix(":1")
    assert walk.sh(f"IMAGE={image}\n{PUSH.format(2)}").code == 0
    ends_well(f"place.image={image}:2")
    copies = [one.code for one in walk.account.records if one.words[:3] == ("apply", "-f", "data_copy_job.yaml")]
    assert copies == [0, 0, 0], "the copy's Job has the new image too"

    render_folder(str(walk.folder / "run.toml"), ["place.target=serve"], out=walk.folder / "serve")
    assert walk.sh("kubectl apply -f serve/serve.yaml").code == 0  # Its pods wait for a machine.
    ends_well("train.learning_rate=0.02")

    def lose_a_machine() -> None:
        """Lose a machine; its pool starts another one."""
        lost = next(node for node in cluster.nodes
                    if cluster.pools[node.pool].machine_type == PLACES[cloud][0].removeprefix("place.machine="))
        cluster.nodes.remove(lost)
        cluster.resize_pool(lost.pool, 2)

    walk.when_followed(lose_a_machine)
    ends_well("train.learning_rate=0.03")

    walk.when_followed(lambda: setattr(walk.account, "has_login", False))
    walk.render("train.learning_rate=0.04")
    left = walk.train()
    # kubectl's credentials of AKS are a certificate, so that the run is seen to its end and its machines are left.
    said = "so the GPU machines are not ended: az login" if cloud == "azure" else "The job goes on"
    assert left.code == (0 if cloud == "azure" else 64), left.output[-3000:]
    assert said in left.output
    assert "The GPU machines are paid until" in left.output
    assert walk.gpu_machines
    assert walk.sh(LOGINS[cloud]).code == 0
    ends_well()

    walk.render("place.queue=ml")
    queue = walk.folder / "kueue.yaml"
    text = queue.read_text()
    queue.write_text(text.replace("nominalQuota: 16", "nominalQuota: 8"))
    assert queue.read_text() != text
    held = walk.sh(f"QUEUE_LIMIT_S=300 ./train_dlrm_{cloud}.sh --yes")
    assert held.code == 70, held.output[-3000:]
    assert "Kueue has not admitted the job for 300 seconds: couldn't assign flavors" in held.output
    assert walk.gpu_machines == []
    queue.write_text(text)
    ends_well()

    walk.render("train.learning_rate=0.05")
    start_again_after_a_full_volume(walk)


# The file that names a version of Kubernetes, its text, that of a version past its date, and both refusals.
OLD_VERSIONS = {
    "aws": ("eks_cluster.yaml", 'version: "1.35"', 'version: "1.30"', "invalid version, 1.30 is not supported",
            "a cluster of eks-1.30 cannot be created any more"),
    "azure": ("aks_cluster.sh", "--nodepool-name", "--kubernetes-version 1.33 --nodepool-name",
              "on version 1.33, which is not supported", "a cluster of aks-1.33 cannot be created any more"),
}  # GKE's scripts name none at all.
LARGER_GIB = {"aws": 21600, "azure": 20480, "gcp": 20480}


def start_again_after_a_full_volume(walk: Walk) -> None:
    """Fill the volume, destroy the cluster, be refused one of a version past its date, and train on a larger volume in
    one of today's."""
    (cluster,) = walk.account.clusters.values()
    cluster.full_paths.add("/mnt/data")
    full = walk.train()
    assert full.code == 70, full.output[-3000:]
    assert "No space left on device" in full.output
    assert walk.gpu_machines == []
    assert walk.sh(f"./train_dlrm_{walk.cloud}.sh destroy --yes").code == 0
    assert walk.account.clusters == {}
    if walk.cloud in OLD_VERSIONS:
        name, now, before, refusal, finding = OLD_VERSIONS[walk.cloud]
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
    size_gib = LARGER_GIB[walk.cloud]
    larger = walk.sh(f"CAPACITY_GIB={size_gib} ./train_dlrm_{walk.cloud}.sh --yes")
    assert larger.code == 0, larger.output[-3000:]
    (bought,) = [one.words for one in walk.account.records if str(size_gib) in " ".join(one.words)]
    assert "create" in " ".join(bought), "a larger file system, in a cluster of a version that the cloud sells today"
    assert walk.gpu_machines == []


def test_aws_starts_again_with_a_larger_volume_and_todays_version(walk_of, trains_at_once):
    walk = walk_of("aws")
    walk.render("place.volume=fsx-lustre-scratch-2", "data.kind=prepared", "data.path=/mnt/data/rows")
    walk.push()
    assert walk.sh("./storage.sh buckets\nmkdir rows && printf 0 >rows/part-0.bin\n"
                   "embark data copy rows \"$(grep -o 's3://own-7/data[^}]*' storage.sh | head -1)\"").code == 0
    done = walk.train()
    assert done.code == 0, done.output[-3000:]
    walk.render("train.learning_rate=0.05")
    start_again_after_a_full_volume(walk)


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
