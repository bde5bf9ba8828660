"""Progress: every layer and block counted once, and a time left that goes by what blocks took."""

import json

import pytest

from narrowgauge.quant.pipeline.results import (
    BlockResult,
    KVResult,
    LayerResult,
    Meter,
    SmoothingResult,
    quantization_report,
)

LAYERS = [
    LayerResult(name=name, scheme="W4A16", weight_error=0.123456, output_error=None, seconds=3.0) for name in "abcd"
]


class Clock:
    """A clock that the test sets."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def _meter(sizes, blocks):
    clock, steps = Clock(), []
    return Meter(sizes, blocks, steps.append, clock=clock), clock, steps


def test_within_the_first_block_time_goes_by_weights_then_by_blocks():
    meter, clock, steps = _meter({"a": 30, "b": 10, "c": 30, "d": 10}, 2)
    meter.say("calibration text")
    clock.now += 1000  # texts and embedding are no measure for the rest
    meter.begin()
    clock.now += 6
    meter.layer("a", "0")
    clock.now += 2
    meter.layer("b", "0")
    clock.now += 4  # the forward pass to the next block
    meter.block("0")
    clock.now += 3
    meter.say("1: smoothing")
    clock.now += 20
    meter.layer("c", "1")
    meter.layer("d", "1")
    meter.block("1")
    meter.say("checkpoint")
    assert [step.eta_s for step in steps] == [None, 10.0, 8.0, 12.0, 9.0, 0.0, 0.0, 0.0, 0.0]
    assert [step.done for step in steps] == [0, 1, 2, 2, 2, 3, 4, 4, 4]
    assert {step.total for step in steps} == {4}


def test_blocks_of_an_earlier_run_count_as_done_but_not_as_time():
    meter, clock, steps = _meter({"a": 1, "b": 1, "c": 1}, 3)
    meter.found((LAYERS[0],))
    meter.begin()
    clock.now += 5
    meter.layer("b", "1")
    meter.block("1")
    assert [(step.done, step.eta_s) for step in steps] == [(2, None), (2, 5.0)]


def test_without_linears_blocks_are_counted():
    meter, clock, steps = _meter({}, 2)
    meter.begin()
    clock.now += 3
    meter.block("0")
    meter.block("1")
    assert [(step.done, step.total) for step in steps] == [(1, 2), (2, 2)]


def test_the_report_holds_no_time_and_no_digit_that_depends_on_the_order_of_a_sum():
    smoothing = SmoothingResult(
        method="awq", linears=("a", "b"), smallest=None, largest=None, note="no scales lose less"
    )
    scales = KVResult(name="attn", key=(0.1000049, 0.2), value=(1 / 3, 1 / 3))
    blocks = [
        BlockResult(layers=tuple(LAYERS[:2]), smoothing=(smoothing,), kv_cache=scales),
        BlockResult(layers=tuple(LAYERS[2:])),
    ]
    report = quantization_report([{"name": "awq"}], blocks)
    assert json.loads(json.dumps(report)) == report
    assert report["layers"][3] == {
        "name": "d",
        "scheme": "W4A16",
        "weight_error": pytest.approx(0.1235, abs=1e-12),
        "output_error": None,
        "fallback": None,
    }
    assert report["smoothing"][0]["note"] == "no scales lose less"
    assert report["kv_cache"] == [{"name": "attn", "key": [0.1, 0.2], "value": [0.3333, 0.3333]}]
    assert set(quantization_report([], [BlockResult()])) == {"methods", "layers"}
