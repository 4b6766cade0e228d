"""What must never be shown is cut out by its form, and ordinary text stays as it is."""

import json

import pytest

from embark.dashboard.api import log_lines
from embark.dashboard.runs import WatchedRun
from embark.errors import UserError
from embark.events.events import Event, parse_event
from embark.formatting import redact
from embark.launch.backend import LogLine
from embark.report.run_files import RunFiles

SECRETS = [
    "AWS_SECRET_ACCESS_KEY=wJalrXUtnFEMI/K7MDENG/bPxRfiCYhunter2",
    "export HF_TOKEN=hunter2hunter2", "WANDB_API_KEY='hunter2'", "SOME_VENDOR_KEY=hunter2", "DB_PASSWORD=hunter2;x=1",
    "postgres://u:hunter2@db:5432/x", "redis://:hunter2@cache/0", "amqp://u:p@ss-hunter2@mq",
    "https://hunter2hunter2hunter2@h/x",
    '{"password": "hunter2"}', '{"user": "a", "client_secret": "hunter2", "b": 1}', "{'api_key': 'hunter2'}",
    r'{"log": "{\"password\": \"hunter2\"}"}', "password: hunter2", "  password: hunterxx", "secretAccessKey: hunter2",
    "os.environ['DB_PASSWORD'] = 'hunter2'", "db.password = hunter2", "PGPASSWORD=hunter2 psql",
    "Authorization: Basic dXNlcjpodW50ZXIyaHVudGVyMg==hunter2",
    "authorization: Bearer hunter2", '"Authorization": "Token hunter2"',
    "header: Bearer hunter/22", "sent Basic aHVudGVyMmh1bnRlcjI=",
    "Proxy-Authorization: hunter2", "Set-Cookie: id=hunter2; Path=/",
    "X-Api-Key: hunter2", "X-Auth-Token: hunter2", "x-amz-security-token: hunter2", "X-Amz-Signature=hunter/22",
    "GET https://a.blob.core.windows.net/c/x?sv=1&sig=hunter%2F22 failed", "sv=2024&sig=hunter%2F22&se=1",
    "DefaultEndpointsProtocol=https;AccountName=a;AccountKey=hunter2/abc==;EndpointSuffix=core.windows.net",
    "Endpoint=sb://x/;SharedAccessKey=hunter2=", "SharedKey account:hunter/22",
    "AWS4-HMAC-SHA256 Credential=hunter2/20260101/eu/s3, SignedHeaders=host, Signature=hunter2",
    "docker login --username a --password hunter2", "tool --api-key hunter2", "credentials=hunter2", "token=hunter2",
    "-----BEGIN PRIVATE KEY-----\nhunter2\n-----END PRIVATE KEY-----", "-----BEGIN OPENSSH PRIVATE KEY-----\nhunter2",
    "mysql -h db -u a -phunter2 shop", "mysqldump -p'hunter2' shop", "curl -sS -u a:hunter2 https://h/x",
    "sshpass -p hunter2 ssh -p 22 h", "sshpass -phunter2 ssh h", "docker login -u a -p hunter2 registry:5000",
    "az acr login -n a -p 'hunter2'", "redis-cli -h h -p 6379 -a hunter2 ping",
    "curl --user 'a:hunter2' https://h/x", "nats://hunter2@broker:4222", "connect nats://hunter2@a,nats://hunter2@b",
    '{"private_key": "-----BEGIN RSA PRIVATE KEY-----\\nhunter2\\n-----END RSA PRIVATE KEY-----\\n"}',
]  # fmt: skip
BY_THEMSELVES = [
    "AKIA" + "IOSFODNN7EXAMPLE", "ASIA" + "IOSFODNN7EXAMPLE", "ghp_" + "a1B2" * 9, "github_pat_" + "a1B2" * 8,
    "hf_" + "a1B2" * 8, "glpat-" + "a1B2" * 5, "sk-" + "a1B2" * 8, "sk-ant-api03-" + "a1B2" * 8, "xoxb-" + "12-ab" * 4,
    "AIza" + "a1B2c" * 7, "ya29." + "a1B2" * 8, "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.a1B2c3D4", "MIIEvQIBADANB9kq" * 4,
]
ORDINARY = [
    "num_tokens=5", "max_token=512", "key=value", "sort_key=user_id", "primary_key = \"id\"", "monkey=banana 1",
    "tokens: 512",
    "--set data.key=user_id --set train.batch_size=4096", 'name = "keys"', "keys=3, tokens=4", "passes=2",
    "compass=north1",
    "invalid token: ExpiredToken", "a bearer token is missing", "Basic authentication is needed",
    "the password is wrong",
    "password: required", "secret embark-key not found", "secretKeyRef: name", "secret: none",
    "HF_TOKEN=$HF_TOKEN", "HF_TOKEN=${X}",
    "AWS_WEB_IDENTITY_TOKEN_FILE=/var/run/secrets/token", "SSH_KEY=~/.ssh/id_ed25519", "PUBLIC_KEY=abc",
    "s3://bucket/runs/dlrm-key=1/step-000000060", "http://127.0.0.1:6006/path", "git+ssh://git@github.com/a/b",
    "gs://b/x@y",
    "http://host:80/a@b",
    "sha256 " + "0123456789abcdef" * 4, "0123456789abcdef" * 4, "step 12,400/20,000 loss 0.4512  AUC 0.7712",
    "embark-worker-0 NCCL INFO Using network AWS Libfabric", "signal=SIGTERM", "design: flat",
    "risk-0123456789abcdef01234567",
    "table t0: id 7 of sample 3 of the batch is not in 0 to 5,", "tokenizer=bert-base", "token_count: 17", "passed: 12",
    "docker run -p 80:80 image", "redis-cli -p 6379 ping", "login as alice",
    "curl -s http://h:8000/v2 -o out", "mysql-connector 8.1", "nats://broker:4222", "curl -o user:x",
    "assigned: node-12", "signature_version=s3v4", "keyspace: 12", "turnkey: 12",
]  # fmt: skip


@pytest.mark.parametrize("text", SECRETS)
def test_a_secret_is_cut_out_by_its_form(text, monkeypatch):
    assert "hunter" not in redact(text).replace("embark", "")
    assert "hunter" not in redact(f"2026-01-01 rank 3 | {text}")


@pytest.mark.parametrize("secret", BY_THEMSELVES)
def test_a_secret_that_has_a_form_of_its_own_needs_no_name(secret):
    assert secret[4:] not in redact(secret)
    if not secret.startswith("MII"):
        assert redact(f"got {secret}, used it") == "got …, used it"


@pytest.mark.parametrize("text", ORDINARY)
def test_ordinary_text_stays_as_it_is(text):
    assert redact(text) == text


def test_values_of_the_environment_are_cut_out_wherever_they_stand(monkeypatch):
    monkeypatch.setenv("MY_SERVICE_CREDENTIAL", "swordfish/1")
    assert redact("it was swordfish/1, or swordfish%2F1") == "it was …, or …"


@pytest.mark.parametrize("text", SECRETS)
def test_no_secret_reaches_events_logs_and_the_page(text, tmp_path):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "rank0.log").write_text(text.replace("\n", " ") + "\n")
    old = json.dumps({"event": "error", "time_s": 1.0, "text": text})  # As an older version may have written it.
    (tmp_path / "events.jsonl").write_text(old + "\n")
    run = WatchedRun(RunFiles(tmp_path))
    shown = [str(log_lines(run, file=number, words="")) for number in (0, 1)]
    shown += [Event("note", {"text": text}).to_json(), parse_event(old).to_json(),
              str(LogLine.of(0, "pod", text, 0).to_dict())]
    assert "hunter" not in "".join(shown)
    assert not log_lines(run, file=1, words="hunter")["lines"]


def test_the_short_last_line_of_a_private_key_is_not_on_the_page(tmp_path):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "rank0.log").write_text(
        "before\n-----BEGIN PRIVATE KEY-----\n" + "aB3" * 21 + "x\nhunter2\n-----END PRIVATE KEY-----\nafter\n")
    (tmp_path / "events.jsonl").write_text("")
    lines = [line["text"] for line in log_lines(WatchedRun(RunFiles(tmp_path)), file=1, words="")["lines"]]
    assert lines == ["before", "-----BEGIN PRIVATE KEY-----…", "…", "…", "-----END PRIVATE KEY-----", "after"]


def test_an_error_shown_by_a_command_has_no_secret(capsys):
    from embark.cli.console import Console

    for console in (Console(), Console(json=True)):
        console.error(UserError("postgres://u:hunter2@db failed", fix="unset DB_PASSWORD=hunter2"))
        console.warning("HF_TOKEN=hunter2hunter2 is set")
    assert "hunter" not in capsys.readouterr().err
