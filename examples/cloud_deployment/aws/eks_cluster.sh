#!/usr/bin/env bash
# up creates the cluster of eks_cluster.yaml if it does not exist, and what eksctl leaves out; machines starts
# the GPU machines, which are paid from that moment, and stop ends them; delete removes the cluster. Safe to
# repeat.
# Written by `embark render`. Change the spec and run it again: --diff shows what would change; files edited by
# hand are kept unless --force is given.
set -euo pipefail

CLUSTER=${CLUSTER:-embark}
REGION=${REGION:-us-west-2}

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
# Creates all but the GPU machines.
up() {
  local config=eks_cluster.yaml
  if [ "$DRY_RUN" = 1 ] || ! eksctl get cluster --name "$CLUSTER" --region "$REGION" >/dev/null 2>&1; then
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
}

if [ "$#" = 0 ]; then set -- up; fi

case ${1:-} in
  up | machines | stop | delete) "$@" ;;
  *)
    printf 'usage: %s %s\n' "$0" '[up | machines | stop | delete]' >&2
    exit 64
    ;;
esac
