"""Which revisions answer for a model, and in which shares: the state that the controller sets and the gateway keeps.

The state is always written and read whole, never patched, so that no route of an earlier rollout can be left behind.
"""

import asyncio
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit

import xxhash

from narrowgauge.quant.formats.manifest import write_atomically
from narrowgauge.quant.formats.read import ReadError, build, plain

BUCKETS = 10_000
"""Shares are counted in these: one basis point is one bucket."""
_SEED = 7  # the same as in HAProxy's `xxh32(7)`, so that both routers send a session the same way
_LONGEST_NAME = 200

_log = logging.getLogger(__name__)


class TrafficError(ValueError):
    """A traffic state that cannot be accepted; the message says which key and why."""


class StaleEpoch(TrafficError):
    """A state that is not newer than the one in force (`current`): another writer has been here since."""

    def __init__(self, message: str, current: "TrafficState") -> None:
        super().__init__(message)
        self.current = current


def bucket(key: str | bytes) -> int:
    """The bucket 0–9999 of a session key: xxh32 with seed 7 of its bytes (text as UTF-8), modulo 10000."""
    data = key.encode("utf-8", "surrogatepass") if isinstance(key, str) else key
    return xxhash.xxh32_intdigest(data, seed=_SEED) % BUCKETS


@dataclass(frozen=True, kw_only=True)
class TrafficState:
    """What one model's clients get.

    `epoch` grows with every change. `canary_bp` of 10000 buckets go to the canary, `shadow_bp` of 10000 requests
    answered by stable are copied to it. `replicas` holds the base URLs of each revision by its id; revisions that are
    neither stable nor canary may stand there (they are probed and get no traffic).
    """

    epoch: int
    stable: str
    canary: str | None = None
    canary_bp: int = 0
    shadow_bp: int = 0
    replicas: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.epoch < 0:
            raise ValueError(f"epoch: must be 0 or more, not {self.epoch}")
        if not self.stable:
            raise ValueError("stable: must name a revision")
        for name, share in (("canary_bp", self.canary_bp), ("shadow_bp", self.shadow_bp)):
            if not 0 <= share <= BUCKETS:
                raise ValueError(f"{name}: must be from 0 to {BUCKETS} (units of 0.01 %), not {share}")
            if share and self.canary is None:
                raise ValueError(f"{name}: is {share} but there is no canary; name one or set it to 0")
        if self.canary is not None and self.canary in ("", self.stable):
            raise ValueError(f"canary: must name a revision other than stable, not {self.canary!r}")
        for revision in filter(None, (self.stable, self.canary)):
            if not self.replicas.get(revision):
                raise ValueError(f"replicas: revision {revision} is named but has no replica; list at least one URL")
        self._check_urls()

    def _check_urls(self) -> None:
        seen: dict[str, str] = {}
        for revision, urls in self.replicas.items():
            for url in urls:
                if not _is_base_url(url):
                    raise ValueError(f"replicas.{revision}: {url!r} is not http://HOST:PORT")
                if url in seen:
                    raise ValueError(f"replicas.{revision}: {url} is listed twice (also under {seen[url]})")
                seen[url] = revision


def read_state(mapping: object, *, source: str = "") -> TrafficState:
    """Builds a state from its JSON form. Raises TrafficError with one line."""
    try:
        return build(TrafficState, mapping, source=source)
    except ReadError as error:
        raise TrafficError(str(error)) from None


class TrafficTable:
    """The states in force, by model, kept on disk so that a restarted gateway serves at once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._states: dict[str, TrafficState] = {}
        self._writing = asyncio.Lock()

    def load(self) -> None:
        """Reads every kept state. A file that cannot be read is passed over with a warning: the controller sets it anew."""
        self._folder.mkdir(parents=True, exist_ok=True)
        for path in sorted(self._folder.glob("*.json")):
            try:
                self._states[unquote(path.stem)] = read_state(json.loads(path.read_bytes()), source=str(path))
            except (OSError, ValueError) as error:
                _log.warning("kept traffic state not used: %s: %s", path, error)

    def get(self, model: str) -> TrafficState | None:
        """The state in force, or None for a model that nobody set."""
        return self._states.get(model)

    def states(self) -> Mapping[str, TrafficState]:
        """All states by model."""
        return self._states

    async def put(self, model: str, state: TrafficState) -> TrafficState:
        """Keeps the state on disk, then puts it in force; returns the state in force.

        Raises StaleEpoch where the epoch is older, or equal with another state; TrafficError for an unusable name;
        OSError where it cannot be kept (then nothing has changed).
        """
        if not model or len(quote(model, safe="")) > _LONGEST_NAME:
            raise TrafficError(f"model: a name has 1 to {_LONGEST_NAME} characters, not {len(model)}")
        async with self._writing:
            current = self._states.get(model)
            if current == state:
                return state
            if current is not None and state.epoch <= current.epoch:
                how = "older than" if state.epoch < current.epoch else "equal to"
                raise StaleEpoch(
                    f"epoch {state.epoch} is {how} the one in force ({current.epoch}) and the state differs; "
                    "read the state and try again with a newer epoch",
                    current,
                )
            data = (json.dumps(plain(state), indent=2, sort_keys=True) + "\n").encode()
            await asyncio.to_thread(write_atomically, self._folder / f"{quote(model, safe='')}.json", data)
            self._states[model] = state
            return state


def _is_base_url(url: str) -> bool:
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        return False
    bare = not (parts.path or parts.query or parts.fragment or parts.username)
    return parts.scheme in ("http", "https") and bool(parts.hostname) and bool(port) and bare
