"""What a rollout is asked to do: the Revision and the RolloutSpec, as frozen values read from versioned YAML."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from narrowgauge.quant.formats.read import ReadError, build, digest, lookup, parse
from narrowgauge.serving.engine_args import check_engine_args
from narrowgauge.serving.rollout.gates.base import GATES, Gate

BUCKETS = 10_000
"""Shares are counted in units of 0.01 %."""

OnDeadline = Literal["abort", "hold"]
EngineArgument = bool | int | float | str


class SpecError(ReadError):
    """A RolloutSpec or a Revision that cannot be accepted; the message says where, why, and what to write."""


@dataclass(frozen=True, kw_only=True)
class Revision:
    """What is served, immutable: a checkpoint (URI and digest) and the engine's arguments, under a served name.

    `engine_args` are flags of `narrowgauge serve` without the dashes (`{"max-num-seqs": 8}`).
    """

    model: str
    uri: str
    digest: str
    engine_args: Mapping[str, EngineArgument] = field(default_factory=dict)
    engine: Literal["narrowgauge"] = "narrowgauge"

    def __post_init__(self) -> None:
        if not (self.model and self.uri and self.digest):
            raise ValueError("a revision needs a model, a uri and a digest")
        for flag in self.engine_args:
            _check_flag(flag)

    @property
    def id(self) -> str:
        """First 12 hex digits of the SHA-256 of the canonical JSON."""
        return digest(self)[:12]


@dataclass(frozen=True, kw_only=True)
class Until:
    """When a step has seen enough: finished requests of the canary (shadow copies in a shadow step), seconds, or both."""

    requests: int | None = None
    seconds: float | None = None

    def __post_init__(self) -> None:
        if self.requests is None and self.seconds is None:
            raise ValueError("until needs 'requests' or 'seconds'")
        if (self.requests is not None and self.requests < 1) or (self.seconds is not None and self.seconds <= 0):
            raise ValueError("until: requests must be at least 1 and seconds above 0")


@dataclass(frozen=True, kw_only=True)
class Step:
    """A share of copies (`shadow`) or of clients (`traffic`) for the canary, until enough was seen.

    `gates`, `deadline_s` and `on_deadline` replace the spec's for this step.
    """

    until: Until
    shadow: float | None = None
    traffic: float | None = None
    gates: tuple[Gate, ...] | None = None
    deadline_s: float | None = None
    on_deadline: OnDeadline | None = None

    def __post_init__(self) -> None:
        if (self.shadow is None) == (self.traffic is None):
            raise ValueError("a step has either 'shadow' or 'traffic'")
        name, share = ("shadow", self.shadow) if self.shadow is not None else ("traffic", self.traffic)
        if share is None or not 0.0 < share <= 1.0:
            raise ValueError(f"{name} is {share}; it must be above 0 and at most 1")
        if abs(share * BUCKETS - round(share * BUCKETS)) > 1e-6:
            raise ValueError(f"{name} is {share}; shares come in units of 0.0001")
        if self.deadline_s is not None and self.deadline_s <= 0:
            raise ValueError(f"deadline_s is {self.deadline_s}; it must be above 0")

    @property
    def canary_bp(self) -> int:
        """Share of clients in basis points; 0 in a shadow step."""
        return round((self.traffic or 0.0) * BUCKETS)

    @property
    def shadow_bp(self) -> int:
        """Share of copied requests in basis points; 0 in a traffic step."""
        return round((self.shadow or 0.0) * BUCKETS)


@dataclass(frozen=True, kw_only=True)
class RolloutSpec:
    """How a model's new revisions are rolled out. Times in seconds; each phase has a deadline.

    `start_deadline_s` bounds loading, `promote_deadline_s` the switch at the router, `bake_s` is how long the old
    revision is kept ready after it, `drain_s` how long a stopping replica may finish its requests, and
    `hold_deadline_s` how long a hold waits for an operator before the rollout is aborted.
    """

    version: Literal[1]
    model: str
    steps: tuple[Step, ...]
    gates: tuple[Gate, ...]
    router: Literal["in_process"] = "in_process"
    engine: Literal["narrowgauge"] = "narrowgauge"
    engine_args: Mapping[str, EngineArgument] = field(default_factory=dict)
    deadline_s: float = 300.0
    on_deadline: OnDeadline = "abort"
    start_deadline_s: float = 600.0
    promote_deadline_s: float = 60.0
    bake_s: float = 30.0
    drain_s: float = 60.0
    hold_deadline_s: float = 86_400.0

    def __post_init__(self) -> None:
        if not self.model:
            raise ValueError("model: must name the served model")
        for name in ("deadline_s", "start_deadline_s", "promote_deadline_s", "drain_s", "hold_deadline_s"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be above 0")
        if self.bake_s < 0:
            raise ValueError(f"bake_s is {self.bake_s}; it must be 0 or more")
        shares = [step.canary_bp for step in self.steps]
        if shares != sorted(shares):
            raise ValueError("steps: shadow steps come first, and a traffic share never falls from step to step")
        for position, gates in enumerate((self.gates, *(step.gates for step in self.steps))):
            names = [(gate.name, getattr(gate, "metric", None)) for gate in gates or ()]
            if len(set(names)) != len(names):
                where = "gates" if position == 0 else f"steps[{position - 1}].gates"
                raise ValueError(f"{where}: a gate stands there twice")

    def gates_of(self, step: int) -> tuple[Gate, ...]:
        """The gates that judge a step; beyond the last (promoting, baking) and before the first, those next to it."""
        if not self.steps:
            return self.gates
        own = self.steps[min(max(step, 0), len(self.steps) - 1)].gates
        return self.gates if own is None else own

    def revision(self, *, uri: str, checkpoint_digest: str) -> Revision:
        """The Revision that this spec makes of a checkpoint: every asker gets the same id."""
        return Revision(
            model=self.model, uri=uri, digest=checkpoint_digest, engine_args=self.engine_args, engine=self.engine
        )


def _check_flag(flag: str) -> None:
    reserved = {"fd", "host", "port", "served-model-name", "revision", "digest", "admin-socket", "die-with"}
    if not flag or flag.startswith("-") or flag in reserved:
        raise ValueError(f"engine_args: {flag!r} cannot be set here; name an engine flag without its dashes")


def read_revision(mapping: object, *, source: str = "") -> Revision:
    """Builds a Revision from JSON. Raises SpecError."""
    try:
        return build(Revision, mapping, source=source)
    except ReadError as error:
        raise SpecError(str(error)) from None


def read_spec(mapping: object, *, source: str = "", trusted: bool = False) -> RolloutSpec:
    """Builds a RolloutSpec from JSON that stands on its own (files inlined). Raises SpecError.

    Arguments of our own engine are checked unless the spec is `trusted`: one that was accepted before, perhaps by
    another release, must not keep a controller from starting.
    """
    try:
        spec = build(RolloutSpec, mapping, source=source, registries={Gate: GATES})
        if spec.engine == "narrowgauge" and not trusted:
            check_engine_args(spec.engine_args)
    except ReadError as error:
        raise SpecError(str(error)) from None
    except ValueError as error:
        raise SpecError(f"{source}: {error}" if source else str(error)) from None
    return spec


def load_rollout_spec(path: Path) -> RolloutSpec:
    """Reads a spec's YAML and the files its gates name (relative to it). Raises SpecError."""
    try:
        mapping = parse(path)
    except ReadError as error:
        raise SpecError(str(error)) from None
    if isinstance(mapping, dict):
        for holder in (mapping, *_mappings(mapping.get("steps"))):
            for gate in _mappings(holder.get("gates")):
                _inline_files(gate, path)
    return read_spec(mapping, source=str(path))


def _mappings(value: object) -> list[dict[str, Any]]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def _inline_files(gate: dict[str, Any], spec: Path) -> None:
    """Puts the lines of each JSONL file in place of its name; what is wrong with the rest is left to `build`."""
    if gate.get("name") not in GATES:
        return
    for key in getattr(lookup(GATES, gate["name"]), "FILES", ()):
        if isinstance(gate.get(key), str):
            gate[key] = _read_jsonl(spec.parent / gate[key], f"{spec}: gate {gate['name']}, {key}: {gate[key]}")


def _read_jsonl(path: Path, asked: str) -> list[Any]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise SpecError(
            f"{asked}: {path.absolute()} cannot be read: {error.strerror}; a spec's files belong in its own folder "
            "(copy them along with it), or are named by an absolute path"
        ) from None
    except UnicodeDecodeError:
        raise SpecError(f"{path}: is not UTF-8 text") from None
    items = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            items.append(json.loads(line))
        except ValueError as error:
            raise SpecError(f"{path}:{number}: is not JSON: {error}") from None
    return items
