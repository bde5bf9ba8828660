"""What the command line and flows use to speak with the controller."""

import time
from collections.abc import Callable
from typing import Any

import httpx

from narrowgauge.quant.formats.read import plain
from narrowgauge.serving.rollout.connection import message_of
from narrowgauge.serving.rollout.spec import Revision, RolloutSpec
from narrowgauge.serving.rollout.state import Action
from narrowgauge.serving.sockets import admin_client, listens


class ControllerUnreachable(RuntimeError):
    """No controller answers at the admin URL; the message says how to start one."""


class RolloutRefused(ValueError):
    """The controller said no; the message is its own. `status` is the HTTP status."""

    def __init__(self, message: str, *, status: int) -> None:
        super().__init__(message)
        self.status = status


class RolloutClient:
    """Speaks to the controller at `admin_url` (`unix:PATH` or `http://HOST:PORT`). Every call makes one request.

    Rollouts come as dicts: id, model, revision_id, stable_id, phase, terminal, step, epoch, allowed, reason, gate,
    verdicts, traffic, phases (history), override, registry.
    """

    def __init__(self, admin_url: str, *, timeout_s: float = 60.0) -> None:
        self._url = admin_url
        self._timeout_s = timeout_s

    def start(
        self, *, model: str, revision: Revision, spec: RolloutSpec, override: str | None = None
    ) -> dict[str, Any]:
        """Starts a rollout or finds the one in progress; `created` says which, `note` what there is to say about it.

        Raises RolloutRefused, ControllerUnreachable, as all calls do.
        """
        body = {"model": model, "revision": plain(revision), "spec": plain(spec), "override": override}
        return dict(self._send("POST", "/admin/v1/rollouts", body))

    def get(self, rollout_id: str) -> dict[str, Any]:
        """One rollout."""
        return dict(self._send("GET", f"/admin/v1/rollouts/{rollout_id}"))

    def rollouts(self, model: str | None = None) -> list[dict[str, Any]]:
        """All rollouts, oldest first, or one model's."""
        found = list(self._send("GET", "/admin/v1/rollouts"))
        return [rollout for rollout in found if model in (None, rollout["model"])]

    def events(self, rollout_id: str) -> list[dict[str, Any]]:
        """A rollout's events in order."""
        return list(self._send("GET", f"/admin/v1/rollouts/{rollout_id}/events"))

    def gate(self, rollout_id: str) -> str:
        """All gates in one word: pass, fail or inconclusive."""
        return str(self._send("GET", f"/admin/v1/gate/{rollout_id}")["result"])

    def promote(self, rollout_id: str, epoch: int) -> dict[str, Any]:
        """Goes on to the next step (from the last: to everybody) without waiting. `epoch`: of the rollout as seen."""
        return self._ask(rollout_id, "promote", epoch)

    def pause(self, rollout_id: str, epoch: int) -> dict[str, Any]:
        """Keeps the shares as they are until it is resumed."""
        return self._ask(rollout_id, "pause", epoch)

    def resume(self, rollout_id: str, epoch: int) -> dict[str, Any]:
        """Takes the held step up again."""
        return self._ask(rollout_id, "resume", epoch)

    def abort(self, rollout_id: str, epoch: int) -> dict[str, Any]:
        """Sends everybody back to stable."""
        return self._ask(rollout_id, "abort", epoch)

    def models(self) -> list[dict[str, Any]]:
        """Served and registered models with their stable revision."""
        return list(self._send("GET", "/admin/v1/models"))

    def model(self, name: str) -> dict[str, Any]:
        """One model, with its registered versions."""
        return dict(self._send("GET", f"/admin/v1/models/{name}"))

    def replicas(self) -> list[dict[str, Any]]:
        """Running replicas."""
        return list(self._send("GET", "/admin/v1/replicas"))

    def answers(self) -> bool:
        """Whether a controller answers."""
        try:
            self._send("GET", "/health")
        except (ControllerUnreachable, RolloutRefused):
            return False
        return True

    def wait(
        self,
        rollout_id: str,
        *,
        timeout_s: float,
        progress: Callable[[dict[str, Any]], None] | None = None,
        poll_s: float = 0.5,
    ) -> dict[str, Any]:
        """Waits until the rollout is terminal and returns it; `progress` gets every look. Raises RolloutRefused in time.

        A controller that does not answer meanwhile is waited for: it may be restarting.
        """
        end = time.monotonic() + timeout_s
        while True:
            try:
                rollout = self.get(rollout_id)
            except ControllerUnreachable:
                if time.monotonic() >= end:
                    raise
            else:
                if progress is not None:
                    progress(rollout)
                if rollout["terminal"]:
                    return rollout
                if time.monotonic() >= end:
                    raise RolloutRefused(
                        f"rollout {rollout_id} is {rollout['phase']} after {timeout_s:.0f} s ({rollout['reason']}); "
                        f"see `narrowgauge rollout status {rollout_id}`",
                        status=504,
                    )
            time.sleep(poll_s)

    def _ask(self, rollout_id: str, action: Action, epoch: int) -> dict[str, Any]:
        return dict(self._send("POST", f"/admin/v1/rollouts/{rollout_id}/{action}", {"epoch": epoch}))

    def _send(self, method: str, path: str, body: Any = None) -> Any:
        if not listens(self._url):
            raise self._unreachable("nobody listens there")
        try:
            with admin_client(self._url, timeout_s=self._timeout_s) as client:
                response = client.request(method, path, json=body)
        except (httpx.HTTPError, OSError) as error:
            raise self._unreachable(str(error) or type(error).__name__) from None
        if response.status_code >= 400:
            raise RolloutRefused(message_of(response), status=response.status_code)
        return response.json()

    def _unreachable(self, why: str) -> ControllerUnreachable:
        return ControllerUnreachable(
            f"no controller answers at {self._url} ({why}); start one with `narrowgauge gateway` or "
            "`narrowgauge controller`, or set NG_ADMIN_URL"
        )
