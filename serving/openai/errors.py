"""Errors as OpenAI's clients read them: {"error": {"message", "type", "param", "code"}}, code being the HTTP status.

The clients repeat 408, 409, 429 and every 5xx by themselves, so a caller's mistake is never a 5xx, and 429 is left to the
limits of one client: a replica with a full queue says 503 with Retry-After. Needs no engine: the gateway may use it too.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

TYPES = {
    400: "BadRequestError",
    401: "UnauthorizedError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    409: "ConflictError",
    413: "RequestTooLargeError",
    429: "RateLimitError",
    500: "InternalServerError",
    502: "BadGatewayError",
    503: "ServiceUnavailableError",
    504: "GatewayTimeoutError",
}
CLIENT_GONE = 499  # nobody reads it; it is only for logs


class ApiError(Exception):
    """An answer that is an error. `param` is the request's field at fault; `retry_after_s` becomes a Retry-After header."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, retry_after_s: int | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.retry_after_s = status, message, param, retry_after_s

    def body(self) -> dict[str, Any]:
        """The JSON value of the answer, also sent in-band when a stream has already begun."""
        kind = TYPES.get(self.status, "BadRequestError" if self.status < 500 else "InternalServerError")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.status}}

    def response(self, headers: Mapping[str, str] | None = None) -> Response:
        """The HTTP answer."""
        extra = {} if self.retry_after_s is None else {"retry-after": str(self.retry_after_s)}
        # json's escaping keeps any text of the caller's (lone surrogates too) a valid answer
        return Response(
            json.dumps(self.body()),
            status_code=self.status,
            media_type="application/json",
            headers={**(headers or {}), **extra},
        )


def bad_request(message: str, *, param: str | None = None) -> ApiError:
    """The caller's mistake: 400."""
    return ApiError(400, message, param=param)


def unavailable(message: str, *, retry_after_s: int = 1) -> ApiError:
    """Not now: 503 with Retry-After."""
    return ApiError(503, message, retry_after_s=retry_after_s)


def unknown_model(name: str) -> ApiError:
    """404 for a model that is not served here."""
    return ApiError(404, f"The model `{name}` does not exist.", param="model")


def from_validation(errors: Sequence[Mapping[str, Any]]) -> ApiError:
    """pydantic's `errors()` as one 400: invalid JSON, or the first field at fault with all that is wrong with it."""
    if errors[0]["type"] == "json_invalid":
        return bad_request(f"the body is not valid JSON: {errors[0].get('ctx', {}).get('error', errors[0]['msg'])}")
    field = str(errors[0]["loc"][0]) if errors[0]["loc"] else None
    reasons: dict[str, None] = {}
    for error in errors:
        if field is None or (error["loc"] and str(error["loc"][0]) == field):
            reasons[error["msg"].removeprefix("Value error, ")] = None
    text = ", or ".join(list(reasons)[:4])
    if field is None:
        return bad_request(f"the body must be a JSON object: {text}")
    where = ".".join(str(part) for part in errors[0]["loc"] if isinstance(part, int) or part.isidentifier())
    return bad_request(f"{where}: {text}", param=field)


async def answer_api_error(request: Request, error: Exception) -> Response:
    """Starlette's handler for ApiError."""
    assert isinstance(error, ApiError)
    return error.response()


async def answer_http_error(request: Request, error: Exception) -> Response:
    """Starlette's handler for its own 404 and 405 (a path or method that does not exist)."""
    status = getattr(error, "status_code", 500)
    reason = {404: f"there is no {request.url.path} here", 405: f"{request.url.path} does not take {request.method}"}
    message = reason.get(status, str(getattr(error, "detail", error)))
    return ApiError(status, message).response(getattr(error, "headers", None))


async def answer_crash(request: Request, error: Exception) -> Response:
    """Starlette's handler for what nobody foresaw; the trace goes to the log, not to the client."""
    return ApiError(500, f"internal error: {type(error).__name__}").response()


async def answer_client_gone(request: Request, error: Exception) -> Response:
    """Starlette's handler for a client that left while its request was still read or worked on."""
    return Response(status_code=CLIENT_GONE)
