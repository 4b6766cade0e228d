#!/usr/bin/env bash
# Creates the GKE cluster if it does not exist, with its networks and GPU machines. Safe to repeat.
# Written by `embark render`. Change the spec and run it again: --diff shows what would change; files edited by
# hand are kept unless --force is given.
set -euo pipefail

: "${PROJECT:?the id of your Google Cloud project}"
CLUSTER=${CLUSTER:-embark}
REGION=${REGION:-us-central1}
# gcloud compute machine-types list shows which zones have the machine.
ZONE=${ZONE:-us-central1-a}

# `up`: without the GPU machines, which are paid from the moment they start.
PART=${1:-up}
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
run gcloud services enable container.googleapis.com compute.googleapis.com --project="$PROJECT"
if ! gcloud container clusters describe "$CLUSTER" --location="$REGION" --project="$PROJECT" >/dev/null 2>&1; then
  # One zone: each zone of a regional pool would have the full node count.
  run gcloud container clusters create "$CLUSTER" \
    --location="$REGION" \
    --node-locations="$ZONE" \
    --release-channel=regular \
    --machine-type=e2-standard-4 \
    --num-nodes=2 \
    --enable-ip-alias \
    --enable-dataplane-v2 \
    --workload-pool="$PROJECT.svc.id.goog" \
    --addons=GcsFuseCsiDriver,GcpFilestoreCsiDriver \
    --enable-image-streaming \
    --enable-managed-prometheus \
    --monitoring=SYSTEM,DCGM \
    --labels=embark=cluster \
    --project="$PROJECT"
fi

# An existing cluster may lack this run's machines.
if [ "$PART" != up ] && ! gcloud container node-pools describe a2-highgpu-8g --cluster="$CLUSTER" --location="$REGION" --project="$PROJECT" >/dev/null 2>&1; then
  run gcloud container node-pools create a2-highgpu-8g \
    --cluster="$CLUSTER" \
    --location="$REGION" \
    --node-locations="$ZONE" \
    --machine-type=a2-highgpu-8g \
    --enable-gvnic \
    --workload-metadata=GKE_METADATA \
    --accelerator=type=nvidia-tesla-a100,count=8,gpu-driver-version=latest \
    --num-nodes=2 \
    --enable-autoscaling \
    --total-min-nodes=0 \
    --total-max-nodes=2 \
    --location-policy=ANY \
    --disk-size=200 \
    --node-labels=embark/pool=a2-highgpu-8g \
    --placement-type=COMPACT \
    --project="$PROJECT"
fi
run gcloud container clusters get-credentials "$CLUSTER" --location="$REGION" --project="$PROJECT"

run kubectl apply -f gke_cluster.yaml
# The pods' own identity: their service account holds the roles; no key and no secret anywhere.
NUMBER=0
if [ "$DRY_RUN" = 0 ]; then NUMBER="$(gcloud projects describe "$PROJECT" --format='value(projectNumber)')"; fi
POOL="projects/$NUMBER/locations/global/workloadIdentityPools/$PROJECT.svc.id.goog"
MEMBER="principal://iam.googleapis.com/$POOL/subject/ns/"embark/sa/embark
run gcloud storage buckets add-iam-policy-binding gs://embark-example \
  --member="$MEMBER" \
  --role=roles/storage.objectUser \
  --project="$PROJECT"
