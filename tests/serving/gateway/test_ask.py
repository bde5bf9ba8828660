"""What is read from a request, what is refused, and what goes on to the replica."""

import json

import pytest

from narrowgauge.serving.gateway.ask import end_to_end, read_ask, request_id_of
from narrowgauge.serving.openai.errors import ApiError

CHAT = "/v1/chat/completions"


def ask(body, *, headers=(), target=CHAT, peer=None):
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return read_ask(target, list(headers), data, arrived=0.0, request_id="id-1", peer=peer)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "the body is not valid JSON"),
        (b"{", "the body is not valid JSON"),
        (b'{"model": "m"', "the body is not valid JSON"),
        (b'{"model": "m", "temperature": NaN}', "NaN is not JSON"),
        (b'\xff{"model": "m"}', "it is not UTF-8"),
        ('{"model": "m"}'.encode("utf-16"), "it is not UTF-8"),
        (b'\xef\xbb\xbf{"model": "m"}', "the body is not valid JSON"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"model": "m", "seed": ' + b"9" * 5_000 + b"}", "the body is not valid JSON"),
        (b"[1]", "the body must be a JSON object"),
        (b"null", "the body must be a JSON object"),
        (b"{}", "you must name a model"),
        (b'{"model": ""}', "you must name a model"),
        (b'{"model": 7}', "you must name a model"),
        (b'{"model": "m", "stream": true, "stream_options": {}, "x": 1e999}', "a number that is too large"),
    ],
)
def test_a_body_that_cannot_be_routed_is_a_400_in_one_line(body, message):
    with pytest.raises(ApiError) as refusal:
        ask(body)
    assert refusal.value.status == 400
    assert message in refusal.value.message
    assert "\n" not in refusal.value.message


def test_the_session_is_the_header_else_the_user_else_nobody():
    assert ask({"model": "m", "user": "u"}, headers=[(b"x-session-id", b"s")]).key == b"s"
    assert ask({"model": "m", "user": "u"}).key == "u"
    assert ask({"model": "m", "user": "\ud800"}).key == "\ud800"
    for user in ("", 5, None, ["u"]):
        assert ask({"model": "m", "user": user}).key is None


def test_a_pin_is_canary_or_stable():
    assert ask({"model": "m"}).track is None
    assert ask({"model": "m"}, headers=[(b"x-narrowgauge-track", b"canary")]).track == "canary"
    with pytest.raises(ApiError, match="x-narrowgauge-track must be 'canary' or 'stable'"):
        ask({"model": "m"}, headers=[(b"x-narrowgauge-track", b"blue")])


@pytest.mark.parametrize("body", [b'{"model":"m","stream":true}', b' {"stream" : true, "model": "m", "x": 1.0e2 }\n'])
def test_usage_is_asked_for_and_the_clients_own_bytes_stay(body):
    result = ask(body)
    assert result.drops_usage
    assert result.body.startswith(body.rstrip()[:-1])
    assert json.loads(result.body) == {**json.loads(body), "stream_options": {"include_usage": True}}


@pytest.mark.parametrize("options", [{}, {"include_usage": False}, None, {"chunk_include_usage": True}])
def test_usage_is_asked_for_beside_the_clients_other_options(options):
    result = ask({"model": "m", "stream": True, "stream_options": options, "text": "é\ud800"})
    assert result.drops_usage
    sent = json.loads(result.body)
    assert sent["stream_options"] == {**(options or {}), "include_usage": True}
    assert sent["text"] == "é\ud800"


@pytest.mark.parametrize(
    ("target", "fields"),
    [
        (CHAT, {"stream": True, "stream_options": {"include_usage": True}}),
        (CHAT, {"stream": True, "stream_options": "all"}),
        (CHAT, {"stream": False}),
        (CHAT, {"stream": 1}),
        (CHAT, {}),
        ("/tokenize", {"stream": True}),
    ],
)
def test_where_usage_need_not_be_asked_for_the_body_is_the_clients(target, fields):
    body = json.dumps({"model": "m", **fields}).encode()
    result = ask(body, target=target)
    assert result.body == body
    assert not result.drops_usage


def test_the_path_decides_what_is_recorded_and_the_query_goes_on():
    result = ask({"model": "m"}, target="/v1/completions?a=b")
    assert (result.path, result.target, result.generative) == ("/v1/completions", "/v1/completions?a=b", True)
    assert not ask({"model": "m"}, target="/tokenize").generative


@pytest.mark.parametrize(
    ("fields", "named"), [({"tools": [{}]}, True), ({"functions": [{}]}, True), ({"tools": []}, False)]
)
def test_requests_that_name_tools_are_known(fields, named):
    assert ask({"model": "m", **fields}).names_tools is named


def test_headers_of_one_connection_and_our_own_stay_here():
    sent = [
        *((b"Host", b"front"), (b"content-length", b"14"), (b"TE", b"trailers"), (b"transfer-encoding", b"chunked")),
        *((b"Connection", b"close, X-Private"), (b"x-private", b"1"), (b"accept-encoding", b"gzip")),
        *((b"x-narrowgauge-shadow", b"1"), (b"x-narrowgauge-role", b"canary"), (b"x-request-id", b"theirs")),
        *((b"authorization", b"Bearer k"), (b"content-type", b"application/json"), (b"traceparent", b"00-1-2-01")),
        (b"x-forwarded-for", b"10.0.0.1"),
    ]
    assert ask({"model": "m"}, headers=sent, peer="10.0.0.2").headers == [
        *((b"authorization", b"Bearer k"), (b"content-type", b"application/json"), (b"traceparent", b"00-1-2-01")),
        *((b"x-forwarded-for", b"10.0.0.1, 10.0.0.2"), (b"x-request-id", b"id-1")),
    ]


def test_end_to_end_headers_keep_their_order_and_repetitions():
    headers = [(b"Set-Cookie", b"a"), (b"Keep-Alive", b"5"), (b"set-cookie", b"b")]
    assert end_to_end(headers) == [(b"set-cookie", b"a"), (b"set-cookie", b"b")]


@pytest.mark.parametrize("value", [b"", b"a b", b"x" * 129, b"caf\xc3\xa9"])
def test_a_request_id_that_could_not_be_logged_is_replaced(value):
    assert request_id_of([(b"x-request-id", b"kept-1")]) == "kept-1"
    made = request_id_of([(b"x-request-id", value)])
    assert made != value.decode("latin-1")
    assert len(made) == 32
    assert made != request_id_of([])
