"""Which headers travel, in each direction."""

import pytest

from proxy.edge.headers import HOP_BY_HOP, to_client, to_worker

ID = (b"x-request-id", b"r1")


@pytest.mark.parametrize("name", sorted(HOP_BY_HOP))
def test_hop_by_hop_headers_do_not_travel(name):
    assert to_worker([(name, b"x"), (b"accept", b"*/*")], "r1") == [(b"accept", b"*/*"), ID]
    assert to_client([(name, b"x"), (b"etag", b"1")]) == [(b"etag", b"1")]


@pytest.mark.parametrize(
    "connection",
    [b"X-Secret-Hop", b"close, x-secret-hop", b"X-SECRET-HOP ,keep-alive", b"\tx-secret-hop", b",,x-secret-hop,"],
)
def test_what_connection_names_does_not_travel(connection):
    headers = [(b"x-secret-hop", b"1"), (b"connection", connection), (b"x-open", b"2")]
    assert to_client(headers) == to_client(headers[::-1]) == [(b"x-open", b"2")]
    assert to_worker(headers, "r1") == [(b"x-open", b"2"), ID]


def test_several_connection_headers_all_count():
    headers = [(b"connection", b"x-a"), (b"x-a", b"1"), (b"connection", b"x-b"), (b"x-b", b"2"), (b"x-c", b"3")]
    assert to_client(headers) == [(b"x-c", b"3")]


@pytest.mark.parametrize("name", [b"authorization", b"x-api-key", b"cookie", b"proxy-authorization"])
def test_the_clients_credentials_stay_here(name):
    sent = to_worker([(name, b"Bearer K1"), (b"content-type", b"application/json")], "r1")
    assert not any(b"K1" in value for _, value in sent)
    assert (b"content-type", b"application/json") in sent


@pytest.mark.parametrize("name", [b"host", b"content-length", b"expect", b"x-request-id"])
def test_what_is_the_new_requests_own_is_not_copied(name):
    assert to_worker([(name, b"x")], "r1") == [ID]


@pytest.mark.parametrize(
    "name",
    [
        b"accept",
        b"accept-encoding",
        b"content-type",
        b"user-agent",
        b"x-session-id",
        b"x-data-parallel-rank",
        b"traceparent",
    ],
)
def test_what_the_worker_can_use_travels(name):
    assert to_worker([(name, b"x")], "r1") == [(name, b"x"), ID]


def test_repeated_headers_stay_repeated_and_in_order():
    headers = [(b"set-cookie", b"a=1"), (b"retry-after", b"7"), (b"set-cookie", b"b=2")]
    assert to_client(headers) == headers


@pytest.mark.parametrize(
    "name", [b"content-type", b"content-length", b"content-encoding", b"retry-after", b"vary", b"x-ratelimit"]
)
def test_what_describes_the_answer_travels_back(name):
    assert to_client([(name, b"x")]) == [(name, b"x")]


@pytest.mark.parametrize(
    "name", [b"server", b"date", b"x-request-id", b"x-homing-worker", b"x-homing-reason", b"x-homing-attempts"]
)
def test_a_worker_does_not_speak_for_the_proxy(name):
    assert to_client([(name, b"x")]) == []


def test_empty_is_fine():
    assert to_client([]) == []
    assert to_worker([], "r1") == [ID]
