#!/usr/bin/env bash
# The run's storage: buckets creates its buckets, volume its file system and adds that to the cluster, delete
# deletes the file system. Safe to repeat.
# Written by `embark render`. Change the spec and run it again: --diff shows what would change; files edited by
# hand are kept unless --force is given.
set -euo pipefail
shopt -s inherit_errexit 2>/dev/null || true

: "${PROJECT:?the id of your Google Cloud project}"
REGION=${REGION:-us-central1}
ZONE=${ZONE:-us-central1-a}
CLUSTER=${CLUSTER:-embark}
# 1,024 GiB of Filestore zonal read 0.27 GB/s and cost 0.35 USD an hour. More is faster.
CAPACITY_GIB=${CAPACITY_GIB:-1024}
# The cluster's network.
NETWORK=${NETWORK:-default}
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
    printf 'You are not logged in to %s, or the login has expired: %s, then run this again.\n' gcp 'gcloud auth login' >&2
    exit 64
  fi
  exit "$code"
}

logged_in() {
  gcloud auth print-access-token >/dev/null 2>&1
}

trap finish EXIT
cd "$(dirname "$0")"
# Whether a resource exists, by the words of its `describe` command; with DRY_RUN=1 none does.
exists() {
  [ "$DRY_RUN" = 0 ] && gcloud "$@" --project="$PROJECT" >/dev/null 2>&1
}

buckets() {
  if ! exists storage buckets describe gs://embark-example; then
    run gcloud storage buckets create gs://embark-example \
      --location="$REGION" \
      --uniform-bucket-level-access \
      --public-access-prevention \
      --project="$PROJECT"
  fi
}

volume() {
  local address=none
  run gcloud services enable compute.googleapis.com file.googleapis.com --project="$PROJECT"
  if ! exists filestore instances describe dlrm-data --location="$ZONE"; then
    run gcloud filestore instances create dlrm-data \
      --location="$ZONE" \
      --tier=zonal \
      --file-share="name=data,capacity=${CAPACITY_GIB}GiB" \
      --network="name=$NETWORK" \
      --project="$PROJECT"
  fi
  if [ "$DRY_RUN" = 0 ]; then
    address="$(gcloud filestore instances describe dlrm-data --location="$ZONE" --project="$PROJECT" \
      --format='value(networks[0].ipAddresses[0])')"
  fi
  mount_volume modeInstance/"$ZONE"/dlrm-data/data "$address"
}

# Deletes the file system with its data; the bucket keeps them.
delete() {
  if [ "$DRY_RUN" = 1 ] || exists filestore instances describe dlrm-data --location="$ZONE"; then
    run gcloud filestore instances delete dlrm-data --location="$ZONE" --project="$PROJECT" --quiet
  fi
}
# Adds the file system with the handle $1 at the address $2 to the cluster.
mount_volume() {
  local PATCH="{\"spec\":{\"csi\":{\"volumeHandle\":\"$1\",\"volumeAttributes\":{\"ip\":\"$2\"}}}}"
  if [ "$DRY_RUN" = 0 ]; then
    kubectl patch --local -f volume.yaml --type=merge --output=json --patch="$PATCH" |
      kubectl apply -f -
  fi
  run kubectl apply -f claim.yaml
}
if [ "$#" = 0 ]; then
  buckets
  if [ "$DRY_RUN" = 1 ] || exists container clusters describe "$CLUSTER" --location="$REGION"; then volume; fi
  exit 0
fi

case ${1:-} in
  buckets | volume | delete) "$@" ;;
  *)
    printf 'usage: %s [--dry-run] [--yes] %s\n' "$0" '[buckets | volume | delete]' >&2
    exit 64
    ;;
esac
