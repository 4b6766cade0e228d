"""The words that a launch runs are those that bash makes of the rendered line."""

from __future__ import annotations

import pytest
from render_jobs import job_of
from shell_words import words_of

from embark.render.clouds import aws as vm_aws
from embark.render.clouds import azure as vm_azure
from embark.render.clouds import gcp as vm_gcp
from embark.render.shell_text import Shell, Step, command, step_text, substitute
from embark.render.targets import tpu_vm

VALUES = {
    "NAME": "dlrm", "REGION": "us-east-1", "ZONE": "us-central1-a", "AMI": "resolve:ssm:/a/b", "SUBNET_ID": "subnet 1",
    "GROUP_ID": "sg-1", "USER_DATA": "/tmp/a file", "RESOURCE_GROUP": "it's one", "LOCATION": "eastus",
    "VM_IMAGE": "a:b:c", "PROJECT": "my-project", "NETWORK": "default", "IMAGE_FAMILY": "family",
    "IMAGE_PROJECT": "images", "RUNTIME_VERSION": "v2", "rank": "1", "principal": "p", "account": "/a/b",
    "vpc": "vpc-1", "id": "sg-1",
}


def commands() -> list[tuple[str, ...]]:
    aws, azure, gcp, tpu = (job_of("g5.xlarge", target="vm", spot=True),
                            job_of("Standard_ND96asr_v4", target="vm", name="it"),
                            job_of("a2-highgpu-1g", target="vm", spot=True), job_of("v6e-8", nodes=2, target="tpu-vm"))
    group, grants = vm_aws.group_words(aws), vm_azure.grant_words(azure)
    steps = [*vm_aws.role_steps(aws, "{}", '{"a": "$b"}'), vm_aws.placement_step(),
             *vm_azure.network_steps(azure, azure.location), *vm_gcp.network_steps(gcp)]
    found = [words for step in steps for words in (*step.commands, *step.remove, step.unless) if words]
    found += [vm_aws.start_words(aws, aws.location), vm_aws.subnet_words(), vm_aws.end_words(), group.vpc,
              group.find, group.create, *group.rules, vm_azure.start_words(azure, azure.location, ["--x", "a b"]),
              grants.principal, *grants.grants, vm_azure.end_words(),
              vm_gcp.start_words(gcp, gcp.location, ["a;b"]),
              vm_gcp.again_words(gcp), vm_gcp.end_words(gcp), tpu_vm.create_words(tpu, "a file"),
              tpu_vm.describe_words(tpu), tpu_vm.end_words(tpu), tpu_vm.ssh_words("dlrm-0", "--worker=0")]
    return found


@pytest.mark.parametrize("words", commands(), ids=lambda words: "-".join(words[1:4]))
def test_a_command_has_the_same_words_in_a_script_and_in_a_launch(words):
    values = {**VALUES, "1": "", "ZONE%-*": "us-central1"}  # bash has no first argument here
    assert substitute(words, values) == words_of(command(*words), **VALUES)


def test_a_list_is_all_of_its_words_and_what_others_print_is_not_guessed():
    assert substitute(["a", Shell('"${CARDS[@]}"')], {"CARDS": ["b c", "d"]}) == ["a", "b c", "d"]
    assert substitute(["$NAME"], {}) == ["$NAME"], "a plain text is a value"
    with pytest.raises(AssertionError, match="not known here"):
        substitute([Shell('"$(date)"')], {})
    with pytest.raises(KeyError):
        substitute([Shell('"$OTHER"')], {})


def test_a_step_is_left_out_where_it_is_done():
    text = step_text(Step("", (("touch", "a"),), unless=("test", "-e", "a"), wait_s=3, why="It is needed."))
    assert text.splitlines()[:3] == ["# It is needed.", "if ! test -e a >/dev/null 2>&1; then", "  run touch a"]
    assert "run sleep 3" in text
