"""Events in a stream of bytes: cut anywhere, read without decoding, nothing taken for what it is not."""

import json

import pytest

from narrowgauge.serving.gateway.events import DONE, EventStream, Findings, error_event
from narrowgauge.serving.gateway.records import Stopwatch
from narrowgauge.serving.openai.errors import ApiError


def chunk(text="", *, finish=None, **more):
    value = {"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": finish}], "usage": None, **more}
    return b"data: " + json.dumps(value).encode() + b"\n\n"


USAGE = chunk(choices=[], usage={"prompt_tokens": 5, "total_tokens": 7, "completion_tokens": 2})
EVENTS = [b": queued\n\n", chunk("a"), b": alive\n\n", chunk("b", finish="length"), USAGE, DONE]


def stream(*, drops_usage=True):
    return EventStream(Stopwatch(0.0), drops_usage=drops_usage)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 50, 10_000])
def test_what_is_forwarded_does_not_depend_on_where_the_network_cuts(size):
    data = b"".join(EVENTS)
    events = stream()
    out = [events.feed(data[begin : begin + size], 0.0) for begin in range(0, len(data), size)]
    assert b"".join(out) == EVENTS[1] + EVENTS[3] + DONE
    assert all(part == b"" or part.endswith(b"\n\n") for part in out), "only whole events go on"
    assert (events.done, events.started, events.error_status) == (True, True, None)
    assert (events.finish_reason, events.prompt_tokens, events.output_tokens) == ("length", 5, 2)


def test_the_usage_chunk_goes_on_to_a_client_who_asked_for_it():
    events = stream(drops_usage=False)
    assert b"".join(events.feed(event, 0.0) for event in EVENTS) == EVENTS[1] + EVENTS[3] + USAGE + DONE


def test_usage_in_a_chunk_with_choices_is_read_and_forwarded():
    last = chunk("b", finish="stop", usage={"prompt_tokens": 1, "completion_tokens": 3})
    events = stream()
    assert events.feed(last, 0.0) == last
    assert (events.finish_reason, events.prompt_tokens, events.output_tokens) == ("stop", 1, 3)


def test_text_that_looks_like_fields_is_text():
    text = '"usage":{"prompt_tokens":99,"completion_tokens":99},"choices":[],"finish_reason":"stop" data: [DONE]\n\n'
    event = chunk(text)
    events = stream()
    assert events.feed(event, 0.0) == event
    assert (events.finish_reason, events.prompt_tokens, events.output_tokens, events.done) == (None, None, None, False)


def test_events_of_other_line_ends_are_found_too():
    events = stream()
    data = chunk("a").replace(b"\n", b"\r\n") + b": alive\r\n\r\n" + b"data: [DONE]\r\n\r\n"
    assert events.feed(data, 0.0) == chunk("a").replace(b"\n", b"\r\n") + DONE
    assert events.done


def test_only_what_a_client_waits_for_is_timed():
    watch = Stopwatch(10.0)
    events = EventStream(watch, drops_usage=True)
    for moment, event in enumerate([b": queued\n\n", chunk("a"), b": alive\n\n", chunk("b"), USAGE, DONE], start=11):
        events.feed(event, float(moment))
    assert (watch.ttft_s, watch.itl_p50_s) == (2.0, 2.0)


@pytest.mark.parametrize(
    ("code", "status"), [(429, 429), (503, 503), ("boom", 500), (None, 500), (200, 500), (9**99, 500)]
)
def test_an_error_event_is_known_by_its_first_key(code, status):
    events = stream()
    event = b"data: " + json.dumps({"error": {"message": "no", "code": code}}).encode() + b"\n\n"
    assert events.feed(event, 0.0) == event
    assert (events.error_status, events.started) == (status, False)


def test_an_error_that_is_no_object_counts_as_500():
    events = stream()
    events.feed(b'data: {"error": "boom"}\n\n', 0.0)
    assert events.error_status == 500


def test_a_whole_answer_is_searched_the_same_way():
    findings = Findings()
    findings.search(
        json.dumps({"choices": [{"finish_reason": "stop"}], "usage": {"prompt_tokens": 2}}, indent=1).encode()
    )
    assert (findings.finish_reason, findings.prompt_tokens, findings.output_tokens) == ("stop", 2, None)


def test_our_own_error_in_band_is_json_and_ends_the_stream():
    first, rest = error_event(ApiError(502, 'lost "it"\n')).split(b"\n\n", 1)
    assert rest == DONE
    assert json.loads(first.removeprefix(b"data: "))["error"]["message"] == 'lost "it"\n'
