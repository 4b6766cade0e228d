#!/usr/bin/env bash
# Creates the run's storage where it does not exist: buckets, which need no cluster, and then the volume. delete
# removes the volume; buckets stay. Safe to repeat.
# Written by `embark render`. Change the spec and run it again: --diff shows what would change; files edited by
# hand are kept unless --force is given.
set -euo pipefail
shopt -s inherit_errexit 2>/dev/null || true

CLUSTER=${CLUSTER:-embark}
REGION=${REGION:-us-west-2}
# 1,200 GiB of FSx for Lustre, PERSISTENT_2, 1000 MB/s/TiB read 1.2 GB/s and cost 0.99 USD an hour. More is faster, in steps of 2400.
CAPACITY_GIB=${CAPACITY_GIB:-1200}
ZONE=${ZONE:-us-west-2b}
VOLUME=embark-dlrm-data
DATA_SOURCE=${DATA_SOURCE:-s3://embark-example/data/criteo-1tb}
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
buckets() {
  :
  if [ "$DRY_RUN" = 1 ] || ! aws s3api head-bucket --bucket embark-example >/dev/null 2>&1; then
    # us-east-1 is the one region that must not be named.
    if [ "$REGION" = us-east-1 ]; then
      run aws s3api create-bucket --bucket embark-example --region "$REGION"
    else
      run aws s3api create-bucket \
        --bucket embark-example \
        --region "$REGION" \
        --create-bucket-configuration "LocationConstraint=$REGION"
    fi
  fi
  run aws s3api put-public-access-block \
    --bucket embark-example \
    --public-access-block-configuration BlockPublicAcls=true,IgnorePublicAcls=true,BlockPublicPolicy=true,RestrictPublicBuckets=true
}
# Prints what a command found. A dry run asks no account, and finds nothing.
ask() {
  if [ "$DRY_RUN" = 1 ]; then printf 'None\n'; else "$@"; fi
}

# Runs a command that creates something and prints its id.
create() {
  run "$@" || return
  if [ "$DRY_RUN" = 1 ]; then printf 'dry-run\n'; fi
}

# Waits until the command after it prints the state $1. Any state that is not on the way there is a failure.
wait_for() {
  local wanted=$1 state
  shift
  if [ "$DRY_RUN" = 1 ]; then return 0; fi
  while true; do
    state=$("$@")
    case $state in
      "$wanted") return 0 ;;
      CREATING | PENDING | EXECUTING | UPDATING | DELETING) sleep 15 ;;
      *)
        printf '%s, not %s: %s\n' "$state" "$wanted" "$*" >&2
        exit 70
        ;;
    esac
  done
}

# Prints one field of the file system, by its tag, or None.
file_system() {
  aws fsx describe-file-systems --region "$REGION" \
    --query "FileSystems[?Tags[?Key=='embark-volume' && Value=='$VOLUME']].$1 | [0]" --output text
}

# Prints one field of the file system's link to the bucket, or None.
link() {
  aws fsx describe-data-repository-associations --region "$REGION" --filters "Name=file-system-id,Values=$1" \
    --query "Associations[0].$2" --output text
}

# Prints one field of the cluster's network.
cluster() {
  aws eks describe-cluster --name "$CLUSTER" --region "$REGION" --query "cluster.resourcesVpcConfig.$1" --output text
}

# Prints the machines' own private subnet.
subnet() {
  aws ec2 describe-subnets --region "$REGION" \
    --filters "Name=vpc-id,Values=$1" "Name=availability-zone,Values=$ZONE" \
    Name=tag:kubernetes.io/role/internal-elb,Values=1 --query 'Subnets[0].SubnetId' --output text
}

# The file system, in the machines' zone, linked to the bucket, as a volume of the cluster.
volume() {
  local vpc id task dns mount
  if [ "$DRY_RUN" = 0 ] && ! aws s3 ls "$DATA_SOURCE/" >/dev/null; then
    printf 'There is no data in %s. Copy it there: embark data copy FOLDER %s\n' "$DATA_SOURCE" "$DATA_SOURCE" >&2
    exit 64
  fi
  id=$(ask file_system FileSystemId)
  if [ "$id" = None ]; then
    vpc=$(ask cluster vpcId)
    # In the cluster's security group, whose members may talk to each other.
    id=$(create aws fsx create-file-system \
      --region "$REGION" \
      --file-system-type LUSTRE \
      --file-system-type-version 2.15 \
      --storage-type SSD \
      --storage-capacity "$CAPACITY_GIB" \
      --subnet-ids "$(ask subnet "$vpc")" \
      --security-group-ids "$(ask cluster clusterSecurityGroupId)" \
      --lustre-configuration DeploymentType=PERSISTENT_2,PerUnitStorageThroughput=1000,DataCompressionType=LZ4 \
      --tags "Key=embark-volume,Value=$VOLUME" \
      --query FileSystem.FileSystemId \
      --output text)
  fi
  wait_for AVAILABLE file_system Lifecycle

  # Objects of the bucket appear as files, and are fetched when they are first read.
  if [ "$(ask link "$id" AssociationId)" = None ]; then
    run aws fsx create-data-repository-association \
      --region "$REGION" \
      --file-system-id "$id" \
      --file-system-path /criteo-1tb \
      --data-repository-path "$DATA_SOURCE" \
      --s3 'AutoImportPolicy={Events=[NEW,CHANGED,DELETED]}' >/dev/null
  fi
  wait_for AVAILABLE link "$id" Lifecycle
  # New objects appear by themselves, but at some time: an import says when all are there.
  task=$(create aws fsx create-data-repository-task \
    --region "$REGION" \
    --file-system-id "$id" \
    --type IMPORT_METADATA_FROM_REPOSITORY \
    --paths "$DATA_SOURCE" \
    --report Enabled=false \
    --query DataRepositoryTask.TaskId \
    --output text)
  wait_for SUCCEEDED aws fsx describe-data-repository-tasks --region "$REGION" --task-ids "$task" \
    --query 'DataRepositoryTasks[0].Lifecycle' --output text

  dns=$(ask file_system DNSName)
  mount=$(ask file_system LustreConfiguration.MountName)
  PATCH="{\"spec\":{\"csi\":{\"volumeHandle\":\"$id\",\"volumeAttributes\":{\"dnsname\":\"$dns\",\"mountname\":\"$mount\"}}}}"
  if [ "$DRY_RUN" = 0 ]; then
    kubectl patch --local -f volume.yaml --type=merge --output=json --patch="$PATCH" |
      kubectl apply -f -
  fi
  run kubectl apply -f claim.yaml
}
# Deletes the file system, which lies in the cluster's network. What it has of the bucket stays in the bucket.
delete() {
  :
  local id
  if [ "$DRY_RUN" = 0 ] && kubectl get -f claim.yaml >/dev/null 2>&1; then
    run kubectl delete -f claim.yaml -f volume.yaml --ignore-not-found --wait=false
  fi
  id=$(ask file_system FileSystemId)
  if [ "$DRY_RUN" = 0 ] && [ "$id" = None ]; then return 0; fi
  if [ "$(ask link "$id" Lifecycle)" != None ]; then
    run aws fsx delete-data-repository-association \
      --region "$REGION" \
      --association-id "$(link "$id" AssociationId)" \
      --no-delete-data-in-file-system >/dev/null
    wait_for None link "$id" Lifecycle
  fi
  run aws fsx delete-file-system --region "$REGION" --file-system-id "$id" >/dev/null
  wait_for None file_system Lifecycle
}

all() {
  buckets
  volume
}
if [ "$#" = 0 ]; then set -- all; fi

case ${1:-} in
  all | buckets | volume | delete) "$@" ;;
  *)
    printf 'usage: %s [--dry-run] [--yes] %s\n' "$0" '[buckets | volume | delete]' >&2
    exit 64
    ;;
esac
