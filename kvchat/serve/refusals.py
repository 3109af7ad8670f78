"""Error responses: a status and ``{"error": {message, type, param, code}}``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError
from starlette.responses import JSONResponse

RETRY_S = 5


class Refusal(Exception):
    """An error response instead of an answer; ``more`` are further fields of the error's body."""

    def __init__(
        self, status: int, message: str, kind: str, param: str | None = None, code: str | None = None, **more: Any
    ) -> None:
        super().__init__(message)
        self.status = status
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code, **more}}

    @property
    def headers(self) -> Mapping[str, str]:
        """When to retry, or how to authenticate."""
        by_status = {503: {"Retry-After": str(RETRY_S)}, 401: {"WWW-Authenticate": "Bearer"}}
        return by_status.get(self.status, {})

    def response(self) -> JSONResponse:
        return JSONResponse(self.body, self.status, self.headers)


def invalid(message: str, param: str | None = None, status: int = 400) -> Refusal:
    return Refusal(status, message, "invalid_request_error", param)


def unavailable(message: str) -> Refusal:
    """Return the error for a request that may be sent again later."""
    return Refusal(503, message, "unavailable_error", code="unavailable")


def of_body(error: ValidationError) -> Refusal:
    """Return the error for an invalid body, about its first problem."""
    details = error.errors(include_url=False, include_context=False)[0]
    param = ".".join(map(str, details["loc"])).replace("max_new_tokens", "max_tokens") or None
    if details["type"] == "extra_forbidden":
        return invalid(f"Unknown field {param}.", param)
    message = details["msg"].removeprefix("Value error, ")
    return invalid(f"{param}: {message}." if param else f"{message}.", param)
