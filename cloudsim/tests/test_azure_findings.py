"""An empty subscription refuses what scripts for Azure once did wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from account_shell import run_shell

from cloudsim.account import Account
from cloudsim.azure import open_account
from cloudsim.kubernetes.cloud import VolumeFacts

GROUP = "az group create --name embark --location eastus\n"
STORAGE = GROUP + """
az storage account create --name ours --resource-group embark --location eastus
az storage container-rm create --storage-account ours --resource-group embark --name runs
"""
CLUSTER = GROUP + """
az aks create --resource-group embark --name embark --location eastus --node-vm-size Standard_D4s_v5 --node-count 2 \
  --nodepool-name system --enable-oidc-issuer --enable-workload-identity --generate-ssh-keys
az aks get-credentials --resource-group embark --name embark
"""
IDENTITY = """
az identity create --resource-group embark --name train
az identity federated-credential create --resource-group embark --identity-name train --name embark \
  --issuer "$(az aks show --resource-group embark --name embark --query oidcIssuerProfile.issuerUrl --output tsv)" \
  --subject system:serviceaccount:embark:embark
"""
ROLE = """
az role assignment create --role 'Storage Blob Data Contributor' --assignee-principal-type ServicePrincipal \
  --assignee-object-id "$(az identity show --resource-group embark --name train --query principalId --output tsv)" \
  --scope "$(az storage account show --name ours --query id --output tsv)/blobServices/default/containers/runs"
"""
NETWORK = """
NODES=$(az aks show --resource-group embark --name embark --query nodeResourceGroup --output tsv)
VNET=$(az network vnet list --resource-group "$NODES" --query '[0].name' --output tsv)
"""
VOLUME = NETWORK + """
az network vnet subnet create --resource-group "$NODES" --vnet-name "$VNET" --name storage \
  --delegations Microsoft.NetApp/volumes --address-prefixes 10.225.0.0/24
az netappfiles account create --resource-group embark --account-name embark --location eastus
az netappfiles pool create --resource-group embark --account-name embark --name embark --location eastus --size 1 \
  --service-level Ultra
az netappfiles volume create --resource-group embark --account-name embark --pool-name embark --name data \
  --location eastus --service-level Ultra --usage-threshold 1024 --file-path data --protocol-types NFSv3 MODE \
  --subnet "$(az network vnet subnet show --resource-group "$NODES" --vnet-name "$VNET" --name storage --query id \
  --output tsv)"
"""
DELETE_VOLUME = """
az netappfiles volume delete --resource-group embark --account-name embark --pool-name embark --name data --yes
az netappfiles pool delete --resource-group embark --account-name embark --name embark --yes
az netappfiles account delete --resource-group embark --account-name embark --yes
"""
DELETE_CLUSTER = "az aks delete --resource-group embark --name embark --yes\n"
POOL = """az aks nodepool add --resource-group embark --cluster-name embark --name gpu --node-count 2 --zones 1 \
  --node-vm-size Standard_ND96asr_v4 """
FEATURE = """
az feature register --namespace Microsoft.ContainerService --name AKSInfinibandSupport
until [ "$(az feature show --namespace Microsoft.ContainerService --name AKSInfinibandSupport \
  --query properties.state --output tsv)" = Registered ]; do sleep 20; done
"""
IMAGE = "ourregistry.azurecr.io/embark:1"
REGISTRY = GROUP + f"""
az acr create --name ourregistry --resource-group embark --sku Standard
az acr login --name ourregistry
printf 'FROM scratch\\n' >Dockerfile
docker build --tag {IMAGE} . && docker push {IMAGE}
"""
LABEL = {"azure.workload.identity/use": "true"}


@pytest.fixture
def account(tmp_path: Path):
    opened = open_account(tmp_path)
    yield opened
    opened.close()


def said(account: Account, text: str) -> str:
    """Return the output of a script that must fail."""
    done = run_shell(account, f"set -e\n{text}", account.folder)
    assert done.code != 0, done.output
    return done.output


def does(account: Account, text: str) -> str:
    done = run_shell(account, f"set -e\n{text}", account.folder)
    assert done.code == 0, done.output
    return done.output


def test_a_role_on_a_storage_account_that_does_not_exist_is_refused(account):
    text = said(account, CLUSTER + IDENTITY + ROLE)
    assert "storage account 'ours' was not found" in text
    assert "MissingSubscription" in text
    does(account, STORAGE + ROLE)


def test_a_cluster_is_not_deleted_while_a_volume_lies_in_its_network(account):
    does(account, CLUSTER + VOLUME.replace("MODE", ""))
    assert "InUseSubnetCannotBeDeleted" in said(account, DELETE_CLUSTER)
    assert "CannotDeleteResource" in said(account, "\n".join(reversed(DELETE_VOLUME.strip().splitlines())))
    does(account, DELETE_VOLUME + DELETE_CLUSTER)
    assert account.paid() == []


@pytest.mark.parametrize(("flags", "mode"), [("", 0o770), ("--unix-permissions 0777", 0o777)])
def test_a_netapp_volume_keeps_its_mode_whatever_the_pods_group(account, flags, mode):
    does(account, CLUSTER + VOLUME.replace("MODE", flags))
    cluster = account.clusters["embark/embark"]
    found = cluster.cloud.volume({"spec": {"nfs": {"server": "10.225.0.4", "path": "/data"}}}, cluster.pools["system"])
    assert isinstance(found, VolumeFacts)
    assert (found.uid, found.mode, found.takes_fs_group) == (0, mode, False)


def test_a_subnet_that_is_not_delegated_takes_no_volume(account):
    text = VOLUME.replace("MODE", "").replace("--delegations Microsoft.NetApp/volumes", "")
    assert "is not delegated to Microsoft.NetApp/volumes" in said(account, CLUSTER + text)


@pytest.mark.parametrize(("labels", "env", "annotated", "reason"), [
    ({}, True, True, "has no label azure.workload.identity/use"), (LABEL, False, True, "Account must be specified"),
    (LABEL, True, False, "has no annotation azure.workload.identity/client-id"), (LABEL, True, True, ""),
])
def test_a_pod_is_its_identity_only_with_label_annotation_and_account(account, labels, env, annotated, reason):
    does(account, STORAGE + CLUSTER + IDENTITY + ROLE)
    client = does(account, "az identity show --resource-group embark --name train --query clientId -o tsv").strip()
    annotations = {"azure.workload.identity/client-id": client} if annotated else {}
    container = {"env": [{"name": "AZURE_STORAGE_ACCOUNT_NAME", "value": "ours"}] if env else []}
    found = account.clusters["embark/embark"].cloud.access_error(
        "az://runs/dlrm", write=True, namespace="embark", pod={"metadata": {"labels": labels}, "spec": {
            "containers": [container]}}, service_account={"metadata": {"name": "embark", "annotations": annotations}})
    assert reason in found
    assert bool(found) == bool(reason)


def test_machines_pull_only_with_a_role_on_the_registry(account):
    does(account, REGISTRY + CLUSTER)
    cluster = account.clusters["embark/embark"]
    assert "401 Unauthorized" in cluster.cloud.pull_error(IMAGE, cluster.pools["system"], "embark")
    does(account, "az aks update --resource-group embark --name embark --attach-acr ourregistry")
    assert cluster.cloud.pull_error(IMAGE, cluster.pools["system"], "embark") == ""


def test_a_plain_machine_logs_in_before_it_pulls(account):
    def start(name: str, login: str) -> str:
        files = [{"path": "/usr/local/bin/embark-setup", "content": f"{login}\ndocker pull {IMAGE}\n"},
                 {"path": "/etc/embark/spec.toml", "content": 'store.root = "/tmp/runs"\n'}]
        (account.folder / "init.yaml").write_text("#cloud-config\n" + yaml.safe_dump({"write_files": files}))
        return does(account, f"""
az vm create --resource-group embark --name {name} --image Ubuntu2204 --size Standard_D2s_v5 --assign-identity \
  --generate-ssh-keys --custom-data init.yaml --query name
az role assignment create --role AcrPull --assignee-principal-type ServicePrincipal --query id \
  --assignee-object-id "$(az vm show --resource-group embark --name {name} --query identity.principalId --output tsv)" \
  --scope "$(az acr show --name ourregistry --query id --output tsv)"
az vm run-command invoke --resource-group embark --name {name} --command-id RunShellScript --scripts 'tail x'
""")

    does(account, REGISTRY)
    assert "401 Unauthorized" in start("a-0", "")
    assert "training" in start("b-0", "docker login --password-stdin ourregistry.azurecr.io")


def test_ids_stand_for_group_and_name_and_a_table_is_a_table(account):
    does(account, GROUP + "".join(f"""
az vm create --resource-group embark --name {name} --image Ubuntu2204 --size Standard_D2s_v5 --generate-ssh-keys \
  --query name
""" for name in ("a-0", "a-1")))
    listed = does(account, "az vm list --resource-group embark --output table").splitlines()
    assert listed[0].split() == ["Name", "ResourceGroup", "PowerState", "PublicIps", "Location"]
    assert set(listed[1]) == {"-", " "}
    assert [line.split()[0] for line in listed[2:]] == ["a-0", "a-1"]
    ids = "$(az vm list --resource-group embark --query '[].id' --output tsv)"
    assert does(account, f"az vm show --ids {ids} --query '[].name' --output tsv").split() == ["a-0", "a-1"]
    subnet = does(account, "az network vnet subnet show --query name --output tsv --ids $(az network vnet show "
                  "--resource-group embark --name a-0VNET --query id --output tsv)/subnets/a-0Subnet")
    assert subnet.strip() == "a-0Subnet"
    assert "invalid resource ID: a-0" in said(account, "az vm show --ids a-0")
    does(account, f"az vm delete --yes --ids {ids}")
    assert does(account, "az vm list --query '[].name' --output tsv") == ""
    assert "(ResourceNotFound)" in said(account, "az vm show --ids /subscriptions/x/resourceGroups/embark/providers/"
                                        "Microsoft.Compute/virtualMachines/a-0")


def test_a_pod_that_asks_for_a_device_tolerates_the_taint_of_its_name(account):
    does(account, CLUSTER)
    assert account.clusters["embark/embark"].tolerates_extended_resources


def test_infiniband_needs_the_feature_before_the_pool(account):
    does(account, CLUSTER + POOL)
    assert "rdma/ib" not in account.clusters["embark/embark"].pools["gpu"].allocatable
    does(account, "az aks nodepool delete --resource-group embark --cluster-name embark --name gpu\n" + FEATURE + POOL)
    assert account.clusters["embark/embark"].pools["gpu"].allocatable["rdma/ib"] == "8"


@pytest.mark.parametrize(("text", "reason"), [
    (POOL.replace("ND96asr_v4", "ND96asr_v9"), "VM size"), (POOL.replace("--zones 1", "--zones 4"), "zone(s) '4'"),
    (POOL.replace("--name gpu", "--name gpu-machines"), "agent pool name"),
    (POOL + "--gpus 8", "unrecognized arguments"),
    (POOL + "--ppg /subscriptions/x", "was not found"),
    (POOL + "--max-count 4 --min-count 0", "enable-cluster-autoscaler"),
    (POOL + "--enable-cluster-autoscaler --min-count 0 --max-count 1", "not in the range"),
    (POOL.replace("--cluster-name embark", "--cluster-name other"), "was not found"),
    (POOL + "--node-taints nvidia.com/gpu=present", "Invalid node taint"),
    ("az role assignment create --role 'Blob Contributor' --assignee x --scope /subscriptions/x", "doesn't exist"),
    ("az netappfiles volumes create", "misspelled"), ("az group create --name x --location eastus9", "not available"),
    ("az group create --name embark --location westus2", "already exists in location"),
    ("az acr login --name nobody", "could not be found"), ("az group delete --name embark", "--yes"),
])
def test_what_azure_refuses_is_refused_with_its_cause(account, text, reason):
    does(account, CLUSTER)
    assert reason in said(account, text)
