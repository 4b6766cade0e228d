"""MLPerf's LoadGen, Server scenario, drives `embark serve`; the client is on the same cores.

    embark train quickstart --set train.precision=fp32 && embark export quickstart --tables int8
    pip install mlcommons-loadgen
    python bench/serve_loadgen.py runs/quickstart/export --qps 20 --p99-ms 10

Queries of 128 candidates as raw tensors arrive at random; a run is VALID where LoadGen is sure that 99 of 100 are
answered within `--p99-ms`. `--shared`: dense and half of the sparse columns are those of one user, sent once. Before
the first run, the same requests one at a time. mlcommons-loadgen has no wheel for ARM: pip builds it.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlperf_loadgen as lg
import numpy as np
from open_loop import OpenLoop, sequential_latencies
from serve import NUM_REQUESTS, make_requests, start

SHOWN = ("Result is", "Early stopping satisfied", "Completed samples per second", "50.00 perc", "99.00 perc")


def loadgen(port: int, messages: Sequence[bytes], qps: float, p99_ms: float, num_queries: int) -> str:
    """LoadGen's summary of one run."""

    def on_answer(sample: int, status: int) -> None:
        assert status == 200, status
        lg.QuerySamplesComplete([lg.QuerySampleResponse(sample, 0, 0)])

    client = OpenLoop(port, on_answer)

    def issue(samples: Sequence[Any]) -> None:
        for sample in samples:
            client.send(messages[sample.index], sample.id)

    settings = lg.TestSettings()
    settings.scenario, settings.mode = lg.TestScenario.Server, lg.TestMode.PerformanceOnly
    settings.server_target_qps, settings.server_target_latency_ns = qps, int(p99_ms * 1e6)
    settings.min_duration_ms, settings.min_query_count = 1_000, num_queries
    with tempfile.TemporaryDirectory() as folder:
        logs = lg.LogSettings()
        logs.log_output.outdir = folder
        sut, samples = lg.ConstructSUT(issue, lambda: None), lg.ConstructQSL(
            NUM_REQUESTS, NUM_REQUESTS, lambda _: None, lambda _: None)
        lg.StartTestWithLogSettings(sut, samples, settings, logs)
        lg.DestroyQSL(samples)
        lg.DestroySUT(sut)
        client.close()
        return (Path(folder) / "mlperf_log_summary.txt").read_text()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("artifact")
    parser.add_argument("--candidates", type=int, default=128)
    parser.add_argument("--qps", type=float, nargs="+", default=[20])
    parser.add_argument("--p99-ms", type=float, default=10)
    parser.add_argument("--queries", type=int, default=1_000, help="of a few hundred LoadGen cannot tell a p99")
    parser.add_argument("--shared", action="store_true")
    args = parser.parse_args()
    requests, _, model = make_requests(args.artifact, args.candidates, args.shared)
    server = start("Embark", [sys.executable, "-m", "embark", "serve", args.artifact, "--device", "cpu", "--port",
                              "PORT"], f"/v2/models/{model}/infer", requests)
    try:
        sequential_latencies(server.port, server.messages, 50, 0.0)
        for pause_s in (0.0, 0.03):
            p50, p99 = 1e3 * np.percentile(sequential_latencies(server.port, server.messages, 200, pause_s), [50, 99])
            print(f"one at a time, {1e3 * pause_s:g} ms between them: p50 {p50:.2f} ms, p99 {p99:.2f} ms", flush=True)
        for qps in args.qps:
            summary = loadgen(server.port, server.messages, qps, args.p99_ms, args.queries)
            shown = [" ".join(line.split()) for line in summary.splitlines() if any(text in line for text in SHOWN)]
            print(f"{qps:g} queries/s, {qps * args.candidates:,.0f} candidates/s, p99 of {args.p99_ms:g} ms: "
                  + "; ".join(shown), flush=True)
    finally:
        server.stop()


if __name__ == "__main__":
    main()
