"""What a client asks: the parts of an HTTP request that routing, retries and records need to know. Everything else is bytes."""

import json
import re
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

from narrowgauge.serving.gateway.routing import Role
from narrowgauge.serving.openai.errors import bad_request

Headers = list[tuple[bytes, bytes]]

GENERATIVE = ("/v1/chat/completions", "/v1/completions")
"""Paths whose requests are recorded and may be copied to a shadow."""

_HOP_BY_HOP = frozenset(
    b"connection keep-alive proxy-authenticate proxy-authorization proxy-connection te trailer transfer-encoding upgrade".split()
)
_NOT_FORWARDED = _HOP_BY_HOP | frozenset(b"host content-length expect accept-encoding x-request-id".split())
_REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")


@dataclass(frozen=True, kw_only=True)
class Ask:
    """One request as it goes to a replica.

    `target` is path and query. `arrived` is monotonic seconds. `body` asks for usage in streams; `drops_usage`: the client
    had not asked for that chunk, the gateway did. `names_tools`: never copied to a shadow.
    """

    path: str
    target: str
    model: str
    key: str | bytes | None
    track: Role | None
    stream: bool
    drops_usage: bool
    names_tools: bool
    request_id: str
    headers: Headers
    body: bytes
    arrived: float

    @property
    def generative(self) -> bool:
        """Whether it is recorded and may be copied."""
        return self.path in GENERATIVE


def read_ask(
    target: str, headers: Headers, body: bytes, *, arrived: float, request_id: str, peer: str | None = None
) -> Ask:
    """Reads what routing needs. Raises ApiError (400) for a body that is not a JSON object with a model's name."""
    path = target.partition("?")[0]
    fields = _read_object(body)
    model = fields.get("model")
    if not isinstance(model, str) or not model:
        raise bad_request("you must name a model: the body needs a text field 'model'", param="model")
    by_name = dict(reversed(headers))
    user = fields.get("user")
    stream = fields.get("stream") is True and path in GENERATIVE
    sent, drops_usage = _asking_for_usage(fields, body) if stream else (body, False)
    return Ask(
        path=path,
        target=target,
        model=model,
        key=by_name.get(b"x-session-id") or (user if isinstance(user, str) and user else None),
        track=_track(by_name.get(b"x-narrowgauge-track")),
        stream=stream,
        drops_usage=drops_usage,
        names_tools=any(fields.get(name) for name in ("tools", "functions")),
        request_id=request_id,
        headers=_forwarded(headers, request_id, peer),
        body=sent,
        arrived=arrived,
    )


def request_id_of(headers: Headers) -> str:
    """The client's x-request-id where it is printable and at most 128 long, else a new one."""
    for name, value in headers:
        if name == b"x-request-id" and _REQUEST_ID.fullmatch(value):
            return value.decode("ascii")
    return uuid.uuid4().hex


def end_to_end(headers: Iterable[tuple[bytes, bytes]]) -> Headers:
    """Headers without those that concern one connection only, be they known or named in Connection (names in lower case)."""
    kept = [(name.lower(), value) for name, value in headers]
    named = {token.strip().lower() for name, value in kept if name == b"connection" for token in value.split(b",")}
    return [(name, value) for name, value in kept if name not in _HOP_BY_HOP and name not in named]


def _forwarded(headers: Headers, request_id: str, peer: str | None) -> Headers:
    # Ours are set below or by the gateway alone: a client cannot mark its request as a shadow copy. Without
    # accept-encoding the answer stays plain, so that events can be found in it.
    kept = [
        (name, value)
        for name, value in end_to_end(headers)
        if name not in _NOT_FORWARDED and not name.startswith(b"x-narrowgauge-")
    ]
    if not any(name == b"content-type" for name, _ in kept):
        kept.append((b"content-type", b"application/json"))
    if peer:
        earlier = [value for name, value in kept if name == b"x-forwarded-for"]
        kept = [(name, value) for name, value in kept if name != b"x-forwarded-for"]
        kept.append((b"x-forwarded-for", b", ".join([*earlier, peer.encode("ascii", "replace")])))
    kept.append((b"x-request-id", request_id.encode()))
    return kept


def _track(value: bytes | None) -> Role | None:
    if value is None:
        return None
    if value not in (b"canary", b"stable"):
        raise bad_request("x-narrowgauge-track must be 'canary' or 'stable'")
    return cast(Role, value.decode())


def _read_object(body: bytes) -> Mapping[str, Any]:
    try:
        fields = json.loads(body.decode("utf-8"), parse_constant=_refuse_constant)
    except RecursionError:
        raise bad_request("the body is not acceptable JSON: it is nested too deeply") from None
    except ValueError as error:
        reason = "it is not UTF-8" if isinstance(error, UnicodeDecodeError) else str(error)
        raise bad_request(f"the body is not valid JSON: {reason}") from None
    if not isinstance(fields, dict):
        raise bad_request("the body must be a JSON object")
    return fields


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _asking_for_usage(fields: Mapping[str, Any], body: bytes) -> tuple[bytes, bool]:
    options = fields.get("stream_options")
    if options is None and "stream_options" not in fields:
        # The text is a JSON object with members, so it ends in a brace: the client's own bytes stay as they are.
        return body.rstrip()[:-1] + b',"stream_options":{"include_usage":true}}', True
    if options is not None and not isinstance(options, dict):
        return body, False  # the replica refuses it
    if (options or {}).get("include_usage") is True:
        return body, False
    asked = {**fields, "stream_options": {**(options or {}), "include_usage": True}}
    try:
        return json.dumps(asked, allow_nan=False).encode(), True
    except ValueError:
        raise bad_request("the body holds a number that is too large") from None
