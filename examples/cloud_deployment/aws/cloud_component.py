# Trains dlrm on 2 x p4d.24xlarge: 16 ranks, by TorchX. The cluster needs Volcano. torchx run --workspace '' -s
# kubernetes -cfg queue=default,namespace=embark cloud_component.py:train
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
MEMORY_MB = 1094656
DEVICES = {'vpc.amazonaws.com/efa': 4}
LABELS = {'node.kubernetes.io/instance-type': 'p4d.24xlarge', 'topology.kubernetes.io/zone': 'us-west-2b'}
ENVIRONMENT = {'PYTHONUNBUFFERED': '1',
 'NCCL_DEBUG': 'WARN',
 'TORCH_FR_BUFFER_SIZE': '2000',
 'TORCH_NCCL_DUMP_ON_TIMEOUT': '1',
 'EMBARK_GRACE_S': '120',
 'EMBARK_USD_PER_HOUR': '43.9153',
 'OMP_NUM_THREADS': '11',
 'TORCH_DISABLE_SHARE_RDZV_TCP_STORE': '1',
 'NCCL_SOCKET_IFNAME': 'eth0',
 'HOME': '/tmp',
 'EMBARK_SPEC_BASE64': 'bmFtZSA9ICJkbHJtIgoKW21vZGVsXQpudW1fZGVuc2UgPSAxMwplbWJlZGRpbmdfZGltID0gMTI4CmJvdHRvbV9tbHAgPSBbNTEyLCAyNTZdCnRvcF9tbHAgPSBbMTAyNCwgMTAyNCwgNTEyLCAyNTZdCm51bV90YWJsZXMgPSAyNgpyb3dzX3Blcl90YWJsZSA9IFs0MDAwMDAwMCwgMzkwNjAsIDE3Mjk1LCA3NDI0LCAyMDI2NSwgMywgNzEyMiwgMTU0MywgNjMsIDQwMDAwMDAwLCAzMDY3OTU2LCA0MDUyODIsIDEwLCAyMjA5LCAxMTkzOCwgMTU1LCA0LCA5NzYsIDE0LCA0MDAwMDAwMCwgNDAwMDAwMDAsIDQwMDAwMDAwLCA1OTAxNTIsIDEyOTczLCAxMDgsIDM2XQoKW2RhdGFdCmtpbmQgPSAicHJlcGFyZWQiCnBhdGggPSAiL21udC9kYXRhL2NyaXRlby0xdGIiCm51bV90cmFpbl9zYW1wbGVzID0gNDE5NTE5NzY5MgpudW1fZXZhbF9zYW1wbGVzID0gMTc4Mjc0NjM3CgpbdHJhaW5dCmJhdGNoX3NpemUgPSA2NTUzNgpsZWFybmluZ19yYXRlID0gMC4wMDUKCltwbGFjZV0KbWFjaGluZSA9ICJwNGQuMjR4bGFyZ2UiCm5vZGVzID0gMgpyZWdpb24gPSAidXMtd2VzdC0yIgp6b25lID0gInVzLXdlc3QtMmIiCnJlbmRlcl90YXJnZXRzID0gWyJqb2IiLCAiam9ic2V0IiwgInRyYWluam9iIiwgInB5dG9yY2hqb2IiLCAicmF5IiwgInRvcmNoeCJdCmltYWdlID0gInJlZ2lzdHJ5LmV4YW1wbGUuY29tL2VtYmFyazowLjEuMC10b3JjaDIuMTMuMCIKcXVldWUgPSAiZW1iYXJrIgp2b2x1bWUgPSAiZnN4LWx1c3RyZS0xMDAwIgoKW3N0b3JlXQpyb290ID0gInMzOi8vZW1iYXJrLWV4YW1wbGUvcnVucyIKa2VlcF9jaGVja3BvaW50cyA9IDEKClt3YXRjaF0KcHJvbWV0aGV1c19wb3J0ID0gOTQ2NAoKW3NlcnZlXQp0YWJsZXMgPSAiaW50OCIK'}
MAX_RETRIES = 3
START = ('printf %s "$EMBARK_SPEC_BASE64" | base64 -d > /tmp/embark-spec.toml && exec python -m embark.torchrun '
 'MEETING -m embark train /tmp/embark-spec.toml')
PORT = 29500
WAIT_S = 1800
POD = {'spec': {'serviceAccountName': 'embark',
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
