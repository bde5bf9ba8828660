"""Which failures of a task are worth another try."""

from typing import Any

import httpx

DELAYS_S = [1.0, 5.0, 15.0]
_TRANSIENT = (ConnectionError, TimeoutError, httpx.TransportError)


def is_transient(task: Any, run: Any, state: Any) -> bool:
    """Prefect's retry condition: only what the network does to us; a refusal stays one however often it is asked."""
    error = state.result(raise_on_failure=False)
    return isinstance(error, _TRANSIENT)
