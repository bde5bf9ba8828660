"""Starts a rollout at the controller and watches it to its end, telling each phase and verdict as it comes."""

import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from narrowgauge.flows.progress import Watch
from narrowgauge.serving.registry import ModelVersion
from narrowgauge.serving.rollout.client import RolloutClient
from narrowgauge.serving.rollout.spec import RolloutSpec
from narrowgauge.serving.settings import Settings

POLL_S = 0.25


class RolloutRequestError(ValueError):
    """A rollout that cannot be asked for; the message says why."""

    exit_code = 2


@dataclass(frozen=True, kw_only=True)
class StartedRollout:
    """A rollout that the controller took: its id, and the revision that it brings."""

    id: str
    revision: str


@dataclass(frozen=True, kw_only=True)
class PhaseTime:
    """How long a phase (with its step's share, "Canary 10 %") lasted, in seconds."""

    phase: str
    seconds: float


@dataclass(frozen=True, kw_only=True)
class RolloutOutcome:
    """How a rollout ended: `gate` names the one that said no, `reason` has its figures."""

    id: str
    revision: str
    phase: str
    reason: str
    gate: str | None
    phases: tuple[PhaseTime, ...]

    @property
    def completed(self) -> bool:
        """Whether the new revision is the stable one now."""
        return self.phase == "Completed"


def check_request(model: str, spec: RolloutSpec, *, settings: Settings) -> None:
    """Refuses before hours of work what could only fail after them: a spec of another model, no controller to ask."""
    if spec.model != model:
        raise RolloutRequestError(
            f"the rollout's spec is for model '{spec.model}', the recipe makes '{model}'; let both name the same"
        )
    RolloutClient(settings.admin_url).models()


def start_rollout(
    version: ModelVersion, spec: RolloutSpec, override: str | None, *, settings: Settings, watch: Watch
) -> StartedRollout:
    """Asks the controller at NG_ADMIN_URL to roll the version out; the same ask gets the same rollout.

    The controller keeps the reason of an override as a tag. Raises what the client raises where no controller answers or it refuses.
    """
    revision = spec.revision(uri=version.uri, checkpoint_digest=version.digest)
    client = RolloutClient(settings.admin_url)
    started = client.start(model=version.name, revision=revision, spec=spec, override=override)
    watch.line(f"rollout: {started['id']} brings revision {revision.id} to {version.name}")
    if started["note"]:
        watch.line(f"rollout: {started['note']}")
    return StartedRollout(id=started["id"], revision=revision.id)


def wait_for(rollout: StartedRollout, *, settings: Settings, watch: Watch) -> RolloutOutcome:
    """Tells every event until the rollout is over. Raises what the client raises where the controller goes away."""
    client = RolloutClient(settings.admin_url)
    told, teller = 0, Teller()
    while True:
        found = client.get(rollout.id)  # before the events, so that an end is only seen with all that led to it
        events = client.events(rollout.id)
        for event in events[told:]:
            for line in teller.lines(event):
                watch.line(line)
        told = len(events)
        if found["terminal"]:
            return RolloutOutcome(
                id=rollout.id,
                revision=rollout.revision,
                phase=found["phase"],
                reason=found["reason"],
                gate=found["gate"],
                phases=phase_times(events),
            )
        time.sleep(POLL_S)


class Teller:
    """Turns events into lines for people: a verdict is told when it is one, and once in a step unless it changes."""

    def __init__(self) -> None:
        self._step: int | None = None
        self._results: dict[int, str] = {}

    def lines(self, event: Mapping[str, Any]) -> list[str]:
        """What is to be told of the next event."""
        match event["kind"]:
            case "Moved":
                if event["step"] != self._step:
                    self._step, self._results = event["step"], {}
                reason = f": {event['reason']}" if event["reason"] else ""
                return [f"rollout: {_phase(event)}{reason}"]
            case "TrafficSet" if event["canary"]:
                return [f"traffic: canary {event['canary_bp'] / 100:g} %, shadow {event['shadow_bp'] / 100:g} %"]
            case "TrafficSet":
                return [f"traffic: all to {event['stable']}"]
            case "Judged":
                return [
                    line for place, verdict in enumerate(event["verdicts"]) for line in self._verdict(place, verdict)
                ]
            case "ReplicaLost":
                return [f"replica {event['replica']} is lost: {event['reason']}"]
            case "Registered":
                return [f"registry: {event['detail']}"]
        return []

    def _verdict(self, place: int, verdict: Mapping[str, Any]) -> list[str]:
        before = self._results.get(place)
        self._results[place] = verdict["result"]
        if verdict["result"] in (before, "inconclusive"):
            return []
        return [f"gate {verdict['gate']}: {verdict['result']}: {verdict['reason']}"]


def _phase(move: Mapping[str, Any]) -> str:
    return f"{move['phase']} step {move['step'] + 1}" if move["phase"] in ("Shadow", "Canary") else str(move["phase"])


def phase_times(events: Sequence[Mapping[str, Any]]) -> tuple[PhaseTime, ...]:
    """How long each phase lasted, from the moves between them; the last phase is where it ended and lasts nothing."""
    moves = [event for event in events if event["kind"] == "Moved"]
    return tuple(
        PhaseTime(phase=_phase(move), seconds=after["at"] - move["at"]) for move, after in itertools.pairwise(moves)
    )
