#!/usr/bin/env bash
# Azure Monitor: the GPUs' metrics in managed Prometheus, and a mail when they are idle or a machine is dead.
# Written by `embark render`. Change the spec and run it again: --diff shows what would change; files edited by
# hand are kept unless --force is given.
set -euo pipefail
shopt -s inherit_errexit 2>/dev/null || true

RESOURCE_GROUP=${RESOURCE_GROUP:-embark}
CLUSTER=${CLUSTER:-embark}
LOCATION=${LOCATION:-eastus}
: "${EMAIL:?the address for the mails}"

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
run az monitor action-group create \
  --resource-group "$RESOURCE_GROUP" \
  --name embark-dlrm \
  --short-name embark \
  --action email owner "$EMAIL"
ACTIONS="$(value 'the action group' az monitor action-group show --resource-group "$RESOURCE_GROUP" --name embark-dlrm --query id)"
if ! az monitor account show --resource-group "$RESOURCE_GROUP" --name "$CLUSTER" >/dev/null 2>&1; then
  run az monitor account create --resource-group "$RESOURCE_GROUP" --name "$CLUSTER" --location "$LOCATION"
fi

WORKSPACE="$(value 'the workspace' az monitor account show --resource-group "$RESOURCE_GROUP" --name "$CLUSTER" --query id)"
run az aks update \
  --resource-group "$RESOURCE_GROUP" \
  --name "$CLUSTER" \
  --enable-azure-monitor-metrics \
  --azure-monitor-workspace-resource-id "$WORKSPACE"

run kubectl apply -f dcgm_pod_monitor.yaml

CLUSTER_ID="$(value 'the cluster' az aks show --resource-group "$RESOURCE_GROUP" --name "$CLUSTER" --query id)"
run az deployment group create \
  --resource-group "$RESOURCE_GROUP" \
  --name embark-rules-dlrm \
  --template-file alert_rules.json \
  --parameters \
  workspace="$WORKSPACE" \
  cluster="$CLUSTER_ID" \
  actionGroup="$ACTIONS" \
  location="$LOCATION"
# The run's own metrics; import grafana_dashboard.json into Grafana.
if [ "$DRY_RUN" = 1 ] || kubectl get crd podmonitors.azmonitoring.coreos.com >/dev/null 2>&1; then
  run kubectl apply -f run_metrics.yaml
else
  printf 'The cluster has no Prometheus that reads %s.\n' podmonitors.azmonitoring.coreos.com
fi
