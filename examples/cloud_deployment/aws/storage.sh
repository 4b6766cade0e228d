#!/usr/bin/env bash
# Creates the run's storage where it does not exist. Safe to repeat.
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
if ! aws s3api head-bucket --bucket embark-example >/dev/null 2>&1; then
  # us-east-1 is the one region that must not be named.
  if [ "$REGION" = us-east-1 ]; then
    run aws s3api create-bucket --bucket embark-example --region "$REGION"
  else
    run aws s3api create-bucket \
      --bucket embark-example \
      --region "$REGION" \
      --create-bucket-configuration "LocationConstraint=$REGION"
  fi
  run aws s3api put-public-access-block \
    --bucket embark-example \
    --public-access-block-configuration BlockPublicAcls=true,IgnorePublicAcls=true,BlockPublicPolicy=true,RestrictPublicBuckets=true
fi
if [ "${1:-all}" = buckets ]; then exit 0; fi
# 1,200 GiB of FSx for Lustre, PERSISTENT_2, 1000 MB/s/TiB read 1.2 GB/s. More is faster, in steps of 2400.
CAPACITY_GIB=${CAPACITY_GIB:-1200}
ZONE=${ZONE:-us-west-2b}
VOLUME=embark-dlrm-data

# In the machines' own zone and subnet, in the cluster's security group, whose members may talk to each other.
if [ "$DRY_RUN" = 0 ]; then
  VPC_ID="$(aws eks describe-cluster --name "$CLUSTER" --region "$REGION" \
    --query cluster.resourcesVpcConfig.vpcId --output text)"
  GROUP_ID="$(aws eks describe-cluster --name "$CLUSTER" --region "$REGION" \
    --query cluster.resourcesVpcConfig.clusterSecurityGroupId --output text)"
  SUBNET_ID="$(aws ec2 describe-subnets --region "$REGION" \
    --filters "Name=vpc-id,Values=$VPC_ID" "Name=availability-zone,Values=$ZONE" \
    Name=tag:kubernetes.io/role/internal-elb,Values=1 --query 'Subnets[0].SubnetId' --output text)"
  FS_ID="$(aws fsx describe-file-systems --region "$REGION" \
    --query "FileSystems[?Tags[?Key=='embark-volume' && Value=='$VOLUME']].FileSystemId | [0]" --output text)"
else
  VPC_ID=vpc-0 GROUP_ID=sg-0 SUBNET_ID=subnet-0 FS_ID=None
fi
if [ "$FS_ID" = None ]; then
  if [ "$DRY_RUN" = 1 ]; then
    printf '+ aws fsx create-file-system … in %s of %s\n' "$SUBNET_ID" "$VPC_ID" >&2
    FS_ID=fs-0
  else
    FS_ID=$(aws fsx create-file-system \
      --region "$REGION" \
      --client-request-token "$VOLUME" \
      --file-system-type LUSTRE \
      --file-system-type-version 2.15 \
      --storage-type SSD \
      --storage-capacity "$CAPACITY_GIB" \
      --subnet-ids "$SUBNET_ID" \
      --security-group-ids "$GROUP_ID" \
      --lustre-configuration DeploymentType=PERSISTENT_2,PerUnitStorageThroughput=1000,DataCompressionType=LZ4 \
      --tags "Key=embark-volume,Value=$VOLUME" \
      --query FileSystem.FileSystemId \
      --output text)
  fi
fi
field_of() {
  aws fsx describe-file-systems --region "$REGION" --file-system-ids "$FS_ID" --query "FileSystems[0].$1" --output text
}
if [ "$DRY_RUN" = 0 ]; then
  until [ "$(field_of Lifecycle)" = AVAILABLE ]; do sleep 30; done
  DNS_NAME="$(field_of DNSName)"
  MOUNT_NAME="$(field_of LustreConfiguration.MountName)"
fi

# Objects of the bucket appear as files, and are fetched when they are first read.
DATA_SOURCE=${DATA_SOURCE:-s3://embark-example/data/criteo-1tb}
if [ "$DRY_RUN" = 1 ] || [ "$(aws fsx describe-data-repository-associations --region "$REGION" \
  --filters "Name=file-system-id,Values=$FS_ID" \
  --query 'Associations[0].AssociationId' --output text)" = None ]; then
  run aws fsx create-data-repository-association \
    --region "$REGION" \
    --file-system-id "$FS_ID" \
    --file-system-path /criteo-1tb \
    --data-repository-path "$DATA_SOURCE" \
    --batch-import-meta-data-on-create \
    --s3 'AutoImportPolicy={Events=[NEW,CHANGED,DELETED]},AutoExportPolicy={Events=[NEW,CHANGED,DELETED]}'
fi

PATCH="{\"spec\":{\"csi\":{\"volumeHandle\":\"$FS_ID\",\"volumeAttributes\":{\"dnsname\":\"${DNS_NAME:-}\",\"mountname\":\"${MOUNT_NAME:-}\"}}}}"
if [ "$DRY_RUN" = 0 ]; then
  kubectl patch --local -f volume.yaml --type=merge --output=json --patch="$PATCH" |
    kubectl apply -f -
fi
run kubectl apply -f claim.yaml
