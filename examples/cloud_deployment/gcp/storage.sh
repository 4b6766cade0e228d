#!/usr/bin/env bash
# Creates the run's storage where it does not exist. Safe to repeat.
# Written by `embark render`. Change the spec and run it again: --diff shows what would change; files edited by
# hand are kept unless --force is given.
set -euo pipefail

: "${PROJECT:?the id of your Google Cloud project}"
REGION=${REGION:-us-central1}
ZONE=${ZONE:-us-central1-a}

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
if ! gcloud storage buckets describe gs://embark-example --project="$PROJECT" >/dev/null 2>&1; then
  run gcloud storage buckets create gs://embark-example \
    --location="$REGION" \
    --uniform-bucket-level-access \
    --public-access-prevention \
    --project="$PROJECT"
fi
if [ "${1:-all}" = buckets ]; then exit 0; fi
# 1,024 GiB of Filestore zonal read 0.3 GB/s. More is faster.
CAPACITY_GIB=${CAPACITY_GIB:-1024}
# The cluster's network.
NETWORK=${NETWORK:-default}
ADDRESS=none
run gcloud services enable file.googleapis.com --project="$PROJECT"

if ! gcloud filestore instances describe dlrm-data --location="$ZONE" --project="$PROJECT" >/dev/null 2>&1; then
  run gcloud filestore instances create dlrm-data \
    --location="$ZONE" \
    --tier=zonal \
    --file-share="name=data,capacity=${CAPACITY_GIB}GiB" \
    --network="name=$NETWORK" \
    --project="$PROJECT"
fi

if [ "$DRY_RUN" = 0 ]; then
  ADDRESS="$(gcloud filestore instances describe dlrm-data --location="$ZONE" --project="$PROJECT" \
    --format='value(networks[0].ipAddresses[0])')"
fi
HANDLE=modeInstance/"$ZONE"/dlrm-data/data
PATCH="{\"spec\":{\"csi\":{\"volumeHandle\":\"$HANDLE\",\"volumeAttributes\":{\"ip\":\"$ADDRESS\"}}}}"
if [ "$DRY_RUN" = 0 ]; then
  kubectl patch --local -f volume.yaml --type=merge --output=json --patch="$PATCH" |
    kubectl apply -f -
fi
run kubectl apply -f claim.yaml
