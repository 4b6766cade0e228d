"""What a checkpoint costs on this machine: the pause of a save, its rate beside `torch.save`, and what training loses.

Everything is measured in one process, the contenders taking turns, so that a busy machine slows them alike. The state
is a real run's: the tables, the optimizers, the metrics, saved by the trainer's own `Checkpointer`.

    python bench/checkpoints.py [--preset quickstart] [--times 5] [--windows 10] [--window-s 10] [--folder DIR]
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import embark.trainers.torch  # noqa: F401  isort: skip  before torch: it tells torch's threads how to wait
import torch

from embark.data import Loader, open_source
from embark.spec import RunSpec, load_spec
from embark.store import RunDir
from embark.store.checkpoint_interval import steps_between_saves
from embark.trainers.torch.batch import ToDevice
from embark.trainers.torch.checkpoint import TorchCheckpointer
from embark.trainers.torch.trainer import TorchTrainer
from embark.trainers.torch.world import World, join

FREQUENT_S = 20.0


@dataclass(slots=True)
class Bench:
    """A run that can be trained, saved and loaded by hand."""

    spec: RunSpec
    world: World
    built: TorchTrainer
    checkpointer: TorchCheckpointer
    folder: Path
    step: int = 0

    def save(self, *, wait: bool) -> tuple[float, float]:
        """The pause, and the time to the commit, in seconds. Without `wait` the latter is not known yet."""
        self.step += 1
        began = time.perf_counter()
        self.checkpointer.begin(self.step, {})
        paused = time.perf_counter()
        if wait:
            self.finish()
        return paused - began, time.perf_counter() - began

    def finish(self) -> float:
        """Wait for the save under way; how long it took from its beginning."""
        cost_s = 0.0
        for saved in self.checkpointer.wait():
            if saved.error:
                raise saved.error
            cost_s = saved.cost_s
        return cost_s

    def load(self) -> None:
        def complain(text: str) -> None:
            raise SystemExit(text)

        self.checkpointer.load_newest(complain)

    def state(self) -> dict[str, Any]:
        """What is saved, as plain tensors under their names."""
        flat: dict[str, Any] = {}

        def put(name: str, held: Any) -> None:
            if isinstance(held, dict):
                for key, inner in held.items():
                    put(f"{name}.{key}", inner)
            elif hasattr(held, "local_shards"):
                for number, shard in enumerate(held.local_shards()):
                    flat[f"{name}#{number}"] = shard.tensor.detach()
            else:
                flat[name] = held.detach() if isinstance(held, torch.Tensor) else held

        put("", self.checkpointer._state())
        return flat


def main() -> None:
    args = parse_args()
    print(f"{time.strftime('%Y-%m-%d')}, {os.cpu_count()} cores, torch {torch.__version__}, "
          f"{torch.get_num_threads()} threads, load {os.getloadavg()[0]:.1f}")
    for preset in args.preset:
        with opened(preset, args.folder) as bench:
            save_pause_s, cost_s = saves_and_loads(bench, args.times)
            if args.windows:
                stall(bench, args.windows, args.window_s, save_pause_s, cost_s)


@contextmanager
def opened(preset: str, folder: Path | None) -> Iterator[Bench]:
    spec = load_spec(preset, ["place.device=cpu", "store.keep_checkpoints=1"])
    with tempfile.TemporaryDirectory(dir=folder) as scratch, join(spec.place) as world:
        built = TorchTrainer(spec, world, 100_000, open_source(spec))
        checkpointer = TorchCheckpointer(RunDir(f"{scratch}/run"), built)
        bench = Bench(spec, world, built, checkpointer, Path(scratch))
        train(bench, num_steps=3)
        try:
            yield bench
        finally:
            checkpointer.close()


def saves_and_loads(bench: Bench, times: int) -> tuple[float, float]:
    """Prints the table; returns the pause and the cost of a background save."""
    state = bench.state()
    num_bytes = sum(t.numel() * t.element_size() for t in state.values() if isinstance(t, torch.Tensor))
    file = bench.folder / "torch.pt"
    pauses_s: list[float] = []
    processor_s: list[float] = []

    def in_background() -> None:
        began_s = time.process_time()
        pauses_s.append(bench.save(wait=True)[0])
        processor_s.append(time.process_time() - began_s)

    roads: dict[str, Callable[[], object]] = {
        "Embark: save, checksums, synced": in_background,
        "torch.save, synced": lambda: torch_save(state, file, sync=True),
        "torch.save, not synced": lambda: torch_save(state, file, sync=False),
        "Embark: verify and load": bench.load,
        "torch.load and copy": lambda: torch_load(state, file),
        "Embark: verify and load, not in memory": bench.load,
        "torch.load and copy, not in memory": lambda: torch_load(state, file),
    }
    took_s: dict[str, list[float]] = {name: [] for name in roads}
    in_background()  # the first one makes the buffers
    first_pause_s = pauses_s.pop()
    for _ in range(times):
        for name, road in roads.items():
            if "not in memory" in name:
                forget(bench.folder)
            began = time.perf_counter()
            road()
            took_s[name].append(time.perf_counter() - began)
    print(f"\n{bench.spec.name}: {num_bytes / 1e6:,.1f} MB, median of {times}")
    print(f"  {'':42}{'s':>9}{'MB/s':>9}   {'from':>8}{'to':>8}")
    for name, values in took_s.items():
        median = statistics.median(values)
        print(f"  {name:42}{median:>9.3f}{num_bytes / median / 1e6:>9,.0f}   {min(values):>8.3f}{max(values):>8.3f}")
    pause_s, cost_s = statistics.median(pauses_s), statistics.median(took_s["Embark: save, checksums, synced"])
    print(f"  training stands still for {pause_s:.3f} s of a save in the background ({min(pauses_s):.3f} to "
          f"{max(pauses_s):.3f}; the first {first_pause_s:.3f}), {cost_s:.3f} s in the foreground: "
          f"{cost_s / pause_s:.1f}x less; a save takes {statistics.median(processor_s):.2f} s of processor time")
    file.unlink()
    return pause_s, cost_s


def stall(bench: Bench, num_windows: int, window_s: float, pause_s: float, cost_s: float) -> None:
    """Trains in windows, with a save at the beginning of every second one, and prints what a save takes away."""
    rates: dict[bool, list[float]] = {True: [], False: []}
    steps_s: list[float] = []
    costs_s: list[float] = []
    stream = batches(bench)
    train(bench, num_steps=20, stream=stream)
    # a b b a a b b a …: a machine that slows down over time slows both alike
    for number in range(2 * num_windows):
        with_save = number % 4 in (1, 2)
        began = time.perf_counter()
        if with_save:
            bench.save(wait=False)
        num_steps = 0
        while time.perf_counter() - began < window_s:
            train(bench, num_steps=1, stream=stream)
            num_steps += 1
        took_s = time.perf_counter() - began
        rates[with_save].append(num_steps * bench.spec.train.batch_size / took_s)
        if with_save:
            costs_s.append(bench.finish())
        else:
            steps_s.append(took_s / num_steps)
    plain, saving = statistics.median(rates[False]), statistics.median(rates[True])
    step_s = statistics.median(steps_s)
    # Neighbours in time are compared with each other, then the median is taken: the machine's mood drops out.
    losses_s = [window_s * (1 - b / a) for a, b in zip(rates[False], rates[True], strict=True)]
    low_s, lost_s, high_s = statistics.quantiles(losses_s, n=4)
    choice = steps_between_saves(pause_s, statistics.median(costs_s), step_s,
                                 bench.spec.store.hours_between_failures * 3600, 30.0)
    auto_s = choice.every_steps * step_s
    print(f"  {num_windows} windows of {window_s:.0f} s each way: {plain:,.0f} samples/s, with a save in it "
          f"{saving:,.0f}; a save under way took {statistics.median(costs_s):.2f} s")
    print(f"  a save costs {lost_s:.2f} s of training (half of the pairs: {low_s:.2f} to {high_s:.2f}): "
          f"{lost_s / FREQUENT_S:.2%} saved every {FREQUENT_S:.0f} s, {lost_s / auto_s:.2%} (to {high_s / auto_s:.2%}) "
          f"at auto's interval of {auto_s:.0f} s")
    print(f"  auto says: {choice.why}")


def batches(bench: Bench) -> Iterator[Any]:
    """The trainer's own loader, epoch after epoch."""
    source = open_source(bench.spec)
    to_device = ToDevice([t.name for t in bench.spec.model.table_list()], bench.world.device)
    with Loader(source, batch_size=bench.spec.train.batch_size, rank=0, world_size=1, start_step=0,
                stop_step=1_000_000) as loader:
        yield from map(to_device, iter(loader))


def train(bench: Bench, num_steps: int, stream: Iterator[Any] | None = None) -> None:
    feed = stream or itertools.islice(batches(bench), num_steps)
    for _ in range(num_steps):
        bench.built.step(feed, bench.step)


def torch_save(state: dict[str, Any], file: Path, *, sync: bool) -> None:
    torch.save(state, file)
    if sync:
        with file.open("rb") as saved:
            os.fsync(saved.fileno())


def torch_load(state: dict[str, Any], file: Path) -> None:
    for name, held in torch.load(file, weights_only=True).items():
        if isinstance(held, torch.Tensor):
            state[name].copy_(held)


def forget(folder: Path) -> None:
    """Let the system drop the folder's files from memory, and nobody else's."""
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--preset", nargs="+", default=["quickstart", "laptop"])
    parser.add_argument("--times", type=int, default=5, help="saves and loads of each kind")
    parser.add_argument("--windows", type=int, default=10, help="training windows with and without a save; 0: none")
    parser.add_argument("--window-s", type=float, default=10.0)
    parser.add_argument("--folder", type=Path, help="where to save; the system's temporary folder if not given")
    return parser.parse_args()


if __name__ == "__main__":
    main()
