from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from narrowgauge.serving import metrics
from narrowgauge.serving.metrics import GatewayMetrics, ReplicaMetrics, RolloutMetrics, build_info


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def snapshot(**changes):
    base = {
        "running": 0,
        "waiting": 0,
        "kv_blocks_total": 8,
        "kv_blocks_used": 2,
        "preemptions": 0,
        "steps": 5,
        "heartbeat_age_s": 0.1,
        "fragmentation": 0.25,
    }
    return SimpleNamespace(**{**base, **changes})


@pytest.fixture
def replica():
    return ReplicaMetrics(CollectorRegistry(), model="m", snapshot=lambda: snapshot(running=3))


def sample(replica, name, **labels):
    return replica.registry.get_sample_value(name, labels)


OURS = {"model": "m", "role": "stable"}
VLLM = {"model_name": "m", "engine": "0"}


def test_every_finish_reason_exists_before_the_first_request(replica):
    for reason in ("stop", "length", "abort", "error"):
        assert sample(replica, "vllm:request_success_total", **VLLM, finished_reason=reason) == 0
        for role in ("stable", "canary", "shadow"):
            labels = {"model": "m", "role": role, "finished_reason": reason}
            assert sample(replica, "narrowgauge_requests_finished_total", **labels) == 0


def test_a_sequence_is_timed_from_arrival_by_one_clock(replica):
    clock = Clock()
    meter = replica.meter("stable", clock=clock)
    clock.now += 2.0
    meter.tokens(1, prompt=7)
    clock.now += 0.5
    meter.tokens(2, prompt=7)
    meter.finish("stop")
    meter.finish("abort")
    assert sample(replica, "narrowgauge_time_to_first_token_seconds_sum", **OURS) == 2.0
    assert sample(replica, "vllm:time_to_first_token_seconds_sum", **VLLM) == 2.0
    assert sample(replica, "vllm:inter_token_latency_seconds_sum", **VLLM) == 0.25
    assert sample(replica, "vllm:e2e_request_latency_seconds_sum", **VLLM) == 2.5
    assert sample(replica, "vllm:prompt_tokens_total", **VLLM) == 7
    assert sample(replica, "vllm:generation_tokens_total", **VLLM) == 3
    assert sample(replica, "vllm:request_success_total", **VLLM, finished_reason="stop") == 1
    assert sample(replica, "vllm:request_success_total", **VLLM, finished_reason="abort") == 0


def test_shadow_copies_stay_out_of_what_users_see(replica):
    meter = replica.meter("shadow")
    meter.tokens(4, prompt=3)
    meter.finish("length")
    shadow = {"model": "m", "role": "shadow"}
    assert sample(replica, "narrowgauge_generation_tokens_total", **shadow) == 4
    assert sample(replica, "narrowgauge_requests_finished_total", **shadow, finished_reason="length") == 1
    assert sample(replica, "vllm:generation_tokens_total", **VLLM) == 0
    assert sample(replica, "vllm:request_success_total", **VLLM, finished_reason="length") == 0


def test_the_engines_gauges_are_read_at_each_scrape(replica):
    assert sample(replica, "vllm:num_requests_running", **VLLM) == 3
    assert sample(replica, "vllm:kv_cache_usage_perc", **VLLM) == 0.25
    assert sample(replica, "narrowgauge_kv_fragmentation_ratio", model="m", role="all") == 0.25
    assert sample(replica, "narrowgauge_engine_steps_total", model="m", role="all") == 5


def test_a_loading_engine_has_no_gauges_but_the_page_is_whole():
    registry = CollectorRegistry()
    build_info(registry, process="replica", version="1")
    ReplicaMetrics(registry, model="m", snapshot=lambda: None)
    names = {family.name for family in text_string_to_metric_families(generate_latest(registry).decode())}
    assert "vllm:num_requests_running" not in names
    assert {"narrowgauge_build_info", "vllm:request_success"} <= names


@pytest.mark.parametrize("build", [GatewayMetrics, RolloutMetrics])
def test_every_process_can_have_its_metrics_twice_side_by_side(build):
    first, second = build(CollectorRegistry()), build(CollectorRegistry())
    assert first.registry is not second.registry
    for registry in (first.registry, second.registry):
        names = [family.name for family in registry.collect()]
        assert all(name.startswith("narrowgauge_") for name in names)
        assert len(names) == len(set(names))


def test_bucket_bounds_hold_the_usual_objectives():
    assert {0.5, 1.0, 2.5} <= set(metrics.TTFT_BUCKETS)
    assert {0.05, 0.1} <= set(metrics.ITL_BUCKETS)
    for bounds in (metrics.TTFT_BUCKETS, metrics.ITL_BUCKETS, metrics.E2E_BUCKETS):
        assert list(bounds) == sorted(set(bounds))
