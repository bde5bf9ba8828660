"""A fleet that dies under a command is named as what went wrong."""

import time
from pathlib import Path

import psutil
import pytest

from narrowgauge.flows.fleet import FleetError, fleet
from narrowgauge.serving.settings import read_settings


def kill_gateway() -> None:
    for child in psutil.Process().children():
        if "gateway" in child.cmdline():
            child.kill()
            while child.status() != psutil.STATUS_ZOMBIE:  # ended; its parent, the fleet, is the one to learn how
                time.sleep(0.01)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NG_HOME", str(tmp_path))  # what the gateway reads


def use_a_fleet_that_crashes() -> None:
    with fleet(read_settings()):
        kill_gateway()
        raise RuntimeError("no answer")


def test_a_gateway_that_crashed_is_named_in_place_of_what_failed_for_it() -> None:
    with pytest.raises(FleetError, match=r"the gateway ended by itself with -9.*gateway\.log") as caught:
        use_a_fleet_that_crashes()
    assert str(caught.value.__cause__) == "no answer"


def test_a_gateway_that_crashed_unnoticed_is_told_with_what_was_left() -> None:
    with fleet(read_settings()) as running:
        kill_gateway()
    assert "ended by itself with -9" in running.leftovers[0]
