"""Every way a request can fail, with the facts that follow from it.

    HomingError
    ├── ClientFault      the client's: never retried, never counts against a worker
    │   ├── BadRequest 400   ├── Unauthorized 401   ├── Forbidden 403
    │   ├── NotFound 404     ├── UnknownModel 404   ├── WrongMethod 405
    │   ├── Conflict 409     └── TooLarge 413
    ├── Refused          ours: a decision not to place
    │   └── NoWorker 503
    ├── WorkerFault      a worker's: counts against it
    │   ├── ConnectFailed 502      nothing was sent, so placing again is safe
    │   ├── ReuseFailed 502        a kept-alive connection died with no byte of answer: safe on a fresh one
    │   ├── FirstByteTimeout 504   work may have begun: not safe
    │   └── WorkerDied 502         the answer broke off: not safe
    └── InternalError 500

`StartError` stands apart: it is for people at a terminal (one line and an exit code), not for API clients.
"""

from __future__ import annotations

import json
from typing import ClassVar


class HomingError(Exception):
    """An error that has a shape on the wire.

    The message says what happened, which value, and what to do next.
    """

    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    code: ClassVar[str] = "internal"
    retry_safe: ClassVar[bool] = False
    blames_worker: ClassVar[bool] = False
    retry_after: ClassVar[int | None] = None

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param

    def body(self) -> bytes:
        """Renders the error object of the OpenAI dialect, as JSON bytes."""
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return json.dumps({"error": error}).encode()


class ClientFault(HomingError):
    """The request is at fault."""

    status = 400
    type = "invalid_request_error"
    code = "bad_request"


class BadRequest(ClientFault):
    """The body cannot be read as a request."""


class BadJson(BadRequest):
    """The body is not a JSON object."""

    code = "bad_json"


class MissingModel(BadRequest):
    """The body names no model."""

    code = "missing_model"


class Unauthorized(ClientFault):
    """A key or token is missing or wrong."""

    status = 401
    type = "authentication_error"
    code = "invalid_api_key"


class Forbidden(ClientFault):
    """The caller may not do this."""

    status = 403
    type = "permission_error"
    code = "forbidden"


class NotFound(ClientFault):
    """No such route or thing."""

    status = 404
    code = "not_found"


class UnknownModel(ClientFault):
    """No worker has ever served this model."""

    status = 404
    code = "model_not_found"


class WrongMethod(ClientFault):
    """The route is there, but not for this method."""

    status = 405
    code = "method_not_allowed"


class Conflict(ClientFault):
    """The request contradicts what is known."""

    status = 409
    code = "conflict"


class TooLarge(ClientFault):
    """The body is over the limit."""

    status = 413
    code = "body_too_large"


class Refused(HomingError):
    """Nothing was sent to any worker."""

    status = 503
    retry_after = 1


class NoWorker(Refused):
    """No worker can take the request at the moment."""

    code = "no_worker"


class WorkerFault(HomingError):
    """A worker did not do its part."""

    status = 502
    blames_worker = True


class ConnectFailed(WorkerFault):
    """No connection could be made: nothing was sent."""

    code = "worker_unreachable"
    retry_safe = True


class ReuseFailed(WorkerFault):
    """A kept-alive connection was closed under us before any byte of the answer."""

    code = "worker_unreachable"
    retry_safe = True
    blames_worker = False


class FirstByteTimeout(WorkerFault):
    """The worker took the request and stayed silent."""

    status = 504
    code = "first_byte_timeout"


class WorkerDied(WorkerFault):
    """The worker's answer broke off."""

    code = "worker_died"


class InternalError(HomingError):
    """A fault of ours."""


class StartError(Exception):
    """The command cannot start. Shown as one line; `exit_code` follows the table in docs/reference/scripts.md."""

    def __init__(self, message: str, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code
