#!/usr/bin/env bash
# Budget and quotas. 2 x Standard_ND96asr_v4 on demand in eastus: 54.39 USD an hour by the catalog (2026-08-22).
# budget.sh quota says whether the machines may start; budget.sh budget sets up alerts by mail.
# Written by `embark render`. Change the spec and run it again: --diff shows what would change; files edited by
# hand are kept unless --force is given.
set -euo pipefail

LOCATION=${LOCATION:-eastus}
RESOURCE_GROUP=${RESOURCE_GROUP:-embark}
# A month's budget, for the alerts.
BUDGET_USD=${BUDGET_USD:-1400}

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
# Whether the quota $1 has the $2 units that the run needs; $3 is its limit.
enough() {
  local have=${3%%.*}
  case $have in
    '' | None | *[!0-9-]*) printf '%s: unknown from here; see the console\n' "$1" >&2; return 0 ;;
    -1) have=$2 ;;
  esac
  if [ "$have" -lt "$2" ]; then
    printf '%s: %s of the %s that the run needs. Request an increase; it may take days.\n' "$1" "$have" "$2" >&2
    return 1
  fi
  printf '%s: %s, the run needs %s\n' "$1" "$have" "$2"
}
# Checks the quotas that the run needs.
quota() {
  enough 'Standard NDASv4_A100 Family vCPUs' 192 "$(az vm list-usage --location "$LOCATION" \
    --query '[?name.value=='"'"'StandardNDASv4_A100Family'"'"'] | [0].limit' --output tsv)"
}

# Sends a mail as the budget is spent. An alert stops nothing.
budget() {
  : "${EMAIL:?the address for the mails}"
  run az deployment group create \
    --resource-group "$RESOURCE_GROUP" \
    --name embark-budget-dlrm \
    --template-file budget.json \
    --parameters amount="$BUDGET_USD" email="$EMAIL" startDate="$(date +%Y-%m-01)"
}

case ${1:-} in
  quota | budget) "$@" ;;
  *)
    printf 'usage: %s %s\n' "$0" 'quota | budget' >&2
    exit 64
    ;;
esac
