"""One sentence: fits or not, why, how long, how much; and what does fit, found by predictions."""

import re

from plan_setups import hand_estimator, real_estimator, setup_of, shipped_catalog

from embark.plan.survey import survey_catalog
from embark.plan.verdict import survey_sentence, verdict


def machine(name):
    return shipped_catalog().machines[name]


def ask(estimator, name, nodes=1, **more):
    return verdict(estimator(machine(name), nodes), estimator, **more)


def test_what_fits_is_reported_with_time_and_money(tmp_path):
    answer = ask(real_estimator(tmp_path), "p5en.48xlarge")
    assert answer.fits
    assert answer.nearest == ()
    assert re.fullmatch(
        r"criteo-1tb fits one p5en\.48xlarge \(8 x H200\): .*98\.1 GiB.*; a step of 65,536 samples takes [\d.]+ ms, "
        r"bound by [\w -]+; the run takes \d+ min \d\d s and \$\d+\.\d\d on demand in [\w-]+, \$\d\.\d\d on spot",
        answer.sentence)


def test_a_step_that_was_not_measured_is_called_an_estimate(tmp_path):
    assert "ms, an estimate, bound by" in ask(real_estimator(tmp_path), "p4d.24xlarge").sentence


def test_criteo_does_not_fit_one_a100_and_three_ways_out_are_named(tmp_path):
    estimator = real_estimator(tmp_path, purchase="spot")
    answer = ask(estimator, "a2-highgpu-1g")
    assert not answer.fits
    assert answer.sentence.startswith("criteo-1tb does not fit one a2-highgpu-1g (1 x A100): ")
    assert "98.1 GiB" in answer.sentence
    assert "nearest that fits: 4 x a2-highgpu-1g, $" in answer.sentence
    more, larger, cheapest = answer.nearest
    assert (more.how, more.estimate.setup.machine.name) == ("more machines", "a2-highgpu-1g")
    assert not estimator.predicts(machine("a2-highgpu-1g"), 2)
    assert larger.estimate.setup.machine.cloud == "gcp"
    assert larger.estimate.setup.num_nodes == 1
    assert cheapest.estimate.total_usd("spot") <= larger.estimate.total_usd("spot")
    assert all(n.estimate.fits for n in answer.nearest)


def test_the_smallest_number_that_fits_and_shares_the_batch_is_found():
    fits_from = hand_estimator(lambda s: 0.01 if s.num_ranks >= 5 * 8 else None, sets=["train.batch_size=61440"])
    found = {n.how: n.estimate for n in ask(fits_from, "p4d.24xlarge", max_nodes=1).nearest}
    assert found["more machines"].setup.num_nodes == 5
    uneven = hand_estimator(lambda s: 0.01 if s.num_ranks >= 5 * 8 else None)
    found = {n.how: n.estimate for n in ask(uneven, "p4d.24xlarge", max_nodes=1).nearest}
    assert found["more machines"].setup.num_nodes == 8  # 65,536 samples are not dealt to 40, 48 or 56 ranks


def test_larger_machines_are_of_the_same_cloud_and_region():
    only_large = hand_estimator(lambda s: 0.01 if s.machine.gpu_memory_gib > 600 else None, region="us-west-2")
    found = {n.how: n.estimate for n in ask(only_large, "p4d.24xlarge").nearest}
    assert found["a larger machine of the cloud"].setup.machine.cloud == "aws"
    assert found["a larger machine of the cloud"].price.region == "us-west-2"


def test_two_ways_that_are_the_same_are_reported_once():
    same = hand_estimator(lambda s: 0.01 if (s.machine.name, s.num_nodes) == ("p4de.24xlarge", 1) else None)
    answer = ask(same, "p4d.24xlarge")
    assert answer.sentence.count("p4de.24xlarge") == 1
    assert "(a larger machine of the cloud and the cheapest)" in answer.sentence


def test_tables_larger_than_anything_get_advice():
    answer = ask(hand_estimator(lambda _: None), "p4d.24xlarge", max_nodes=4)
    assert not answer.fits
    assert answer.nearest == ()
    assert "up to 4 machines of any type do not fit its 98.1 GiB of tables" in answer.sentence
    assert "fp16" in answer.sentence


def test_layers_larger_than_any_device_are_named_and_not_the_tables(tmp_path):
    estimator = real_estimator(tmp_path, sets=["model.top_mlp=[400000, 400000]"])
    answer = ask(estimator, "p4d.24xlarge", max_nodes=2)
    assert answer.nearest == ()
    assert re.search(r"; up to 2 machines of any type do not fit it either: on 2 x [\w.-]+, the fullest rank needs "
                     r"[\d,.]+ GiB and its device has [\d,.]+, most of it for dense layers \([\d,.]+ GiB\): use "
                     r"smaller layers", answer.sentence)


def test_a_missing_price_is_reported_in_the_sentence():
    unpriced = next(m for m in shipped_catalog().machines.values() if not shipped_catalog().prices_of(m))
    sentence = ask(hand_estimator(lambda _: 0.01), unpriced.name).sentence
    assert "no price on demand known" in sentence
    assert "$" not in sentence


def test_a_tpu_never_is_the_cheapest_while_something_firm_is(tmp_path):
    estimator = hand_estimator(lambda s: 1e-6 if s.machine.gpu.kind == "tpu" else 0.01 if s.num_ranks == 8 else None)
    found = {n.how: n.estimate for n in ask(estimator, "a2-highgpu-1g").nearest}
    assert found["the cheapest"].setup.machine.gpu.kind == "gpu"


def sentence(estimator, kept=None, **more):
    found = survey_catalog(estimator, max_nodes=2)
    return survey_sentence(found, list(found.fitting) if kept is None else kept, "run", max_nodes=2, **more)


def test_a_survey_names_the_cheapest_and_the_fastest():
    by_memory = hand_estimator(lambda s: 40.0 / (s.num_nodes * s.machine.gpu_memory_gib))
    assert re.fullmatch(r"run: cheapest is .* on demand, .*; fastest is .* on demand, .*", sentence(by_memory))
    one = hand_estimator(lambda s: 0.01 if (s.machine.name, s.num_nodes) == ("p4d.24xlarge", 1) else None)
    assert sentence(one).startswith("run: cheapest and fastest is p4d.24xlarge in us-")


def test_a_bound_that_nobody_keeps_is_answered_with_the_best_there_is():
    result = sentence(hand_estimator(lambda _: 0.01), kept=[], bounds_text="within 1.0 s")
    assert result.startswith("nothing here runs run within 1.0 s; the cheapest is ")
    assert ", the fastest " in result


def test_a_catalog_where_nothing_fits_says_why_of_the_largest():
    assert re.search(r"run fits no machine here, up to 2 of each; on the largest, .*: too small by hand",
                     sentence(hand_estimator(lambda _: None)))


def test_a_catalog_where_nothing_has_a_price_says_so():
    unpriced = {m.name for m in shipped_catalog().machines.values() if not shipped_catalog().prices_of(m)}
    estimator = hand_estimator(lambda s: 0.01 if s.machine.name in unpriced else None)
    assert "is not known" in sentence(estimator)


def test_a_setup_is_named_as_people_name_it():
    assert setup_of("Standard_ND96asr_v4", 2).description == "2 x ND96asr_v4 (16 x A100)"
    assert setup_of("a2-highgpu-1g", 1).description == "one a2-highgpu-1g (1 x A100)"


def test_an_elastic_run_fits_its_fewest_machines_and_costs_its_most():
    sets = ["train.batch_size=61440", "place.nodes={min=2, max=3}"]
    estimator = hand_estimator(lambda s: 0.01 if s.num_nodes >= 3 else None, sets=sets)
    small = estimator.of_place(machine("p4d.24xlarge"))
    assert (small.fits, small.setup.num_nodes) == (False, 2)
    assert not verdict(small, estimator).fits
    estimator = hand_estimator(lambda s: 0.01 if s.num_nodes >= 2 else None, sets=sets)
    assert estimator.of_place(machine("p4d.24xlarge")).setup.num_nodes == 3
