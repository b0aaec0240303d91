"""What `homing-worker join` accepts, what it fills in, and what it says about the rest."""

import re
import socket

import pytest

from workers.agent.join import BadOption, settle_options


def settle(**changes: object):
    return settle_options(**{"proxy": "http://proxy:8080", "engine": "http://10.0.0.7:8000", "token": "t", **changes})


def test_advertises_the_engine_and_names_it_after_its_host_and_port(monkeypatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "gpu box" + "x" * 80)
    options = settle(engine="http://10.0.0.7:8000/", proxy="http://proxy:8080/")
    assert (options.proxy, options.engine, options.advertise) == (
        "http://proxy:8080",
        "http://10.0.0.7:8000",
        "http://10.0.0.7:8000",
    )
    assert options.worker_id == "gpu-box" + "x" * 52 + "-8000"
    assert len(options.worker_id) == 64


@pytest.mark.parametrize(
    "engine", ["http://127.0.0.1:8000", "http://localhost:8000", "http://[::1]:8000", "http://0.0.0.0:8000"]
)
def test_asks_for_an_address_that_the_proxy_can_reach(engine) -> None:
    with pytest.raises(BadOption, match="pass --advertise"):
        settle(engine=engine)
    assert settle(engine=engine, proxy="http://127.0.0.1:8080").advertise == engine
    assert settle(engine=engine, advertise="http://10.0.0.7:8000").advertise == "http://10.0.0.7:8000"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"proxy": "proxy:8080"}, "--proxy 'proxy:8080' is no base URL"),
        ({"engine": "ftp://10.0.0.7"}, "--engine 'ftp://10.0.0.7' is no base URL"),
        ({"engine": "http://10.0.0.7:99999"}, "--engine 'http://10.0.0.7:99999' is no base URL"),
        ({"advertise": "http://user:pw@10.0.0.7"}, "--advertise"),
        ({"advertise": "http://10.0.0.7/?a=b"}, "--advertise"),
        ({"proxy": "http://"}, "--proxy"),
        ({"worker_id": "a b"}, "--id 'a b' is no worker name"),
        ({"worker_id": "a" * 65}, "--id"),
        ({"worker_id": ""}, "--id"),
        ({"token": None}, "set HOMING_JOIN_TOKEN"),
    ],
)
def test_says_in_one_line_which_value_cannot_work(changes, said) -> None:
    with pytest.raises(BadOption, match=re.escape(said)) as raised:
        settle(**changes)
    assert "\n" not in str(raised.value)
