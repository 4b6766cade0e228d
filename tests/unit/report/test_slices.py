"""Slices of runs side by side."""

from embark.report.report import slice_blocks, slice_rows
from embark.run.feature_metrics import Estimate, Slice, SliceResult


def sliced(auc: float) -> SliceResult:
    def one(value: str, auc: float) -> Slice:
        interval = Estimate(auc, auc - 0.01, auc + 0.01)
        return Slice(value=value, num_samples=900, click_rate=0.2, log_loss=0.4, auc=auc, calibration=None,
                     auc_interval=interval, calibration_interval=None)

    return SliceResult(run="r", step=1, data="", split="", rows="validation split", feature="country", kind="sparse",
                       all_rows=one("all rows", 0.8), slices=(one("de", auc), one(f"only {auc}", 0.7)), num_values=2,
                       method="by Student's t")


def test_runs_differ_in_a_slice_where_their_intervals_do_not_overlap():
    rows = slice_rows([("a", sliced(0.75)), ("b", sliced(0.70))])
    assert [row["differ in"] for row in rows] == ["", "AUC", ""]
    assert rows[1]["a: AUC"] == "0.7500 (0.7400 to 0.7600)"
    assert rows[2]["b: AUC"] == "–"  # a slice that the other has not
    alone = slice_rows([("a", sliced(0.75))])
    assert list(alone[0]) == ["country", "rows", "AUC", "calibration", "log loss", "click rate", "differs in"]
    assert [row["differs in"] for row in alone] == ["", "AUC", "AUC"]
    assert slice_blocks([]) == []
    assert len(slice_blocks([("a", sliced(0.75))])) == 2
