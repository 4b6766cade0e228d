#!/usr/bin/env bash
# Creates the cluster of eks_cluster.yaml if it does not exist, and what eksctl leaves out. Safe to repeat.
# Written by `embark render`. Change the spec and run it again: --diff shows what would change; files edited by
# hand are kept unless --force is given.
set -euo pipefail

CLUSTER=${CLUSTER:-embark}
REGION=${REGION:-us-west-2}

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
if ! eksctl get cluster --name "$CLUSTER" --region "$REGION" >/dev/null 2>&1; then
  run eksctl create cluster -f eks_cluster.yaml
fi

# An existing cluster may lack this run's machines.
if [ "$PART" != up ] && ! eksctl get nodegroup --cluster "$CLUSTER" --region "$REGION" --name p4d-24xlarge >/dev/null 2>&1; then
  run eksctl create nodegroup -f eks_cluster.yaml --include=p4d-24xlarge
fi

run aws eks update-kubeconfig --name "$CLUSTER" --region "$REGION"

# A gateway endpoint for S3 costs nothing; without it all data passes through the NAT gateway, billed by the gigabyte.
if [ "$DRY_RUN" = 0 ]; then
  VPC_ID="$(aws eks describe-cluster --name "$CLUSTER" --region "$REGION" \
    --query cluster.resourcesVpcConfig.vpcId --output text)"
  read -r -a ROUTE_TABLES <<<"$(aws ec2 describe-route-tables --region "$REGION" \
    --filters "Name=vpc-id,Values=$VPC_ID" --query 'RouteTables[].RouteTableId' --output text)"
  if [ -z "$(aws ec2 describe-vpc-endpoints --region "$REGION" \
    --filters "Name=vpc-id,Values=$VPC_ID" "Name=service-name,Values=com.amazonaws.$REGION.s3" \
    --query 'VpcEndpoints[].VpcEndpointId' --output text)" ]; then
    run aws ec2 create-vpc-endpoint \
      --region "$REGION" \
      --vpc-id "$VPC_ID" \
      --service-name "com.amazonaws.$REGION.s3" \
      --vpc-endpoint-type Gateway \
      --route-table-ids "${ROUTE_TABLES[@]}"
  fi
fi
# eksctl's own EFA plugin does not tolerate the GPU machines' taint and knows few machine types.
run kubectl delete daemonset aws-efa-k8s-device-plugin-daemonset --namespace kube-system --ignore-not-found
run helm repo add --force-update eks https://aws.github.io/eks-charts
run helm upgrade aws-efa-k8s-device-plugin eks/aws-efa-k8s-device-plugin \
  --install \
  --namespace kube-system \
  --set-json 'tolerations=[{"operator":"Exists"}]'
