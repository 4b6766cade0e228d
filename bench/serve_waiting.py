"""Does a server wait as `embark plan --serve` says? Requests at random times, at rates that nothing was fitted to.

    embark train quickstart --set train.precision=fp32 && embark export quickstart --tables int8
    python bench/serve_waiting.py runs/quickstart/export

The time of a request is the median of requests one at a time, with pauses between them. From it and the rate alone
follow the predicted p50 and p99, by the plan's own function. Latency counts from the moment a request is due; the
client has the same cores, and what it takes of them is printed.
"""

from __future__ import annotations

import argparse
import json
import time

import numpy as np
from open_loop import poisson_latencies, sequential_latencies
from serving import serving

from embark.export.artifact import open_artifact
from embark.plan.serving import latency_ms

NUM_BODIES, SHARES = 32, (0.1, 0.25, 0.4, 0.55, 0.7)


def messages_of(artifact: str, num_rows: int) -> list[bytes]:
    """Whole requests of rows in JSON."""
    layout, rng = open_artifact(artifact).info.rows.layout, np.random.default_rng(1)
    found = []
    for _ in range(NUM_BODIES):
        body = json.dumps({"rows": [
            {**{name: round(float(rng.random()), 4) for name in layout.dense},
             **{one.name: int(rng.integers(one.rows)) for one in layout.features}} for _ in range(num_rows)]}).encode()
        found.append(b"POST /score HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("artifact")
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument("--requests", type=int, default=1_500, help="at each rate")
    parser.add_argument("--processes", type=int, default=1, help="of the server, among which requests are divided")
    args = parser.parse_args()
    messages = messages_of(args.artifact, args.rows)
    with serving(args.artifact, args.processes) as (port, _):
        sequential_latencies(port, messages, 50, 0.0)
        alone = sequential_latencies(port, messages, 200, 0.02)
        request_s = float(np.median(alone))
        print(f"one at a time, of {args.rows} rows: p50 {1e3 * request_s:.2f} ms, p99 "
              f"{1e3 * float(np.percentile(alone, 99)):.2f} ms")
        print("| utilization | requests/s | p50 predicted | measured | p99 predicted | measured | p99 apart |")
        print("|---|---|---|---|---|---|---|")
        for share in SHARES:
            qps = share * args.processes / request_s
            before_s = time.process_time()
            found = poisson_latencies(port, messages, qps, args.requests / qps)
            client_s = (time.process_time() - before_s) / len(found)
            p50, p99 = 1e3 * np.percentile(found, [50, 99])
            expected = [latency_ms(request_s, share, quantile) for quantile in (0.5, 0.99)]
            print(f"| {share:.0%} | {qps:.1f} | {expected[0]:.1f} | {p50:.1f} | {expected[1]:.1f} | {p99:.1f} | "
                  f"{expected[1] / p99 - 1:+.0%} |", flush=True)
        print(f"the client takes {1e3 * client_s:.2f} ms of a core for a request")


if __name__ == "__main__":
    main()
