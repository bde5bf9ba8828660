"""How a gateway behaves: every limit and time of it, in one place. Seconds and bytes."""

from dataclasses import dataclass, field

from narrowgauge.serving.gateway.replicas import ProbeRules


class GatewayConfigError(ValueError):
    """A setting that cannot work; the message says which flag and what it may be."""

    exit_code = 2


@dataclass(frozen=True, kw_only=True)
class GatewayConfig:
    """What `narrowgauge gateway` can be told.

    `connect_s`: to open a connection. `idle_s`: silence of a replica within a stream, its comments count as life.
    `answer_s`: the same without stream, where nothing comes before the whole answer. `early_headers_s`: silence after
    which a stream's client gets headers. `comment_s`: silence after which it gets a comment. `shadow_in_flight`: copies
    at once, further ones are dropped.
    """

    probes: ProbeRules = field(default_factory=ProbeRules)
    connect_s: float = 2.0
    idle_s: float = 60.0
    answer_s: float = 600.0
    early_headers_s: float = 2.0
    comment_s: float = 5.0
    drain_s: float = 30.0
    max_body_bytes: int = 8 << 20
    shadow_in_flight: int = 16
    records: int = 100_000

    def __post_init__(self) -> None:
        positive = {
            "--probe-interval": self.probes.interval_s,
            "--probe-timeout": self.probes.timeout_s,
            "--probe-misses": self.probes.misses,
            "--probe-returns": self.probes.returns,
            "--connect-timeout": self.connect_s,
            "--idle-timeout": self.idle_s,
            "--answer-timeout": self.answer_s,
            "--early-headers-after": self.early_headers_s,
            "--comment-every": self.comment_s,
            "--max-body-bytes": self.max_body_bytes,
            "--records": self.records,
        }
        for flag, value in positive.items():
            if not value > 0:
                raise GatewayConfigError(f"{flag}: must be above 0, not {value}")
        for flag, value in {"--drain-timeout": self.drain_s, "--shadow-in-flight": self.shadow_in_flight}.items():
            if not value >= 0:
                raise GatewayConfigError(f"{flag}: must be 0 or more, not {value}")
