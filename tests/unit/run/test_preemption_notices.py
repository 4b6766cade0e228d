"""A machine that is about to be taken away says so, in each cloud's own way; these are real servers on loopback."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from limits import HANG_S
from metadata_servers import Answer, Aws, Azure, Gce, Service, broken

from embark.errors import UserError
from embark.run import preemption_notices as notices
from embark.run.preemption_notices import (
    AZURE_ASSET_TAG,
    GRACES,
    MAX_FAILURES,
    NoticeWatch,
    detect_cloud,
    grace_seconds,
)

VARIABLES = {
    "aws": "AWS_EC2_METADATA_SERVICE_ENDPOINT", "azure": "EMBARK_AZURE_METADATA_ENDPOINT", "gce": "GCE_METADATA_HOST",
}
NOON = "2026-11-15T12:00:00Z"
QUICK = {"poll_s": 0.02, "timeout_s": 2.0}


@pytest.fixture(autouse=True)
def no_cloud(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    """Wherever the tests run, this machine is nobody's unless a test says so."""
    for name in (*VARIABLES.values(), "AWS_EC2_METADATA_DISABLED", "EMBARK_GRACE_S", "KUBERNETES_SERVICE_HOST"):
        monkeypatch.delenv(name, raising=False)
    detect = notices.detect_cloud
    monkeypatch.setattr(notices, "detect_cloud", lambda: detect(dmi=tmp_path / "no-dmi"))


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[type[Service]], Service]]:
    started: list[Service] = []

    def start(kind: type[Service]) -> Service:
        service = kind()
        started.append(service)
        cloud = kind.__name__.lower()
        if cloud in VARIABLES:
            monkeypatch.setenv(VARIABLES[cloud], service.address if cloud == "gce" else f"http://{service.address}/")
        return service

    yield start
    for service in started:
        service.close()


def wait_for(what: Callable[[], Any]) -> Any:
    until = time.monotonic() + HANG_S
    while not (value := what()) and time.monotonic() < until:
        time.sleep(0.005)
    assert value, "it did not happen"
    return value


def asked_again(service: Service, times: int = 6) -> None:
    """Wait until the watch has looked some more."""
    before = len(service.asked)
    wait_for(lambda: len(service.asked) >= before + times)


def watchers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "embark-notices"]


def test_aws_tells_of_a_spot_interruption(serve):
    aws = serve(Aws)
    with NoticeWatch(**QUICK) as watch:
        asked_again(aws)
        assert watch.notice() == ""
        aws.action = json.dumps({"action": "terminate", "time": NOON})
        found = wait_for(watch.notice)
    assert (watch.cloud, found) == ("aws", "spot terminate")
    assert watch.problem == ""
    assert sum(line.startswith("PUT") for line in aws.asked) == 1, "one token lasts for hours"


def test_aws_is_asked_for_a_new_token_when_the_old_one_is_refused(serve):
    aws = serve(Aws)
    with NoticeWatch(**QUICK) as watch:
        asked_again(aws)
        aws.tokens.clear()
        aws.action = json.dumps({"action": "stop", "time": NOON})
        assert wait_for(watch.notice) == "spot stop"


def test_aws_is_asked_for_a_new_token_before_the_old_one_ends(serve, monkeypatch):
    monkeypatch.setattr(notices, "AWS_TOKEN_TTL_S", 1)
    aws = serve(Aws)
    with NoticeWatch(**QUICK) as watch:
        wait_for(lambda: sum(line.startswith("PUT") for line in aws.asked) >= 2)
        assert watch.problem == ""


@pytest.mark.parametrize("nonsense", ['{"action": ', "<html>hello</html>", "[]", "{}", "null"])
def test_nonsense_is_reported_once_and_is_no_notice(serve, nonsense):
    aws = serve(Aws)
    aws.action = nonsense
    with NoticeWatch(**QUICK) as watch:
        result = wait_for(lambda: watch.problem)
        asked_again(aws, 20)
        assert watch.notice() == ""
        assert watch.problem == result
        assert aws.address in result
        assert "fix: for a container" in result
        aws.action = json.dumps({"action": "terminate", "time": NOON})
        wait_for(watch.notice)


def test_a_passing_fault_is_not_reported(serve):
    aws = serve(Aws)
    with NoticeWatch(**QUICK) as watch:
        for _ in range(2):
            aws.num_faults = MAX_FAILURES - 1
            wait_for(lambda: not aws.num_faults)
            asked_again(aws)
        assert watch.problem == ""


@pytest.mark.parametrize("kind", ["Preempt", "Terminate"])
def test_azure_tells_of_an_eviction_of_this_machine_only(serve, kind):
    azure = serve(Azure)
    mine = {"EventId": "1", "EventType": kind, "ResourceType": "VirtualMachine", "Resources": ["pool_3", "pool_7"],
            "EventStatus": "Scheduled", "NotBefore": "Sun, 15 Nov 2026 12:00:00 GMT"}
    azure.events = [mine | {"Resources": ["pool_3"]}, mine | {"EventType": "Freeze"}, mine | {"EventType": "Reboot"}]
    with NoticeWatch(**QUICK) as watch:
        asked_again(azure)
        assert watch.notice() == ""
        azure.events = [*azure.events, mine]
        found = wait_for(watch.notice)
    assert (watch.cloud, found) == ("azure", kind)
    assert sum("/name?" in line for line in azure.asked) == 1


def test_on_azure_an_event_that_has_begun_counts(serve):
    serve(Azure).events = [{"EventType": "Preempt", "Resources": ["Pool_7"], "EventStatus": "Started", "NotBefore": ""}]
    with NoticeWatch(**QUICK) as watch:
        assert wait_for(watch.notice) == "Preempt"


def test_on_azure_without_a_name_any_eviction_counts(serve):
    azure = serve(Azure)
    azure.name = None
    azure.events = [{"EventType": "Preempt", "Resources": ["somebody"]}]
    with NoticeWatch(**QUICK) as watch:
        assert wait_for(watch.notice) == "Preempt"


def test_azures_first_answer_may_be_late(serve):
    azure = serve(Azure)
    azure.first_answer_s = 0.6
    azure.events = [{"EventType": "Preempt", "Resources": ["Pool_7"]}]
    with NoticeWatch(poll_s=0.02, timeout_s=0.2) as watch:
        wait_for(watch.notice)
        assert sum("scheduledevents" in line for line in azure.asked) == 1


def test_gce_tells_of_a_preemption_without_waiting_for_the_next_question(serve, monkeypatch):
    gce = serve(Gce)
    watch = NoticeWatch(poll_s=600)
    monkeypatch.setattr(watch._left, "wait", lambda _: None)
    with watch:
        wait_for(lambda: any("wait_for_change=true&timeout_sec=600" in line for line in gce.asked))
        assert watch.notice() == ""
        gce.set("preempted", "TRUE")
        found = wait_for(watch.notice)
    assert (watch.cloud, found) == ("gce", "preempted")


def test_gce_holds_the_question_open_while_nothing_changes(serve):
    gce = serve(Gce)
    with NoticeWatch(poll_s=0.02) as watch:
        time.sleep(0.5)
        assert len(gce.asked) <= 4
        assert watch.problem == ""


def test_what_only_looks_like_gce_is_not_believed(serve):
    gce = serve(Gce)
    gce.values["preempted"] = "TRUE"
    gce.flavor = "Other"
    with NoticeWatch(**QUICK) as watch:
        assert "not Google's" in wait_for(lambda: watch.problem)
        assert watch.notice() == ""


def test_where_gke_hides_the_notices_that_is_reported(serve):
    serve(Gce).values.clear()
    with NoticeWatch(**QUICK) as watch:
        assert "404" in wait_for(lambda: watch.problem)
        assert "Workload Identity" in watch.problem


@pytest.mark.parametrize("how", ["hang", "reset"])
@pytest.mark.parametrize("cloud", VARIABLES)
def test_a_broken_service_holds_nothing_up(monkeypatch, cloud, how):
    monkeypatch.setattr(notices._Azure, "first_wait_s", 0.0)
    with broken(how) as address:
        monkeypatch.setenv(VARIABLES[cloud], f"http://{address}")
        with NoticeWatch(poll_s=0.02, timeout_s=0.05) as watch:
            assert "SIGTERM still saves" in wait_for(lambda: watch.problem)
        assert watch.notice() == ""
        wait_for(lambda: not watchers())
        with NoticeWatch(poll_s=600, timeout_s=600) as patient:
            assert patient.notice() == ""
        if how == "hang":
            assert watchers(), "the request is still under way: leaving did not wait for it"
    wait_for(lambda: not watchers())


def test_an_endpoint_that_is_no_address_is_reported(monkeypatch):
    monkeypatch.setenv(VARIABLES["aws"], "file:///etc/hostname")
    with NoticeWatch(**QUICK) as watch:
        assert wait_for(lambda: watch.problem)


def test_a_proxy_of_the_environment_is_not_used(serve, monkeypatch):
    aws, proxy = serve(Aws), serve(Service)
    for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, f"http://{proxy.address}")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    aws.action = json.dumps({"action": "terminate", "time": NOON})
    with NoticeWatch(**QUICK) as watch:
        wait_for(watch.notice)
    assert proxy.asked == []


def test_a_redirect_is_not_followed(serve, monkeypatch):
    elsewhere = serve(Service)

    class Portal(Service):
        def answer(self, method: str, path: str, headers: dict[str, str]) -> Answer:
            return 302, {"Location": f"http://{elsewhere.address}/"}, ""

    monkeypatch.setenv(VARIABLES["aws"], f"http://{serve(Portal).address}")
    with NoticeWatch(**QUICK) as watch:
        assert "302" in wait_for(lambda: watch.problem)
    assert elsewhere.asked == []


def test_after_the_first_notice_nothing_more_is_asked(serve):
    aws = serve(Aws)
    aws.action = json.dumps({"action": "terminate", "time": NOON})
    with NoticeWatch(**QUICK) as watch:
        first = wait_for(watch.notice)
        wait_for(lambda: not watchers())
        aws.action = json.dumps({"action": "stop", "time": NOON})
        assert watch.notice() is first


def test_on_a_laptop_there_is_no_thread_and_no_traffic(monkeypatch):
    requests: list[str] = []
    monkeypatch.setattr(notices, "_request", lambda url, *_, **__: requests.append(url))
    with NoticeWatch(**QUICK) as watch:
        assert not watchers()
        time.sleep(0.05)
        assert (watch.cloud, watch.notice(), watch.problem) == (None, "", "")
    assert requests == []


def test_a_watch_that_is_reported_not_to_ask_does_not(serve):
    aws = serve(Aws)
    with NoticeWatch(is_polling=False, **QUICK) as watch:
        assert not watchers()
        assert watch.notice() == ""
    assert aws.asked == []


@pytest.mark.parametrize(
    ("strings", "cloud"),
    [
        ({"sys_vendor": "Amazon EC2", "product_name": "p5.48xlarge", "chassis_asset_tag": "Amazon EC2"}, "aws"),
        ({"sys_vendor": "Xen", "product_name": "HVM domU", "bios_version": "4.11.amazon"}, "aws"),
        ({"sys_vendor": "Microsoft Corporation", "product_name": "Virtual Machine",
          "chassis_asset_tag": AZURE_ASSET_TAG}, "azure"),
        ({"sys_vendor": "Google", "product_name": "Google Compute Engine"}, "gce"),
        ({"sys_vendor": "Microsoft Corporation", "product_name": "Virtual Machine", "chassis_asset_tag": "7"}, None),
        ({"sys_vendor": "Google", "product_name": "Eve"}, None),
        ({"sys_vendor": "LENOVO", "product_name": "21HM"}, None),
        ({"sys_vendor": "QEMU", "product_name": "Standard PC", "bios_version": "1.16"}, None),
        ({}, None),
    ],
)
def test_the_firmware_says_whose_machine_it_is(tmp_path, strings, cloud):
    for name, text in strings.items():
        (tmp_path / name).write_text(text + "\n")
    assert detect_cloud({}, tmp_path) == cloud


def test_the_environment_goes_before_the_firmware(tmp_path):
    (tmp_path / "sys_vendor").write_text("Amazon EC2\n")
    assert detect_cloud({"GCE_METADATA_HOST": "localhost:1"}, tmp_path) == "gce"
    assert detect_cloud({"GCE_METADATA_HOST": ""}, tmp_path) == "aws"
    assert detect_cloud({"AWS_EC2_METADATA_DISABLED": "true"}, tmp_path) is None


@pytest.mark.parametrize(
    ("environment", "environ", "seconds"),
    [
        ("aws", {}, 120), ("azure", {}, 30), ("gce", {}, 30), ("gke-spot", {}, 15), (None, {}, 30),
        ("gce", {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, 15), ("aws", {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, 30),
        ("gke-spot", {"EMBARK_GRACE_S": "120"}, 120), (None, {"EMBARK_GRACE_S": "7.5"}, 7.5),
    ],
)
def test_the_grace_is_the_clouds_or_the_pods_or_what_is_reported(environment, environ, seconds):
    assert grace_seconds(environment, environ) == seconds


@pytest.mark.parametrize("text", ["soon", "-1", "nan", "inf"])
def test_a_grace_that_is_no_time_is_refused(text):
    with pytest.raises(UserError, match="EMBARK_GRACE_S"):
        grace_seconds("aws", {"EMBARK_GRACE_S": text})


def test_every_grace_names_its_source_and_date():
    assert all(seconds > 0 and "2026-" in source for seconds, source in GRACES.values())
