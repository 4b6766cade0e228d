#!/usr/bin/env bash
# Budget and quotas. 2 x Standard_ND96asr_v4 on demand in eastus: 54.39 USD an hour by the catalog (2026-08-22).
# budget.sh quota says whether the machines may start; budget.sh budget sets up alerts by mail.
# Written by `embark render`. Change the spec and run it again: --diff shows what would change; files edited by
# hand are kept unless --force is given.
set -euo pipefail
shopt -s inherit_errexit 2>/dev/null || true

LOCATION=${LOCATION:-eastus}
RESOURCE_GROUP=${RESOURCE_GROUP:-embark}
# A month's budget, for the alerts.
BUDGET_USD=${BUDGET_USD:-1400}

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
# Fails unless the quota $1 has the $2 units that the run needs. The other words are a command that prints its limit.
enough() {
  local name=$1 needed=$2 have
  shift 2
  if [ "$DRY_RUN" = 1 ]; then
    printf '%s: the run needs %s\n' "$name" "$needed"
    return 0
  fi
  have="$("$@")"
  have=${have%%.*}
  case $have in
    '' | None | *[!0-9-]*) unknown "$name: no such quota is listed. Look in the console" ;;
    -1) have=$needed ;;
  esac
  if [ "$have" -lt "$needed" ]; then
    printf '%s: %s of the %s that the run needs. Request an increase; it may take days.\n' "$name" "$have" "$needed" >&2
    exit 1
  fi
  printf '%s: %s, the run needs %s\n' "$name" "$have" "$needed"
}

# A quota that cannot be read is an error: machines that may not start are found out late, and cost days.
unknown() {
  if [ "${SKIP_QUOTA:-0}" = 1 ]; then exit 0; fi
  printf '%s, or go on with SKIP_QUOTA=1.\n' "$1" >&2
  exit 1
}
# The limit of the run's family. Its name has spaces in some families and none in others, and so has the region's answer.
family_limit() {
  az vm list-usage --location "$LOCATION" --query '[].[name.value, localName, limit]' --output tsv |
    awk -F '\t' -v code='Standard NDASv4_A100 Family' -v name='Standard NDASv4_A100 Family vCPUs' '
      function plain(text) { gsub(/ /, "", text); return tolower(text) }
      plain($1) == plain(code) || plain($2) == plain(name) { limit = $3 }
      END { print limit }'
}

# Checks the quotas that the run needs.
quota() {
  enough 'Standard NDASv4_A100 Family vCPUs' 192 family_limit
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
    printf 'usage: %s [--dry-run] [--yes] %s\n' "$0" 'quota | budget' >&2
    exit 64
    ;;
esac
