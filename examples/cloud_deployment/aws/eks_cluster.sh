#!/usr/bin/env bash
# up creates the cluster of eks_cluster.yaml if it does not exist, and what eksctl leaves out; machines starts
# the GPU machines, which are paid from that moment, and stop ends them; delete removes the cluster. Safe to
# repeat.
# Written by `embark render`. Change the spec and run it again: --diff shows what would change; files edited by
# hand are kept unless --force is given.
set -euo pipefail
shopt -s inherit_errexit 2>/dev/null || true

CLUSTER=${CLUSTER:-embark}
REGION=${REGION:-us-west-2}

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
# Creates all but the GPU machines.
up() {
  local config=eks_cluster.yaml
  if [ "$DRY_RUN" = 1 ] || ! eksctl get cluster --name "$CLUSTER" --region "$REGION" >/dev/null 2>&1; then
    pay 'The cluster: 0.55 USD an hour until it is deleted.'
    if [ "$DRY_RUN" = 0 ]; then config=$(with_second_zone); fi
    run eksctl create cluster -f "$config"
  fi
  # An existing cluster may lack this run's machines.
  if [ "$DRY_RUN" = 0 ] &&
    ! eksctl get nodegroup --cluster "$CLUSTER" --region "$REGION" --name p4d-24xlarge >/dev/null 2>&1; then
    run eksctl create nodegroup -f eks_cluster.yaml --include=p4d-24xlarge
  fi
  run aws eks update-kubeconfig --name "$CLUSTER" --region "$REGION"
  # Namespace and service account, which everything below belongs to.
  run kubectl apply -f eks_objects.yaml
  endpoint
  # Groups of machines for servers grow with the pods that wait.
  run helm repo add --force-update autoscaler https://kubernetes.github.io/autoscaler
  run helm upgrade cluster-autoscaler autoscaler/cluster-autoscaler \
    --install \
    --namespace kube-system \
    --set autoDiscovery.clusterName="$CLUSTER" \
    --set awsRegion="$REGION" \
    --set rbac.serviceAccount.name=cluster-autoscaler
  # eksctl's own EFA plugin does not tolerate the GPU machines' taint. This one has another name, to live beside it.
  run helm repo add --force-update eks https://aws.github.io/eks-charts
  run helm upgrade embark-efa eks/aws-efa-k8s-device-plugin \
    --install \
    --namespace kube-system \
    --set-json 'tolerations=[{"operator":"Exists"}]'
}

# Prints the name of a copy of eks_cluster.yaml whose second zone is one that this account has: accounts differ, and EKS
# has no control plane in three zones.
with_second_zone() {
  local zone=us-west-2b copy other
  other=$(aws ec2 describe-availability-zones --region "$REGION" \
    --filters Name=zone-type,Values=availability-zone Name=state,Values=available \
    --query "AvailabilityZones[?ZoneName!='$zone' && ZoneId!='use1-az3' && ZoneId!='usw1-az2' && ZoneId!='cac1-az3'].ZoneName | [0]" \
    --output text)
  if [ "$other" = None ]; then
    printf '%s has no second zone for this account, which the control plane needs: set another place.region\n' "$REGION" >&2
    return 64
  fi
  copy=$(mktemp --suffix=.yaml)
  sed '/^availabilityZones:/,/^vpc:/s/^- 'us-west-2a'$/- '"$other/" eks_cluster.yaml >"$copy"
  printf '%s\n' "$copy"
}

# A gateway endpoint for S3 costs nothing; without it all data passes through the NAT gateway, billed by the gigabyte.
endpoint() {
  local vpc=vpc-0 tables=(rtb-0)
  if [ "$DRY_RUN" = 0 ]; then
    vpc="$(network)"
    if [ -n "$(endpoints "$vpc")" ]; then return 0; fi
    read -r -a tables <<<"$(aws ec2 describe-route-tables --region "$REGION" \
      --filters "Name=vpc-id,Values=$vpc" --query 'RouteTables[].RouteTableId' --output text)"
  fi
  run aws ec2 create-vpc-endpoint \
    --region "$REGION" \
    --vpc-id "$vpc" \
    --service-name "com.amazonaws.$REGION.s3" \
    --vpc-endpoint-type Gateway \
    --route-table-ids "${tables[@]}"
}

# Prints the id of the cluster's network, which outlives the cluster where a deletion was interrupted.
network() {
  aws ec2 describe-vpcs --region "$REGION" --filters "Name=tag:alpha.eksctl.io/cluster-name,Values=$CLUSTER" \
    --query 'Vpcs[0].VpcId' --output text
}

# Prints the ids of the endpoints for S3 in a network.
endpoints() {
  aws ec2 describe-vpc-endpoints --region "$REGION" \
    --filters "Name=vpc-id,Values=$1" "Name=service-name,Values=com.amazonaws.$REGION.s3" \
    --query 'VpcEndpoints[].VpcEndpointId' --output text
}

# Starts the GPU machines: last, since they are paid from now on.
machines() {
  pay '2 x p4d.24xlarge on demand in us-west-2: 43.92 USD an hour by the catalog (2026-08-22).'
  run eksctl scale nodegroup \
    --cluster "$CLUSTER" \
    --region "$REGION" \
    --name p4d-24xlarge \
    --nodes 2 \
    --nodes-max 2 \
    --wait
}

# Ends the GPU machines; the cluster stays.
stop() {
  if [ "$DRY_RUN" = 0 ] && ! eksctl get cluster --name "$CLUSTER" --region "$REGION" >/dev/null 2>&1; then return 0; fi
  run eksctl scale nodegroup --cluster "$CLUSTER" --region "$REGION" --name p4d-24xlarge --nodes 0 --nodes-min 0
}

# Deletes the cluster's log groups, which have no end and are paid by the gigabyte.
logs() {
  local prefix groups group
  for prefix in "/aws/containerinsights/$CLUSTER/" "/aws/eks/$CLUSTER/"; do
    groups="$(aws logs describe-log-groups --region "$REGION" --log-group-name-prefix "$prefix" \
      --query 'logGroups[].logGroupName' --output text)"
    for group in $groups; do
      run aws logs delete-log-group --region "$REGION" --log-group-name "$group"
    done
  done
}

# Deletes the cluster and its network. A file system in it must be gone: storage.sh delete.
delete() {
  local vpc=vpc-0 found=(vpce-0)
  if [ "$DRY_RUN" = 0 ]; then
    vpc="$(network)"
    if [ "$vpc" = None ]; then return 0; fi
    # eksctl did not make it, and would wait for it in vain.
    read -r -a found <<<"$(endpoints "$vpc")"
  fi
  if [ "${#found[@]}" -gt 0 ]; then
    run aws ec2 delete-vpc-endpoints --region "$REGION" --vpc-endpoint-ids "${found[@]}"
  fi
  # Without --wait eksctl does not say that a deletion failed.
  run eksctl delete cluster --name "$CLUSTER" --region "$REGION" --disable-nodegroup-eviction --wait
  if [ "$DRY_RUN" = 0 ]; then logs; fi
}

if [ "$#" = 0 ]; then set -- up; fi

case ${1:-} in
  up | machines | stop | delete) "$@" ;;
  *)
    printf 'usage: %s [--dry-run] [--yes] %s\n' "$0" '[up | machines | stop | delete]' >&2
    exit 64
    ;;
esac
