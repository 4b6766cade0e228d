# This machine's number and the first one's address are tags, which the metadata service serves.
METADATA=http://169.254.169.254/latest
TOKEN=$(curl --silent --fail --request PUT --header 'X-aws-ec2-metadata-token-ttl-seconds: 300' "$METADATA/api/token")
tag() {
  curl --silent --fail --retry 60 --retry-delay 5 --retry-all-errors \
    --header "X-aws-ec2-metadata-token: $TOKEN" "$METADATA/meta-data/tags/instance/$1"
}
RANK=$(tag embark-rank)
MASTER=$(tag embark-master)
