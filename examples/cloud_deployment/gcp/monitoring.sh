#!/usr/bin/env bash
# Cloud Monitoring: sends a mail when GPUs are idle or a machine is dead. On GKE the metrics are those of
# --monitoring=SYSTEM,DCGM; plain machines get the Ops Agent.
# Written by `embark render`. Change the spec and run it again: --diff shows what would change; files edited by
# hand are kept unless --force is given.
set -euo pipefail
shopt -s inherit_errexit 2>/dev/null || true

: "${PROJECT:?the id of your Google Cloud project}"
ZONE=${ZONE:-us-central1-a}
: "${EMAIL:?the address for the mails}"

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
channel() {
  gcloud beta monitoring channels list --project="$PROJECT" --filter=displayName=embark-dlrm --format='value(name)' --limit=1
}
CHANNEL=''
if [ "$DRY_RUN" = 0 ]; then CHANNEL="$(channel)"; fi
if [ -z "$CHANNEL" ]; then
  run gcloud beta monitoring channels create \
    --project="$PROJECT" \
    --display-name=embark-dlrm \
    --type=email \
    --channel-labels="email_address=$EMAIL"
  if [ "$DRY_RUN" = 0 ]; then CHANNEL="$(channel)"; fi
fi
if [ "$DRY_RUN" = 1 ] || [ -z "$(gcloud alpha monitoring policies list --project="$PROJECT" \
  --filter=displayName=embark-dlrm-idle-gpus --format='value(name)')" ]; then
  run gcloud alpha monitoring policies create \
    --project="$PROJECT" \
    --policy-from-file=idle_gpus.json \
    --notification-channels="$CHANNEL"
fi
if [ "$DRY_RUN" = 1 ] || [ -z "$(gcloud alpha monitoring policies list --project="$PROJECT" \
  --filter=displayName=embark-dlrm-dead-machines --format='value(name)')" ]; then
  run gcloud alpha monitoring policies create \
    --project="$PROJECT" \
    --policy-from-file=dead_machines.json \
    --notification-channels="$CHANNEL"
fi
# The run's own metrics; import grafana_dashboard.json into Grafana.
if [ "$DRY_RUN" = 1 ] || kubectl get crd podmonitorings.monitoring.googleapis.com >/dev/null 2>&1; then
  run kubectl apply -f run_metrics.yaml
else
  printf 'The cluster has no Prometheus that reads %s.\n' podmonitorings.monitoring.googleapis.com
fi
