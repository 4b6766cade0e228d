#!/usr/bin/env bash
# The AKS cluster: up creates it if it does not exist, machines adds the GPU machines, stop deletes them, delete
# deletes all. Safe to repeat.
# Written by `embark render`. Change the spec and run it again: --diff shows what would change; files edited by
# hand are kept unless --force is given.
set -euo pipefail
shopt -s inherit_errexit 2>/dev/null || true

RESOURCE_GROUP=${RESOURCE_GROUP:-embark}
CLUSTER=${CLUSTER:-embark}
LOCATION=${LOCATION:-eastus}
# az vm list-skus shows which zones have the machine.
ZONE=${ZONE:-1}
# The pods' managed identity.
IDENTITY=${IDENTITY:-embark-train}
STORAGE_ACCOUNT=${STORAGE_ACCOUNT:-embarkexample}
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
# The cluster, the drivers for its GPU machines, and what the run's pods may use. The GPU machines come later, since
# they are paid from the moment they start.
up() {
  run az group create --name "$RESOURCE_GROUP" --location "$LOCATION"
  # Without this feature machines of one pool do not share an InfiniBand fabric. It takes some minutes, once.
  run az feature register --namespace Microsoft.ContainerService --name AKSInfinibandSupport
  STATE=Registered
  if [ "$DRY_RUN" = 0 ]; then
    for _ in $(seq 90); do
      STATE="$(az feature show --namespace Microsoft.ContainerService --name AKSInfinibandSupport \
        --query properties.state --output tsv)"
      if [ "$STATE" = Registered ]; then break; fi
      sleep 20
    done
  fi
  if [ "$STATE" != Registered ]; then
    printf 'The feature AKSInfinibandSupport is %s after half an hour; Azure may have to approve it.\n' "$STATE" >&2
    exit 70
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
    pay 'The cluster: 0.38 USD an hour until it is deleted.'
    # Without --kubernetes-version it is AKS's default, which is always in support.
    run az aks create \
      --resource-group "$RESOURCE_GROUP" \
      --name "$CLUSTER" \
      --location "$LOCATION" \
      --nodepool-name system \
      --node-count 2 \
      --node-vm-size Standard_D4s_v5 \
      --network-plugin azure \
      --network-plugin-mode overlay \
      --network-dataplane cilium \
      --network-policy cilium \
      --enable-managed-identity \
      --enable-oidc-issuer \
      --enable-workload-identity \
      --enable-azure-monitor-metrics \
      --node-os-upgrade-channel NodeImage \
      --generate-ssh-keys
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
  ISSUER="$(value "the cluster's issuer" az aks show --resource-group "$RESOURCE_GROUP" --name "$CLUSTER" --query oidcIssuerProfile.issuerUrl)"
  ACCOUNT="$(value 'the storage account' az storage account show --name "$STORAGE_ACCOUNT" --query id)"
  # The pods' own identity: workload identity, no key and no secret anywhere.
  run az identity create --resource-group "$RESOURCE_GROUP" --name "$IDENTITY" --location "$LOCATION"
  run az identity federated-credential create \
    --resource-group "$RESOURCE_GROUP" \
    --name embark \
    --identity-name "$IDENTITY" \
    --issuer "$ISSUER" \
    --subject system:serviceaccount:embark:embark \
    --audiences api://AzureADTokenExchange
  PRINCIPAL="$(value 'the pods'"'"' identity' az identity show --resource-group "$RESOURCE_GROUP" --name "$IDENTITY" --query principalId)"
  run az role assignment create \
    --role 'Storage Blob Data Contributor' \
    --assignee-object-id "$PRINCIPAL" \
    --assignee-principal-type ServicePrincipal \
    --scope "$ACCOUNT"/blobServices/default/containers/embark-example
  CLIENT="$(value 'the pods'"'"' identity' az identity show --resource-group "$RESOURCE_GROUP" --name "$IDENTITY" --query clientId)"
  run kubectl annotate serviceaccount embark \
    azure.workload.identity/client-id="$CLIENT" \
    --namespace embark \
    --overwrite
  # That of the servers, which only read.
  run az identity create --resource-group "$RESOURCE_GROUP" --name "$IDENTITY"-serve --location "$LOCATION"
  run az identity federated-credential create \
    --resource-group "$RESOURCE_GROUP" \
    --name embark \
    --identity-name "$IDENTITY"-serve \
    --issuer "$ISSUER" \
    --subject system:serviceaccount:embark:embark-serve \
    --audiences api://AzureADTokenExchange
  PRINCIPAL="$(value 'the servers'"'"' identity' az identity show --resource-group "$RESOURCE_GROUP" --name "$IDENTITY"-serve --query principalId)"
  run az role assignment create \
    --role 'Storage Blob Data Reader' \
    --assignee-object-id "$PRINCIPAL" \
    --assignee-principal-type ServicePrincipal \
    --scope "$ACCOUNT"/blobServices/default/containers/embark-example
  CLIENT="$(value 'the servers'"'"' identity' az identity show --resource-group "$RESOURCE_GROUP" --name "$IDENTITY"-serve --query clientId)"
  run kubectl annotate serviceaccount embark-serve \
    azure.workload.identity/client-id="$CLIENT" \
    --namespace embark \
    --overwrite

}

# The GPU machines.
machines() {
  pay '2 x Standard_ND96asr_v4 on demand in eastus: 54.39 USD an hour by the catalog (2026-08-22).'
  # A pool of its own: GPU machines in the system pool run the cluster's own pods and cannot scale to zero.
  local count ppg
  count="$(az aks nodepool show --resource-group "$RESOURCE_GROUP" --cluster-name "$CLUSTER" --name gpu \
    --query count --output tsv 2>/dev/null || true)"
  if [ -z "$count" ]; then
    ppg="$(value 'the proximity placement group' az ppg show --resource-group "$RESOURCE_GROUP" --name embark-ppg --query id)"
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
      --ppg "$ppg" \
      --labels embark/pool=nd96asr-v4
  elif [ "$count" != 2 ]; then
    # The autoscaler removes idle machines, and does not know of a pool without machines that they have InfiniBand.
    run az aks nodepool update \
      --resource-group "$RESOURCE_GROUP" \
      --cluster-name "$CLUSTER" \
      --name gpu \
      --disable-cluster-autoscaler
    run az aks nodepool scale \
      --resource-group "$RESOURCE_GROUP" \
      --cluster-name "$CLUSTER" \
      --name gpu \
      --node-count 2
    run az aks nodepool update \
      --resource-group "$RESOURCE_GROUP" \
      --cluster-name "$CLUSTER" \
      --name gpu \
      --enable-cluster-autoscaler \
      --min-count 0 \
      --max-count 2
  fi
}

# Deletes the GPU machines.
stop() {
  if [ "$DRY_RUN" = 1 ] || az aks nodepool show --resource-group "$RESOURCE_GROUP" --cluster-name "$CLUSTER" --name gpu >/dev/null 2>&1; then
    run az aks nodepool delete --resource-group "$RESOURCE_GROUP" --cluster-name "$CLUSTER" --name gpu
  fi
}

# Deletes the cluster. A file system in its network must be gone: storage.sh delete.
delete() {
  if [ "$DRY_RUN" = 1 ] || az aks show --resource-group "$RESOURCE_GROUP" --name "$CLUSTER" >/dev/null 2>&1; then
    run az aks delete --resource-group "$RESOURCE_GROUP" --name "$CLUSTER" --yes
  fi
  # Other clusters of the region may use it.
  printf 'The monitor workspace of the region stays: az resource list --resource-type Microsoft.Monitor/accounts\n' >&2
}

set -- "${1:-up}"

case ${1:-} in
  up | machines | stop | delete) "$@" ;;
  *)
    printf 'usage: %s [--dry-run] [--yes] %s\n' "$0" '[up | machines | stop | delete]' >&2
    exit 64
    ;;
esac
