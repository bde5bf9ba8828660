"""The router that splits traffic: told a whole state, and asked what it has."""

from typing import Protocol

from narrowgauge.serving.gateway.traffic import TrafficState


class TrafficRouter(Protocol):
    """Set and read back. Both are safe to repeat; both raise `connection.Unreachable` where the router does not answer."""

    async def read(self, model: str) -> TrafficState | None:
        """The state in force, None for a model that was never set."""

    async def write(self, model: str, state: TrafficState) -> TrafficState:
        """Sets the whole state; returns what the router has then. Raises RouterRefused."""

    async def newest_epoch(self) -> int:
        """The newest epoch over all models, 0 where nothing was set."""

    async def close(self) -> None:
        """Gives its connections back."""


class RouterRefused(RuntimeError):
    """The router refused the state: a newer epoch is in force (`stale`), or the state is not valid for it."""

    def __init__(self, message: str, *, stale: bool) -> None:
        super().__init__(message)
        self.stale = stale
