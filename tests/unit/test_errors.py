"""The tree of errors: every class has its facts, and they fit together."""

import json

import pytest

from proxy import errors
from proxy.errors import HomingError, StartError

ALL = [item for item in vars(errors).values() if isinstance(item, type) and issubclass(item, HomingError)]
LEAVES = [item for item in ALL if not item.__subclasses__() or item is errors.BadRequest]

FACTS = {
    "BadRequest": (400, "bad_request", False, False),
    "BadJson": (400, "bad_json", False, False),
    "MissingModel": (400, "missing_model", False, False),
    "Unauthorized": (401, "invalid_api_key", False, False),
    "Forbidden": (403, "forbidden", False, False),
    "NotFound": (404, "not_found", False, False),
    "UnknownModel": (404, "model_not_found", False, False),
    "WrongMethod": (405, "method_not_allowed", False, False),
    "Conflict": (409, "conflict", False, False),
    "TooLarge": (413, "body_too_large", False, False),
    "NoWorker": (503, "no_worker", False, False),
    "ConnectFailed": (502, "worker_unreachable", True, True),
    "ReuseFailed": (502, "worker_unreachable", True, False),
    "FirstByteTimeout": (504, "first_byte_timeout", False, True),
    "WorkerDied": (502, "worker_died", False, True),
    "InternalError": (500, "internal", False, False),
}


def test_every_error_is_in_the_table():
    assert {kind.__name__ for kind in LEAVES} == set(FACTS)


@pytest.mark.parametrize("kind", LEAVES)
def test_the_facts_of_each(kind):
    assert (kind.status, kind.code, kind.retry_safe, kind.blames_worker) == FACTS[kind.__name__]


@pytest.mark.parametrize("kind", ALL)
def test_they_fit_together(kind):
    is_clients = issubclass(kind, errors.ClientFault)
    assert is_clients == (400 <= kind.status < 500)
    assert is_clients != (kind.type == "server_error")
    assert not (is_clients and (kind.retry_safe or kind.blames_worker))
    assert (kind.retry_after is not None) == issubclass(kind, errors.Refused)
    assert kind.__doc__


@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize("message", ["plain", 'quotes " and \n lines', "lone \ud800 surrogate", "ä" * 5000])
def test_the_body_is_the_error_object_of_the_dialect(kind, message):
    body = kind(message, param="model").body()
    assert json.loads(body) == {"error": {"message": message, "type": kind.type, "param": "model", "code": kind.code}}
    assert b"\n" not in body  # it may stand in one data line of a stream
    assert json.loads(kind(message).body())["error"]["param"] is None


def test_an_error_at_the_start_has_an_exit_code():
    assert (str(StartError("no", 2)), StartError("no", 2).exit_code, StartError("no").exit_code) == ("no", 2, 1)
    assert not issubclass(StartError, HomingError)
