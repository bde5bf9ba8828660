"""How the steps tell of themselves while they run: lines and bars for people, on standard error."""

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

ARTIFACT_INTERVAL_S = 5.0
LINE_INTERVAL_S = 20.0

_log = logging.getLogger(__name__)


class Watch(Protocol):
    """Told what happens. Called from the thread that works; must return at once and never raise."""

    def line(self, text: str) -> None:
        """Something began, ended or was found."""

    def progress(self, stage: str, done: float, total: float) -> None:
        """`done` of `total` parts of a stage are finished; the last call of a stage has done == total."""


class Quiet:
    """Tells nobody."""

    def line(self, text: str) -> None:
        """Nothing."""

    def progress(self, stage: str, done: float, total: float) -> None:
        """Nothing."""


class Terminal:
    """Lines and, on a real terminal, a bar with the time left. Use as a context manager so that the bar is taken down."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(stderr=True)
        self._bars: Progress | None = None
        self._bar: TaskID | None = None
        self._stage = ""
        self._last_line_s = 0.0

    def __enter__(self) -> "Terminal":
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def line(self, text: str) -> None:
        """Prints it, above the bar where there is one."""
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def progress(self, stage: str, done: float, total: float) -> None:
        """Moves the bar; a new stage begins a new one. Where there is no terminal, a line now and then."""
        if not self.console.is_terminal:
            if stage != self._stage or time.monotonic() - self._last_line_s >= LINE_INTERVAL_S:
                self._stage, self._last_line_s = stage, time.monotonic()
                self.line(f"{stage}: {done:g} of {total:g}")
            return
        if stage != self._stage:
            self._close()
            self._open(stage, total)
        if self._bars is not None and self._bar is not None:
            self._bars.update(self._bar, completed=done, total=total)
        if done >= total:
            self._close()

    def _open(self, stage: str, total: float) -> None:
        columns = (
            TextColumn("  {task.description}"),
            BarColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
        )
        self._bars = Progress(*columns, console=self.console, transient=True)
        self._bars.start()
        self._bar = self._bars.add_task(stage, total=total)
        self._stage = stage

    def _close(self) -> None:
        if self._bars is not None:
            self._bars.stop()
        self._bars = self._bar = None
        self._stage = ""


class WithArtifact:
    """Passes everything on and keeps a Prefect progress artifact up to date, at most every 5 s; its failure is logged only."""

    def __init__(self, watch: Watch, key: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._watch = watch
        self._key = key
        self._clock = clock
        self._artifact: Any = None
        self._last_s = -ARTIFACT_INTERVAL_S
        self._broken = False

    def line(self, text: str) -> None:
        """Passes it on."""
        self._watch.line(text)

    def progress(self, stage: str, done: float, total: float) -> None:
        """Passes it on, then tells Prefect unless it was told just now."""
        self._watch.progress(stage, done, total)
        now = self._clock()
        if self._broken or (now - self._last_s < ARTIFACT_INTERVAL_S and done < total):
            return
        self._last_s = now
        with self._telemetry():
            self._publish(stage, 100.0 * done / total if total else 100.0)

    def _publish(self, stage: str, percent: float) -> None:
        from prefect.artifacts import create_progress_artifact, update_progress_artifact

        if self._artifact is None:
            self._artifact = create_progress_artifact(progress=percent, key=self._key, description=stage)
        else:
            update_progress_artifact(self._artifact, progress=percent, description=stage)

    @contextlib.contextmanager
    def _telemetry(self) -> Iterator[None]:
        try:
            yield
        except Exception:  # noqa: BLE001 - telemetry must not end hours of work
            self._broken = True
            _log.warning(
                "Prefect's progress artifact '%s' cannot be kept; going on without it", self._key, exc_info=True
            )
