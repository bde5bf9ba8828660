"""Everything of ours that is read from the environment, in one place (flows/settings.py adds to it).

NG_HOME holds all state; nothing of ours is written elsewhere but compiled CPU kernels.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


class SettingsError(ValueError):
    """An environment variable that cannot be used; the message names it and what it should hold."""

    exit_code = 2


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Resolved settings. Paths are absolute; URLs are as users write them (`unix:PATH` or `http://…` for the admin ones)."""

    home: Path
    artifact_root: str
    store_url: str
    mlflow_tracking_uri: str
    admin_url: str
    gateway_admin_url: str

    @property
    def models(self) -> Path:
        """Verified checkpoints by digest."""
        return self.home / "models"

    @property
    def work(self) -> Path:
        """State of unfinished work, by key."""
        return self.home / "work"

    @property
    def run(self) -> Path:
        """Sockets and records of what is running."""
        return self.home / "run"

    @property
    def locks(self) -> Path:
        """Lock files between processes."""
        return self.home / "locks"

    @property
    def logs(self) -> Path:
        """Logs of child processes."""
        return self.home / "logs"


def read_settings(environment: Mapping[str, str] | None = None) -> Settings:
    """Reads the NG_ variables (and MLFLOW_TRACKING_URI behind NG_MLFLOW_TRACKING_URI). Raises SettingsError."""
    env = os.environ if environment is None else environment
    home = _home(env)
    return Settings(
        home=home,
        artifact_root=env.get("NG_ARTIFACT_ROOT") or f"file://{home}/artifacts",
        store_url=env.get("NG_STORE_URL") or f"sqlite:///{home}/rollouts.db",
        mlflow_tracking_uri=env.get("NG_MLFLOW_TRACKING_URI")
        or env.get("MLFLOW_TRACKING_URI")
        or f"sqlite:///{home}/mlflow/mlflow.db",
        admin_url=env.get("NG_ADMIN_URL") or f"unix:{home}/run/controller.sock",
        gateway_admin_url=env.get("NG_GATEWAY_ADMIN_URL") or f"unix:{home}/run/gateway.sock",
    )


def _home(env: Mapping[str, str]) -> Path:
    if chosen := env.get("NG_HOME"):
        home = Path(chosen).expanduser()
        if home.exists() and not home.is_dir():
            raise SettingsError(f"NG_HOME={chosen} is a file; it must name a folder")
        return home.absolute()
    state = env.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(state).absolute() / "narrowgauge"
