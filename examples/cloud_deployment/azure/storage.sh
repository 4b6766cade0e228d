#!/usr/bin/env bash
# Creates the run's storage where it does not exist. Safe to repeat.
# Written by `embark render`. Change the spec and run it again: --diff shows what would change; files edited by
# hand are kept unless --force is given.
set -euo pipefail

RESOURCE_GROUP=${RESOURCE_GROUP:-embark}
CLUSTER=${CLUSTER:-embark}
LOCATION=${LOCATION:-eastus}
STORAGE_ACCOUNT=${STORAGE_ACCOUNT:-embarkexample}
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
if ! az storage account show --name "$STORAGE_ACCOUNT" >/dev/null 2>&1; then
  run az storage account create \
    --name "$STORAGE_ACCOUNT" \
    --resource-group "$RESOURCE_GROUP" \
    --location "$LOCATION" \
    --sku Standard_LRS \
    --kind StorageV2 \
    --allow-blob-public-access false \
    --allow-shared-key-access false \
    --min-tls-version TLS1_2
fi
run az storage container-rm create \
  --storage-account "$STORAGE_ACCOUNT" \
  --resource-group "$RESOURCE_GROUP" \
  --name embark-example
# Lets you upload data: owning the account does not imply that.
run az role assignment create \
  --role 'Storage Blob Data Contributor' \
  --assignee-object-id "$(az ad signed-in-user show --query id --output tsv)" \
  --assignee-principal-type User \
  --scope "$(az storage account show --name "$STORAGE_ACCOUNT" --query id --output tsv)"
if [ "${1:-all}" = buckets ]; then exit 0; fi
# 1,024 GiB of Azure NetApp Files, Ultra read 0.1 GB/s. More is faster.
CAPACITY_GIB=${CAPACITY_GIB:-1024}

# A subnet of its own in the cluster's network: 10.224.0.0/12 is AKS's, 10.224.0.0/16 its machines'.
NODE_GROUP=none VNET=none
if [ "$DRY_RUN" = 0 ]; then
  NODE_GROUP="$(az aks show --resource-group "$RESOURCE_GROUP" --name "$CLUSTER" --query nodeResourceGroup --output tsv)"
  VNET="$(az network vnet list --resource-group "$NODE_GROUP" --query '[0].name' --output tsv)"
fi
if ! az network vnet subnet show --resource-group "$NODE_GROUP" --vnet-name "$VNET" --name embark-storage >/dev/null 2>&1; then
  run az network vnet subnet create \
    --resource-group "$NODE_GROUP" \
    --vnet-name "$VNET" \
    --name embark-storage \
    --delegations Microsoft.NetApp/volumes \
    --address-prefixes 10.225.0.0/24
fi
run az provider register --namespace Microsoft.NetApp --wait

if ! az netappfiles account show --resource-group "$RESOURCE_GROUP" --account-name embark >/dev/null 2>&1; then
  run az netappfiles account create --resource-group "$RESOURCE_GROUP" --account-name embark --location "$LOCATION"
fi

if ! az netappfiles pool show --resource-group "$RESOURCE_GROUP" --account-name embark --name embark >/dev/null 2>&1; then
  run az netappfiles pool create \
    --resource-group "$RESOURCE_GROUP" \
    --account-name embark \
    --name embark \
    --location "$LOCATION" \
    --service-level Ultra \
    --size "$(((CAPACITY_GIB + 1023) / 1024))"
fi

if ! az netappfiles volume show \
  --resource-group "$RESOURCE_GROUP" \
  --account-name embark \
  --pool-name embark \
  --name dlrm-data >/dev/null 2>&1; then
  run az netappfiles volume create \
    --resource-group "$RESOURCE_GROUP" \
    --account-name embark \
    --pool-name embark \
    --name dlrm-data \
    --location "$LOCATION" \
    --service-level Ultra \
    --usage-threshold "$CAPACITY_GIB" \
    --file-path data \
    --protocol-types NFSv3 \
    --network-features Standard \
    --subnet "$(az network vnet subnet show --resource-group "$NODE_GROUP" --vnet-name "$VNET" --name embark-storage --query id --output tsv)"
fi

ADDRESS=none
if [ "$DRY_RUN" = 0 ]; then
  ADDRESS="$(az netappfiles volume show --resource-group "$RESOURCE_GROUP" --account-name embark --pool-name embark \
    --name dlrm-data --query 'mountTargets[0].ipAddress' --output tsv)"
fi
PATCH="{\"spec\":{\"nfs\":{\"server\":\"$ADDRESS\"}}}"
if [ "$DRY_RUN" = 0 ]; then
  kubectl patch --local -f volume.yaml --type=merge --output=json --patch="$PATCH" |
    kubectl apply -f -
fi
run kubectl apply -f claim.yaml
