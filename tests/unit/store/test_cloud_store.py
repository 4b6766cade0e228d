"""Credentials that obstore does not find itself."""

from __future__ import annotations

import json
import threading
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, HTTPServer

from embark.store.cloud_store import _azureml_token


def test_an_azure_ml_endpoint_s_identity_gives_the_token(monkeypatch):
    asked = []

    class Identity(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append((self.path, self.headers["secret"]))
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps({"access_token": "T", "expires_on": "1800000000"}).encode())

        def log_message(self, *_: object) -> None:
            pass

    assert _azureml_token() is None
    with HTTPServer(("127.0.0.1", 0), Identity) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        monkeypatch.setenv("MSI_ENDPOINT", f"http://127.0.0.1:{server.server_port}/msi/token")
        monkeypatch.setenv("MSI_SECRET", "S")
        found = _azureml_token()()
        thread.join()
    assert found == {"token": "T", "expires_at": datetime.fromtimestamp(1_800_000_000, UTC)}
    assert asked == [("/msi/token?api-version=2017-09-01&resource=https://storage.azure.com/", "S")]
