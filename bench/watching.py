"""What watching a run costs it, in processor time, on this machine's CPU: as a share of the steps it watches.

    python bench/watching.py [SPEC]      # quickstart where none is named
"""

from __future__ import annotations

import sys
import time

import torch

from embark.data import open_source
from embark.events.events import Event
from embark.events.metrics import Latest
from embark.events.system import SystemSampler
from embark.run.clock import Clock
from embark.run.rank_reports import PROFILE_EVERY_S
from embark.spec import PlaceSpec, RunSpec, load_spec
from embark.trainers.torch.engines.pipeline import BatchRange
from embark.trainers.torch.phases import NUM_STEPS, InputWaits, Profiler
from embark.trainers.torch.trainer import TorchTrainer
from embark.trainers.torch.world import join

CPU = torch.device("cpu")
WARM_STEPS = 10
NUM_LOOKS = 5
MANY = 20_000


def main(name: str) -> None:
    torch.set_num_threads(1)  # threads that wait for each other count as work
    spec = load_spec(name)
    every_s = spec.watch.system_every_s
    step_s, look_s = steps_and_looks(spec)
    sampled_s = a_sample()
    per_step_s, per_event_s = around_a_step(), an_event()
    per_second = {
        f"machine looked at every {every_s:g} s": (sampled_s, sampled_s / every_s),
        f"phases looked at every {PROFILE_EVERY_S:g} s": (look_s, look_s / PROFILE_EVERY_S),
        "around every step": (per_step_s, per_step_s / step_s),
        f"a told event, every {spec.watch.every} steps": (per_event_s, per_event_s / (spec.watch.every * step_s)),
    }
    print(f"{spec.name}: a step takes {step_s * 1e3:.1f} ms of processor time on one thread")
    for what, (cost_s, share) in per_second.items():
        print(f"  {what:36} {cost_s * 1e3:9.4f} ms each   {share:.4%} of the time")
    print(f"  {'together':36} {'':9}           {sum(share for _, share in per_second.values()):.4%}")


def steps_and_looks(spec: RunSpec) -> tuple[float, float]:
    """A step's time, and what a look adds to the steps it looks at. Looked at and not, in turns."""
    looks, clock = Profiler(CPU), Clock(spec.train.batch_size, InputWaits(CPU))
    plain_s, looked_s = [], []
    with join(PlaceSpec(device="cpu")) as world:
        source = open_source(spec)
        built = TorchTrainer(spec, world, 1000, source)
        part = BatchRange(spec.train.batch_size, 0, 1, 0, WARM_STEPS + 2 * NUM_LOOKS * NUM_STEPS + 2)
        with built.engine.feed(source, part) as fed:
            batches = clock.timed(fed)
            step = 0
            for _ in range(WARM_STEPS):
                built.engine.step(batches, step)
                step += 1
            for turn in range(2 * NUM_LOOKS):
                began_s = time.thread_time()
                if turn % 2:
                    looks.begin(clock.counters().input_s)
                for _ in range(NUM_STEPS):
                    with looks.step():
                        built.engine.step(batches, step)
                    looks.stepped(clock.counters().input_s)
                    step += 1
                (looked_s if turn % 2 else plain_s).append(time.thread_time() - began_s)
    plain_s.sort()
    looked_s.sort()
    usual_s = plain_s[NUM_LOOKS // 2]
    return usual_s / NUM_STEPS, max(0.0, looked_s[NUM_LOOKS // 2] - usual_s)


def a_sample() -> float:
    with SystemSampler(0.05) as sampler:
        time.sleep(2)
    return sampler.busy_s / sampler.num_samples


def around_a_step() -> float:
    """The clock at the batches and at the decision, and the look that is not taken."""
    looks, clock = Profiler(CPU), Clock(1, InputWaits(CPU))
    batches = clock.timed(iter(range(MANY)))
    began_s = time.thread_time()
    for _ in range(MANY):
        with looks.step():
            next(batches)
        with clock.agreeing():
            pass
    return (time.thread_time() - began_s) / MANY


def an_event() -> float:
    """Made into readings, as every sink beside the record does."""
    latest, values = Latest(), {"step": 1, "loss": 0.5, "auc": 0.5, "log_loss": 0.5, "step_s": 0.1, "input_s": 0.0}
    began_s = time.thread_time()
    for _ in range(MANY):
        latest.add(Event("step", values))
    return (time.thread_time() - began_s) / MANY


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "quickstart")
