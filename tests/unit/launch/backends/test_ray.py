"""The Ray backend against a Jobs API over HTTP: what it sends, what it refuses, and how it bears trouble."""

from __future__ import annotations

import ast
import json
import threading

import pytest
from ray_head import RayHead, ray_head

from embark.cli.console import Console
from embark.cli.launch import launch_run
from embark.cli.status import cancel as cancel_command
from embark.cli.status import status as status_command
from embark.errors import Fault, Interrupted, SpecError, UserError
from embark.launch.backend import ray_address
from embark.launch.backends.ray import Ray
from embark.launch.http import HttpClient
from embark.launch.run_registry import find_run, list_runs
from embark.launch.shell import Shell
from embark.spec import load_spec, to_toml
from embark.store.errors import RetryPolicy

SETTINGS = ["name=clicks", "place.target=ray", "place.nodes=2", "store.root=s3://training/runs"]
HASTY = RetryPolicy(max_retries=1000, give_up_s=120, first_wait_s=0.05, longest_wait_s=0.2)


@pytest.fixture
def head(tmp_path, monkeypatch):
    with ray_head() as server:
        server.node(CPU=0.0)
        server.node(CPU=4.0)
        server.node(CPU=6.0)
        for variable in ("RAY_API_SERVER_ADDRESS", "RAY_JOB_HEADERS", "RAY_AUTH_TOKEN"):
            monkeypatch.delenv(variable, raising=False)
        monkeypatch.setenv("RAY_ADDRESS", server.url)
        monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
        monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
        monkeypatch.setenv("COLUMNS", "200")
        yield server


def spec_of(*settings: str):
    return load_spec("quickstart", [*SETTINGS, *settings])


def place(messages: list[str] | None = None, retry: RetryPolicy = HASTY) -> Ray:
    return Ray(Shell(), notify=(messages if messages is not None else []).append, retry=retry)


def launched(*settings: str):
    assert launch_run(Console(quiet=True), spec_of(*settings), yes=True, dry_run=False) == 0
    return find_run("clicks").handle


def constants(source: str) -> dict[str, object]:
    return {node.targets[0].id: ast.literal_eval(node.value) for node in ast.parse(source).body
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
            and isinstance(node.value, ast.Constant)}


def test_the_job_requests_what_the_machines_of_the_cluster_have(head: RayHead):
    handle = launched("place.grace_s=40")
    (job,) = head.jobs.values()
    files = head.files()
    spec = spec_of("place.grace_s=40")
    assert files["spec.toml"] == to_toml(spec, only_set=True) != to_toml(spec)
    values = constants(files["ray_train.py"])
    assert (values["NUM_MACHINES"], values["NUM_PROCESSES"], values["NUM_CPUS"], values["USE_GPU"]) == (2, 1, 4, False)
    assert job["entrypoint"] == "python ray_train.py"
    assert job["runtime_env"]["env_vars"]["RAY_JOB_STOP_WAIT_TIME_S"] == "40"
    assert job["metadata"] == {"embark_run": "clicks"}
    assert handle.title == "clicks on 2 machines of a Ray cluster: 2 ranks"
    assert handle.usd_per_hour is None


def test_each_gpu_of_the_cluster_is_a_rank_unless_the_spec_says_cpu(head: RayHead):
    head.nodes.clear()
    for _ in range(2):
        head.node(CPU=64.0, GPU=8.0)
    launched()
    values = constants(head.files()["ray_train.py"])
    assert (values["NUM_PROCESSES"], values["USE_GPU"]) == (8, True)
    head.jobs.clear()
    launched("place.device=cpu")
    values = constants(head.files()["ray_train.py"])
    assert (values["NUM_PROCESSES"], values["USE_GPU"]) == (1, False)


def test_a_named_machine_sets_the_ranks_and_the_price(head: RayHead, capsys):
    assert launch_run(Console(), spec_of("place.machine=p5.48xlarge"), yes=True, dry_run=False) == 0
    assert "an hour on demand" in capsys.readouterr().out
    assert constants(head.files()["ray_train.py"])["NUM_PROCESSES"] == 8
    assert find_run("clicks").handle.usd_per_hour > 0


@pytest.mark.parametrize(("settings", "field"), [
    (["store.root=runs"], "store.root"), (["place.nodes=3", "train.batch_size=100"], "train.batch_size"),
    (["place.device=cuda"], "place.device"), (["data.kind=prepared", "data.path=prepared"], "data.path")])
def test_what_could_not_train_there_is_refused_and_nothing_is_sent(head: RayHead, settings, field):
    with pytest.raises(SpecError) as caught:
        launch_run(Console(quiet=True), spec_of(*settings), yes=True, dry_run=False)
    assert [mistake.field for mistake in caught.value.mistakes] == [field]
    assert not any(line.startswith(("PUT", "POST")) for line in head.requests)


def test_a_run_that_is_there_already_is_not_started_twice(head: RayHead):
    launched()
    with pytest.raises(UserError, match="embark-clicks-"):
        launch_run(Console(quiet=True), spec_of(), yes=True, dry_run=False)
    head.move("SUCCEEDED")
    launched()
    assert len(head.jobs) >= 1


def test_a_dry_run_says_the_requests_and_sends_none(head: RayHead, capsys):
    assert launch_run(Console(json=True), spec_of(), yes=False, dry_run=True) == 0
    commands = json.loads(capsys.readouterr().out)["commands"]
    assert [(words[0], words[1].removeprefix(head.url).rpartition("/")[0]) for words in commands] == [
        ("GET", "/api/jobs"), ("PUT", "/api/packages/gcs"), ("POST", "/api/jobs")]
    assert not head.requests


def test_a_cluster_that_is_unavailable_is_waited_for_and_then_a_fault(head: RayHead):
    handle, messages = launched(), []
    head.down()
    threading.Timer(0.4, head.up).start()
    assert place(messages).status(handle).state == "pending"
    assert "does not answer" in messages[0]
    assert "refused" in messages[0]
    head.down()
    with pytest.raises(Fault, match="does not answer") as caught:
        place(retry=RetryPolicy(max_retries=2, give_up_s=0.1, first_wait_s=0.05, longest_wait_s=0.05)).status(handle)
    assert "/api/version" in caught.value.fix


def test_the_token_of_rays_variables_is_sent_and_never_stored(head: RayHead, monkeypatch, tmp_path):
    head.tokens = {"Bearer secret-1", "Bearer secret-2"}
    with pytest.raises(UserError, match="refuses your credentials") as caught:
        launched()
    assert "RAY_AUTH_TOKEN" in caught.value.fix
    monkeypatch.setenv("RAY_AUTH_TOKEN", "secret-1")
    launched()
    monkeypatch.setenv("RAY_JOB_HEADERS", '{"Authorization": "Bearer secret-2"}')
    assert status_command("clicks", console=Console(quiet=True)) == 0
    assert not [path for path in (tmp_path / "data").rglob("*") if path.is_file() and "secret-" in path.read_text()]


def test_logs_have_time_and_rank_come_once_and_are_followed_to_the_end(head: RayHead):
    handle = launched()
    head.move("RUNNING")
    first = ("Running entrypoint for job\n"
             "(RayTrainWorker pid=7, ip=10.0.0.1) 2026-11-15T11:00:00.000001Z [rank 0]:step 1\n"
             "(RayTrainWorker pid=7, ip=10.0.0.1) 2026-11-15T11:00:00.000001Z [rank 0]:step 1\n"
             "(RayTrainWorker pid=8, ip=10.0.0.2) 2026-11-15T11:00:00.500000Z [rank 9]:step 1\n"
             "(RayTrainWorker pid=8, ip=10.0.0.2) 2026-11-15T11:00:00.600000Z [machi")
    name = next(iter(head.jobs))
    head.logs[name] = first
    lines = place().logs(handle, follow=True)
    seen = [next(lines) for _ in range(3)]
    head.logs[name] += "ne 1]:error: gone\n\x1b[36m(TrainController pid=3)\x1b[0m Done\n"
    head.move("SUCCEEDED", end_time=1_790_000_060_000)
    seen += lines
    assert [(line.source, line.text) for line in seen] == [
        ("ray", "Running entrypoint for job"), ("rank 0", "step 1"), ("rank 9", "step 1"),
        ("machine 1", "error: gone"), ("TrainController", "Done")]
    assert seen[1].time_ns == 1_794_740_400_000_001_000
    assert seen[3].index == 1


def test_cancel_stops_the_job_and_a_second_one_forgets_it(head: RayHead, capsys):
    handle = launched()
    head.move("RUNNING")
    assert cancel_command("clicks", yes=True, console=Console()) == 0
    captured = capsys.readouterr()
    assert f"removed Ray job {handle.where['id']}" in captured.out
    assert "they save a last checkpoint, within 2 min 00 s" in captured.err
    assert place().status(handle).state == "gone"
    assert cancel_command("clicks", yes=True, console=Console()) == 0
    assert f"ray job delete {handle.where['id']}" in capsys.readouterr().out
    assert head.jobs
    assert not list_runs().runs


REQUESTS = ("the nodes", "the jobs", "the package", "the job")


@pytest.mark.parametrize("is_after", [False, True])
@pytest.mark.parametrize("step", range(1, len(REQUESTS) + 1))
def test_ctrl_c_at_any_request_says_what_is_there_and_how_to_remove_it(head: RayHead, monkeypatch, step, is_after):
    original, left = HttpClient._send, [step]

    def cut(self, *words):
        left[0] -= 1
        if left[0] == 0 and not is_after:
            raise KeyboardInterrupt
        answer = original(self, *words)
        if left[0] == 0:
            raise KeyboardInterrupt
        return answer

    monkeypatch.setattr(HttpClient, "_send", cut)
    with pytest.raises(Interrupted) as caught:
        launch_run(Console(quiet=True), spec_of(), yes=True, dry_run=False)
    assert bool(head.jobs) == (step == len(REQUESTS) and is_after)
    if step <= 2:
        assert caught.value.what == "stopped by Ctrl-C; nothing was created"
        assert not list_runs().runs
        return
    assert "the job embark-clicks-" in caught.value.what
    assert caught.value.fix == "embark cancel clicks"
    left[0] = 100
    for _ in range(3):
        if list_runs().runs:
            assert cancel_command("clicks", yes=True, console=Console(quiet=True)) == 0
    assert not any(job["status"] in ("PENDING", "RUNNING") for job in head.jobs.values())
    assert not list_runs().runs


def test_the_address_is_what_ray_s_own_commands_would_take(monkeypatch, tmp_path):
    for variable in ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    assert ray_address() == ""
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "ray_current_cluster").write_text("10.0.0.1:6379")
    assert ray_address() == "http://127.0.0.1:8265"
    monkeypatch.setenv("RAY_ADDRESS", "https://ray.example.com/")
    assert ray_address() == "https://ray.example.com"
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    with pytest.raises(UserError, match="is not where a Ray cluster takes jobs") as caught:
        ray_address()
    assert "http://HEAD:8265" in caught.value.fix


def test_without_a_cluster_and_a_machine_the_error_names_the_options(monkeypatch, tmp_path):
    for variable in ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    with pytest.raises(UserError, match="no Ray cluster") as caught:
        launch_run(Console(quiet=True), spec_of(), yes=True, dry_run=False)
    assert "ray start --head" in caught.value.fix
