"""A rollout is asked for in time, told as it goes, and timed by its own events."""

from pathlib import Path

import pytest

from narrowgauge.flows.demo import GOOD_SPEC
from narrowgauge.flows.rollout import PhaseTime, RolloutRequestError, check_request, event_lines, phase_times
from narrowgauge.serving.rollout.client import ControllerUnreachable
from narrowgauge.serving.rollout.gates.base import Verdict
from narrowgauge.serving.rollout.spec import load_rollout_spec
from narrowgauge.serving.rollout.state import Event, Judged, Moved, Phase, TrafficSet, event_to_json
from narrowgauge.serving.settings import read_settings


def moved(at: float, phase: Phase, step: int = -1, reason: str = "") -> Event:
    return Moved(at=at, phase=phase, step=step, reason=reason, deadline_at=0.0)


def test_a_spec_of_another_model_is_refused_before_the_work(tmp_path: Path) -> None:
    settings = read_settings({"NG_HOME": str(tmp_path)})
    with pytest.raises(RolloutRequestError, match="'smollm2', the recipe makes 'other'"):
        check_request("other", load_rollout_spec(GOOD_SPEC), settings=settings)


def test_without_a_controller_one_line_says_how_to_start_one(tmp_path: Path) -> None:
    settings = read_settings({"NG_HOME": str(tmp_path)})
    with pytest.raises(ControllerUnreachable, match="narrowgauge gateway") as caught:
        check_request("smollm2", load_rollout_spec(GOOD_SPEC), settings=settings)
    assert "\n" not in str(caught.value)


def test_phases_last_from_their_move_to_the_next() -> None:
    events = [
        moved(10.0, "Starting"),
        moved(12.5, "Shadow", 0),
        TrafficSet(at=13.0, stable="a", canary="b", canary_bp=0, shadow_bp=10_000),
        moved(20.0, "Canary", 1),
        moved(30.0, "Aborting", 1),
        moved(31.0, "Aborted", 1),
    ]
    assert phase_times([event_to_json(event) for event in events]) == (
        PhaseTime(phase="Starting", seconds=2.5),
        PhaseTime(phase="Shadow", seconds=7.5),
        PhaseTime(phase="Canary step 2", seconds=10.0),
        PhaseTime(phase="Aborting", seconds=1.0),
    )


def test_moves_shares_and_verdicts_are_told_with_their_figures() -> None:
    verdicts = (Verdict(gate="golden", result="fail", reason="top-1 agreement 0.1 < 0.5"),)
    events: list[Event] = [
        moved(1.0, "Aborting", 0, "top-1 agreement 0.1 < 0.5"),
        TrafficSet(at=2.0, stable="a", canary="b", canary_bp=1000, shadow_bp=0),
        TrafficSet(at=3.0, stable="a", canary=None, canary_bp=0, shadow_bp=0),
        Judged(at=4.0, verdicts=verdicts),
    ]
    assert [line for event in events for line in event_lines(event_to_json(event))] == [
        "rollout: Aborting: top-1 agreement 0.1 < 0.5",
        "traffic: canary 10 %, shadow 0 %",
        "traffic: all to a",
        "gate golden: fail: top-1 agreement 0.1 < 0.5",
    ]
