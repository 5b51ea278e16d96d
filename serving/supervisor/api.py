"""What the supervisor asks a tritonserver over HTTP, with the standard library alone."""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import json
import re
import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from ...runtime.errors import Error


class TritonError(Error):
    """The server answered with an error: its own words."""


class NoAnswer(Error):
    """The server did not answer in time, or not at all."""


@dataclasses.dataclass(frozen=True)
class ModelState:
    """A model of the repository index: state is READY, UNAVAILABLE, LOADING or UNLOADING."""

    name: str
    version: str
    state: str
    reason: str


class TritonApi:
    """Calls to one server. Any thread: a connection a call, closed after it, for an open one would delay its exit."""

    def __init__(self, host: str, http_port: int, metrics_port: int) -> None:
        self._host = "127.0.0.1" if host in ("0.0.0.0", "") else "::1" if host == "::" else host
        self._http_port = http_port
        self._metrics_port = metrics_port

    def is_live(self, timeout_s: float) -> bool:
        """Whether its ports are open and it answers: it is ready for loading models."""
        try:
            return self._call("GET", "/v2/health/live", None, timeout_s)[0] == 200
        except NoAnswer:
            return False

    def is_model_ready(self, name: str, timeout_s: float) -> bool:
        """Whether the server counts the model as ready, which says nothing about its stub."""
        return self._call("GET", f"/v2/models/{quote(name)}/ready", None, timeout_s)[0] == 200

    def index(self, timeout_s: float) -> list[ModelState]:
        """Return the models of the repositories that are loaded or were; one entry a version."""
        entries = self._json("POST", "/v2/repository/index", {}, timeout_s)
        return [
            ModelState(one["name"], one.get("version", ""), one.get("state", ""), one.get("reason", ""))
            for one in entries
        ]

    def load(self, name: str, timeout_s: float) -> None:
        """Load a model, or load it again where its files changed; returns when it is ready."""
        self._json("POST", f"/v2/repository/models/{quote(name)}/load", {}, timeout_s)

    def unload(self, name: str, timeout_s: float) -> None:
        """Unload a model; its running requests end first, after this returns."""
        self._json("POST", f"/v2/repository/models/{quote(name)}/unload", {}, timeout_s)

    def config(self, name: str, timeout_s: float) -> dict[str, Any]:
        """Return a loaded model's configuration."""
        found: dict[str, Any] = self._json("GET", f"/v2/models/{quote(name)}/config", None, timeout_s)
        return found

    def generate(self, name: str, inputs: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        """Return the first answer of an inference, streaming model or not.

        Its stream is read to the end: a connection closed at that moment leaves the request in the server for ever.
        """
        with self._connection(self._http_port, timeout_s) as connection:
            response = self._send(
                connection, "POST", f"/v2/models/{quote(name)}/generate_stream", inputs, timeout_s
            )
            line = self._first_event(response, time.monotonic() + timeout_s)
        try:
            found: dict[str, Any] = json.loads(line)
        except ValueError:
            raise TritonError(f"an answer of {name} is no JSON: {line[:200]!r}") from None
        if "error" in found:
            raise TritonError(str(found["error"]))
        return found

    def metrics(self, timeout_s: float) -> str:
        """Return the metrics as text."""
        with self._connection(self._metrics_port, timeout_s) as connection:
            response = self._send(connection, "GET", "/metrics", None, timeout_s)
            return self._body(response).decode("utf-8", "replace")

    def _json(self, method: str, path: str, body: Mapping[str, Any] | None, timeout_s: float) -> Any:
        status, text = self._call(method, path, body, timeout_s)
        try:
            found = json.loads(text) if text else {}
        except ValueError:
            raise TritonError(f"{path}: status {status}, {text[:200]!r}") from None
        if status != 200:
            raise TritonError(str(found.get("error", text)) if isinstance(found, dict) else text)
        return found

    def _call(
        self, method: str, path: str, body: Mapping[str, Any] | None, timeout_s: float
    ) -> tuple[int, str]:
        with self._connection(self._http_port, timeout_s) as connection:
            response = self._send(connection, method, path, body, timeout_s)
            return response.status, self._body(response).decode("utf-8", "replace")

    def _connection(self, port: int, timeout_s: float) -> contextlib.closing[http.client.HTTPConnection]:
        return contextlib.closing(http.client.HTTPConnection(self._host, port, timeout=timeout_s))

    def _send(
        self,
        connection: http.client.HTTPConnection,
        method: str,
        path: str,
        body: Mapping[str, Any] | None,
        timeout_s: float,
    ) -> http.client.HTTPResponse:
        text = None if body is None else json.dumps(body)
        headers = {"Connection": "close", "Content-Type": "application/json"}
        try:
            connection.request(method, path, text, headers)
            return connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            raise NoAnswer(f"no answer to {method} {path} within {timeout_s:g} s ({error!r})") from None

    @staticmethod
    def _body(response: http.client.HTTPResponse) -> bytes:
        try:
            return response.read()
        except (OSError, http.client.HTTPException) as error:
            raise NoAnswer(f"an answer broke off ({error!r})") from None

    @staticmethod
    def _first_event(response: http.client.HTTPResponse, deadline: float) -> str:
        """Return the JSON of the first event, or of the error that came in its place."""
        found = ""
        try:
            for line in response:
                if not found and line.startswith(b"data:"):
                    found = line[5:].decode("utf-8", "replace")
                elif not found and line.startswith(b"{"):  # an error before there was a stream
                    found = line.decode("utf-8", "replace")
                if time.monotonic() > deadline:
                    break
        except (OSError, http.client.HTTPException) as error:
            if not found:
                raise NoAnswer(f"no event of the stream came ({error!r})") from None
        if not found:
            raise NoAnswer(f"the stream ended without an event (status {response.status})")
        return found


def counter_sum(metrics: str, family: str, labels: Mapping[str, str]) -> float:
    """Return the sum of a family's samples that have all of `labels`; 0.0 when there is none."""
    total = 0.0
    for line in metrics.splitlines():
        if line.startswith(f"{family}{{") and all(
            f'{name}="{text}"' in line for name, text in labels.items()
        ):
            found = re.search(r"\}\s+(\S+)", line)
            total += float(found.group(1)) if found else 0.0
    return total
