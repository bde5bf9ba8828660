"""Where replicas run: started, watched and stopped by a platform; the controller only names revisions."""

from dataclasses import dataclass
from typing import Protocol

from narrowgauge.serving.rollout.spec import Revision


@dataclass(frozen=True, kw_only=True)
class Replica:
    """One running copy of a revision. `was_ready` stays true once it has been ready and warmed up."""

    id: str
    model: str
    revision: str
    digest: str
    url: str
    pid: int | None
    started_at: float
    was_ready: bool = False


@dataclass(frozen=True, kw_only=True)
class Ended:
    """A replica that is gone. `expected`: it was told to stop."""

    replica: Replica
    expected: bool
    reason: str


class Platform(Protocol):
    """Keeps what it started across restarts of the controller. Calls return at once; nothing here waits for a process."""

    def adopt(self) -> tuple[Ended, ...]:
        """Takes over the replicas that an earlier controller recorded; those that are gone meanwhile are returned."""

    def replicas(self) -> tuple[Replica, ...]:
        """Replicas that live and were not told to stop, oldest first."""

    def stopping(self) -> tuple[Replica, ...]:
        """Replicas that were told to stop and still live."""

    def start(self, revision: Revision) -> Replica:
        """Starts one replica. Raises PlatformError."""

    def mark_ready(self, replica_id: str) -> None:
        """Remembers that the replica has been ready and warmed up."""

    def stop(self, replica_id: str, *, grace_s: float) -> None:
        """Tells a replica to finish its requests and end; after `grace_s` it is ended. Asking again changes nothing."""

    def poll(self) -> tuple[Ended, ...]:
        """Replicas that ended since the last call."""


class PlatformError(RuntimeError):
    """A replica could not be started; the message says why."""
