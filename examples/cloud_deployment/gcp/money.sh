#!/usr/bin/env bash
# Money and quotas. 2 x a2-highgpu-8g in us-central1, on demand: $58.77 an hour by the catalog (2026-08-22).
# money.sh quota says whether the machines may start; money.sh budget asks for a mail.
# Written by `embark render`. Change the spec and run it again: --diff shows what would change, and a file that
# was edited by hand is not overwritten unasked.
set -euo pipefail

: "${PROJECT:?the id of your Google Cloud project}"
REGION=${REGION:-us-central1}
# A month's, for the alerts.
BUDGET_USD=${BUDGET_USD:-1500}

DRY_RUN=${DRY_RUN:-0}

# Says a command, and runs it unless DRY_RUN is 1.
run() {
  printf '+' >&2
  printf ' %q' "$@" >&2
  printf '\n' >&2
  if [ "$DRY_RUN" = 1 ]; then return 0; fi
  "$@"
}

cd "$(dirname "$0")"

# Whether the quota named $1 has the $2 that the run takes; $3 is what it has.
enough() {
  local have=${3%%.*}
  case $have in
    '' | None | *[!0-9-]*) printf '%s: not known from here; look in the console\n' "$1" >&2; return 0 ;;
    -1) have=$2 ;;
  esac
  if [ "$have" -lt "$2" ]; then
    printf '%s: %s of the %s that the run takes. Ask for more; it may take days.\n' "$1" "$have" "$2" >&2
    return 1
  fi
  printf '%s: %s, the run takes %s\n' "$1" "$have" "$2"
}

# Looks at the quotas that the run needs.
quota() {
  enough NVIDIA_A100_GPUS 16 "$(gcloud compute regions describe "$REGION" \
      --project="$PROJECT" \
      '--flatten=quotas[]' \
      --format='value(quotas.metric,quotas.limit)' |
    awk '$1 == "NVIDIA_A100_GPUS" { print $2 }')"
  enough GPUS_ALL_REGIONS 16 "$(gcloud compute project-info describe \
      --project="$PROJECT" \
      '--flatten=quotas[]' \
      --format='value(quotas.metric,quotas.limit)' |
    awk '$1 == "GPUS_ALL_REGIONS" { print $2 }')"
}

# A mail when the money goes. An alert stops nothing.
budget() {
  # Mails go to those who administer the billing account.
  local account=ACCOUNT
  if [ "$DRY_RUN" = 0 ]; then account="$(gcloud billing projects describe "$PROJECT" --format='value(billingAccountName.basename())')"; fi
  if [ "$DRY_RUN" = 1 ] || [ -z "$(gcloud billing budgets list --billing-account="$account" --filter=displayName=embark-dlrm --format='value(name)')" ]; then
    run gcloud billing budgets create \
      --billing-account="$account" \
      --display-name=embark-dlrm \
      --budget-amount="${BUDGET_USD}USD" \
      --filter-projects="projects/$PROJECT" \
      --threshold-rule=percent=0.5 \
      --threshold-rule=percent=0.8 \
      --threshold-rule=percent=1
  fi
}

case ${1:-} in
  quota|budget) "$@" ;;
  *)
    printf 'usage: %s quota | budget\n' "$0" >&2
    exit 64
    ;;
esac
