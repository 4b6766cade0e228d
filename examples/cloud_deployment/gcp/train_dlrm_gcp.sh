#!/usr/bin/env bash
# Trains dlrm on 2 x a2-highgpu-8g of gcp: checks tools, login and quota, creates what is missing, submits the
# job and follows it. Safe to repeat: what exists stays. --dry-run prints every command that would change
# something, and runs none.
# Written by `embark render`. Change the spec and run it again: --diff shows what would change; files edited by
# hand are kept unless --force is given.
set -euo pipefail

CLUSTER=${CLUSTER:-embark}
: "${PROJECT:?the id of your Google Cloud project}"
REGION=${REGION:-us-central1}
ZONE=${ZONE:-us-central1-a}
export CLUSTER PROJECT REGION ZONE
YES=${YES:-0}
# How long pods may wait to start: machines come within minutes, or capacity, quota or a label is missing.
START_LIMIT_S=${START_LIMIT_S:-1800}

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
# Asks a question unless --yes or --dry-run is given.
ask() {
  local answer
  if [ "$YES" = 1 ] || [ "$DRY_RUN" = 1 ]; then return 0; fi
  read -r -p "$1 [y/N] " answer
  case $answer in
    y | Y | yes) ;;
    *) exit 130 ;;
  esac
}

# Tools, login, image and quota: everything that can be checked before anything costs money.
check() {
  local missing=0
  if ! command -v gcloud >/dev/null; then
    printf '%s\n' 'gcloud is missing: https://cloud.google.com/sdk/docs/install' >&2
    missing=1
  fi
  if ! command -v kubectl >/dev/null; then
    printf '%s\n' 'kubectl is missing: https://kubernetes.io/docs/tasks/tools/' >&2
    missing=1
  fi
  if ! command -v helm >/dev/null; then
    printf '%s\n' 'helm is missing: https://helm.sh/docs/intro/install/' >&2
    missing=1
  fi
  if [ "$DRY_RUN" = 0 ] && [ "$missing" = 1 ]; then exit 64; fi
  if [ "$DRY_RUN" = 0 ]; then
    gcloud auth print-access-token >/dev/null
    ./budget.sh quota
  fi
  printf '%s\n' 'place.image has no registry yet: embark image run.toml --tag REGISTRY/embark:1 --push builds it, pushes it and writes its name into run.toml' >&2
  if [ "$DRY_RUN" = 0 ]; then exit 64; fi
}

# Cluster, storage, job, and its log until it ends.
train() {
  check
  printf '%s\n' '2 x a2-highgpu-8g on demand in us-central1: 58.77 USD an hour by the catalog (2026-08-22). 1,024 GiB of Filestore zonal read 0.27 GB/s and cost 0.35 USD an hour. The cluster and buckets are extra.'
  ask 'Continue?'
  # Each step finds what it uses: buckets, then the cluster and who its pods are, then the volume and its data. The
  # GPU machines come last, since they are paid from the moment they start.
  ./storage.sh buckets
  ./gke_cluster.sh up
  ./storage.sh volume
  run kubectl apply -f data_copy_job.yaml
  if [ "$DRY_RUN" = 0 ]; then wait_for_copy; fi
  run kubectl apply --server-side --force-conflicts \
    -f https://github.com/kubernetes-sigs/kueue/releases/download/v0.19.2/manifests.yaml
  run kubectl wait deployment --all --namespace kueue-system --for=condition=Available --timeout=300s
  run kubectl apply -f kueue.yaml
  ./gke_cluster.sh machines
  run kubectl apply -f kubernetes_job.yaml
  if [ "$DRY_RUN" = 0 ]; then follow; fi
}

# Shows the job and its pods, and why one waits.
status() {
  kubectl get job.batch dlrm --namespace embark
  kubectl get pods --namespace embark --selector app.kubernetes.io/instance=dlrm --output wide
  kubectl get events --namespace embark --field-selector type=Warning --sort-by .lastTimestamp
  # Why the autoscaler starts no machine; it does not call that a warning.
  kubectl get events --namespace embark --field-selector reason=NotTriggerScaleUp --sort-by .lastTimestamp
}

# Follows every pod's log, each line with its pod's name.
logs() {
  kubectl logs \
    --namespace embark \
    --selector app.kubernetes.io/instance=dlrm \
    --container trainer \
    --follow \
    --prefix \
    --max-log-requests 10 "$@"
}

# Waits until the data is on the volume, and stops if the copy fails or cannot start.
wait_for_copy() {
  local now phase waited=0
  while true; do
    now=$(kubectl get job.batch dlrm-data-copy --namespace embark \
      --output 'jsonpath={.status.conditions[?(@.status=="True")].type}')
    phase=$(kubectl get pods --namespace embark \
      --selector app.kubernetes.io/instance=dlrm-data-copy --output 'jsonpath={.items[*].status.phase}')
    case $now in
      *Complete*) return 0 ;;
      *Failed*)
        kubectl logs --namespace embark --selector app.kubernetes.io/instance=dlrm-data-copy --tail=20 >&2
        printf 'the data was not copied\n' >&2
        exit 70
        ;;
    esac
    case $phase in *Running* | *Succeeded*) waited=0 ;; *) waited=$((waited + 15)) ;; esac
    if [ "$waited" -gt "$START_LIMIT_S" ]; then
      kubectl get events --namespace embark --field-selector type=Warning --sort-by .lastTimestamp >&2
      printf 'the copy of the data has not started for %s seconds\n' "$START_LIMIT_S" >&2
      exit 70
    fi
    sleep 15
  done
}

# Prints the job's state: Complete, Failed, or nothing yet.
state() {
  kubectl get job.batch dlrm --namespace embark \
    --output 'jsonpath={.status.conditions[?(@.status=="True")].type}'
}

# The phases of the job's pods, and what their containers wait for; nothing while a queue holds the job back.
phases() {
  kubectl get pods --namespace embark --selector app.kubernetes.io/instance=dlrm \
    --output 'jsonpath={.items[*].status.phase} {.items[*].status.containerStatuses[*].state.waiting.reason}'
}

# Follows the logs until the job ends, those of replaced pods too. Pods that cannot start would cost their machines.
follow() {
  local now found limit waited=0 since=--tail=-1
  while true; do
    now=$(state || true)
    case $now in
      *Complete* | *Succeeded*) printf 'done\n'; return 0 ;;
      *Failed*)
        status
        printf 'the job failed: %s\n' "$now" >&2
        exit 70
        ;;
    esac
    # Fails while no pod runs yet, and ends when the pods that ran have ended.
    if logs "$since" 2>/dev/null; then since=--since=30s; elif [ $((waited % 120)) = 0 ]; then status; fi
    found=$(phases || true)
    case "$now $found" in
      *Suspended*) waited=0 ;;
      # The pods that run wait for it, and their machines are paid.
      *Pending*) waited=$((waited + 15)) ;;
      *Running* | *Succeeded*) waited=0 ;;
      *) waited=$((waited + 15)) ;;
    esac
    limit=$START_LIMIT_S
    # Time does not cure these; a minute more may, where a role is new.
    case $found in *ImagePull* | *InvalidImageName* | *ConfigError*) limit=300 ;; esac
    if [ "$waited" -gt "$limit" ]; then
      status >&2
      printf 'not all pods have started for %s seconds; %s clean stops paying for the machines\n' "$limit" "$0" >&2
      exit 70
    fi
    sleep 15
  done
}

# Deletes the job; machines, data and checkpoints stay.
stop() {
  run kubectl delete job.batch dlrm --namespace embark --ignore-not-found
}

# Deletes the job and the GPU machines, which are nearly all of the bill.
clean() {
  stop
  ./gke_cluster.sh stop
}

# Deletes the file system, which lies in the cluster's network, and then the cluster. The bucket stays.
destroy() {
  ask 'Delete the file system and the cluster?'
  export DRY_RUN
  ./storage.sh delete
  ./gke_cluster.sh delete
}

COMMAND=run
for word in "$@"; do
  case $word in
    --dry-run) DRY_RUN=1 ;;
    --yes) YES=1 ;;
    run | check | status | logs | stop | clean | destroy) COMMAND=$word ;;
    *)
      printf 'usage: %s [--dry-run] [--yes] [run | check | status | logs | stop | clean | destroy]\n' "$0" >&2
      exit 64
      ;;
  esac
done
export DRY_RUN
case $COMMAND in
  run) train ;;
  *) "$COMMAND" ;;
esac
