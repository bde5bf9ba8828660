"""Every metric name of ours, one class a process; the registry is passed in and nothing is global.

Names are `narrowgauge_<what>_<unit>` with labels `model` and `role`; the replica also answers under the names that vLLM's
dashboards ask for (labels `model_name`, `engine`), for what it really measures. Roles: `stable` and `canary` are users'
requests by the revision that answered, `shadow` are copies that no user sees, `all` is the state of the whole engine.
vLLM's request series leave shadow copies out; its gauges show the engine as it is. A digest is a label of
`narrowgauge_revision_info` only: join it. Counters get `_total` from the client library.

To add a metric: one attribute in the class of the process that measures it.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.registry import Collector

# Bucket bounds of vLLM's histograms, in seconds: an objective must equal a bound to be read exactly.
TTFT_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
ITL_BUCKETS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
E2E_BUCKETS = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0),
    *(60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
FINISH_REASONS = ("stop", "length", "abort", "error")
REJECTIONS = ("busy", "unavailable")
REQUEST_ROLES = ("stable", "canary", "shadow")
TICK_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
ROLLOUT_BUCKETS = (10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0, 7200.0, 21600.0, 86400.0)


class EngineSnapshot(Protocol):
    """What the replica's collector reads from the engine at each scrape."""

    @property
    def running(self) -> int: ...
    @property
    def waiting(self) -> int: ...
    @property
    def kv_blocks_total(self) -> int: ...
    @property
    def kv_blocks_used(self) -> int: ...
    @property
    def preemptions(self) -> int: ...
    @property
    def steps(self) -> int: ...
    @property
    def heartbeat_age_s(self) -> float: ...
    @property
    def fragmentation(self) -> float: ...


class ReplicaMetrics:
    """What a replica measures. `model` is the served name; `snapshot` gives the engine's state, None while it loads."""

    def __init__(
        self, registry: CollectorRegistry, *, model: str, snapshot: Callable[[], EngineSnapshot | None]
    ) -> None:
        self.registry = registry
        ours, theirs = ("model", "role"), ("model_name", "engine")
        self._model = model
        self.revision_info = _gauge(
            registry, "narrowgauge_revision_info", "What is served (1)", *("model", "revision", "digest", "role")
        )
        self._rejected = _counter(
            registry, "narrowgauge_requests_rejected", "Requests answered with 503", *ours, "reason"
        )
        self._finished = _counter(
            registry, "narrowgauge_requests_finished", "Finished sequences", *ours, "finished_reason"
        )
        self._prompt = _counter(registry, "narrowgauge_prompt_tokens", "Prompt tokens of started sequences", *ours)
        self._generated = _counter(registry, "narrowgauge_generation_tokens", "Generated tokens", *ours)
        self._ttft = _histogram(
            registry, "narrowgauge_time_to_first_token_seconds", "Arrival to first token", *ours, buckets=TTFT_BUCKETS
        )
        self._itl = _histogram(
            registry, "narrowgauge_inter_token_latency_seconds", "Gap between tokens", *ours, buckets=ITL_BUCKETS
        )
        self._e2e = _histogram(
            registry, "narrowgauge_e2e_request_latency_seconds", "Arrival to last token", *ours, buckets=E2E_BUCKETS
        )
        self._vllm = _VllmSeries(registry, labels=theirs, model=model)
        for role in REQUEST_ROLES:  # a series that is absent until its first event breaks ratios and alerts
            for reason in FINISH_REASONS:
                self._finished.labels(model, role, reason)
            for reason in REJECTIONS:
                self._rejected.labels(model, role, reason)
        registry.register(_EngineCollector(model, snapshot))

    def meter(
        self, role: str, *, arrival_s: float | None = None, clock: Callable[[], float] = time.monotonic
    ) -> "SequenceMeter":
        """A stopwatch for one sequence of a request that came at `arrival_s` by `clock` (default: now)."""
        return SequenceMeter(self, role, arrival_s=clock() if arrival_s is None else arrival_s, clock=clock)

    def reject(self, role: str, reason: str) -> None:
        """Counts a request that was not admitted: `busy` (the queue is full) or `unavailable` (loading, draining, dead)."""
        self._rejected.labels(self._model, role, reason).inc()


class SequenceMeter:
    """Times one sequence by the clock of this process and writes it to the metrics as it goes."""

    def __init__(self, metrics: ReplicaMetrics, role: str, *, arrival_s: float, clock: Callable[[], float]) -> None:
        key = (metrics._model, role)
        self._clock = clock
        self._arrival = self._last = arrival_s
        self._started = self._ended = False
        self._metrics, self._key = metrics, key
        self._vllm = metrics._vllm if role != "shadow" else None

    def tokens(self, new: int, *, prompt: int) -> None:
        """`new` tokens have come (0 for an answer without any, as when a prompt is scored); `prompt` is its length."""
        now = self._clock()
        if not self._started:
            self._started = True
            self._metrics._prompt.labels(*self._key).inc(prompt)
            self._metrics._ttft.labels(*self._key).observe(now - self._arrival)
            if self._vllm:
                self._vllm.prompt.inc(prompt)
                self._vllm.ttft.observe(now - self._arrival)
        elif new:
            self._metrics._itl.labels(*self._key).observe((now - self._last) / new)
            if self._vllm:
                self._vllm.itl.observe((now - self._last) / new)
        self._last = now
        if new:
            self._metrics._generated.labels(*self._key).inc(new)
            if self._vllm:
                self._vllm.generated.inc(new)

    def finish(self, reason: str) -> None:
        """The sequence ended (`stop`, `length`, `abort`, `error`); only the first call counts."""
        if self._ended:
            return
        self._ended = True
        self._metrics._finished.labels(*self._key, reason).inc()
        self._metrics._e2e.labels(*self._key).observe(self._clock() - self._arrival)
        if self._vllm:
            self._vllm.finished[reason].inc()
            self._vllm.e2e.observe(self._clock() - self._arrival)


class _VllmSeries:
    """Request series under vLLM's names (vllm/v1/metrics), with their children looked up once."""

    def __init__(self, registry: CollectorRegistry, *, labels: tuple[str, str], model: str) -> None:
        key = (model, "0")
        self.prompt = _counter(registry, "vllm:prompt_tokens", "Prompt tokens", *labels).labels(*key)
        self.generated = _counter(registry, "vllm:generation_tokens", "Generated tokens", *labels).labels(*key)
        success = _counter(registry, "vllm:request_success", "Finished requests", *labels, "finished_reason")
        self.finished = {reason: success.labels(*key, reason) for reason in FINISH_REASONS}
        self.ttft = _histogram(
            registry, "vllm:time_to_first_token_seconds", "Arrival to first token", *labels, buckets=TTFT_BUCKETS
        ).labels(*key)
        self.itl = _histogram(
            registry, "vllm:inter_token_latency_seconds", "Gap between tokens", *labels, buckets=ITL_BUCKETS
        ).labels(*key)
        self.e2e = _histogram(
            registry, "vllm:e2e_request_latency_seconds", "Arrival to last token", *labels, buckets=E2E_BUCKETS
        ).labels(*key)


class _EngineCollector(Collector):
    """Reads the engine once a scrape, so that gauges never freeze at the value of the last step."""

    def __init__(self, model: str, snapshot: Callable[[], EngineSnapshot | None]) -> None:
        self._model, self._snapshot = model, snapshot

    def collect(self) -> Iterator[Metric]:
        """All engine gauges and counters of one snapshot; nothing while the engine loads."""
        stats = self._snapshot()
        if stats is None:
            return
        usage = stats.kv_blocks_used / stats.kv_blocks_total if stats.kv_blocks_total else 0.0
        gauges: tuple[tuple[str, str | None, str, float], ...] = (
            ("narrowgauge_requests_running", "vllm:num_requests_running", "Sequences in the batch", stats.running),
            ("narrowgauge_requests_waiting", "vllm:num_requests_waiting", "Sequences in the queue", stats.waiting),
            ("narrowgauge_kv_usage_ratio", "vllm:kv_cache_usage_perc", "Share of KV blocks in use, 0-1", usage),
            ("narrowgauge_kv_fragmentation_ratio", None, "1 - largest free run / free blocks", stats.fragmentation),
            ("narrowgauge_engine_heartbeat_age_seconds", None, "Since the loop's last beat", stats.heartbeat_age_s),
        )
        counters: tuple[tuple[str, str | None, str, int], ...] = (
            ("narrowgauge_preemptions", "vllm:num_preemptions", "Sequences put back in the queue", stats.preemptions),
            ("narrowgauge_engine_steps", None, "Steps of the engine's loop", stats.steps),
        )
        for name, alias, text, value in gauges:
            yield _family(GaugeMetricFamily(name, text, labels=("model", "role")), (self._model, "all"), value)
            if alias:
                yield _family(
                    GaugeMetricFamily(alias, text, labels=("model_name", "engine")), (self._model, "0"), value
                )
        for name, alias, text, value in counters:
            yield _family(CounterMetricFamily(name, text, labels=("model", "role")), (self._model, "all"), value)
            if alias:
                counter = CounterMetricFamily(alias, text, labels=("model_name", "engine"))
                yield _family(counter, (self._model, "0"), value)

    def describe(self) -> Iterable[Metric]:
        """Nothing: the engine must not be asked while it loads."""
        return ()


class GatewayMetrics:
    """What the gateway measures: requests as clients saw them, where they went, and the state of the split."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        ours = ("model", "role")
        self.requests = _counter(
            registry, "narrowgauge_gateway_requests", "Finished requests", *ours, "status", "fault"
        )  # fault: "" | client | replica | gateway
        self.in_flight = _gauge(registry, "narrowgauge_gateway_requests_in_flight", "Requests not finished yet", *ours)
        self.prompt_tokens = _counter(registry, "narrowgauge_gateway_prompt_tokens", "Prompt tokens by usage", *ours)
        self.output_tokens = _counter(registry, "narrowgauge_gateway_output_tokens", "Output tokens by usage", *ours)
        self.ttft = _histogram(
            registry,
            "narrowgauge_gateway_time_to_first_token_seconds",
            "To the first data event",
            *ours,
            buckets=TTFT_BUCKETS,
        )
        self.itl = _histogram(
            registry, "narrowgauge_gateway_inter_token_latency_seconds", "Median gap", *ours, buckets=ITL_BUCKETS
        )
        self.e2e = _histogram(
            registry, "narrowgauge_gateway_e2e_request_latency_seconds", "Arrival to end", *ours, buckets=E2E_BUCKETS
        )
        self.retries = _counter(registry, "narrowgauge_gateway_retries", "Requests sent a second time", *ours)
        self.shadow_copies = _counter(
            registry, "narrowgauge_gateway_shadow_copies", "Shadow copies by result", "model", "result"
        )  # result: sent | dropped | failed
        self.replica_up = _gauge(registry, "narrowgauge_gateway_replica_up", "In the pool (1) or out", *ours, "replica")
        self.traffic_ratio = _gauge(registry, "narrowgauge_gateway_traffic_ratio", "Intended share, 0-1", *ours)
        self.traffic_epoch = _gauge(
            registry, "narrowgauge_gateway_traffic_epoch", "Epoch of the accepted state", "model"
        )
        self.revision_info = _gauge(
            registry, "narrowgauge_revision_info", "What is served (1)", *("model", "revision", "digest", "role")
        )


class RolloutMetrics:
    """What the controller measures: phases, gates, transitions and its own heartbeat."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        self.phase = _gauge(registry, "narrowgauge_rollout_phase", "1 for the phase it is in", "model", "phase")
        self.weight_ratio = _gauge(
            registry, "narrowgauge_rollout_weight_ratio", "Traffic share, 0-1", "model", "role", "kind"
        )  # kind: intent | observed
        self.gate_result = _gauge(
            registry, "narrowgauge_rollout_gate_result", "-1 fail, 0 inconclusive, 1 pass", "model", "gate"
        )
        self.gate_samples = _gauge(registry, "narrowgauge_rollout_gate_samples", "Samples judged", "model", "gate")
        self.transitions = _counter(
            registry, "narrowgauge_rollout_transitions", "Phase changes", "model", "from", "to", "reason"
        )
        self.aborts = _counter(registry, "narrowgauge_rollout_aborts", "Aborted rollouts", "model", "reason")
        self.alias_drift = _gauge(
            registry, "narrowgauge_rollout_alias_drift", "1 where champion is not what is served", "model"
        )
        self.tick_duration = _histogram(
            registry, "narrowgauge_rollout_tick_duration_seconds", "One pass of the controller", buckets=TICK_BUCKETS
        )
        self.last_tick = _gauge(
            registry, "narrowgauge_rollout_last_tick_timestamp_seconds", "Unix time of the last pass"
        )
        self.duration = _histogram(
            registry, "narrowgauge_rollout_duration_seconds", "Start to end", "model", "status", buckets=ROLLOUT_BUCKETS
        )


def build_info(registry: CollectorRegistry, *, process: str, version: str) -> None:
    """`narrowgauge_build_info{process,version} 1`, for any process."""
    _gauge(registry, "narrowgauge_build_info", "Version of the software (1)", "process", "version").labels(
        process, version
    ).set(1)


def exposition(registry: CollectorRegistry) -> tuple[bytes, str]:
    """(body, content type) of a /metrics page, without the client library's `_created` twins, which double every series."""
    return generate_latest(_WithoutCreated(registry)), CONTENT_TYPE_PLAIN_0_0_4


class _WithoutCreated(CollectorRegistry):
    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__()
        self._whole = registry

    def collect(self) -> Iterator[Metric]:
        for metric in self._whole.collect():
            metric.samples = [sample for sample in metric.samples if not sample.name.endswith("_created")]
            yield metric


def _counter(registry: CollectorRegistry, name: str, text: str, *labels: str) -> Counter:
    return Counter(name, text, labels, registry=registry)


def _gauge(registry: CollectorRegistry, name: str, text: str, *labels: str) -> Gauge:
    return Gauge(name, text, labels, registry=registry)


def _histogram(
    registry: CollectorRegistry, name: str, text: str, *labels: str, buckets: tuple[float, ...]
) -> Histogram:
    return Histogram(name, text, labels, registry=registry, buckets=buckets)


def _family(
    family: GaugeMetricFamily | CounterMetricFamily, labels: tuple[str, str], value: float
) -> GaugeMetricFamily | CounterMetricFamily:
    family.add_metric(labels, value)
    return family
