"""Clusters have the machines, the fabric and the numbers that the spec means."""

from __future__ import annotations

import datetime
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from recorded_commands import run_script
from render_jobs import MACHINES, job_of

from embark.catalog import load_catalog
from embark.catalog.machine import WARNING_DAYS
from embark.errors import UserError
from embark.lint.rendered import refuse_faults
from embark.render.clouds.aws import render_eks
from embark.render.clouds.azure import LUSTRE_DRIVER_VERSION, render_aks
from embark.render.clouds.gcp import extra_networks, render_gke
from embark.render.render import render_infrastructure
from embark.render.settings import fabric_needs
from embark.spec.serve import ServeSpec


def text_of(files, path: str) -> str:
    return next(file.text for file in files if file.path == path)


def cluster_config(job) -> dict:
    return yaml.safe_load(text_of(render_eks(job), "eks_cluster.yaml"))


def test_machines_with_efa_stand_in_one_zone_behind_private_addresses():
    group = cluster_config(job_of("p5.48xlarge", zone="us-east-1c", region="us-east-1"))["managedNodeGroups"][1]
    assert group["efaEnabled"] is True
    assert group["availabilityZones"] == ["us-east-1c"]
    assert group["privateNetworking"] is True
    assert group["disablePodIMDS"] is False, "pods could not see a spot notice"
    assert group["taints"][0]["key"] == "nvidia.com/gpu"


@pytest.mark.parametrize("nodes", [1, 3, 8])
def test_the_machines_of_the_run_are_all_that_start_and_none_must_stay(nodes: int):
    """None with the cluster, all of them by a word of its script: until then they would wait, and be paid."""
    job = job_of("p4d.24xlarge", nodes=nodes)
    group = cluster_config(job)["managedNodeGroups"][1]
    assert (group["minSize"], group["desiredCapacity"], group["maxSize"]) == (0, 0, nodes)
    script = text_of(render_infrastructure(job), "eks_cluster.sh")
    started = script.partition("machines() {")[2].partition("}")[0]
    assert re.findall(r"--nodes(?:-max)? (\d+)", started) == [str(nodes)] * 2


@pytest.mark.parametrize("machine", ["p4d.24xlarge", "Standard_ND96asr_v4", "a2-highgpu-8g"])
def test_so_many_plain_machines_start_meet_and_end(machine: str):
    files = render_infrastructure(job_of(machine, nodes=5, target="vm"))
    loops = re.findall(r"\$\(seq 0 (\d+)\)", text_of(files, "vm.sh"))
    assert loops
    assert set(loops) == {"4"}
    assert "--nnodes=5" in text_of(files, "cloud_init.yaml")


def test_a_machine_without_efa_asks_for_none():
    group = cluster_config(job_of("g5.xlarge"))["managedNodeGroups"][1]
    assert "efaEnabled" not in group


def test_eks_stays_in_standard_support_and_aks_takes_its_default():
    config = cluster_config(job_of("p4d.24xlarge"))
    support = load_catalog().support[f"eks-{config['metadata']['version']}"]
    assert support.ends - datetime.date(2026, 11, 18) > datetime.timedelta(days=WARNING_DAYS)
    assert config["upgradePolicy"] == {"supportType": "STANDARD"}, "extended support costs six times as much"
    assert "--kubernetes-version" not in text_of(render_aks(job_of("Standard_ND96asr_v4")), "aks_cluster.sh").replace(
        "# Without --kubernetes-version", "")


def test_every_installed_operator_supports_the_cluster_s_kubernetes():
    catalog = load_catalog()
    limits = {name: one.kubernetes for name, one in catalog.support.items() if one.version and one.kubernetes}
    assert {"volcano-1.15", "keda-2.20"} <= set(limits)
    assert all(limit >= catalog.versions["eks"] for limit in limits.values()), limits


@pytest.mark.parametrize(("today", "refused"), [("2027-01-27", False), ("2028-03-28", True)])
def test_a_rendering_warns_of_an_end_and_refuses_what_cannot_be_created(today, refused):
    files = render_eks(job_of("p4d.24xlarge"))
    day = datetime.date.fromisoformat(today)
    if refused:
        with pytest.raises(UserError, match="EMB401") as raised:
            refuse_faults(files, day)
        assert "newer Embark" in raised.value.fix
    else:
        assert [one.code for one in refuse_faults(files, day)] == ["EMB414"]


def test_aks_keeps_gpus_out_of_the_system_pool():
    script = text_of(render_aks(job_of("Standard_ND96asr_v4", spot=True, nodes=3)), "aks_cluster.sh")
    create = re.search(r"az aks create(.*?)\n  fi", script, re.S).group(1)
    pool = re.search(r"az aks nodepool add(.*?)\n  elif", script, re.S).group(1)
    assert "ND96" not in create
    assert "--node-vm-size Standard_ND96asr_v4" in pool
    assert "--node-count 3" in pool
    assert "--max-count 3" in pool
    assert "--priority Spot" in pool
    assert "--spot-max-price=-1" in pool
    assert "--gpu-driver None" in pool


def test_aks_machines_with_infiniband_get_driver_and_device_plugin():
    files = render_aks(job_of("Standard_ND96asr_v4"))
    policy = next(d for d in yaml.safe_load_all(text_of(files, "aks_cluster.yaml")) if d["kind"] == "NicClusterPolicy")
    resources = json.loads(policy["spec"]["sriovDevicePlugin"]["config"])["resourceList"]
    assert [(r["resourcePrefix"], r["resourceName"]) for r in resources] == [("rdma", "ib")]
    assert "AKSInfinibandSupport" in text_of(files, "aks_cluster.sh")
    plain_machine = render_aks(job_of("Standard_NC24ads_A100_v4"))
    assert "AKSInfinibandSupport" not in text_of(plain_machine, "aks_cluster.sh")
    assert "NicClusterPolicy" not in text_of(plain_machine, "aks_cluster.yaml")


def test_spot_s_taint_is_tolerated_by_what_readies_the_machines():
    files = render_aks(job_of("Standard_ND96asr_v4", spot=True))
    for name in ("gpu_operator_values.yaml", "network_operator_values.yaml"):
        assert "kubernetes.azure.com/scalesetpriority" in text_of(files, name)


@pytest.mark.parametrize(("machine", "num_networks"), [
    ("a2-highgpu-8g", 0), ("a3-highgpu-8g", 4), ("a3-megagpu-8g", 8), ("a3-ultragpu-8g", 9), ("a4-highgpu-8g", 9)])
def test_gke_has_a_network_for_each_card_of_the_fabric(machine: str, num_networks: int):
    job = job_of(machine)
    extra = extra_networks(job)
    assert len(extra) == num_networks
    objects = list(yaml.safe_load_all(text_of(render_gke(job), "gke_cluster.yaml")))
    sets = {o["metadata"]["name"]: o["spec"] for o in objects if o["kind"] == "GKENetworkParamSet"}
    networks = {o["metadata"]["name"] for o in objects if o["kind"] == "Network"}
    assert set(sets) == networks == {network.name for network in extra}
    script = text_of(render_gke(job), "gke_cluster.sh")
    for network in extra:
        assert f"network={network.network},subnetwork={network.subnet}" in script
        assert sets[network.name]["vpcSubnet"] == network.subnet


@pytest.mark.parametrize("machine", ["a3-highgpu-8g", "a3-megagpu-8g", "a3-ultragpu-8g", "a4-highgpu-8g"])
def test_pods_name_networks_that_the_cluster_has(machine: str):
    job = job_of(machine)
    assert {name for _, name in fabric_needs(job).networks} <= {network.name for network in extra_networks(job)}


def test_gke_counts_are_what_they_say():
    script = text_of(render_gke(job_of("a2-highgpu-8g", nodes=5, spot=True)), "gke_cluster.sh")
    pool = re.search(r"node-pools create(.*?)\n  else", script, re.S).group(1)
    assert "--num-nodes=0" in pool, "machines start when pods wait for them"
    assert "--total-max-nodes=5" in pool
    assert '--node-locations="$ZONE"' in pool, "a regional pool has its count in every zone"
    assert "--spot" in pool
    assert "--preemptible" not in pool
    assert "type=nvidia-tesla-a100,count=8,gpu-driver-version=" in pool


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("target", ["job", "vm"])
def test_the_number_of_machines_is_one_number_everywhere(machine: str, target: str):
    """No text of a run on 7 machines tells of 2, and those that differ do so by that number alone."""
    two, seven = (render_infrastructure(job_of(machine, nodes=n, target=target, max_hours=1.0)) for n in (2, 7))
    assert [f.path for f in two] == [f.path for f in seven]
    changed = 0
    for before, after in zip(two, seven, strict=True):
        for line, other in zip(before.text.splitlines(), after.text.splitlines(), strict=False):
            if line == other or line.startswith("#"):
                continue
            changed += 1
            assert re.search(r"\d", line), f"{before.path}: {line!r} became {other!r}"
    assert changed >= 3
    assert any(re.search(r"\b7\b", file.text) for file in seven)


def test_the_volume_the_claim_and_the_copy_agree():
    job = job_of("a2-highgpu-8g", volume="filestore-zonal")
    files = render_infrastructure(job)
    names = ("volume.yaml", "claim.yaml", "data_copy_job.yaml")
    volume, claim, copy = (yaml.safe_load(text_of(files, name)) for name in names)
    assert claim["spec"]["volumeName"] == volume["metadata"]["name"]
    assert volume["spec"]["claimRef"] == {key: claim["metadata"][key] for key in ("namespace", "name")}
    assert volume["spec"]["capacity"] == claim["spec"]["resources"]["requests"]
    assert claim["metadata"]["name"] == job.claim_name
    pod = copy["spec"]["template"]["spec"]
    assert pod["volumes"][0]["persistentVolumeClaim"]["claimName"] == job.claim_name
    assert pod["containers"][0]["command"][-2:] == ["gs://training/data/criteo", "/mnt/data/criteo"]
    assert copy["spec"]["template"]["metadata"]["labels"] != job.labels, "the run's Service would find the copy's pod"


def test_fsx_reads_the_bucket_itself_so_nothing_is_copied():
    files = render_infrastructure(job_of("p4d.24xlarge", volume="fsx-lustre-1000"))
    assert "data_copy_job.yaml" not in [file.path for file in files]
    assert "1.2 GB/s" in text_of(files, "storage.sh"), "1.2 TiB at 1000 MB/s/TiB"
    assert "create-data-repository-association" in text_of(files, "storage.sh")


def test_managed_lustre_on_aks_gets_its_driver(tmp_path):
    def applied(volume: str) -> list[str]:
        files = render_infrastructure(job_of("Standard_ND96asr_v4", volume=volume))
        folder = tmp_path / volume
        folder.mkdir()
        ran = run_script(files, "aks_cluster.sh", [], folder, {"STORAGE_ACCOUNT": "trainingaccount"})
        assert ran.code == 0, ran.output
        return [words[-1] for words in ran.of("kubectl") if "apply" in words and "azurelustre" in words[-1]]

    found = applied("azure-managed-lustre-250")
    assert {path.rpartition("/")[2] for path in found} >= {
        "csi-azurelustre-driver.yaml", "csi-azurelustre-node-jammy.yaml", "csi-azurelustre-node-noble.yaml"}
    assert all(f"/{LUSTRE_DRIVER_VERSION}/deploy/" in path for path in found)
    assert applied("azure-netapp-premium") == []


@pytest.mark.parametrize(("cache_gb", "disk_gib"), [(50.0, 256), (300.0, 512), (1500.0, 2048)])
def test_a_node_of_aks_has_room_for_the_cache(cache_gb, disk_gib):
    job = job_of("Standard_ND96asr_v4")
    data = job.spec.data.model_copy(update={"cache_gb": cache_gb})
    job = replace(job, spec=job.spec.model_copy(update={"data": data}))
    text = next(file.text for file in render_infrastructure(job) if file.path == "aks_cluster.sh")
    assert f"--node-osdisk-size {disk_gib} " in text


ZONES_STUB = """#!/usr/bin/env bash
{ for word in "$(basename "$0")" "$@"; do printf '%s\\0' "$word"; done; printf '\\0'; } >>"$RECORD"
case "$*" in
  "get cluster"*) exit 1 ;;
  *describe-availability-zones*) printf '%s\\n' "$SECOND_ZONE" ;;
  "create cluster"*) cp "$4" "$HOME/created.yaml" ;;
  *) printf 'None\\n' ;;
esac
"""


def test_the_second_zone_of_eks_is_one_that_the_account_has(tmp_path):
    job = job_of("p4d.24xlarge", zone="ap-northeast-1a", region="ap-northeast-1")
    files = render_eks(job)
    assert cluster_config(job)["availabilityZones"] == ["ap-northeast-1a", "ap-northeast-1b"]
    done = run_script(files, "eks_cluster.sh", ["up"], tmp_path, {"SECOND_ZONE": "ap-northeast-1c"}, stub=ZONES_STUB)
    assert done.code == 0, done.output
    created = yaml.safe_load((tmp_path / "created.yaml").read_text())
    assert created == {**cluster_config(job), "availabilityZones": ["ap-northeast-1a", "ap-northeast-1c"]}
    asked = next(words for words in done.of("aws") if "describe-availability-zones" in words)
    assert "ZoneName!='ap-northeast-1a'" in asked[asked.index("--query") + 1]


def test_a_region_without_a_second_zone_for_the_account_is_refused(tmp_path):
    files = render_eks(job_of("p4d.24xlarge"))
    done = run_script(files, "eks_cluster.sh", ["up"], tmp_path, {"SECOND_ZONE": "None"}, stub=ZONES_STUB)
    assert done.code == 64
    assert "set another place.region" in done.output
    assert not [words for words in done.of("eksctl") if words[1] == "create"]


def test_gke_keeps_the_add_ons_that_a_server_needs():
    """gcloud switches off every add-on that `--addons` does not name."""
    script = text_of(render_gke(job_of("a2-highgpu-8g")), "gke_cluster.sh")
    named = re.search(r"--addons=(\S+)", script).group(1).split(",")
    assert {"HorizontalPodAutoscaling", "HttpLoadBalancing", "GcePersistentDiskCsiDriver"} < set(named)


def test_the_infiniband_driver_stays_off_the_servers_machines():
    files = render_aks(job_of("Standard_ND96asr_v4"))
    policy = next(d for d in yaml.safe_load_all(text_of(files, "aks_cluster.yaml")) if d["kind"] == "NicClusterPolicy")
    values = yaml.safe_load(text_of(files, "network_operator_values.yaml"))
    workers = values["node-feature-discovery"]["worker"]["affinity"]["nodeAffinity"]
    for affinity in (policy["spec"]["nodeAffinity"], workers):
        for term in affinity["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]:
            assert {"key": "embark/pool", "operator": "Exists"} in term["matchExpressions"]


SUBNET_STUB = """#!/usr/bin/env bash
{ for word in "$(basename "$0")" "$@"; do printf '%s\\0' "$word"; done; printf '\\0'; } >>"$RECORD"
case "$*" in
  *"subnet delete"*)
    printf x >>"$HOME/tries"
    if [ "$(wc -c <"$HOME/tries")" -lt 3 ]; then
      printf 'InUseSubnetCannotBeDeleted\\n' >&2
      exit 1
    fi
    ;;
esac
printf 'found\\n'
"""


def test_the_delegated_subnet_is_deleted_once_azure_lets_it_go(tmp_path):
    files = render_infrastructure(job_of("Standard_ND96asr_v4", volume="azure-netapp-ultra", storage_account="mine"))
    done = run_script(files, "storage.sh", ["delete"], tmp_path, stub=SUBNET_STUB)
    assert done.code == 0, done.output
    assert (tmp_path / "tries").read_text() == "xxx"


@pytest.mark.parametrize(("cloud", "least", "most"), [
    ("aws", "--nodes-min 2", "--nodes-max 11"), ("azure", "--min-count 2", "--max-count 11"),
    ("gcp", "--total-min-nodes=2", "--total-max-nodes=11")])
def test_a_guide_s_machines_for_servers_grow_with_the_replicas(cloud, least, most):
    guide = (Path(__file__).parents[3] / "examples" / "cloud_deployment" / cloud / "README.md").read_text()
    assert least in guide
    assert most in guide
    assert ServeSpec().max_replicas == 10, "a machine for each replica, and one for a rollout"


def test_eks_has_an_autoscaler_that_may_start_machines():
    job = job_of("p4d.24xlarge")
    found = cluster_config(job)["iam"]["podIdentityAssociations"][0]
    assert found == {"namespace": "kube-system", "serviceAccountName": "cluster-autoscaler",
                     "wellKnownPolicies": {"autoScaler": True}}
    script = text_of(render_eks(job), "eks_cluster.sh")
    assert 'autoDiscovery.clusterName="$CLUSTER"' in script
    assert "rbac.serviceAccount.name=cluster-autoscaler" in script
