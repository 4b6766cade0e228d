#!/usr/bin/env bash
# Creates the run's storage where it does not exist. Safe to repeat.
# Written by `embark render`. Change the spec and run it again: --diff shows what would change; files edited by
# hand are kept unless --force is given.
set -euo pipefail
shopt -s inherit_errexit 2>/dev/null || true

RESOURCE_GROUP=${RESOURCE_GROUP:-embark}
CLUSTER=${CLUSTER:-embark}
LOCATION=${LOCATION:-eastus}
STORAGE_ACCOUNT=${STORAGE_ACCOUNT:-embarkexample}
# 21,504 GiB of Azure NetApp Files, Ultra read 2.8 GB/s and cost 11.57 USD an hour. More is faster.
CAPACITY_GIB=${CAPACITY_GIB:-21504}
DRY_RUN=${DRY_RUN:-0}
YES=${YES:-0}
KEEP=${KEEP:-0}
for word in "$@"; do
  shift
  case $word in
    --dry-run) DRY_RUN=1 ;;
    --yes) YES=1 ;;
    --keep) KEEP=1 ;;
    *) set -- "$@" "$word" ;;
  esac
done
export DRY_RUN YES

# Prints a command, and runs it unless DRY_RUN is 1.
run() {
  printf '+' >&2
  printf ' %q' "$@" >&2
  printf '\n' >&2
  if [ "$DRY_RUN" = 1 ]; then return 0; fi
  "$@"
}

# Asks a question unless --yes or --dry-run is given, or another one was answered with yes.
confirm() {
  local answer=
  if [ "$YES" = 1 ] || [ "$DRY_RUN" = 1 ]; then return 0; fi
  read -r -p "$1 [y/N] " answer || true
  case $answer in
    y | Y | yes) YES=1 ;;
    *)
      printf 'nothing was changed; --yes answers yes\n' >&2
      exit 130
      ;;
  esac
}

# Shows what machines cost, always, and asks whether to start them.
pay() {
  printf '%s\n' "$1" >&2
  confirm 'Continue?'
}

# Ends the script. A login that has expired looks like many other failures, so it is checked then.
finish() {
  local code=$?
  trap - EXIT
  case $code in 0 | 64 | 130) exit "$code" ;; esac
  if [ "$DRY_RUN" = 0 ] && ! logged_in; then
    printf 'You are not logged in to %s, or the login has expired: %s, then run this again.\n' azure 'az login' >&2
    exit 64
  fi
  exit "$code"
}

logged_in() {
  az account get-access-token --query expiresOn >/dev/null 2>&1
}

trap finish EXIT
cd "$(dirname "$0")"
# Asks az for one value, and stops where there is none. A dry run has only a name for it.
value() {
  local name=$1 found
  shift
  if [ "$DRY_RUN" = 1 ]; then printf '%s\n' "<$name>"; return 0; fi
  found=$("$@" --output tsv)
  if [ -z "$found" ]; then
    printf '%s: az finds none\n' "$name" >&2
    return 1
  fi
  printf '%s\n' "$found"
}
# A subnet of its own in the cluster's network: 10.224.0.0/12 is AKS's, 10.224.0.0/16 its machines'.
find_network() {
  NODE_GROUP="$(value "the machines' group" az aks show --resource-group "$RESOURCE_GROUP" --name "$CLUSTER" --query nodeResourceGroup)"
  VNET="$(value 'the network' az network vnet list --resource-group "$NODE_GROUP" --query '[0].name')"
}

# The containers, before there is a cluster.
buckets() {
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
  # Lets you upload data: owning the account does not imply that. A pipeline is logged in as a service principal.
  USER_TYPE=User
  if [ "$DRY_RUN" = 0 ] && [ "$(az account show --query user.type --output tsv)" = servicePrincipal ]; then
    USER_TYPE=ServicePrincipal
    USER_ID="$(value 'you' az ad sp show --id "$(az account show --query user.name --output tsv)" --query id)"
  else
    USER_ID="$(value 'you' az ad signed-in-user show --query id)"
  fi
  ACCOUNT="$(value 'the storage account' az storage account show --name "$STORAGE_ACCOUNT" --query id)"
  run az role assignment create \
    --role 'Storage Blob Data Contributor' \
    --assignee-object-id "$USER_ID" \
    --assignee-principal-type "$USER_TYPE" \
    --scope "$ACCOUNT"
}

# The file system, in the cluster's network.
volume() {
  find_network
  if ! az network vnet subnet show --resource-group "$NODE_GROUP" --vnet-name "$VNET" --name embark-storage >/dev/null 2>&1; then
    run az network vnet subnet create \
      --resource-group "$NODE_GROUP" \
      --vnet-name "$VNET" \
      --name embark-storage \
      --delegations Microsoft.NetApp/volumes \
      --address-prefixes 10.225.0.0/24
  fi
  SUBNET="$(value 'the subnet' az network vnet subnet show --resource-group "$NODE_GROUP" --vnet-name "$VNET" --name embark-storage --query id)"
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

  # Pods run as user 1000, and Kubernetes does not change the owner of files on NFS: the default mode, 0770, is root's.
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
      --unix-permissions 0777 \
      --subnet "$SUBNET"
  fi

  ADDRESS="$(value "the volume's address" az netappfiles volume show \
    --resource-group "$RESOURCE_GROUP" \
    --account-name embark \
    --pool-name embark \
    --name dlrm-data \
    --query 'mountTargets[0].ipAddress')"
  PATCH="{\"spec\":{\"nfs\":{\"server\":\"$ADDRESS\"}}}"
  if [ "$DRY_RUN" = 0 ]; then
    kubectl patch --local -f volume.yaml --type=merge --output=json --patch="$PATCH" |
      kubectl apply -f -
  fi
  run kubectl apply -f claim.yaml
}

# Deletes the file system; the containers stay.
delete() {
  # A pool is paid as long as it exists, and a network with a volume in it cannot be deleted.
  if [ "$DRY_RUN" = 1 ] || az netappfiles account show --resource-group "$RESOURCE_GROUP" --account-name embark >/dev/null 2>&1; then
    run az netappfiles volume delete \
      --resource-group "$RESOURCE_GROUP" \
      --account-name embark \
      --pool-name embark \
      --name dlrm-data \
      --yes
    run az netappfiles pool delete --resource-group "$RESOURCE_GROUP" --account-name embark --name embark --yes
    run az netappfiles account delete --resource-group "$RESOURCE_GROUP" --account-name embark --yes
  fi
  if [ "$DRY_RUN" = 1 ] || az aks show --resource-group "$RESOURCE_GROUP" --name "$CLUSTER" >/dev/null 2>&1; then
    find_network
    # Azure takes minutes to notice that the file system is gone; until then the subnet is in use.
    for try in $(seq 20); do
      if run az network vnet subnet delete --resource-group "$NODE_GROUP" --vnet-name "$VNET" --name embark-storage; then break; fi
      if [ "$try" = 20 ]; then exit 70; fi
      sleep 30
    done
  fi
}

all() {
  buckets
  volume
}

set -- "${1:-all}"

case ${1:-} in
  all | buckets | volume | delete) "$@" ;;
  *)
    printf 'usage: %s [--dry-run] [--yes] %s\n' "$0" '[all | buckets | volume | delete]' >&2
    exit 64
    ;;
esac
