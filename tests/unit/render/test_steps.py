"""The words that a launch runs are those that bash makes of the rendered line."""

from __future__ import annotations

import pytest
from render_jobs import job_of
from shell_words import words_of

from embark.render.clouds import aws as vm_aws
from embark.render.clouds import azure as vm_azure
from embark.render.clouds import gcp as vm_gcp
from embark.render.shell_text import COMMANDS, Shell, Step, command, job_steps, job_words, step_text, substitute
from embark.render.targets.tpu_vm import create_words

VALUES = {
    "NAME": "dlrm", "REGION": "us-east-1", "ZONE": "us-central1-a", "AMI": "resolve:ssm:/a/b", "SUBNET_ID": "subnet 1",
    "GROUP_ID": "sg-1", "USER_DATA": "/tmp/a file", "RESOURCE_GROUP": "it's one", "LOCATION": "eastus",
    "VM_IMAGE": "a:b:c", "PROJECT": "my-project", "NETWORK": "default", "IMAGE_FAMILY": "family",
    "IMAGE_PROJECT": "images", "RUNTIME_VERSION": "v2", "STORAGE_ACCOUNT": "mine", "rank": "1", "principal": "p",
    "account": "/a/b", "machine": "/c/d", "registry": "/e/f", "vpc": "vpc-1", "id": "sg-1",
}


def commands() -> list[tuple[str, ...]]:
    """Return every command and every option of commands.toml."""
    aws, azure, gcp, tpu = (job_of("g5.xlarge", target="vm", spot=True),
                            job_of("Standard_ND96asr_v4", target="vm", name="it"),
                            job_of("a2-highgpu-1g", target="vm", spot=True), job_of("v6e-8", nodes=2, target="tpu-vm"))
    values = {"trust": "{}", "policy": '{"a": "$b"}', "policy_name": "run", "bucket": "training", "role": "a b",
              "given": ["--x", "a b"], "file": "a file", "object": "runs/a", "registry": "mine", "services": ["a", "b"],
              "disk": "pd-balanced", "accelerator": "nvidia-l4", "num_gpus": "1", "limit_s": "60", "node": "dlrm-0",
              "worker": "--worker=0", "host_project": "shared",
              "startup": Shell('--metadata-from-file=startup-script="$USER_DATA"')}
    found = [vm_aws.start_words(aws), vm_azure.start_words(azure, ["--x", "a b"]), vm_gcp.start_words(gcp, ["a;b"]),
             *vm_azure.container_grants(azure), create_words(tpu, "a file")]
    for job in (aws, azure, gcp):
        for name, row in COMMANDS[job.cloud].items():
            if isinstance(row, str):
                found.append(job_words(job, name, **values))
                continue
            for step in job_steps(job, name, **values):
                found += [words for words in (*step.commands, *step.remove, step.unless) if words]
    return [words for words in found if "${CARDS[@]}" not in str(words)]


@pytest.mark.parametrize("words", commands(), ids=lambda words: "-".join(words[:4]))
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


def test_commands_with_an_empty_value_are_left_out_of_a_step():
    job = job_of("g5.xlarge", target="vm")
    with_policy = job_steps(job, "role", trust="{}", policy="{}", policy_name="run")
    without = job_steps(job, "role", trust="{}", policy="{}", policy_name="")
    assert [len(step.remove) for step in with_policy if step.what] == [4, 2]
    assert [len(step.remove) for step in without if step.what] == [3, 2]
    assert len(with_policy) == len(without) + 1, "a step without a command is left out too"
