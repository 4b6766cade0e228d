"""Preemption notices of AWS, Azure and Google Cloud, behind one watch.

On any other machine there is no thread and no traffic.
"""

from __future__ import annotations

import json
import math
import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import suppress
from email.message import Message
from http.client import HTTPException
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import HTTPDefaultErrorHandler, HTTPErrorProcessor, HTTPHandler, OpenerDirector, Request

from embark.catalog.pricing import GRACES
from embark.errors import UserError

LINK_LOCAL = "169.254.169.254"
DMI = Path("/sys/class/dmi/id")
AZURE_ASSET_TAG = "7783-7084-3265-9085-8269-3286-77"
AZURE_FIRST_WAIT_S = 130.0  # the first request enables Scheduled Events, and may take two minutes
AWS_TOKEN_TTL_S = 21600
MAX_FAILURES = 5
MAX_BYTES = 1 << 20


class NoticeWatch:
    """Polls for notices while it is entered; a failure in here never stops training. One per machine is enough."""

    def __init__(self, *, is_polling: bool = True, poll_s: float = 3.0, timeout_s: float = 2.0) -> None:
        self.cloud = detect_cloud() if is_polling else None
        self.problem = ""  # why notices cannot be seen: set once, after several requests in a row failed
        self._source = _SOURCES[self.cloud](poll_s, timeout_s) if self.cloud else None
        self._notice = ""
        self._left = threading.Event()

    def __enter__(self) -> NoticeWatch:
        if self._source:
            threading.Thread(target=self._watch, args=(self._source,), name="embark-notices", daemon=True).start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._left.set()  # not joined: a request under way may hang

    def notice(self) -> str:
        """Return what the cloud announced, if it takes this machine away; does not block."""
        return self._notice

    def _watch(self, source: _Source) -> None:
        num_failures = 0
        while not self._left.is_set() and not self._notice:
            began = time.monotonic()
            try:
                self._notice = source.look()
                num_failures = 0
            except Exception as error:  # whatever a metadata service answers, training continues
                num_failures += 1
                if num_failures == MAX_FAILURES and not self.problem:
                    self.problem = (f"cannot read preemption notices from {source.endpoint}: "
                                    f"{error or type(error).__name__}; SIGTERM still saves and stops the run"
                                    f"\n  fix: {source.remedy}")
            self._left.wait(max(source.poll_s - (time.monotonic() - began), 0.0))


def detect_cloud(environ: Mapping[str, str] = os.environ, dmi: Path = DMI) -> str | None:
    """Return `aws`, `azure`, `gce` or None, from the environment and the firmware's strings, without the network."""
    for cloud, source in _SOURCES.items():
        if environ.get(source.variable):
            return cloud
    if _dmi(dmi, "chassis_asset_tag") == AZURE_ASSET_TAG:
        return "azure"
    if _dmi(dmi, "product_name") == "Google Compute Engine":  # not by the vendor: a Chromebook's is Google, too
        return "gce"
    is_aws = _dmi(dmi, "sys_vendor") == "Amazon EC2" or "amazon" in _dmi(dmi, "bios_version")  # the latter on Xen
    return "aws" if is_aws and environ.get("AWS_EC2_METADATA_DISABLED", "").lower() != "true" else None


def grace_seconds(environment: str | None, environ: Mapping[str, str] = os.environ) -> float:
    """Return the seconds between notice and end: the cloud's, in a pod at most the pod's; EMBARK_GRACE_S wins over
    both."""
    if text := environ.get("EMBARK_GRACE_S", ""):
        with suppress(ValueError):
            if 0 <= (seconds := float(text)) < math.inf:
                return seconds
        raise UserError(f"the environment's EMBARK_GRACE_S is {text!r}, not a number of seconds",
                        "set it to the pod's terminationGracePeriodSeconds")
    known = [environment] if environment else []
    if "KUBERNETES_SERVICE_HOST" in environ or not known:
        known.append("gke-spot" if environment == "gce" else "kubernetes")
    return min(GRACES[name][0] for name in known)


class _Source(ABC):
    """The metadata service of one cloud."""

    cloud = variable = remedy = prefix = ""

    def __init__(self, poll_s: float, timeout_s: float) -> None:
        said = os.getenv(self.variable, "").rstrip("/") or LINK_LOCAL
        self.endpoint = said if "://" in said else f"http://{said}"
        self.poll_s, self.timeout_s = poll_s, timeout_s
        self.headers: dict[str, str] = {}

    @abstractmethod
    def look(self) -> str:
        """Poll once; returns a notice if there is one."""

    def get(self, path: str, *, wait_s: float = 0.0) -> tuple[str, Message]:
        return _request(self.endpoint + self.prefix + path, self.headers, self.timeout_s + wait_s)


class _Aws(_Source):
    cloud, variable, prefix = "aws", "AWS_EC2_METADATA_SERVICE_ENDPOINT", "/latest/meta-data/"
    remedy = "for a container: aws ec2 modify-instance-metadata-options --http-put-response-hop-limit 2"
    renew_at = 0.0

    def look(self) -> str:
        text = self._get("spot/instance-action")
        return f"spot {json.loads(text)['action']}" if text else ""

    def _get(self, path: str) -> str:
        if time.monotonic() >= self.renew_at:
            headers = {"X-aws-ec2-metadata-token-ttl-seconds": str(AWS_TOKEN_TTL_S)}
            token, _ = _request(f"{self.endpoint}/latest/api/token", headers, self.timeout_s, method="PUT")
            self.headers = {"X-aws-ec2-metadata-token": token}
            self.renew_at = time.monotonic() + AWS_TOKEN_TTL_S / 2
        try:
            return self.get(path)[0]
        except HTTPError as error:
            if error.code == 404:
                return ""
            self.renew_at = 0.0  # 401: the token is no longer known there
            raise


class _Azure(_Source):
    cloud, variable, prefix = "azure", "EMBARK_AZURE_METADATA_ENDPOINT", "/metadata/"
    remedy = f"let this container reach {LINK_LOCAL}"
    name = ""
    first_wait_s = AZURE_FIRST_WAIT_S

    def look(self) -> str:
        self.headers = {"Metadata": "true"}
        with suppress(OSError, HTTPException):
            self.name = self.name or self.get("instance/compute/name?api-version=2021-02-01&format=text")[0].strip()
        text, _ = self.get("scheduledevents?api-version=2020-07-01", wait_s=self.first_wait_s)
        self.first_wait_s = 0.0
        for event in json.loads(text)["Events"]:
            # a scale set reports the events of all its machines to each
            is_mine = not self.name or self.name.lower() in [str(n).lower() for n in event.get("Resources") or ()]
            if is_mine and event.get("EventType") in ("Preempt", "Terminate"):
                return str(event["EventType"])
        return ""


class _Gce(_Source):
    cloud, variable, prefix = "gce", "GCE_METADATA_HOST", "/computeMetadata/v1/instance/"
    remedy = "none is needed on GKE with Workload Identity, which hides these notices from pods"
    etag = ""

    def look(self) -> str:
        self.headers = {"Metadata-Flavor": "Google"}
        wait_s = max(round(self.poll_s), 1) if self.etag else 0
        wait = f"?wait_for_change=true&timeout_sec={wait_s}&last_etag={self.etag}" if wait_s else ""
        text, headers = self.get(f"preempted{wait}", wait_s=wait_s)
        if headers.get("Metadata-Flavor") != "Google":
            raise ValueError("what answers is not Google's metadata server")
        self.etag = headers.get("ETag", "")
        return "preempted" if text.strip() == "TRUE" else ""


_SOURCES: dict[str, type[_Source]] = {source.cloud: source for source in (_Aws, _Azure, _Gce)}


def _request(url: str, headers: dict[str, str], timeout_s: float, *, method: str = "GET") -> tuple[str, Message]:
    # Only http, and nothing that would follow a proxy or a redirect: these addresses are this machine's own.
    opener = OpenerDirector()
    for handler in (HTTPHandler, HTTPDefaultErrorHandler, HTTPErrorProcessor):
        opener.add_handler(handler())
    try:
        with opener.open(Request(url, headers=headers, method=method), timeout=timeout_s) as answer:
            return answer.read(MAX_BYTES).decode(), answer.headers
    except HTTPError as error:
        error.close()
        raise


def _dmi(folder: Path, name: str) -> str:
    with suppress(OSError):
        return (folder / name).read_text(errors="replace").strip()
    return ""
