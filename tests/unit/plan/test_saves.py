"""What checkpoints take: their bytes, their pauses, how often."""

import math
from dataclasses import replace

import pytest
from plan_setups import made, setup_of

from embark.plan.cost import COST, Failures, checkpoint_bytes, saves_of
from embark.spec import load_spec

SPOT = Failures(1 / 12, 120.0, True, "spot")
RARE = Failures(1 / 5000, 120.0, False, "breaks")


def test_a_checkpoint_is_tables_their_state_and_the_dense_layers():
    spec = load_spec("quickstart", ["train.optimizer=adagrad", "train.dense_optimizer=adam"])
    tables = 26 * 100_000 * 64
    bottom = 13 * 512 + 512 + 512 * 256 + 256 + 256 * 64 + 64
    wide = 64 + 27 * 26 // 2
    top = wide * 512 + 512 + 512 * 256 + 256 + 256 + 1
    assert checkpoint_bytes(spec) == 2 * 4 * tables + 12 * (bottom + top)


def test_the_measured_quickstart_checkpoint_is_met():
    """`embark train quickstart` wrote 680 MB."""
    assert checkpoint_bytes(load_spec("quickstart")) == pytest.approx(680e6, rel=0.01)


def test_a_save_takes_the_fullest_rank_s_bytes_and_pauses_for_their_copy():
    saves = saves_of(made(setup_of("p4d.24xlarge")), 100_000, SPOT)
    rank_bytes = saves.checkpoint_bytes / 8
    assert saves.write_s == pytest.approx(rank_bytes / COST["write_gbyte_per_s"] / 1e9 + COST["commit_s"], rel=0.01)
    assert saves.pause_s == pytest.approx(rank_bytes / (32e9 * 0.75), rel=0.01)
    assert saves.host_bytes == pytest.approx(saves.checkpoint_bytes)


def test_a_slow_network_slows_a_save():
    setup = setup_of("p4d.24xlarge")
    slow = replace(setup, machine=replace(setup.machine, network_gbit_per_s=10.0))
    write_s = 105.4e9 / (10e9 / 8 * 0.7) + COST["commit_s"]
    assert saves_of(made(slow), 1000, SPOT).write_s == pytest.approx(write_s, rel=0.01)


def test_in_the_foreground_training_waits_for_all_of_it():
    saves = saves_of(made(setup_of(sets=["store.in_background=false"])), 1000, SPOT)
    assert saves.pause_s == saves.write_s


def test_more_failures_bring_saves_closer_together():
    often, rare = (saves_of(made(setup_of("a2-ultragpu-8g")), 10**7, f) for f in (SPOT, RARE))
    assert often.every_s < rare.every_s
    assert often.every_steps * 0.01 == pytest.approx(often.every_s)
    assert often.num_saves == (10**7 - 1) // often.every_steps


@pytest.mark.parametrize(("grace_s", "fits"), [(120.0, True), (10.0, False)])
def test_a_notice_that_is_long_enough_loses_nothing(grace_s, fits):
    saves = saves_of(made(setup_of("p4d.24xlarge")), 10**6, Failures(0.1, grace_s, True, ""))
    assert saves.fits_notice is fits
    assert (saves.lost_each_s == 0) is fits


def test_what_breaks_without_notice_loses_half_an_interval():
    saves = saves_of(made(setup_of("p4d.24xlarge")), 10**7, RARE)
    assert saves.lost_each_s == pytest.approx(saves.every_s / 2 + saves.write_s - saves.pause_s)


def test_a_spec_s_own_interval_is_stored_and_the_best_is_reported():
    saves = saves_of(made(setup_of(sets=["store.checkpoint_every=500"])), 1750, SPOT)
    assert (saves.every_steps, saves.num_saves) == (500, 3)
    assert "best would be saving every" in saves.why


def test_without_saves_a_failure_undoes_half_the_run():
    sets = ["store.checkpoint_every=0", "store.checkpoint_at_end=false"]
    saves = saves_of(made(setup_of(sets=sets)), 1000, RARE)
    assert (saves.num_saves, saves.total_s, saves.lost_each_s) == (0, 0.0, 5.0)


def test_no_failure_at_all_still_saves_now_and_then():
    saves = saves_of(made(setup_of()), 10**7, Failures(0.0, 120.0, False, ""))
    assert math.isinf(Failures(0.0, 1.0, False, "").mtbf_s)
    assert 0 < saves.every_s <= 3600
