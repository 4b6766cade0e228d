# Trains dlrm on 2 x Standard_ND96asr_v4: 16 ranks, by TorchX. The cluster needs Volcano. torchx run --workspace
# '' -s kubernetes -cfg queue=default,namespace=embark cloud_component.py:train
# Written by `embark render`. Change the spec and run it again: --diff shows what would change; files edited by
# hand are kept unless --force is given.
"""A TorchX component: the run as an application of TorchX."""

import torchx.specs as specs
from torchx.specs.overlays import set_overlay

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
 'NCCL_TOPO_FILE': '/tmp/embark-topology.xml',
 'AZURE_STORAGE_ACCOUNT_NAME': 'embarkexample',
 'HOME': '/tmp',
 'EMBARK_SPEC_BASE64': 'bmFtZSA9ICJkbHJtIgoKW21vZGVsXQpudW1fZGVuc2UgPSAxMwplbWJlZGRpbmdfZGltID0gMTI4CmJvdHRvbV9tbHAgPSBbNTEyLCAyNTZdCnRvcF9tbHAgPSBbMTAyNCwgMTAyNCwgNTEyLCAyNTZdCm51bV90YWJsZXMgPSAyNgpyb3dzX3Blcl90YWJsZSA9IFs0MDAwMDAwMCwgMzkwNjAsIDE3Mjk1LCA3NDI0LCAyMDI2NSwgMywgNzEyMiwgMTU0MywgNjMsIDQwMDAwMDAwLCAzMDY3OTU2LCA0MDUyODIsIDEwLCAyMjA5LCAxMTkzOCwgMTU1LCA0LCA5NzYsIDE0LCA0MDAwMDAwMCwgNDAwMDAwMDAsIDQwMDAwMDAwLCA1OTAxNTIsIDEyOTczLCAxMDgsIDM2XQoKW2RhdGFdCmtpbmQgPSAicHJlcGFyZWQiCnBhdGggPSAiL21udC9kYXRhL2NyaXRlby0xdGIiCm51bV90cmFpbl9zYW1wbGVzID0gNDE5NTE5NzY5MgpudW1fZXZhbF9zYW1wbGVzID0gMTc4Mjc0NjM3CgpbdHJhaW5dCmJhdGNoX3NpemUgPSA2NTUzNgpsZWFybmluZ19yYXRlID0gMC4wMDUKCltwbGFjZV0KbWFjaGluZSA9ICJTdGFuZGFyZF9ORDk2YXNyX3Y0Igpub2RlcyA9IDIKcmVnaW9uID0gImVhc3R1cyIKem9uZSA9ICIxIgpyZW5kZXJfdGFyZ2V0cyA9IFsiam9iIiwgImpvYnNldCIsICJ0cmFpbmpvYiIsICJweXRvcmNoam9iIiwgInJheSIsICJ0b3JjaHgiXQppbWFnZSA9ICJyZWdpc3RyeS5leGFtcGxlLmNvbS9lbWJhcms6MC4xLjAtdG9yY2gyLjEzLjAiCnN0b3JhZ2VfYWNjb3VudCA9ICJlbWJhcmtleGFtcGxlIgpxdWV1ZSA9ICJlbWJhcmsiCnZvbHVtZSA9ICJhenVyZS1uZXRhcHAtdWx0cmEiCgpbc3RvcmVdCnJvb3QgPSAiYXo6Ly9lbWJhcmstZXhhbXBsZS9ydW5zIgprZWVwX2NoZWNrcG9pbnRzID0gMQoKW3dhdGNoXQpwcm9tZXRoZXVzX3BvcnQgPSA5NDY0Cgpbc2VydmVdCnRhYmxlcyA9ICJpbnQ4Igo=',
 'EMBARK_TOPOLOGY_BASE64': 'PHN5c3RlbSB2ZXJzaW9uPSIxIj4KICA8Y3B1IG51bWFpZD0iMCIgYWZmaW5pdHk9IjAwMDAwMDAwLDAwMDAwMDAwLDAwZmZmZmZmIiBhcmNoPSJ4ODZfNjQiIHZlbmRvcj0iQXV0aGVudGljQU1EIiBmYW1pbHlpZD0iMjMiIG1vZGVsaWQ9IjQ5Ij4KICAgIDxwY2kgYnVzaWQ9ImZmZmY6ZmY6MDEuMCIgY2xhc3M9IjB4MDYwNDAwIiBsaW5rX3NwZWVkPSIxNiBHVC9zIiBsaW5rX3dpZHRoPSIxNiI+CiAgICAgIDxwY2kgYnVzaWQ9IjAwMDM6MDA6MDAuMCIgY2xhc3M9IjB4MDMwMjAwIiBsaW5rX3NwZWVkPSIxNiBHVC9zIiBsaW5rX3dpZHRoPSIxNiIvPgogICAgICA8cGNpIGJ1c2lkPSIwMTAzOjAwOjAwLjAiIGNsYXNzPSIweDAyMDcwMCIgbGlua19zcGVlZD0iMTYgR1QvcyIgbGlua193aWR0aD0iMTYiLz4KICAgICAgPHBjaSBidXNpZD0iMDAwNDowMDowMC4wIiBjbGFzcz0iMHgwMzAyMDAiIGxpbmtfc3BlZWQ9IjE2IEdUL3MiIGxpbmtfd2lkdGg9IjE2Ii8+CiAgICAgIDxwY2kgYnVzaWQ9IjAxMDQ6MDA6MDAuMCIgY2xhc3M9IjB4MDIwNzAwIiBsaW5rX3NwZWVkPSIxNiBHVC9zIiBsaW5rX3dpZHRoPSIxNiIvPgogICAgPC9wY2k+CiAgPC9jcHU+CiAgPGNwdSBudW1haWQ9IjEiIGFmZmluaXR5PSIwMDAwMDAwMCwwMDAwZmZmZixmZjAwMDAwMCIgYXJjaD0ieDg2XzY0IiB2ZW5kb3I9IkF1dGhlbnRpY0FNRCIgZmFtaWx5aWQ9IjIzIiBtb2RlbGlkPSI0OSI+CiAgICA8cGNpIGJ1c2lkPSJmZmZmOmZmOjAyLjAiIGNsYXNzPSIweDA2MDQwMCIgbGlua19zcGVlZD0iMTYgR1QvcyIgbGlua193aWR0aD0iMTYiPgogICAgICA8cGNpIGJ1c2lkPSIwMDAxOjAwOjAwLjAiIGNsYXNzPSIweDAzMDIwMCIgbGlua19zcGVlZD0iMTYgR1QvcyIgbGlua193aWR0aD0iMTYiLz4KICAgICAgPHBjaSBidXNpZD0iMDEwMTowMDowMC4wIiBjbGFzcz0iMHgwMjA3MDAiIGxpbmtfc3BlZWQ9IjE2IEdUL3MiIGxpbmtfd2lkdGg9IjE2Ii8+CiAgICAgIDxwY2kgYnVzaWQ9IjAwMDI6MDA6MDAuMCIgY2xhc3M9IjB4MDMwMjAwIiBsaW5rX3NwZWVkPSIxNiBHVC9zIiBsaW5rX3dpZHRoPSIxNiIvPgogICAgICA8cGNpIGJ1c2lkPSIwMTAyOjAwOjAwLjAiIGNsYXNzPSIweDAyMDcwMCIgbGlua19zcGVlZD0iMTYgR1QvcyIgbGlua193aWR0aD0iMTYiLz4KICAgIDwvcGNpPgogIDwvY3B1PgogIDxjcHUgbnVtYWlkPSIyIiBhZmZpbml0eT0iMDAwMDAwZmYsZmZmZjAwMDAsMDAwMDAwMDAiIGFyY2g9Ing4Nl82NCIgdmVuZG9yPSJBdXRoZW50aWNBTUQiIGZhbWlseWlkPSIyMyIgbW9kZWxpZD0iNDkiPgogICAgPHBjaSBidXNpZD0iZmZmZjpmZjowMy4wIiBjbGFzcz0iMHgwNjA0MDAiIGxpbmtfc3BlZWQ9IjE2IEdUL3MiIGxpbmtfd2lkdGg9IjE2Ij4KICAgICAgPHBjaSBidXNpZD0iMDAwZDowMDowMC4wIiBjbGFzcz0iMHgwMzAyMDAiIGxpbmtfc3BlZWQ9IjE2IEdUL3MiIGxpbmtfd2lkdGg9IjE2Ii8+CiAgICAgIDxwY2kgYnVzaWQ9IjAxMDc6MDA6MDAuMCIgY2xhc3M9IjB4MDIwNzAwIiBsaW5rX3NwZWVkPSIxNiBHVC9zIiBsaW5rX3dpZHRoPSIxNiIvPgogICAgICA8cGNpIGJ1c2lkPSIwMDBlOjAwOjAwLjAiIGNsYXNzPSIweDAzMDIwMCIgbGlua19zcGVlZD0iMTYgR1QvcyIgbGlua193aWR0aD0iMTYiLz4KICAgICAgPHBjaSBidXNpZD0iMDEwODowMDowMC4wIiBjbGFzcz0iMHgwMjA3MDAiIGxpbmtfc3BlZWQ9IjE2IEdUL3MiIGxpbmtfd2lkdGg9IjE2Ii8+CiAgICA8L3BjaT4KICA8L2NwdT4KICA8Y3B1IG51bWFpZD0iMyIgYWZmaW5pdHk9ImZmZmZmZjAwLDAwMDAwMDAwLDAwMDAwMDAwIiBhcmNoPSJ4ODZfNjQiIHZlbmRvcj0iQXV0aGVudGljQU1EIiBmYW1pbHlpZD0iMjMiIG1vZGVsaWQ9IjQ5Ij4KICAgIDxwY2kgYnVzaWQ9ImZmZmY6ZmY6MDQuMCIgY2xhc3M9IjB4MDYwNDAwIiBsaW5rX3NwZWVkPSIxNiBHVC9zIiBsaW5rX3dpZHRoPSIxNiI+CiAgICAgIDxwY2kgYnVzaWQ9IjAwMGI6MDA6MDAuMCIgY2xhc3M9IjB4MDMwMjAwIiBsaW5rX3NwZWVkPSIxNiBHVC9zIiBsaW5rX3dpZHRoPSIxNiIvPgogICAgICA8cGNpIGJ1c2lkPSIwMTA1OjAwOjAwLjAiIGNsYXNzPSIweDAyMDcwMCIgbGlua19zcGVlZD0iMTYgR1QvcyIgbGlua193aWR0aD0iMTYiLz4KICAgICAgPHBjaSBidXNpZD0iMDAwYzowMDowMC4wIiBjbGFzcz0iMHgwMzAyMDAiIGxpbmtfc3BlZWQ9IjE2IEdUL3MiIGxpbmtfd2lkdGg9IjE2Ii8+CiAgICAgIDxwY2kgYnVzaWQ9IjAxMDY6MDA6MDAuMCIgY2xhc3M9IjB4MDIwNzAwIiBsaW5rX3NwZWVkPSIxNiBHVC9zIiBsaW5rX3dpZHRoPSIxNiIvPgogICAgPC9wY2k+CiAgPC9jcHU+Cjwvc3lzdGVtPgo='}
MAX_RETRIES = 3
START = ('printf %s "$EMBARK_SPEC_BASE64" | base64 -d > /tmp/embark-spec.toml && printf %s "$EMBARK_TOPOLOGY_BASE64" '
 '| base64 -d > /tmp/embark-topology.xml && exec python -m embark.torchrun MEETING -m embark train '
 '/tmp/embark-spec.toml')
PORT = 29500
WAIT_S = 1800
POD = {'metadata': {'labels': {'azure.workload.identity/use': 'true'}},
 'spec': {'serviceAccountName': 'embark',
          'automountServiceAccountToken': False,
          'terminationGracePeriodSeconds': 120,
          'tolerations': [{'key': 'nvidia.com/gpu', 'operator': 'Exists', 'effect': 'NoSchedule'}],
          'securityContext': {'runAsNonRoot': True, 'runAsUser': 1000, 'runAsGroup': 1000, 'fsGroup': 1000}}}
CLAIMS = {'dlrm-data': '/mnt/data'}


def train(nodes: int = NUM_NODES, image: str = IMAGE) -> specs.AppDef:
    """Trains the run that this file was written for.

    Args:
        nodes: how many machines
        image: the container image, in a registry that the cluster reads
    """
    role = specs.Role(
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
        mounts=[specs.VolumeMount(src=claim, dst_path=path) for claim, path in CLAIMS.items()],
    )
    # What TorchX has no word for: service account, tolerations, user, labels.
    set_overlay(role, "kubernetes", "V1Pod", POD)
    return specs.AppDef(name=NAME, roles=[role])


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
