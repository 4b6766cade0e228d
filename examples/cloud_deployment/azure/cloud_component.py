# Trains dlrm on 2 x Standard_ND96asr_v4: 16 ranks, by TorchX. The cluster needs Volcano. TorchX writes no
# tolerations: GPU nodes must have no taint, or the API server the ExtendedResourceToleration plugin. torchx run
# --workspace '' -s kubernetes -cfg queue=default,namespace=embark cloud_component.py:train
# Written by `embark render`. Change the spec and run it again: --diff shows what would change, and a file that
# was edited by hand is not overwritten unasked.
"""A TorchX component: the run as an application of TorchX."""

import torchx.specs as specs

NAME = 'dlrm'
IMAGE = 'registry.example.com/embark:0.1.0-torch2.13.0'
NUM_NODES = 2
NUM_PROCESSES = 8
NUM_GPUS = 8
NUM_CPUS = 92
MEMORY_MB = 888832
DEVICES = {'rdma/ib': 8}
LABELS = {'node.kubernetes.io/instance-type': 'Standard_ND96asr_v4'}
ENVIRONMENT = {'PYTHONUNBUFFERED': '1',
 'NCCL_DEBUG': 'WARN',
 'TORCH_FR_BUFFER_SIZE': '2000',
 'TORCH_NCCL_DUMP_ON_TIMEOUT': '1',
 'EMBARK_GRACE_S': '120',
 'EMBARK_USD_PER_HOUR': '54.394',
 'OMP_NUM_THREADS': '11',
 'TORCH_DISABLE_SHARE_RDZV_TCP_STORE': '1',
 'NCCL_SOCKET_IFNAME': 'eth0',
 'NCCL_IB_PCI_RELAXED_ORDERING': '1',
 'NCCL_TOPO_FILE': '/etc/embark/topology.xml',
 'AZURE_STORAGE_ACCOUNT_NAME': 'embarkexample',
 'HOME': '/tmp',
 'EMBARK_SPEC_BASE64': 'bmFtZSA9ICJkbHJtIgoKW21vZGVsXQpraW5kID0gImRscm0iCm51bV9kZW5zZSA9IDEzCmVtYmVkZGluZ19kaW0gPSAxMjgKYm90dG9tX21scCA9IFsKICAgIDUxMiwKICAgIDI1NiwKXQp0b3BfbWxwID0gWwogICAgMTAyNCwKICAgIDEwMjQsCiAgICA1MTIsCiAgICAyNTYsCl0KbnVtX2Nyb3NzX2xheWVycyA9IDMKY3Jvc3NfcmFuayA9IDUxMgpudW1fdGFibGVzID0gMjYKcm93c19wZXJfdGFibGUgPSBbCiAgICA0MDAwMDAwMCwKICAgIDM5MDYwLAogICAgMTcyOTUsCiAgICA3NDI0LAogICAgMjAyNjUsCiAgICAzLAogICAgNzEyMiwKICAgIDE1NDMsCiAgICA2MywKICAgIDQwMDAwMDAwLAogICAgMzA2Nzk1NiwKICAgIDQwNTI4MiwKICAgIDEwLAogICAgMjIwOSwKICAgIDExOTM4LAogICAgMTU1LAogICAgNCwKICAgIDk3NiwKICAgIDE0LAogICAgNDAwMDAwMDAsCiAgICA0MDAwMDAwMCwKICAgIDQwMDAwMDAwLAogICAgNTkwMTUyLAogICAgMTI5NzMsCiAgICAxMDgsCiAgICAzNiwKXQp0YWJsZXMgPSBbXQoKW2RhdGFdCmtpbmQgPSAicHJlcGFyZWQiCnBhdGggPSAiL21udC9kYXRhL2NyaXRlby0xdGIiCmxhYmVsID0gImxhYmVsIgpkZW5zZV9jb2x1bW5zID0gW10KZXZhbF9mcmFjdGlvbiA9IDAuMQpldmFsX3NwbGl0ID0gInZhbGlkYXRpb24iCnNodWZmbGUgPSAiYXV0byIKY2FjaGVfZ2IgPSA1MC4wCmNhY2hlX2RpciA9ICIiCm9uX2JhZF9pZCA9ICJyZWZ1c2UiCm51bV90cmFpbl9zYW1wbGVzID0gMjAwMDAwMDAKbnVtX2V2YWxfc2FtcGxlcyA9IDEwNDg1NzYKemlwZl9leHBvbmVudCA9IDEuMgpzaWduYWwgPSAxLjAKcmFnZ2VkID0gZmFsc2UKc2VlZCA9IDEKCltkYXRhLnByZXBhcmVdCmlucHV0ID0gW10KZm9ybWF0ID0gImF1dG8iCmRlbGltaXRlciA9ICIiCmhlYWRlciA9ICJhdXRvIgpjb2x1bW5fbmFtZXMgPSBbXQpsaXN0X2RlbGltaXRlciA9ICJ8IgpzcGFyc2VfY29sdW1ucyA9IFtdCmxpc3RfY29sdW1ucyA9IFtdCmhleF9jb2x1bW5zID0gW10KaWdub3JlZF9jb2x1bW5zID0gW10KbWlzc2luZyA9IFsKICAgICIiLAogICAgIk5BIiwKICAgICJudWxsIiwKICAgICJOVUxMIiwKICAgICJOb25lIiwKICAgICJuYW4iLAogICAgIk5hTiIsCiAgICAiXFxOIiwKXQptYXhfaWRzID0gMzIKaWRzID0gImF1dG8iCm1pbl9jb3VudCA9IDEKbWF4X3Jvd3MgPSA0MDAwMDAwMApkZW5zZSA9ICJhdXRvIgpkZW5zZV9iaXRzID0gMzIKc3BsaXQgPSAiZnJhY3Rpb24iCnRlc3RfZnJhY3Rpb24gPSAwLjAKdmFsaWRhdGlvbl9maWxlcyA9IFtdCnRlc3RfZmlsZXMgPSBbXQpzcGxpdF9jb2x1bW4gPSAiIgptYXhfYmFkX3NoYXJlID0gMC4wMDEKbWVtb3J5X2diID0gMi4wCm51bV93b3JrZXJzID0gMAoKW3RyYWluXQpiYXRjaF9zaXplID0gNjU1MzYKbnVtX2Vwb2NocyA9IDEKbnVtX3N0ZXBzID0gMApsZWFybmluZ19yYXRlID0gMC4wMDUKb3B0aW1pemVyID0gInJvd3dpc2VfYWRhZ3JhZCIKZGVuc2Vfb3B0aW1pemVyID0gImFkYWdyYWQiCmVwcyA9IDFlLTA4Cndhcm11cF9zdGVwcyA9IDAKZGVjYXkgPSAibm9uZSIKZGVjYXlfc3RhcnRfc3RlcCA9IDAKZGVjYXlfc3RlcHMgPSAwCmZpbmFsX3JhdGUgPSAwLjAKcHJlY2lzaW9uID0gImF1dG8iCnRhYmxlX2R0eXBlID0gImZwMzIiCmNvbW1zX2R0eXBlID0gImZwMzIiCnNoYXJkaW5nID0gImF1dG8iCm1lbW9yeV9yZXNlcnZlID0gMC4xNQplbmdpbmUgPSAiYXV0byIKc3BhcnNlY29yZSA9ICJhdXRvIgpldmFsX2V2ZXJ5ID0gMApzZWVkID0gMQoKW3BsYWNlXQpkZXZpY2UgPSAiYXV0byIKdGltZW91dF9zID0gNjAwCndhdGNoX25vdGljZXMgPSB0cnVlCmNsb3VkID0gIiIKbWFjaGluZSA9ICJTdGFuZGFyZF9ORDk2YXNyX3Y0Igpub2RlcyA9IDIKcmVnaW9uID0gImVhc3R1cyIKem9uZSA9ICIxIgpzcG90ID0gZmFsc2UKdGFyZ2V0ID0gImpvYiIKaW1hZ2UgPSAicmVnaXN0cnkuZXhhbXBsZS5jb20vZW1iYXJrOjAuMS4wLXRvcmNoMi4xMy4wIgpuYW1lc3BhY2UgPSAiZW1iYXJrIgpzZXJ2aWNlX2FjY291bnQgPSAiZW1iYXJrIgppZGVudGl0eSA9ICIiCmFjY291bnQgPSAiIgpzdG9yYWdlX2FjY291bnQgPSAiZW1iYXJrZXhhbXBsZSIKcXVldWUgPSAiZW1iYXJrIgp2b2x1bWUgPSAiYXp1cmUtbmV0YXBwLXVsdHJhIgp2b2x1bWVfcGF0aCA9ICIvbW50L2RhdGEiCgpbc3RvcmVdCnJvb3QgPSAiYXo6Ly9lbWJhcmstZXhhbXBsZS9ydW5zIgpjaGVja3BvaW50X2V2ZXJ5ID0gImF1dG8iCmhvdXJzX2JldHdlZW5fZmFpbHVyZXMgPSAxMi4wCmNoZWNrcG9pbnRfYXRfZW5kID0gdHJ1ZQppbl9iYWNrZ3JvdW5kID0gdHJ1ZQprZWVwX2NoZWNrcG9pbnRzID0gMQprZWVwX2V2ZXJ5ID0gMAprZWVwX2Jlc3QgPSAwCmJlc3RfYnkgPSAiYXVjIgp2ZXJpZnkgPSAiY2hlY2tzdW1zIgoKW3dhdGNoXQpldmVyeSA9IDUwCnRlbnNvcmJvYXJkID0gdHJ1ZQpzeXN0ZW1fZXZlcnlfcyA9IDUuMApwaGFzZXNfZXZlcnlfcyA9ICJhdXRvIgpwcm9tZXRoZXVzX3BvcnQgPSA5NDY0CnByb21ldGhldXNfaG9zdCA9ICIwLjAuMC4wIgpzaW5rcyA9IFtdCnNlbmRfZXZlcnlfcyA9IDMwLjAKY2xvdWR3YXRjaF9uYW1lc3BhY2UgPSAiRW1iYXJrIgo='}
MAX_RETRIES = 3
START = ('printf %s "$EMBARK_SPEC_BASE64" | base64 -d > /tmp/embark-spec.toml && exec python -m embark.torchrun '
 'MEETING -m embark train /tmp/embark-spec.toml')
PORT = 29500
WAIT_S = 1800


def train(nodes: int = NUM_NODES, image: str = IMAGE) -> specs.AppDef:
    """Trains the run that this file was written for.

    Args:
        nodes: how many machines
        image: the container image, in a registry that the cluster reads
    """
    return specs.AppDef(
        name=NAME,
        roles=[
            specs.Role(
                name="trainer",
                image=image,
                entrypoint="/bin/bash",
                args=["-c", START.replace("MEETING", _meeting(nodes))],
                env=dict(ENVIRONMENT),
                num_replicas=nodes,
                max_retries=MAX_RETRIES,
                retry_policy=specs.RetryPolicy.APPLICATION,
                resource=specs.Resource(
                    cpu=NUM_CPUS,
                    gpu=NUM_GPUS,
                    memMB=MEMORY_MB,
                    capabilities=dict(LABELS),
                    devices=dict(DEVICES),
                ),
                port_map={"rendezvous": PORT},
            )
        ],
    )


def _meeting(nodes: int) -> str:
    """torchrun's options. TorchX puts in the macros; the shell asks for the first replica's name."""
    options = [f"--nnodes={nodes}", f"--nproc-per-node={NUM_PROCESSES}", f"--max-restarts={MAX_RETRIES}"]
    if nodes == 1:
        return " ".join([*options, "--standalone"])
    return " ".join([
        *options,
        f"--rdzv-id={NAME}",
        "--rdzv-backend=c10d",
        # $$ is a dollar sign to TorchX, which reads ${...} itself.
        f'--rdzv-endpoint="$${{{specs.macros.rank0_env}:=localhost}}":{PORT}',
        f'--rdzv-conf=is_host=$$([ "{specs.macros.replica_id}" = 0 ] && echo true || echo false)'
        f",join_timeout={WAIT_S},read_timeout={WAIT_S}",
    ])
