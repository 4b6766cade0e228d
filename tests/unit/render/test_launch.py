"""The launch script and the plain machines do, in order, what they promise."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from recorded_commands import STUB, run_script
from render_jobs import job_of

from embark.errors import SpecError
from embark.render.clouds import aws as vm_aws
from embark.render.clouds import gcp as vm_gcp
from embark.render.folder import File
from embark.render.job import EXITS
from embark.render.monitoring import budget_usd, needed_units
from embark.render.render import render, render_infrastructure
from embark.render.shell_text import render_template
from embark.render.targets.kubernetes import NAMES, render_launch_script
from embark.render.targets.tpu_vm import runtime_version
from embark.render.targets.vm_node import cloud_init, node_program, off_program

MACHINES = {"aws": "p4d.24xlarge", "azure": "Standard_ND96asr_v4", "gcp": "a2-highgpu-8g"}
SETTINGS = {"PROJECT": "my-project", "SKIP_QUOTA": "1"}


def position(commands: list[list[str]], *words: str) -> int:
    return next(i for i, call in enumerate(commands) if all(word in call for word in words))


@pytest.mark.parametrize("cloud", MACHINES)
def test_a_run_makes_the_bucket_the_cluster_and_the_job_in_this_order(cloud: str, tmp_path: Path):
    job = job_of(MACHINES[cloud], image="ghcr.io/me/embark:1", queue="ml")
    ran = run_script(render_infrastructure(job), NAMES[cloud], ["--yes"], tmp_path, SETTINGS)
    assert ran.code == 0, ran.output
    cluster = {"aws": ("eksctl", "create", "cluster"), "azure": ("aks", "create"), "gcp": ("clusters", "create")}[cloud]
    bucket = {"aws": ("create-bucket",), "azure": ("container-rm",), "gcp": ("buckets", "create")}[cloud]
    made = [position(ran.commands, *bucket), position(ran.commands, *cluster),
            position(ran.commands, "apply", "kueue.yaml"), position(ran.commands, "apply", "kubernetes_job.yaml")]
    assert made == sorted(made)
    assert "\ndone\n" in ran.output


@pytest.mark.parametrize("cloud", MACHINES)
def test_nothing_is_made_while_the_image_is_in_no_registry(cloud: str, tmp_path: Path):
    ran = run_script(render_infrastructure(job_of(MACHINES[cloud])), NAMES[cloud], ["--yes"], tmp_path, SETTINGS)
    assert ran.code == 64
    assert "place.image" in ran.output
    assert not [call for call in ran.commands if "create" in call or "apply" in call]


def test_without_a_yes_it_asks_and_a_no_costs_nothing(tmp_path: Path):
    files = render_infrastructure(job_of("p4d.24xlarge", image="ghcr.io/me/embark:1"))
    ran = run_script(files, NAMES["aws"], [], tmp_path, {**SETTINGS, "YES": "0"})  # its standard input is empty
    assert ran.code == 130
    assert "USD an hour" in ran.output
    assert not [call for call in ran.commands if "create" in call]


@pytest.mark.parametrize(("machine", "place", "name", "words"), [
    ("p4d.24xlarge", {"target": "vm"}, "vm.sh", ["up"]), ("Standard_ND96asr_v4", {"target": "vm"}, "vm.sh", ["up"]),
    ("a2-highgpu-8g", {"target": "vm"}, "vm.sh", ["up"]), ("v5litepod-16", {"target": "tpu-vm"}, "tpu_vm.sh", ["up"]),
    ("p4d.24xlarge", {}, "eks_cluster.sh", ["up"]), ("p4d.24xlarge", {}, "eks_cluster.sh", ["machines"]),
    ("Standard_ND96asr_v4", {}, "aks_cluster.sh", ["up"]), ("Standard_ND96asr_v4", {}, "aks_cluster.sh", ["machines"]),
    ("a2-highgpu-8g", {}, "gke_cluster.sh", ["up"]), ("a2-highgpu-8g", {}, "gke_cluster.sh", ["machines"]),
    ("a2-highgpu-8g", {"target": "vertex", "account": "my-project"}, "vertex_job.sh", [])], ids=str)
def test_no_script_starts_machines_before_its_price_is_accepted(machine, place, name, words, tmp_path: Path):
    files = render(job_of(machine, image="ghcr.io/me/embark:1", **place))
    settings = {**SETTINGS, "YES": "0", "SUBNET_ID": "subnet-1"}
    ran = run_script(files, name, words, tmp_path, settings)
    assert ran.code == 130, ran.output
    assert "USD an hour" in ran.output
    starts = ("run-instances", "cluster", "nodegroup", "nodepool", "node-pools", "instances", "clusters", "custom-jobs",
              "queued-resources", "vm", "aks")
    assert not [call for call in ran.commands if {"create", "add", "scale", "run-instances"} & set(call)
                and set(starts) & set(call)]
    accepted = run_script(files, name, [*words, "--yes"], tmp_path, settings)
    assert accepted.code == 0, accepted.output
    assert "USD an hour" in accepted.output
    assert len(accepted.commands) > len(ran.commands)


def test_a_failed_job_ends_the_script_with_a_fault(tmp_path: Path):
    files = render_infrastructure(job_of("p4d.24xlarge", image="ghcr.io/me/embark:1"))
    broken = STUB.replace("echo Complete", "echo Failed").replace('*" get "*', '*"no such words"*')
    ran = run_script(files, NAMES["aws"], ["--yes"], tmp_path, SETTINGS, stub=broken)
    assert ran.code == 70, ran.output
    assert "the job failed" in ran.output


def test_logs_are_of_every_pod_and_name_it(tmp_path: Path):
    ran = run_script(render_infrastructure(job_of("p4d.24xlarge", nodes=8)), NAMES["aws"], ["logs"], tmp_path)
    (call,) = ran.of("kubectl")
    assert {"--follow", "--prefix", "--selector"} <= set(call)
    assert int(call[call.index("--max-log-requests") + 1]) >= 8


@pytest.mark.parametrize("words", [["--dry"], ["up"], ["run", "--force"]], ids=str)
def test_an_unknown_word_is_refused_with_the_usage(words: list[str], tmp_path: Path):
    ran = run_script(render_infrastructure(job_of("p4d.24xlarge")), NAMES["aws"], words, tmp_path)
    assert ran.code == 64
    assert "usage:" in ran.output
    assert not ran.commands


def test_clean_lets_the_machines_go_and_keeps_the_cluster(tmp_path: Path):
    exists = STUB.replace('*" get "*', '*"no such words"*')
    files = render_infrastructure(job_of("p4d.24xlarge"))
    ran = run_script(files, NAMES["aws"], ["clean", "--yes"], tmp_path, stub=exists)
    assert position(ran.commands, "eksctl", "scale") > position(ran.commands, "kubectl", "delete")
    assert not [call for call in ran.of("eksctl") if "delete" in call]


def test_plain_machines_and_vertex_have_no_launch_script_of_kubernetes():
    assert not render_launch_script(job_of("p4d.24xlarge", target="vm"))


CURL = """#!/bin/bash
case "$*" in
  *api/token*) echo token ;;
  *embark-rank) echo "$RANK_TAG" ;;
  *embark-master) echo 10.0.0.5 ;;
esac
"""


@pytest.mark.parametrize(("rank", "is_host"), [("0", "true"), ("3", "false")])
def test_a_plain_machine_joins_the_first_one(rank: str, is_host: str, tmp_path: Path):
    job = job_of("p4d.24xlarge", nodes=4, target="vm", image="ghcr.io/me/embark:1")
    node = node_program(job, render_template("aws/find_rank.sh")).replace("/var/lib/embark\n", f"{tmp_path}\n")
    files = [File("node.sh", node, True), File("programs/curl", CURL, True)]
    ran = run_script(files, "node.sh", [], tmp_path, {"RANK_TAG": rank})
    (call,) = [call for call in ran.of("docker") if "run" in call]
    assert "--rdzv-endpoint=10.0.0.5:29500" in call
    assert next(w for w in call if w.startswith("--rdzv-conf=")).startswith(f"--rdzv-conf=is_host={is_host},")
    assert {"--nnodes=4", "--nproc-per-node=8"} <= set(call)
    assert call[call.index("ghcr.io/me/embark:1") + 1:][:3] == ["python", "-m", "embark.torchrun"]
    assert call[-4:] == ["-m", "embark", "train", "/etc/embark/spec.toml"]


def test_a_machine_finds_its_number_in_its_name(tmp_path: Path):
    job = job_of("a2-highgpu-8g", nodes=3, target="vm", image="ghcr.io/me/embark:1")
    written = yaml.safe_load(next(f.text for f in vm_gcp.render_vm(job) if f.path == "cloud_init.yaml"))["write_files"]
    node = next(f["content"] for f in written if f["path"].endswith("embark-node"))
    here = File("node.sh", node.replace("/var/lib/embark\n", f"{tmp_path}\n"), True)
    ran = run_script([here], "node.sh", [], tmp_path)
    (call,) = [call for call in ran.of("docker") if "run" in call]
    assert "--rdzv-endpoint=dlrm-0:29500" in call
    assert any("is_host=false" in word for word in call), "the machine is dlrm-1"


def test_the_service_starts_again_as_the_exit_codes_say():
    written = yaml.safe_load(cloud_init(job_of("p4d.24xlarge", target="vm"), "").text)["write_files"]
    text = next(file["content"] for file in written if file["path"].endswith(".service"))
    assert "Restart=on-failure" in text
    final = next(line for line in text.splitlines() if line.startswith("RestartPreventExitStatus=")).partition("=")[2]
    assert [int(code) for code in final.split()] == [int(e.code) for e in EXITS if not e.must_retry]


@pytest.mark.parametrize(("machine", "target", "ends"), [
    ("p4d.24xlarge", "vm", ["systemctl", "poweroff"]), ("a2-highgpu-8g", "vm", ["systemctl", "poweroff"]),
    ("Standard_ND96asr_v4", "vm", ["curl", "--request", "POST", "https://management.azure.com/an-id/deallocate"]),
    ("v5litepod-16", "tpu-vm", ["gcloud", "queued-resources", "delete", "dlrm", "--zone=us-west4-b"])])
def test_a_machine_ends_when_its_run_has_ended(machine: str, target: str, ends: list[str], tmp_path: Path):
    """A machine of Azure that is only shut down is still paid, and so are the chips of a slice."""
    job = job_of(machine, target=target, nodes=1)
    answers = """#!/bin/bash
case "$*" in
  *oauth2/token*) echo '{"access_token":"a-token","expires_in":"1"}' ;;
  *resourceId*) printf /an-id ;;
  *instance/zone*) printf projects/1/zones/us-west4-b ;;
esac
"""
    stub = answers.replace("#!/bin/bash\n", STUB.partition("words=")[0])
    files = [File("off.sh", off_program(job), True)]
    files += [File(f"programs/{name}", stub, True) for name in ("curl", "systemctl")]
    ran = run_script(files, "off.sh", [], tmp_path)
    assert ran.code == 0, ran.output
    assert all(any(word.startswith(end) for word in ran.commands[-1]) for end in ends), ran.commands
    if machine.startswith("Standard"):
        assert "Authorization: Bearer a-token" in ran.commands[-1]


def test_the_service_ends_its_machine_only_when_it_is_over():
    written = yaml.safe_load(cloud_init(job_of("p4d.24xlarge", target="vm"), "").text)["write_files"]
    units = {file["path"].rpartition("/")[2]: file["content"] for file in written}
    # systemd starts these when a unit has ended for good, not when Restart= starts it again.
    lines = units["embark.service"].splitlines()
    assert {"OnSuccess=embark-off.service", "OnFailure=embark-off.service", "Restart=on-failure"} <= set(lines)
    assert lines.index("StartLimitBurst=20") < lines.index("[Service]"), "a run that never starts ends too"
    starts = [line for line in units["embark-off.service"].splitlines() if line.startswith("ExecStart=")]
    assert starts == ["ExecStart=/bin/sleep 1800", "ExecStart=/usr/local/bin/embark-off"]
    assert "Type=oneshot" in units["embark-off.service"], "only such a service has several commands and no time limit"


@pytest.mark.parametrize(("machine", "target", "name"), [
    ("Standard_ND96asr_v4", "vm", "vm.sh"), ("a2-highgpu-8g", "vm", "vm.sh"), ("v5litepod-16", "tpu-vm", "tpu_vm.sh")])
def test_keep_starts_machines_that_do_not_end_by_themselves(machine: str, target: str, name: str, tmp_path: Path):
    files = render_infrastructure(job_of(machine, target=target, nodes=1, image="ghcr.io/me/embark:1"))
    first = next(f.text for f in files if f.path in ("cloud_init.yaml", "tpu_node.sh"))
    assert first.count("=embark-off.service") >= 2
    ran = run_script(files, name, ["up", "--keep"], tmp_path, {**SETTINGS, "TMPDIR": str(tmp_path)})
    assert ran.code == 0, ran.output
    given = next(word for call in ran.commands for word in call if f"{tmp_path}/tmp." in word).rpartition("=")[2]
    text = Path(given).read_text()
    assert "=embark-off.service" not in text
    if target == "vm":
        assert yaml.safe_load(text)["runcmd"] == yaml.safe_load(first)["runcmd"]


def test_what_an_ec2_machine_is_given_fits_once_packed(tmp_path: Path):
    import gzip

    text = next(f.text for f in vm_aws.render_vm(job_of("p4d.24xlarge", target="vm")) if f.path == "cloud_init.yaml")
    assert text.startswith("#cloud-config\n")
    assert len(gzip.compress(text.encode())) < 16_384


def test_metadata_is_two_hops_unavailable_for_containers(tmp_path: Path):
    files = vm_aws.render_vm(job_of("p4d.24xlarge", target="vm"))
    ran = run_script(files, "vm.sh", ["up"], tmp_path, {"SUBNET_ID": "subnet-1"})
    made = [call for call in ran.of("aws") if "run-instances" in call]
    assert len(made) == 2
    assert all("HttpPutResponseHopLimit=2" in " ".join(call) for call in made)
    cards = [sum(word.startswith("NetworkCardIndex=") for word in call) for call in made]
    assert cards == [4, 4], "p4d has four EFA devices"


def test_plain_machines_refuse_a_volume():
    with pytest.raises(SpecError, match=r"place\.volume"):
        vm_aws.render_vm(job_of("p4d.24xlarge", target="vm", volume="fsx-lustre-250"))


@pytest.mark.parametrize(("machine", "version"), [
    ("v4-8", "tpu-ubuntu2204-base"), ("v5litepod-4", "v2-alpha-tpuv5-lite"), ("v5p-8", "v2-alpha-tpuv5"),
    ("v6e-8", "v2-alpha-tpuv6e")])
def test_a_tpu_s_hosts_have_the_system_of_their_generation(machine: str, version: str):
    assert runtime_version(job_of(machine, nodes=1, target="tpu-vm")) == version


def test_quota_and_budget_grow_with_the_machines():
    one, four = (job_of("p4d.24xlarge", nodes=n, max_hours=10.0) for n in (1, 4))
    assert needed_units(four) == 4 * needed_units(one) == 4 * 96
    assert needed_units(job_of("a2-highgpu-8g", nodes=4)) == 32
    assert 3 < budget_usd(four) / budget_usd(one) < 5


@pytest.mark.parametrize(("limit", "code"), [("95.0", 1), ("96.0", 0), ("None", 1), ("-1", 0)])
def test_too_small_a_quota_stops_the_script(limit: str, code: int, tmp_path: Path):
    files = render_infrastructure(job_of("p4d.24xlarge", nodes=1))
    stub = STUB.replace("echo 123456789012345678", f"echo {limit}")
    assert run_script(files, "budget.sh", ["quota"], tmp_path, stub=stub).code == code
