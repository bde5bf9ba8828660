"""Where every outcome is written down: the ring that the controller reads, and the metrics."""

from prometheus_client import CollectorRegistry

from narrowgauge.serving.gateway.events import Findings
from narrowgauge.serving.gateway.records import Fault, RecordRing, Stopwatch
from narrowgauge.serving.gateway.replicas import ReplicaPool
from narrowgauge.serving.gateway.routing import NoReadyReplica, Route
from narrowgauge.serving.gateway.traffic import BUCKETS, TrafficTable
from narrowgauge.serving.metrics import GatewayMetrics


class Ledger:
    """Writes records and metrics."""

    def __init__(self, records: RecordRing) -> None:
        self.records = records
        self.metrics = GatewayMetrics(CollectorRegistry())

    def write(
        self,
        route: Route | NoReadyReplica,
        watch: Stopwatch,
        findings: Findings,
        *,
        status: int,
        fault: Fault | None,
        now: float,
        shadow: bool = False,
    ) -> None:
        """One finished request or failed try; `now` in monotonic seconds."""
        record = self.records.add(
            model=route.model,
            revision=route.revision,
            role=route.role,
            shadow=shadow,
            status=status,
            fault=fault,
            finish_reason=findings.finish_reason,
            ttft_s=watch.ttft_s,
            itl_p50_s=watch.itl_p50_s,
            e2e_s=now - watch.started,
            prompt_tokens=findings.prompt_tokens,
            output_tokens=findings.output_tokens,
        )
        labels = (route.model, "shadow" if shadow else route.role)
        metrics = self.metrics
        metrics.requests.labels(*labels, str(status), fault or "").inc()
        metrics.prompt_tokens.labels(*labels).inc(record.prompt_tokens or 0)
        metrics.output_tokens.labels(*labels).inc(record.output_tokens or 0)
        metrics.e2e.labels(*labels).observe(record.e2e_s)
        if record.ttft_s is not None and findings.started:  # without stream it is the time to the whole answer
            metrics.ttft.labels(*labels).observe(record.ttft_s)
        if record.itl_p50_s is not None:
            metrics.itl.labels(*labels).observe(record.itl_p50_s)

    def refresh(self, table: TrafficTable, pool: ReplicaPool) -> None:
        """Sets the gauges to what is now: called at each scrape, so that none outlives what it speaks of."""
        metrics = self.metrics
        for gauge in (metrics.replica_up, metrics.traffic_ratio, metrics.revision_info, metrics.in_flight):
            gauge.clear()
        by_revision = pool.in_flight()
        for model, state in table.states().items():
            metrics.traffic_epoch.labels(model).set(state.epoch)
            shares = {"stable": BUCKETS - state.canary_bp, "canary": state.canary_bp, "shadow": state.shadow_bp}
            for role, share in shares.items():
                metrics.traffic_ratio.labels(model, role).set(share / BUCKETS)
            for role, revision in (("stable", state.stable), ("canary", state.canary)):
                if revision is None:
                    continue
                metrics.revision_info.labels(model, revision, "", role).set(1)
                replicas = by_revision.get(revision, [])
                metrics.in_flight.labels(model, role).set(sum(replica.in_flight for replica in replicas))
                for replica in replicas:
                    metrics.replica_up.labels(model, role, replica.url).set(replica.ready)
