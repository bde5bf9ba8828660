import json

import pytest

from narrowgauge.engine.request import RequestError
from narrowgauge.serving.openai.errors import ApiError
from narrowgauge.serving.openai.protocol import (
    IGNORED_HEADER,
    NEUTRAL_CHAT,
    NEUTRAL_COMPLETION,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    GenerationConfigError,
    ignored_fields,
    parse_body,
    refuse_unsupported,
    sampling_defaults,
)

MESSAGES = [{"role": "user", "content": "hi"}]


def chat(**fields):
    return parse_body(json.dumps({"messages": MESSAGES, **fields}).encode(), ChatBody)


def refused(call, *arguments, **fields):
    with pytest.raises(ApiError) as caught:
        call(*arguments, **fields)
    assert caught.value.status == 400
    return caught.value


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", "hot"),
        ("temperature", True),
        ("top_p", [0.5]),
        ("max_tokens", 1.5),
        ("max_tokens", "12"),
        ("n", 0),
        ("n", 1000),
        ("stream", "yes"),
        ("stop", 5),
        ("stop", [1]),
        ("seed", 2**70),
        ("logit_bias", {"a": 1}),
        ("logit_bias", [1]),
        ("messages", "hello"),
        ("messages", [{"role": "wizard", "content": "x"}]),
        ("messages", [{"content": "x"}]),
        ("top_logprobs", 21),
        ("stream_options", {"include_usage": 3}),
        ("user", 5),
        ("metadata", "a"),
        ("parallel_tool_calls", "yes"),
    ],
)
def test_a_value_of_the_wrong_kind_is_refused_by_name(field, value):
    error = refused(chat, **{field: value})
    assert error.param == field
    assert error.message.startswith(field)


@pytest.mark.parametrize("body", [b"", b"{", b'{"messages": [}', b"\xff\xfe", b'{"messages": "\\ud800"}'])
def test_what_is_not_json_is_refused_as_such(body):
    assert "valid JSON" in refused(parse_body, body, ChatBody).message


@pytest.mark.parametrize("body", [b"[]", b"3", b"null", b'"text"'])
def test_a_body_that_is_no_object_is_refused(body):
    assert "JSON object" in refused(parse_body, body, ChatBody).message


def test_not_a_number_is_refused():
    assert refused(parse_body, b'{"messages": [], "temperature": NaN}', ChatBody).param == "temperature"


def test_null_means_the_default_everywhere():
    names = set(ChatBody.model_fields) - {"messages"}
    assert chat(**dict.fromkeys(names)).choices == 1


def test_unknown_fields_are_passed_over_and_named_wherever_they_stand():
    body = chat(
        messages=[{"role": "user", "content": "hi", "name": "me"}],
        stream=True,
        stream_options={"include_obfuscation": False},
        tools=[],
        frobnicate=True,
        **{"ü\r\nset-cookie: a": 1},
    )
    refuse_unsupported(body, NEUTRAL_CHAT)
    named = ignored_fields(body, NEUTRAL_CHAT)[IGNORED_HEADER]
    assert named == "frobnicate, ???set-cookie??a, stream_options.include_obfuscation, messages.name"
    assert len(ignored_fields(chat(**{f"field-{i}": 1 for i in range(1000)}), NEUTRAL_CHAT)[IGNORED_HEADER]) <= 512


def test_fields_about_the_caller_are_known_and_change_nothing():
    body = chat(user="me", metadata={"a": 1}, service_tier="auto", safety_identifier="x", parallel_tool_calls=True)
    refuse_unsupported(body, NEUTRAL_CHAT)
    assert ignored_fields(body, NEUTRAL_CHAT) == {}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tools", [{"type": "function", "function": {"name": "f"}}]),
        ("tool_choice", "required"),
        ("functions", [{"name": "f"}]),
        ("response_format", {"type": "json_object"}),
        ("best_of", 3),
        ("use_beam_search", True),
        ("guided_json", {}),
        ("priority", 1),
        ("priority", False),
        ("store", True),
        ("verbosity", "low"),
        ("modalities", ["text", "audio"]),
        ("stream_options", {"include_usage": True}),
    ],
)
def test_a_field_that_would_be_ignored_is_refused_by_name(field, value):
    assert refused(refuse_unsupported, chat(**{field: value}), NEUTRAL_CHAT).param == field


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": []},
        {"tools": None, "tool_choice": "none"},
        {"response_format": {"type": "text"}},
        {"n": 2, "best_of": 2},
        {"priority": 0},
        {"stream": True, "stream_options": {"include_usage": True}},
    ],
)
def test_a_value_that_changes_nothing_is_accepted(fields):
    assert refuse_unsupported(chat(**fields), NEUTRAL_CHAT) is None


def test_a_suffix_is_refused_unless_empty():
    body = parse_body(b'{"prompt": "a", "suffix": "b"}', CompletionBody)
    assert refused(refuse_unsupported, body, NEUTRAL_COMPLETION).param == "suffix"
    assert refuse_unsupported(parse_body(b'{"prompt": "a", "suffix": ""}', CompletionBody), NEUTRAL_COMPLETION) is None


def test_what_was_asked_beats_the_checkpoints_defaults_and_those_beat_openais():
    params = chat(temperature=0.25, stop="x", logit_bias={"5": -100}).sampling({"temperature": 0.5, "top_k": 40})
    assert (params.temperature, params.top_k, params.top_p) == (0.25, 40, 1.0)
    assert params.stop == ("x",)
    assert dict(params.logit_bias) == {5: -100.0}


@pytest.mark.parametrize(("field", "value"), [("temperature", -1), ("top_p", 0), ("top_p", 1.5), ("stop", "")])
def test_a_number_out_of_range_names_its_field(field, value):
    with pytest.raises(RequestError) as caught:
        chat(**{field: value}).sampling({})
    assert caught.value.param == field


def test_only_sampling_numbers_are_taken_from_generation_config(tmp_path):
    assert sampling_defaults(tmp_path) == {}
    config = {"temperature": 0.6, "top_p": None, "do_sample": True, "eos_token_id": [2], "top_k": 20, "max_length": 20}
    (tmp_path / "generation_config.json").write_text(json.dumps(config))
    assert sampling_defaults(tmp_path) == {"temperature": 0.6, "top_k": 20}


@pytest.mark.parametrize("text", ["{", "[1]", '{"temperature": -3}'])
def test_a_generation_config_that_cannot_be_used_is_named(tmp_path, text):
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(GenerationConfigError, match="generation_config"):
        sampling_defaults(tmp_path)


@pytest.mark.parametrize("messages", [5, [{"role": "user"}], {"role": "user"}])
def test_a_field_that_a_body_does_not_declare_may_hold_anything(messages):
    body = DetokenizeBody(tokens=[1], messages=messages)
    assert ignored_fields(body) == {IGNORED_HEADER: "messages"}
