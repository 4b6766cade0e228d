#!/usr/bin/env bash
# CloudWatch: sends a mail when GPUs are idle or a machine is dead. The agents are those of eks_cluster.yaml, or
# on plain machines the one that cloudwatch_agent.json configures.
# Written by `embark render`. Change the spec and run it again: --diff shows what would change; files edited by
# hand are kept unless --force is given.
set -euo pipefail
shopt -s inherit_errexit 2>/dev/null || true

REGION=${REGION:-us-west-2}
CLUSTER=${CLUSTER:-embark}
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
run aws sns create-topic --region "$REGION" --name embark-dlrm
TOPIC=dry-run
if [ "$DRY_RUN" = 0 ]; then
  TOPIC="$(aws sns create-topic --region "$REGION" --name embark-dlrm --query TopicArn --output text)"
fi
run aws sns subscribe --region "$REGION" --topic-arn "$TOPIC" --protocol email --notification-endpoint "$EMAIL"

run aws cloudwatch put-metric-alarm \
  --region "$REGION" \
  --alarm-name embark-dlrm-idle-gpus \
  --alarm-description 'Machines are paid for and do not train.' \
  --namespace ContainerInsights \
  --metric-name node_gpu_utilization \
  --dimensions "Name=ClusterName,Value=$CLUSTER" \
  --statistic Average \
  --period 300 \
  --evaluation-periods 6 \
  --threshold 5 \
  --comparison-operator LessThanThreshold \
  --treat-missing-data notBreaching \
  --alarm-actions "$TOPIC"
run aws cloudwatch put-metric-alarm \
  --region "$REGION" \
  --alarm-name embark-dlrm-dead-machines \
  --alarm-description 'A machine of the cluster does not respond.' \
  --namespace ContainerInsights \
  --metric-name cluster_failed_node_count \
  --dimensions "Name=ClusterName,Value=$CLUSTER" \
  --statistic Average \
  --period 300 \
  --evaluation-periods 1 \
  --threshold 0 \
  --comparison-operator GreaterThanThreshold \
  --treat-missing-data notBreaching \
  --alarm-actions "$TOPIC"
# EKS has no Prometheus of its own. One that the cluster has already is left alone.
if [ "$DRY_RUN" = 1 ] || ! kubectl get crd podmonitors.monitoring.coreos.com >/dev/null 2>&1; then
  run helm repo add --force-update prometheus-community https://prometheus-community.github.io/helm-charts
  run helm upgrade kube-prometheus-stack prometheus-community/kube-prometheus-stack \
    --install \
    --version 88.5.3 \
    --namespace monitoring \
    --create-namespace \
    --wait
fi
# The run's own metrics; import grafana_dashboard.json into Grafana.
if [ "$DRY_RUN" = 1 ] || kubectl get crd podmonitors.monitoring.coreos.com >/dev/null 2>&1; then
  run kubectl apply -f run_metrics.yaml
else
  printf 'The cluster has no Prometheus that reads %s.\n' podmonitors.monitoring.coreos.com
fi
