"""Request ids and the API key, as plain ASGI so that streams and disconnects pass through untouched."""

from __future__ import annotations

import hmac
import re
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deployments.api.errors import ApiError, NotAuthorized, api_error
from engine.errors import InvalidRequest

REQUEST_ID_HEADER = "x-request-id"
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:@/+=-]{1,128}")


def error_response(error: ApiError) -> JSONResponse:
    """`error` as an HTTP response."""
    return JSONResponse(error.body(), error.status, error.headers)


class RequestIds:
    """Takes the client's x-request-id, or draws one; puts it into `scope["state"]` and on every response.

    `answer` False leaves responses alone: behind Ray Serve, whose own middleware gives every request an id and adds
    it to every response, a second header would stand beside the first.
    """

    def __init__(self, app: ASGIApp, answer: bool = True) -> None:
        self._app = app
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get(REQUEST_ID_HEADER)
        good = given is not None and _REQUEST_ID.fullmatch(given) is not None
        request_id = given if good and given is not None else uuid.uuid4().hex

        async def send_with_id(message: Message) -> None:
            if self._answer and message["type"] == "http.response.start":
                MutableHeaders(scope=message)[REQUEST_ID_HEADER] = request_id
            await send(message)

        scope.setdefault("state", {})["request_id"] = request_id
        if given is not None and not good:
            text = f"{REQUEST_ID_HEADER} must be 1 to 128 characters out of A-Z a-z 0-9 . _ : @ / + = -"
            refusal = error_response(api_error(InvalidRequest(text, REQUEST_ID_HEADER)))
            await refusal(scope, receive, send_with_id)
            return
        await self._app(scope, receive, send_with_id)


class BearerKey:
    """Refuses paths under /v1 without the key."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self._app = app
        self._expected = f"Bearer {key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["type"] == "http" and _is_api_path(scope):
            given = Headers(scope=scope).get("authorization", "").encode()
            if not hmac.compare_digest(given, self._expected):
                refusal = NotAuthorized("A valid API key is needed: Authorization: Bearer <key>.")
                await error_response(api_error(refusal))(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _is_api_path(scope: Scope) -> bool:
    path: str = scope["path"].removeprefix(scope.get("root_path", ""))  # a server may mount us below a prefix
    return path == "/v1" or path.startswith("/v1/")
