"""People see what happens; Prefect is told now and then; neither can break the work."""

import io
import logging

import pytest
from rich.console import Console

from narrowgauge.flows import progress
from narrowgauge.flows.progress import Quiet, Terminal, WithArtifact


class Publisher(WithArtifact):
    """Keeps what it would have told Prefect; `breaks` has telling fail."""

    def __init__(self, clock: "Clock", *, breaks: bool = False) -> None:
        super().__init__(Quiet(), "key", clock=clock)
        self.told: list[float] = []
        self.breaks = breaks

    def _publish(self, stage: str, percent: float) -> None:
        self.told.append(percent)
        if self.breaks:
            raise ConnectionError("the server is gone")


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_prefect_is_told_at_most_every_five_seconds_and_at_the_end() -> None:
    clock = Clock()
    watch = Publisher(clock)
    for done in range(1, 101):
        clock.now += 0.2
        watch.progress("stage", done, 100)
    assert watch.told == [1.0, 26.0, 51.0, 76.0, 100.0]


def test_a_broken_artifact_is_logged_once_and_the_work_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    watch = Publisher(clock, breaks=True)
    with caplog.at_level(logging.WARNING):
        for done in range(1, 4):
            clock.now += 10.0
            watch.progress("stage", done, 3)
    assert watch.told == [pytest.approx(100 / 3)]
    assert [record.message for record in caplog.records] == [
        "Prefect's progress artifact 'key' cannot be kept; going on without it"
    ]


def test_without_a_terminal_there_are_lines_and_no_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "LINE_INTERVAL_S", 3600.0)
    output = io.StringIO()
    with Terminal(Console(file=output)) as watch:
        for done in range(50):
            watch.progress("one", done, 50)
        watch.progress("two", 1, 2)
        watch.line("end [not markup]")
    assert output.getvalue().splitlines() == ["one: 0 of 50", "two: 1 of 2", "end [not markup]"]


def test_on_a_terminal_the_bar_is_taken_down_at_the_end() -> None:
    output = io.StringIO()
    with Terminal(Console(file=output, force_terminal=True, width=100)) as watch:
        watch.progress("one", 1, 2)
        watch.line("between")
    text = output.getvalue()
    assert "one" in text
    assert "between" in text
    assert text.rstrip().endswith("\x1b[2K")
