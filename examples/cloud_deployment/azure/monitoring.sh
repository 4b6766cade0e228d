#!/usr/bin/env bash
# Azure Monitor: the GPUs' metrics in managed Prometheus, and a mail when they are idle or a machine is dead.
# Written by `embark render`. Change the spec and run it again: --diff shows what would change; files edited by
# hand are kept unless --force is given.
set -euo pipefail

RESOURCE_GROUP=${RESOURCE_GROUP:-embark}
CLUSTER=${CLUSTER:-embark}
LOCATION=${LOCATION:-eastus}
: "${EMAIL:?the address for the mails}"

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
run az monitor action-group create \
  --resource-group "$RESOURCE_GROUP" \
  --name embark-dlrm \
  --short-name embark \
  --action email owner "$EMAIL"
if ! az monitor account show --resource-group "$RESOURCE_GROUP" --name "$CLUSTER" >/dev/null 2>&1; then
  run az monitor account create --resource-group "$RESOURCE_GROUP" --name "$CLUSTER" --location "$LOCATION"
fi

run az aks update \
  --resource-group "$RESOURCE_GROUP" \
  --name "$CLUSTER" \
  --enable-azure-monitor-metrics \
  --azure-monitor-workspace-resource-id "$(az monitor account show --resource-group "$RESOURCE_GROUP" --name "$CLUSTER" --query id --output tsv)"

run kubectl apply -f dcgm_pod_monitor.yaml

run az deployment group create \
  --resource-group "$RESOURCE_GROUP" \
  --name embark-rules-dlrm \
  --template-file alert_rules.json \
  --parameters \
  workspace="$(az monitor account show --resource-group "$RESOURCE_GROUP" --name "$CLUSTER" --query id --output tsv)" \
  cluster="$(az aks show --resource-group "$RESOURCE_GROUP" --name "$CLUSTER" --query id --output tsv)" \
  actionGroup="$(az monitor action-group show --resource-group "$RESOURCE_GROUP" --name embark-dlrm --query id --output tsv)" \
  location="$LOCATION"
# The run's own metrics; import grafana_dashboard.json into Grafana.
if [ "$DRY_RUN" = 1 ] || kubectl get crd podmonitors.azmonitoring.coreos.com >/dev/null 2>&1; then
  run kubectl apply -f run_metrics.yaml
else
  printf 'The cluster has no Prometheus that reads %s.\n' podmonitors.azmonitoring.coreos.com
fi
