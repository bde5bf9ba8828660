"""A rollout is asked for in time, told as it goes, and timed by its own events."""

from pathlib import Path

import pytest

from narrowgauge.flows.demo import GOOD_SPEC
from narrowgauge.flows.rollout import PhaseTime, RolloutRequestError, Teller, check_request, phase_times
from narrowgauge.serving.rollout.client import ControllerUnreachable
from narrowgauge.serving.rollout.gates.base import Result, Verdict
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
        PhaseTime(phase="Shadow step 1", seconds=7.5),
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
    assert told(events) == [
        "rollout: Aborting: top-1 agreement 0.1 < 0.5",
        "traffic: canary 10 %, shadow 0 %",
        "traffic: all to a",
        "gate golden: fail: top-1 agreement 0.1 < 0.5",
    ]


def told(events: list[Event]) -> list[str]:
    teller = Teller()
    return [line for event in events for line in teller.lines(event_to_json(event))]


def test_a_verdict_is_told_once_in_a_step_unless_it_changes() -> None:
    def judged(result: Result) -> Event:
        return Judged(at=1.0, verdicts=(Verdict(gate="errors", result=result, reason="r"),))

    events = [
        moved(0.0, "Shadow", 0),
        *map(judged, ("inconclusive", "pass", "pass", "inconclusive", "pass")),
        moved(2.0, "Canary", 1),
        judged("pass"),
        moved(3.0, "Promoting", 1),
        judged("pass"),
        judged("fail"),
    ]
    assert [line for line in told(events) if line.startswith("gate")] == [
        *("gate errors: pass: r", "gate errors: pass: r"),  # the second time after it was open again
        "gate errors: pass: r",
        "gate errors: fail: r",
    ]
