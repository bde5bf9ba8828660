"""What a rollout asks of the model registry before it starts, and writes there when it has ended.

The controller alone moves `champion` and `previous`. Calls block (MLflow), so the controller makes them in a thread.
"""

from pathlib import Path
from typing import Protocol

from narrowgauge.serving.registry import ModelVersion, Registry, RegistryError, check_name
from narrowgauge.serving.rollout.spec import Revision
from narrowgauge.serving.rollout.state import Rollout
from narrowgauge.serving.settings import Settings

CHAMPION, PREVIOUS = "champion", "previous"
_ROLLOUT, _OVERRIDE = "narrowgauge.rollout", "narrowgauge.override"


class VersionRejected(ValueError):
    """The registry holds a bad verdict on this checkpoint, and nobody has overridden it."""


class Registrar(Protocol):
    """The registry as a rollout sees it."""

    def admit(self, revision: Revision, override: str | None) -> None:
        """Raises VersionRejected for a rejected version without an override; keeps an override's reason as a tag."""

    def record(self, rollout: Rollout, outcome: str) -> str:
        """Writes "promoted" or "aborted:GATE" down, moving aliases on promotion. Safe to repeat. Returns what it did."""

    def models(self) -> tuple[str, ...]:
        """Names of the registered models."""

    def versions(self, model: str) -> tuple[ModelVersion, ...]:
        """A model's versions."""


class RegistryRegistrar:
    """On MLflow, through serving/registry.py."""

    def __init__(self, settings: Settings) -> None:
        self._uri = settings.mlflow_tracking_uri
        self._registry = Registry(self._uri, home=settings.home)

    def admit(self, revision: Revision, override: str | None) -> None:
        """Looks the version up by digest; a checkpoint that was never registered is admitted."""
        version = self._version(revision)
        if version is None:
            return
        if version.verdict == "rejected" and not override:
            raise VersionRejected(
                f"version {version.version} of {version.name} was rejected by its offline gate; roll it out anyway "
                "with an override that gives the reason (--override REASON)"
            )
        if override:
            self._registry.set_tag(version.name, version.version, key=_OVERRIDE, value=override)

    def record(self, rollout: Rollout, outcome: str) -> str:
        """champion -> this version, the champion before it -> previous, and the outcome's tag."""
        version = self._version(rollout.revision)
        if version is None:
            return f"digest {rollout.revision.digest[:12]} is not registered under {rollout.revision.model}: aliases skipped"
        done = f"version {version.version} of {version.name} is tagged {outcome}"
        if outcome == "promoted" and CHAMPION not in version.aliases:
            before = self._registry.by_alias(version.name, CHAMPION)
            if before is not None:
                self._registry.set_alias(version.name, PREVIOUS, before.version)
            self._registry.set_alias(version.name, CHAMPION, version.version)
            done += f" and {CHAMPION}" + (f" ({PREVIOUS}: version {before.version})" if before else "")
        self._registry.set_tag(version.name, version.version, key=_ROLLOUT, value=outcome)
        return done

    def models(self) -> tuple[str, ...]:
        """Names of the registered models."""
        return self._registry.models() if self._exists() else ()

    def versions(self, model: str) -> tuple[ModelVersion, ...]:
        """A model's versions; none for a name that no registry could hold."""
        return self._registry.versions(model) if self._exists() and _registrable(model) else ()

    def _version(self, revision: Revision) -> ModelVersion | None:
        if not self._exists() or not _registrable(revision.model):
            return None
        return self._registry.by_digest(revision.model, revision.digest)

    def _exists(self) -> bool:
        """Whether there is a registry at all: asking a SQLite one that is not there would create and migrate it."""
        path = self._uri.removeprefix("sqlite:///")
        return path == self._uri or Path(path).exists()


def _registrable(model: str) -> bool:
    try:
        check_name(model)
    except RegistryError:
        return False
    return True
