"""What the flows read from the environment beyond the shared settings."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from narrowgauge.serving.settings import Settings, read_settings


@dataclass(frozen=True, kw_only=True)
class FlowSettings:
    """The shared settings, and the Prefect API to use (None: start a server of our own for the length of a command)."""

    shared: Settings
    prefect_api_url: str | None

    @property
    def prefect_home(self) -> Path:
        """PREFECT_HOME of our own server."""
        return self.shared.home / "prefect"


def read_flow_settings(environment: Mapping[str, str] | None = None) -> FlowSettings:
    """Reads the shared NG_ variables and PREFECT_API_URL. Raises SettingsError."""
    env = os.environ if environment is None else environment
    return FlowSettings(shared=read_settings(env), prefect_api_url=env.get("PREFECT_API_URL") or None)
