"""Numbers are short and other people's text is harmless."""

import math

import pytest

from embark import formatting


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (7.25, "7.2"), (950, "950"), (999.7, "1.00 k"), (1234, "1.23 k"), (41_200, "41.2 k"), (412_000, "412 k"),
     (999_960, "1.00 M"), (167_234_561, "167 M"), (4.2e9, "4.20 B"), (5e16, "50,000 T"), (None, "–"), (math.nan, "–")],
)  # fmt: skip
def test_format_si_keeps_three_digits(value, text):
    assert formatting.format_si(value) == text


@pytest.mark.parametrize(("value", "text"), [(512, "512 B"), (665_600_000, "666 MB"), (1.34e9, "1.34 GB"), (None, "–")])
def test_format_bytes(value, text):
    assert formatting.format_bytes(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.312, "0.31 s"), (0.999, "1.0 s"), (12.43, "12.4 s"), (59.97, "1 min 00 s"), (312, "5 min 12 s"),
     (11_100, "3 h 05 min"), (86_400 * 2 + 3 * 3600, "2 d 03 h"), (None, "–"), (math.inf, "–")],
)  # fmt: skip
def test_format_duration(seconds, text):
    assert formatting.format_duration(seconds) == text


@pytest.mark.parametrize(("seconds", "text"), [
    (0.0266, "26.6 ms"), (0.000171, "0.171 ms"), (0.251, "251 ms"), (1.5, "1.5 s"), (None, formatting.MISSING)])
def test_format_step_time(seconds, text):
    assert formatting.format_step_time(seconds) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "$0.00"), (0.0004, "< $0.001"), (0.032, "$0.032"), (4.1, "$4.10"), (999.5, "$999.50"), (1234.4, "$1,234"),
     (None, "–")],
)
def test_format_usd(value, text):
    assert formatting.format_usd(value) == text


@pytest.mark.parametrize(("seconds", "text"), [(125, "2:05"), (3725, "1:02:05"), (-3, "0:00"), (None, "-:--")])
def test_format_clock(seconds, text):
    assert formatting.format_clock(seconds) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.79124, "0.7912"), (None, "–"), (math.nan, "NaN"), (math.inf, "inf"), ("0.5", "–"), (True, "–")],
)
def test_format_float_of_what_is_not_a_number(value, text):
    assert formatting.format_float(value) == text


@pytest.mark.parametrize(("values", "text"), [
    ({"auc": 0.79123}, "0.7912"), ({"auc": 0.521, "auc_error": 0.04}, "0.5210 ±0.04"), ({}, "–"),
    ({"auc": math.nan}, "–"),
])
def test_an_auc_that_is_not_defined_is_left_out(values, text):
    assert formatting.format_auc(values) == text


def test_format_float_keeps_its_width_when_a_loss_explodes():
    assert formatting.format_float(123_456_789.0) == "1.23e+08"


def test_strip_control_chars_leaves_the_rest():
    assert formatting.strip_control_chars("a\x1b[31mb\x07\x9bc\x7f\u202ed\re") == "a[31mbcde"
    assert formatting.strip_control_chars("two\r\nlines\tand [red] π") == "two\nlines\tand [red] π"
    assert formatting.strip_control_chars("bad \udcff name") == "bad \ufffd name"


def test_to_one_line_is_one_line():
    assert formatting.to_one_line("a\n  b\tc") == "a b c"


def test_text_for_a_stream_without_unicode():
    assert formatting.to_encoding("cat_0 … cat_9 × 64 · π", "ascii") == "cat_0 ... cat_9 x 64 - ?"
    assert formatting.to_encoding("… π", "UTF-8") == "… π"
