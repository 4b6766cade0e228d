#!/usr/bin/env bash
# Creates the AKS cluster if it does not exist, with its GPU machines and drivers. Safe to repeat.
# Written by `embark render`. Change the spec and run it again: --diff shows what would change; files edited by
# hand are kept unless --force is given.
set -euo pipefail

RESOURCE_GROUP=${RESOURCE_GROUP:-embark}
CLUSTER=${CLUSTER:-embark}
LOCATION=${LOCATION:-eastus}
# az vm list-skus shows which zones have the machine.
ZONE=${ZONE:-1}
# The pods' managed identity.
IDENTITY=${IDENTITY:-embark-train}
STORAGE_ACCOUNT=${STORAGE_ACCOUNT:-embarkexample}
# `up`: without the GPU machines, which are paid from the moment they start.
PART=${1:-up}
DRY_RUN=${DRY_RUN:-0}

# Prints a command, and runs it unless DRY_RUN is 1.
run() {
  printf '+' >&2
  printf ' %q' "$@" >&2
  printf '\n' >&2
  if [ "$DRY_RUN" = 1 ]; then return 0; fi
  "$@"
}

cd "$(dirname "$0")"
run az group create --name "$RESOURCE_GROUP" --location "$LOCATION"
# Without this feature machines of one pool do not share an InfiniBand fabric. It takes some minutes, once.
run az feature register --namespace Microsoft.ContainerService --name AKSInfinibandSupport
if [ "$DRY_RUN" = 0 ]; then
  until [ "$(az feature show --namespace Microsoft.ContainerService --name AKSInfinibandSupport \
    --query properties.state --output tsv)" = Registered ]; do sleep 20; done
fi
run az provider register --namespace Microsoft.ContainerService
# Places the machines near each other.
if ! az ppg show --resource-group "$RESOURCE_GROUP" --name embark-ppg >/dev/null 2>&1; then
  run az ppg create \
    --resource-group "$RESOURCE_GROUP" \
    --name embark-ppg \
    --location "$LOCATION" \
    --zone "$ZONE" \
    --type Standard \
    --intent-vm-sizes Standard_ND96asr_v4
fi
if ! az aks show --resource-group "$RESOURCE_GROUP" --name "$CLUSTER" >/dev/null 2>&1; then
  run az aks create \
    --resource-group "$RESOURCE_GROUP" \
    --name "$CLUSTER" \
    --location "$LOCATION" \
    --kubernetes-version 1.34 \
    --nodepool-name system \
    --node-count 2 \
    --node-vm-size Standard_D4s_v5 \
    --network-plugin azure \
    --network-plugin-mode overlay \
    --enable-managed-identity \
    --enable-oidc-issuer \
    --enable-workload-identity \
    --enable-azure-monitor-metrics \
    --node-os-upgrade-channel NodeImage \
    --generate-ssh-keys
fi

# A pool of its own: GPU machines in the system pool run the cluster's own pods and cannot scale to zero.
if [ "$PART" != up ] && ! az aks nodepool show --resource-group "$RESOURCE_GROUP" --cluster-name "$CLUSTER" --name gpu >/dev/null 2>&1; then
  run az aks nodepool add \
    --resource-group "$RESOURCE_GROUP" \
    --cluster-name "$CLUSTER" \
    --name gpu \
    --mode User \
    --node-vm-size Standard_ND96asr_v4 \
    --zones "$ZONE" \
    --os-sku Ubuntu \
    --node-osdisk-size 256 \
    --gpu-driver None \
    --node-count 2 \
    --enable-cluster-autoscaler \
    --min-count 0 \
    --max-count 2 \
    --node-taints nvidia.com/gpu=present:NoSchedule \
    --ppg "$(az ppg show --resource-group "$RESOURCE_GROUP" --name embark-ppg --query id --output tsv)" \
    --labels embark/pool=nd96asr-v4
fi

run az aks get-credentials --resource-group "$RESOURCE_GROUP" --name "$CLUSTER" --overwrite-existing

run helm repo add --force-update nvidia https://helm.ngc.nvidia.com/nvidia
run helm upgrade network-operator nvidia/network-operator \
  --install \
  --namespace nvidia-network-operator \
  --create-namespace \
  --version 26.4.0 \
  --values network_operator_values.yaml \
  --wait
run helm upgrade gpu-operator nvidia/gpu-operator \
  --install \
  --namespace gpu-operator \
  --create-namespace \
  --version v26.3.3 \
  --values gpu_operator_values.yaml \
  --wait

run kubectl apply -f aks_cluster.yaml
# The pods' own identity: workload identity, no key and no secret anywhere.
run az identity create --resource-group "$RESOURCE_GROUP" --name "$IDENTITY" --location "$LOCATION"
run az identity federated-credential create \
  --resource-group "$RESOURCE_GROUP" \
  --name embark \
  --identity-name "$IDENTITY" \
  --issuer "$(az aks show --resource-group "$RESOURCE_GROUP" --name "$CLUSTER" --query oidcIssuerProfile.issuerUrl --output tsv)" \
  --subject system:serviceaccount:embark:embark \
  --audiences api://AzureADTokenExchange
run az role assignment create \
  --role 'Storage Blob Data Contributor' \
  --assignee-object-id "$(az identity show --resource-group "$RESOURCE_GROUP" --name "$IDENTITY" --query principalId --output tsv)" \
  --assignee-principal-type ServicePrincipal \
  --scope "$(az storage account show --name "$STORAGE_ACCOUNT" --query id --output tsv)"/blobServices/default/containers/embark-example
if ! kubectl get serviceaccount embark --namespace embark >/dev/null 2>&1; then
  run kubectl create serviceaccount embark --namespace embark
fi
run kubectl annotate serviceaccount embark \
  azure.workload.identity/client-id="$(az identity show --resource-group "$RESOURCE_GROUP" --name "$IDENTITY" --query clientId --output tsv)" \
  --namespace embark \
  --overwrite
