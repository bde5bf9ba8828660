"""When a failed try is repeated, and where: never after the first byte, never on the canary, once where it was sent."""

from dataclasses import dataclass, field

from narrowgauge.serving.gateway.ask import Headers
from narrowgauge.serving.gateway.records import Fault
from narrowgauge.serving.gateway.replicas import Replica
from narrowgauge.serving.gateway.routing import NoReadyReplica, Route, Router
from narrowgauge.serving.gateway.traffic import TrafficState

# 404: the gateway knows the model, so a replica that does not was started under another name.
_FAILED = frozenset({404, 500, 502, 503, 504})


def is_failure(status: int) -> bool:
    """Whether a replica's own answer means that it failed, so that another one may do better."""
    return status in _FAILED


def fault_of(status: int) -> Fault | None:
    """Whose fault an answer is. 429 counts as the replica's: the gateway sends no more than it is given room for."""
    if status < 400:
        return None
    return "replica" if status >= 500 or status in (404, 429) else "client"


@dataclass(frozen=True, kw_only=True)
class Failed:
    """A try that gave the client nothing. `sent`: the replica may have seen the request. `lost`: the connection broke.

    `answer`: the replica's own refusal, passed on where nobody else can be asked.
    """

    status: int
    sent: bool
    lost: bool
    answer: tuple[Headers, bytes] | None = None


@dataclass(kw_only=True)
class Tries:
    """What has been tried for one request."""

    replicas: set[Replica] = field(default_factory=set)
    sent: int = 0

    def add(self, route: Route, failed: Failed) -> None:
        """Takes in a failed try. One that never reached its replica can be made elsewhere without repeating anything."""
        self.replicas.add(route.replica)
        self.sent += failed.sent


def next_try(
    tries: Tries, route: Route, failed: Failed, *, state: TrafficState, router: Router
) -> Route | NoReadyReplica:
    """Where to repeat a failed try: on a replica of stable that has not had it, or NoReadyReplica for nowhere.

    Where stable has no other replica, a broken connection is tried once more on the same one: a kept-alive connection
    may have been closed just as the request went out.
    """
    nowhere = NoReadyReplica(model=route.model, revision=state.stable)
    if tries.sent > 1:
        return nowhere
    other = router.stable(route.model, state, without=frozenset(tries.replicas))
    if isinstance(other, Route):
        return other
    if failed.lost and route.replica.ready and route.revision == state.stable:
        return Route(model=route.model, role="stable", replica=route.replica)
    return nowhere
