#!/usr/bin/env bash
# Budget and quotas. 2 x p4d.24xlarge on demand in us-west-2: 43.92 USD an hour by the catalog (2026-08-22).
# budget.sh quota says whether the machines may start; budget.sh budget sets up alerts by mail.
# Written by `embark render`. Change the spec and run it again: --diff shows what would change; files edited by
# hand are kept unless --force is given.
set -euo pipefail
shopt -s inherit_errexit 2>/dev/null || true

REGION=${REGION:-us-west-2}
# A month's budget, for the alerts.
BUDGET_USD=${BUDGET_USD:-1100}

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
    printf 'You are not logged in to %s, or the login has expired: %s, then run this again.\n' aws 'aws sso login, or set AWS_PROFILE' >&2
    exit 64
  fi
  exit "$code"
}

logged_in() {
  aws sts get-caller-identity >/dev/null 2>&1
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
# Checks the quotas that the run needs.
quota() {
  # To request more: aws service-quotas request-service-quota-increase --service-code ec2 --region us-west-2 \
  #   --quota-code L-417A185B --desired-value 192
  enough 'Running On-Demand P instances' 192 aws service-quotas get-service-quota --region "$REGION" \
    --service-code ec2 --quota-code L-417A185B --query Quota.Value --output text
}

# Sends a mail as the budget is spent. An alert stops nothing.
budget() {
  : "${EMAIL:?the address for the mails}"
  local account percent
  account=000000000000
  if [ "$DRY_RUN" = 0 ]; then account="$(aws sts get-caller-identity --query Account --output text)"; fi
  if ! aws budgets describe-budget --account-id "$account" --budget-name embark-dlrm >/dev/null 2>&1; then
    run aws budgets create-budget --account-id "$account" --budget "$(sed "s/AMOUNT/$BUDGET_USD/" budget.json)"
    for percent in 50 80 100; do
      run aws budgets create-notification \
        --account-id "$account" \
        --budget-name embark-dlrm \
        --notification "NotificationType=ACTUAL,ComparisonOperator=GREATER_THAN,Threshold=$percent,ThresholdType=PERCENTAGE" \
        --subscribers "SubscriptionType=EMAIL,Address=$EMAIL"
    done
  fi
}

case ${1:-} in
  quota | budget) "$@" ;;
  *)
    printf 'usage: %s [--dry-run] [--yes] %s\n' "$0" 'quota | budget' >&2
    exit 64
    ;;
esac
