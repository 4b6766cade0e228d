"""How often to save: what a save costs against what a failure loses. Pure arithmetic."""

import math

from embark.formatting import format_duration, pluralize
from embark.values import frozen

MAX_LOST_S = 600.0  # Training that a preemption may lose if no save finishes after its notice.
MAX_PAUSE_SHARE = 0.1  # Share of the time that saves may take to stay within `MAX_LOST_S`.
MAX_EVERY_S = 3600.0  # However rare failures are said to be, one that nobody foresaw loses no more than about this.


@frozen
class Choice:
    """The number of steps from one save to the next, and the reason in one sentence."""

    every_steps: int
    why: str


def steps_between_saves(
    save_pause_s: float, save_cost_s: float, step_s: float, mtbf_s: float, grace_s: float, *,
    max_lost_s: float = MAX_LOST_S
) -> Choice:
    """Choose the interval of `store.checkpoint_every = "auto"`.

    `save_pause_s` is how long training stands still in a save, `save_cost_s` how long it takes until the checkpoint
    is committed; they are the same unless it is written in the background. The pause is what saving costs, so it
    goes into `young_daly_interval_s`. Three bounds follow:

    - A notice helps if the step at hand and a save fit into `grace_s`. Where they do not, the last checkpoint must
      do. At worst the machine goes just before a commit, and `interval + save_cost_s` is lost: the interval shrinks
      until that is `max_lost_s`, or until the pauses take `MAX_PAUSE_SHARE` of the time.
    - A save does not begin before the one before it is committed.
    - An interval is at most `MAX_EVERY_S` long.
    """
    save_cost_s = max(save_cost_s, save_pause_s)
    cheapest_s = min(young_daly_interval_s(save_pause_s, mtbf_s), MAX_EVERY_S)
    every_s = cheapest_s
    has_time_to_save = step_s + save_cost_s <= grace_s
    if not has_time_to_save:
        bearable_s = save_pause_s * (1 / MAX_PAUSE_SHARE - 1)
        every_s = min(cheapest_s, max(max_lost_s - save_cost_s, bearable_s))
    background_s = save_cost_s - save_pause_s
    every_steps = max(math.floor(every_s / step_s), math.ceil(background_s / step_s), 1)
    every_s = every_steps * step_s
    # what trains on while a save is written is lost with it
    share = min(expected_overhead(every_s, save_pause_s, mtbf_s) + background_s / mtbf_s, 1.0)
    standing = f"{format_duration(save_pause_s)} of it with training paused, " if background_s else ""
    failures = f"a failure is expected every {format_duration(mtbf_s)}"
    if math.isinf(mtbf_s):
        failures = "no failure is expected"
    why = (f"saving every {pluralize(every_steps, 'step')} ({format_duration(every_s)}): a save takes "
           f"{format_duration(save_cost_s)}, {standing}and {failures}, so {share:.2%} of the time is lost")
    if not has_time_to_save:
        if every_s < 0.99 * cheapest_s:
            why += f"; {format_duration(cheapest_s)} would cost least"
        why += (f"; a preemption leaves only {format_duration(grace_s)}, too short for a step and a save, and loses at "
                f"most {format_duration(every_s + save_cost_s)}")
    return Choice(every_steps, why)


def young_daly_interval_s(save_cost_s: float, mean_time_between_failures_s: float) -> float:
    """Return the seconds of training between two saves, the save itself left out, that lose the least time.

    With d the cost of a save and M the mean time between failures:

        sqrt(2 d M) * (1 + sqrt(d / 2M) / 3 + (d / 2M) / 9) - d     for d < 2M
        M                                                            for d >= 2M

    J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", Future Generation
    Computer Systems 22 (2006) 303-312, which refines J. W. Young, "A first order approximation to the optimum
    checkpoint interval", CACM 17 (1974) 530-531: sqrt(2 d M). Young's is good while d < M / 2; the terms that Daly
    adds carry it on to 2M, and past that a save rarely lasts out a failure.
    """
    cost_s, mtbf_s = save_cost_s, mean_time_between_failures_s
    if cost_s >= 2 * mtbf_s:
        return mtbf_s
    if cost_s == 0 or math.isinf(mtbf_s):
        return 0.0 if cost_s == 0 else math.inf
    ratio = cost_s / (2 * mtbf_s)
    return math.sqrt(2 * cost_s * mtbf_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - cost_s


def expected_overhead(every_s: float, cost_s: float, mtbf_s: float) -> float:
    """Return the share of all time that goes into saves and into training that is done again, from 0 to 1.

    Daly's complete model with failures as a Poisson process: `every_s` of training take
    M * (exp((every_s + cost_s) / M) - 1) in all. Starting again takes the same time whatever the interval, so it is
    left out.
    """
    if math.isinf(mtbf_s):
        return cost_s / (every_s + cost_s)
    exponent = (every_s + cost_s) / mtbf_s
    if exponent > 700:  # exp() overflows; nothing is ever finished
        return 1.0
    return max(1 - every_s / (mtbf_s * math.expm1(exponent)), 0.0)
