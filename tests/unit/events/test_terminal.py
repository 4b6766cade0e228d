"""What a person sees of a run."""

import io
import math
import re
from io import StringIO

import pytest
from rich.console import Console

from embark.events.events import Event
from embark.events.plotting import MARK
from embark.events.sinks.terminal import TerminalView

CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]")


def without_escapes(text):
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


def test_the_header_says_what_runs_where_and_how(shown, make_events):
    text = shown(make_events()[:3])
    assert "  run       demo\n" in text
    assert "NVIDIA H200 · 2 ranks · fp32" in text
    assert "dlrm · 167 M parameters · 666 MB of tables" in text
    assert "2,048,000 samples · 100,000 held out · batch 4,096 · 500 steps an epoch" in text
    assert "pipeline: 2 ranks" in text
    assert "cat_0 … cat_25  26 tables × 100,000 rows × 64  table_wise (fused) on rank 0  666 MB" in text
    assert "333 MB on each of 2 ranks" in text


def test_a_log_has_no_control_characters_and_no_trailing_blanks(shown, make_events):
    text = shown(make_events())
    assert CONTROL.findall(text) == []
    assert [line for line in text.splitlines() if line != line.rstrip()] == []


def test_a_log_has_a_step_line_every_five_seconds_and_the_last(shown, make_events):
    text = shown([event for event in make_events() if event.kind not in ("eval", "note", "save")])
    steps = [int(s.replace(",", "")) for s in re.findall(r"train +step +([\d,]+)/1,000", text)]
    assert steps == [20, 120, 220, 320, 420, 520, 620, 720, 820, 920, 1000]
    assert re.search(r"step   520/1,000   loss 0.4\d+   AUC 0.7\d+   41.2 k samples/s   0:2\d left", text)


def test_an_evaluation_of_a_run_whose_start_is_not_known_has_no_total(shown):
    assert re.search(r"held out  step 210   AUC 0.75", shown([Event("eval", {"step": 210, "auc": 0.75})]))


def test_lines_come_in_the_order_of_their_steps(shown, make_events):
    output = re.findall(r"(train|held out) +step +([\d,]+)/", shown(make_events()))
    steps = [int(step.replace(",", "")) for _, step in output]
    assert steps == sorted(steps)
    assert ("held out", "500") in output


def test_a_log_line_is_never_wrapped(shown, make_events):
    text = shown(make_events(), width=40)
    assert re.search(r"held out  step 1,000/1,000   AUC .* calibration 1.010   100 k samples in 1.2 s\n", text)


def test_text_from_outside_is_literal(shown, make_events):
    assert "  warning   data is slow [red][31mnow\n" in shown(make_events())


def test_the_summary(shown, make_events, tmp_path):
    (tmp_path / "tensorboard").mkdir()
    events = make_events(auc=0.7912)
    events[-1] = Event("end", {**events[-1].values, "run_dir": str(tmp_path)}, events[-1].time_s)
    text = shown(events, width=100)
    summary = text[text.index("\n  loss ") :]
    assert summary.count(MARK) >= 4
    assert re.search(r"[\u2801-\u28ff]{5}", summary)
    assert re.search(r"held out +ceiling +train\n", summary)
    assert re.search(r"  AUC +0.7912 +0.8003 +0.7880  how often a positive outranks a negative\n", summary)
    assert re.search(r"  calibration +1.0100 +1.0100 ", summary)
    assert "97 % of the way from chance (0.5)" in summary
    assert "1,000 steps · 4.10 M samples in 5 min 12 s · 41.2 k samples/s" in summary
    assert f"  run       {tmp_path}\n" in summary
    assert summary.endswith(f"  curves    tensorboard --logdir {tmp_path}/tensorboard\n")


@pytest.mark.parametrize("width", [30, 42, 60, 80, 100, 160])
def test_on_a_terminal_nothing_is_wider_than_it(shown, make_events, width):
    lines = without_escapes(shown(make_events(), width=width, force_terminal=True)).replace("\r", "\n").splitlines()
    assert max(map(len, lines)) <= width
    assert "…" not in "".join(line for line in lines if MARK in line)


def test_on_a_terminal_a_bar_runs_below_the_lines(shown, make_events):
    text = shown(make_events(), force_terminal=True, color_system="standard")
    assert "\x1b[?25l" in text
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")
    assert "━" in text
    plain = without_escapes(text)
    assert "step     0/1,000" in plain
    assert "starting" in plain
    assert re.search(r"held out  step   500   AUC 0.\d{4}   log loss 0.\d{4}   NE 0.\d{4}   calibration 1.010", plain)
    assert "train     step" not in plain


def bar_at(width, **values):
    """The bar after one tick."""
    file = StringIO()
    view = TerminalView(Console(file=file, width=width, force_terminal=True, color_system=None))
    view.emit(Event("start", {"name": "demo", "num_steps": 20_000, "first_step": 0}, 0.0))
    view.emit(Event("step", {"step": 12_300, "auc": 0.7712, **values}, 1.0))
    view.emit(Event("progress", {"step": 12_400, "samples_per_s": 41_234.0, **values}, 2.0))
    view.emit(Event("note", {"level": "info", "text": "drawn again"}, 2.0))
    view.close()
    return next(line for line in without_escapes(file.getvalue()).splitlines() if "12,400/20,000" in line)


def test_the_bar_tells_as_much_as_fits():
    assert re.fullmatch(
        r"  step 12,400/20,000 ━+╸? +train: loss 0.4512  AUC 0.7712  41.2 k samples/s   1:16 left",
        bar_at(100, loss=0.4512),
    )
    assert re.fullmatch(r"  step 12,400/20,000 ━+╸? +train: loss 0.4512  AUC 0.7712   1:16 left",
                        bar_at(80, loss=0.4512))
    assert re.fullmatch(r"  step 12,400/20,000 ━+╸? +train: loss 0.4512   1:16 left", bar_at(60, loss=0.4512))


def test_the_bar_bears_a_loss_that_is_none_or_nan():
    assert "loss NaN" in bar_at(100, loss=math.nan)
    assert "loss –" in bar_at(100, loss=None)


def test_quiet_says_warnings_errors_and_the_result(shown, make_events):
    for options in ({}, {"force_terminal": True, "color_system": None}):
        text = shown(make_events(auc=0.7912), quiet=True, width=200, **options)
        warning, sentence = text.splitlines()
        assert warning == "warning: data is slow [red][31mnow"
        assert sentence.startswith("Held-out AUC 0.7912: 97 %")
    assert "error: out of memory\nFailed at step 1,000" in shown(make_events("failed"), quiet=True)


def test_a_stream_without_unicode_gets_ascii(shown, make_events):
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding="ascii")
    events = make_events()
    events[0] = Event("start", {**events[0].values, "name": "démo"}, events[0].time_s)
    shown(events, file=file)
    file.flush()
    text = raw.getvalue().decode("ascii")
    assert "cat_0 ... cat_25  26 tables x 100,000 rows x 64" in text
    assert "run       d?mo" in text
    assert "  AUC " in text[text.index("ceiling"):]


def test_missing_values_are_shown_as_missing(shown):
    bare = [Event(kind, {}, 0.0) for kind in ("start", "plan", "step", "eval", "save", "resume", "interrupt", "end")]
    for options in ({}, {"force_terminal": True}):
        text = without_escapes(shown(bare, **options))
        assert "AUC –" in text
        assert "Interrupted at step 0." in text


def test_an_interrupted_run_on_the_screen(shown, make_events):
    text = shown(make_events("interrupted"))
    assert "  stopping  step 1,000/1,000   SIGTERM\n" in text
    assert "Run the same command to resume from step 1,000." in text


def test_a_reader_who_goes_away_does_not_end_the_run(make_events):
    class Gone(StringIO):
        num_tries = 0

        def write(self, text):
            self.num_tries += 1
            raise OSError(5, "Input/output error")

    for force_terminal in (False, True):
        gone = Gone()
        view = TerminalView(Console(file=gone, force_terminal=force_terminal))
        for event in make_events():
            view.emit(event)
        view.close()
        assert gone.num_tries > 0
