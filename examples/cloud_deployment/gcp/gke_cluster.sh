#!/usr/bin/env bash
# The GKE cluster: up creates it with its networks and its roles, machines adds the GPU machines' node pool,
# stop deletes that, delete deletes all of it. Safe to repeat.
# Written by `embark render`. Change the spec and run it again: --diff shows what would change; files edited by
# hand are kept unless --force is given.
set -euo pipefail
shopt -s inherit_errexit 2>/dev/null || true

: "${PROJECT:?the id of your Google Cloud project}"
CLUSTER=${CLUSTER:-embark}
REGION=${REGION:-us-central1}
# gcloud compute machine-types list shows which zones have the machine.
ZONE=${ZONE:-us-central1-a}

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

# Creates all but the GPU machines. The run's buckets exist already: storage.sh buckets.
up() {
  run gcloud services enable container.googleapis.com artifactregistry.googleapis.com iam.googleapis.com --project="$PROJECT"
  if ! exists container clusters describe "$CLUSTER" --location="$REGION"; then
    pay 'The cluster: 0.37 USD an hour until it is deleted.'
    # One zone: each zone of a regional pool would have the full node count. The machines have public addresses, through
    # which they fetch images from any registry, and no firewall rule lets connections in: --enable-private-nodes needs a
    # Cloud NAT, which is paid by the hour and the gigabyte.
    run gcloud container clusters create "$CLUSTER" \
      --location="$REGION" \
      --node-locations="$ZONE" \
      --release-channel=regular \
      --machine-type=e2-standard-4 \
      --num-nodes=2 \
      --enable-ip-alias \
      --enable-dataplane-v2 \
      --workload-pool="$PROJECT.svc.id.goog" \
      --addons=HttpLoadBalancing,HorizontalPodAutoscaling,GcePersistentDiskCsiDriver,GcsFuseCsiDriver,GcpFilestoreCsiDriver \
      --enable-image-streaming \
      --enable-managed-prometheus \
      --monitoring=SYSTEM,DCGM \
      --labels=embark=cluster \
      --project="$PROJECT"
  fi
  run gcloud container clusters get-credentials "$CLUSTER" --location="$REGION" --project="$PROJECT"
  # Namespace and service account, which everything below belongs to.
  run kubectl apply -f gke_cluster.yaml
  roles
}
# Who may do what: nodes pull images and write logs; pods use the buckets as themselves, without a key or a secret.
roles() {
  local number=PROJECT_NUMBER nodes role
  if [ "$DRY_RUN" = 0 ]; then number="$(gcloud projects describe "$PROJECT" --format='value(projectNumber)')"; fi
  # New organizations give the machines' default service account no role.
  nodes="serviceAccount:$number-compute@developer.gserviceaccount.com"
  for role in roles/container.defaultNodeServiceAccount roles/artifactregistry.reader; do
    run gcloud projects add-iam-policy-binding "$PROJECT" --member="$nodes" --role="$role" --condition=None --format=none
  done
  local pool="projects/$number/locations/global/workloadIdentityPools/$PROJECT.svc.id.goog"
  local pods="principal://iam.googleapis.com/$pool/subject/ns/"embark/sa/embark
  run gcloud storage buckets add-iam-policy-binding gs://embark-example \
    --member="$pods" \
    --role=roles/storage.objectUser \
    --project="$PROJECT"
  # Servers read, and no more.
  run gcloud storage buckets add-iam-policy-binding gs://embark-example \
    --member="principal://iam.googleapis.com/$pool/subject/ns/"embark/sa/embark-serve \
    --role=roles/storage.objectViewer \
    --project="$PROJECT"
}

# Adds the GPU machines' node pool. The autoscaler starts them when the job's pods wait for them.
machines() {
  pay '2 x a2-highgpu-8g on demand in us-central1: 58.77 USD an hour by the catalog (2026-08-22).'
  if ! exists container node-pools describe a2-highgpu-8g --cluster="$CLUSTER" --location="$REGION"; then
    run gcloud container node-pools create a2-highgpu-8g \
      --cluster="$CLUSTER" \
      --location="$REGION" \
      --node-locations="$ZONE" \
      --machine-type=a2-highgpu-8g \
      --enable-gvnic \
      --workload-metadata=GKE_METADATA \
      --accelerator=type=nvidia-tesla-a100,count=8,gpu-driver-version=latest \
      --num-nodes=0 \
      --enable-autoscaling \
      --total-min-nodes=0 \
      --total-max-nodes=2 \
      --location-policy=ANY \
      --disk-size=200 \
      --node-labels=embark/pool=a2-highgpu-8g \
      --placement-type=COMPACT \
      --project="$PROJECT"
  else
    # The run may have another number of machines now.
    run gcloud container node-pools update a2-highgpu-8g \
      --cluster="$CLUSTER" \
      --location="$REGION" \
      --enable-autoscaling \
      --total-min-nodes=0 \
      --total-max-nodes=2 \
      --project="$PROJECT"
  fi
}

# Deletes the GPU machines; the cluster and its two small machines stay.
stop() {
  if [ "$DRY_RUN" = 1 ] || exists container node-pools describe a2-highgpu-8g --cluster="$CLUSTER" --location="$REGION"; then
    run gcloud container node-pools delete a2-highgpu-8g --cluster="$CLUSTER" --location="$REGION" --project="$PROJECT" --quiet
  fi
}

# Deletes the cluster with all its machines. Buckets and file systems are storage.sh's.
delete() {
  if [ "$DRY_RUN" = 1 ] || exists container clusters describe "$CLUSTER" --location="$REGION"; then
    run gcloud container clusters delete "$CLUSTER" --location="$REGION" --project="$PROJECT" --quiet
  fi
}

if [ "$#" = 0 ]; then set -- up; fi

case ${1:-} in
  up | machines | stop | delete) "$@" ;;
  *)
    printf 'usage: %s [--dry-run] [--yes] %s\n' "$0" '[up | machines | stop | delete]' >&2
    exit 64
    ;;
esac
