"""The metrics in CloudWatch, by PutMetricData."""

import math
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from importlib.util import find_spec
from typing import Any

from embark.errors import MissingPackage
from embark.events.metrics import Reading
from embark.events.sinks.background import SendingSink

MAX_AT_ONCE = 500
"""CloudWatch takes 1,000 in a request, of at most 1 MB."""
MAX_LABEL = 1024
UNITS = {"s": "Seconds", "B": "Bytes", "B/s": "Bytes/Second", "%": "Percent", "samples/s": "Count/Second"}
"""CloudWatch's names for ours; it has none for the rest."""


def cloudwatch_sink(run: str, namespace: str, every_s: float) -> SendingSink:
    """Region, credentials and endpoint are found as the AWS tools find them."""
    if find_spec("boto3") is None:
        raise MissingPackage("CloudWatch needs the boto3 package, which is not installed",
                             fix='pip install "embark-rec[cloud]"')
    return SendingSink("CloudWatch", lambda: CloudWatch(run, namespace), every_s)


class CloudWatch:
    """A metric is named as in the list; its run and its labels are dimensions."""

    def __init__(self, run: str, namespace: str) -> None:
        import boto3
        from botocore.config import Config

        self._run, self._namespace = run, namespace
        config = Config(connect_timeout=5, read_timeout=10, retries={"max_attempts": 2, "mode": "standard"})
        self._client: Any = boto3.client("cloudwatch", config=config)

    def send(self, readings: Sequence[Reading]) -> None:
        """CloudWatch has no NaN: such a loss is missing there."""
        data = [self._datum(one) for one in readings if math.isfinite(one.value)]
        for some in _pieces(data):
            self._client.put_metric_data(Namespace=self._namespace, MetricData=some)

    def close(self) -> None:
        self._client.close()

    def _datum(self, reading: Reading) -> dict[str, Any]:
        labels = (("run", self._run), *reading.labels)
        return {
            "MetricName": reading.metric.name,
            "Dimensions": [{"Name": name, "Value": value[:MAX_LABEL] or "-"} for name, value in labels],
            "Timestamp": datetime.fromtimestamp(reading.time_s, UTC),
            "Value": reading.value,
            "Unit": UNITS.get(reading.metric.unit, "None"),
        }


def _pieces(data: Sequence[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    for start in range(0, len(data), MAX_AT_ONCE):
        yield list(data[start : start + MAX_AT_ONCE])
