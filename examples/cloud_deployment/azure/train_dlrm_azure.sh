#!/usr/bin/env bash
# Trains dlrm on 2 x Standard_ND96asr_v4 of azure: checks tools, login and quota, creates what is missing,
# submits the job and follows it. Safe to repeat: what exists stays. --dry-run prints every command that would
# change something, and runs none.
# Written by `embark render`. Change the spec and run it again: --diff shows what would change; files edited by
# hand are kept unless --force is given.
set -euo pipefail
shopt -s inherit_errexit 2>/dev/null || true

CLUSTER=${CLUSTER:-embark}
RESOURCE_GROUP=${RESOURCE_GROUP:-embark}
LOCATION=${LOCATION:-eastus}
export CLUSTER RESOURCE_GROUP LOCATION
STORAGE_ACCOUNT=${STORAGE_ACCOUNT:-embarkexample}
export STORAGE_ACCOUNT
# How long pods may wait to start: machines come within minutes, or capacity, quota or a label is missing.
START_LIMIT_S=${START_LIMIT_S:-1800}
# How long the queue may hold the job back. Nothing is paid for it meanwhile.
QUEUE_LIMIT_S=${QUEUE_LIMIT_S:-14400}
# What is paid: nothing, the cluster, machines without a job, or machines with a running job.
STAGE=nothing
# The run's own pods: a server of the run has its name too.
PODS=app.kubernetes.io/instance=dlrm,app.kubernetes.io/component!=serve

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
  at_exit || true
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
# Tools, login, image and quota: everything that can be checked before anything costs money.
check() {
  local missing=0
  if ! command -v az >/dev/null; then
    printf '%s\n' 'az is missing: https://learn.microsoft.com/cli/azure/install-azure-cli' >&2
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
    logged_in
    ./budget.sh quota
  fi
  printf '%s\n' 'place.image has no registry yet: embark image run.toml --tag REGISTRY/embark:1 --push builds it, pushes it and writes its name into run.toml' >&2
  if [ "$DRY_RUN" = 0 ]; then exit 64; fi
}

# Whatever ends the script: machines whose job has ended, or never started, are ended too unless --keep is given. What
# still costs money is named.
at_exit() {
  case $STAGE in
    nothing) return 0 ;;
    paid) release || true ;;
    running) printf 'The job goes on; %s follows it again and ends its machines.\n' "$0" >&2 ;;
  esac
  if [ "$STAGE" != cluster ]; then
    printf 'The GPU machines are paid until %s clean ends them. %s\n' "$0" '2 x Standard_ND96asr_v4 on demand in eastus: 54.39 USD an hour by the catalog (2026-08-22).' >&2
  fi
  printf '%s %s destroy deletes it with the file system.\n' 'The cluster: 0.38 USD an hour until it is deleted.' "$0" >&2
}

# Ends the GPU machines, unless --keep is given or pods of somebody else use GPUs of this cluster.
release() {
  local used
  if [ "$KEEP" = 1 ]; then return 1; fi
  if [ "$DRY_RUN" = 0 ]; then
    if ! logged_in; then
      printf 'The login has expired, so the GPU machines are not ended: %s, then %s clean\n' 'az login' "$0" >&2
      return 1
    fi
    used=$(kubectl get pods --all-namespaces --selector app.kubernetes.io/instance!=dlrm \
      --field-selector status.phase!=Succeeded,status.phase!=Failed \
      --output 'jsonpath={.items[*].spec.containers[*].resources.limits.nvidia\.com/gpu}') || return 1
    if [ -n "$used" ]; then
      printf 'Other pods use GPUs of this cluster.\n' >&2
      return 1
    fi
  fi
  ./aks_cluster.sh stop || return 1
  STAGE=cluster
}

# Cluster, storage, job, and its log until it ends.
train() {
  check
  pay '2 x Standard_ND96asr_v4 on demand in eastus: 54.39 USD an hour by the catalog (2026-08-22). 21,504 GiB of Azure NetApp Files, Ultra read 2.8 GB/s and cost 11.57 USD an hour. The cluster: 0.38 USD an hour until it is deleted. Buckets are extra.'
  # Each step finds what it uses: buckets, then the cluster and who its pods are, then the volume and its data. The
  # GPU machines come last, since they are paid from the moment they start.
  ./storage.sh buckets
  STAGE=cluster
  ./aks_cluster.sh up
  if [ "$DRY_RUN" = 0 ]; then replace_earlier; fi
  ./storage.sh volume
  # Kubernetes refuses to change a Job, for example to a new image. A copy resumes where the last one ended.
  run kubectl delete job.batch dlrm-data-copy --namespace embark --ignore-not-found --cascade=foreground
  run kubectl apply -f data_copy_job.yaml
  if [ "$DRY_RUN" = 0 ]; then wait_for_copy; fi
  run kubectl apply --server-side --force-conflicts \
    -f https://github.com/kubernetes-sigs/kueue/releases/download/v0.19.2/manifests.yaml
  run kubectl wait deployment --all --namespace kueue-system --for=condition=Available --timeout=300s
  run kubectl apply -f kueue.yaml
  # No machine is paid while the job waits in the queue.
  run kubectl apply -f kubernetes_job.yaml
  if [ "$DRY_RUN" = 0 ]; then wait_for_queue; fi
  STAGE=paid
  ./aks_cluster.sh machines
  run kubectl apply -f kubernetes_job.yaml
  if [ "$DRY_RUN" = 0 ]; then
    STAGE=running
    follow
  fi
}

# What an earlier start has left. Kubernetes does not run a job again that has ended, so it is deleted; one that has
# trained this spec is not, and one that runs with another spec is not touched.
replace_earlier() {
  local now
  now=$(state)
  case $now in
    e93debd4466a*Complete* | e93debd4466a*Succeeded*)
      printf 'done: this spec is trained already. To train it again: %s stop, then %s\n' "$0" "$0"
      STAGE=paid
      exit 0
      ;;
    *Complete* | *Succeeded* | *Failed*)
      printf 'The job of an earlier start has ended (%s). It is deleted; its checkpoints stay.\n' "${now#* }" >&2
      stop
      ;;
    '' | e93debd4466a*) ;;
    *)
      printf 'A job of this name runs with another spec or image. %s stop ends it, and its checkpoints stay.\n' "$0" >&2
      exit 64
      ;;
  esac
}

# Shows the job and its pods, and why one waits.
status() {
  kubectl get job.batch dlrm --namespace embark --ignore-not-found
  kubectl get workloads.kueue.x-k8s.io --namespace embark --output wide
  kubectl get pods --namespace embark --selector "$PODS" --output wide
  kubectl get events --namespace embark --field-selector type=Warning --sort-by .lastTimestamp
  # Why the autoscaler starts no machine; it does not call that a warning.
  kubectl get events --namespace embark --field-selector reason=NotTriggerScaleUp --sort-by .lastTimestamp
}

# Follows every pod's log, each line with its pod's name.
logs() {
  kubectl logs \
    --namespace embark \
    --selector "$PODS" \
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

# Prints the spec that the job was started with, and its state: Complete, Failed, or none yet. Prints nothing if there
# is no job, and fails if the cluster does not answer.
state() {
  kubectl get job.batch dlrm --namespace embark --ignore-not-found \
    --output 'jsonpath={.metadata.annotations.embark/spec} {.status.conditions[?(@.status=="True")].type}'
}

# The phases of the job's pods, and what their containers wait for; nothing while a queue holds the job back.
phases() {
  kubectl get pods --namespace embark --selector "$PODS" \
    --output 'jsonpath={.items[*].status.phase} {.items[*].status.containerStatuses[*].state.waiting.reason}'
}

# Prints whether Kueue has admitted the job, and why it has not: `True|…`, or `|…`.
admission() {
  kubectl get workloads.kueue.x-k8s.io --namespace embark --output 'jsonpath={.items[?(@.metadata.ownerReferences[0].name=="dlrm")].status.conditions[?(@.type=="Admitted")].status}|{.items[?(@.metadata.ownerReferences[0].name=="dlrm")].status.conditions[?(@.type=="QuotaReserved")].message}'
}

# Waits until Kueue admits the job, and says why it does not.
wait_for_queue() {
  local said why='' waited=0
  while true; do
    said=$(admission)
    case $said in
      True*) return 0 ;;
      '|') said='|it waits for its machines' ;;
    esac
    if [ "${said#*|}" != "$why" ]; then
      why=${said#*|}
      printf 'Kueue has not admitted the job yet: %s\n' "$why" >&2
    fi
    if [ "$waited" -ge "$QUEUE_LIMIT_S" ]; then
      printf 'Kueue has not admitted the job for %s seconds: %s\n' "$QUEUE_LIMIT_S" "$why" >&2
      printf 'It stays in the queue %s: %s waits for it again, %s stop takes it out.\n' embark-nd96asr-v4 "$0" "$0" >&2
      exit 70
    fi
    sleep 15
    waited=$((waited + 15))
  done
}

# Follows the logs until the job ends, those of replaced pods too. Pods that cannot start would cost their machines.
follow() {
  local now found limit waited=0 silent=0 since=--tail=-1
  while true; do
    if ! now=$(state); then
      # The cluster does not answer, and the job may run on. Time does not cure a login that has expired.
      silent=$((silent + 15))
      if [ "$silent" -gt "$START_LIMIT_S" ] || ! logged_in; then
        printf 'the cluster does not answer\n' >&2
        exit 70
      fi
      sleep 15
      continue
    fi
    silent=0
    case $now in
      '')
        printf 'the job was deleted\n' >&2
        STAGE=paid
        exit 70
        ;;
      *Complete* | *Succeeded*)
        printf 'done\n'
        STAGE=paid
        return 0
        ;;
      *Failed*)
        STAGE=paid
        status
        printf 'the job failed: %s\n' "${now#* }" >&2
        exit 70
        ;;
      *Suspended*)
        waited=0
        case $(admission) in
          True*) ;;
          *)
            # The queue took the machines back, for a job that comes first.
            STAGE=paid
            release || true
            wait_for_queue
            ./aks_cluster.sh machines
            STAGE=running
            ;;
        esac
        ;;
    esac
    # Fails while no pod runs yet, and ends when the pods that ran have ended.
    if logs "$since" 2>/dev/null; then since=--since=30s; elif [ $((waited % 120)) = 0 ]; then status || true; fi
    found=$(phases || true)
    case $found in
      # The pods that run wait for it, and their machines are paid.
      *Pending*) waited=$((waited + 15)) ;;
      *Running* | *Succeeded*) waited=0 ;;
      *) waited=$((waited + 15)) ;;
    esac
    limit=$START_LIMIT_S
    # Time does not cure these; a minute more may, where a role is new.
    case $found in *ImagePull* | *InvalidImageName* | *ConfigError*) limit=300 ;; esac
    if [ "$waited" -gt "$limit" ]; then
      STAGE=paid
      status >&2
      printf 'not all pods have started for %s seconds\n' "$limit" >&2
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
  ./aks_cluster.sh stop
}

# Deletes the file system, which lies in the cluster's network, and then the cluster. The bucket stays.
destroy() {
  confirm 'Delete the file system and the cluster?'
  ./storage.sh delete
  ./aks_cluster.sh delete
}

COMMAND=run
for word in "$@"; do
  case $word in
    run | check | status | logs | stop | clean | destroy) COMMAND=$word ;;
    *)
      printf 'usage: %s [--dry-run] [--yes] [--keep] [run | check | status | logs | stop | clean | destroy]\n' "$0" >&2
      exit 64
      ;;
  esac
done
case $COMMAND in
  run) train ;;
  *) "$COMMAND" ;;
esac
