"""How much is computed for a model that fits nowhere."""

from __future__ import annotations

from embark.plan import predict as predict_module
from embark.plan.plan import PlanRequest, plan
from embark.spec import load_spec


def test_what_fits_nowhere_is_counted_once_per_number_of_ranks(monkeypatch):
    counted, placed = [], []
    count, place = predict_module.device_parts, predict_module.closed_form

    def counting(spec, placement, engine, precision, calibration):
        if not placement.shards:
            counted.append((engine, precision, placement.num_ranks))
        return count(spec, placement, engine, precision, calibration)

    def placing(spec, cluster, *known):
        placed.append(cluster)
        return place(spec, cluster, *known)

    monkeypatch.setattr(predict_module, "device_parts", counting)
    monkeypatch.setattr("embark.plan.closed_form.closed_form", placing)
    spec = load_spec("quickstart", ["model.top_mlp=[1000000, 1000000]"])
    found = plan(spec, PlanRequest(across=True, num_samples=1_000_000))
    assert not found.is_ok
    assert "fits no machine" in found.sentence
    assert len(counted) == len(set(counted)) < 60
    assert len(placed) == 1  # on the largest, to say why not
