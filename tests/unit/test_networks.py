"""Which addresses a worker may have."""

import ipaddress

import pytest

from proxy.edge.networks import PRIVATE, check_allowed, read_url
from proxy.errors import BadRequest, Forbidden


@pytest.mark.parametrize(
    ("url", "read"),
    [
        ("http://10.0.0.7:8000", "http://10.0.0.7:8000"),
        ("http://10.0.0.7:8000/", "http://10.0.0.7:8000"),
        ("https://worker.internal", "https://worker.internal"),
        ("http://[::1]:8000", "http://[::1]:8000"),
    ],
)
def test_a_base_url_is_read(url, read):
    assert read_url(url) == read


@pytest.mark.parametrize(
    "url",
    [
        "",
        "10.0.0.7:8000",
        "ftp://10.0.0.7",
        "file:///etc/passwd",
        "http://",
        "http://:8000",
        "http://user@10.0.0.7",
        "http://user:pass@10.0.0.7",
        "http://10.0.0.7?x=1",
        "http://10.0.0.7#x",
        "http://10.0.0.7:0",
        "http://10.0.0.7:99999",
        "http://10.0.0.7:x",
        "http://[::1",
        "javascript:alert(1)",
        "http://10.0.0.7/path",
        "http://@10.0.0.7",
        "http://10.0.0.7\n",
        "http://10.0.0.7:80\r\nx: y",
    ],
)
def test_anything_else_is_refused(url):
    with pytest.raises(BadRequest) as refusal:
        read_url(url)
    assert refusal.value.param == "url"
    assert "http://HOST:PORT" in refusal.value.message


@pytest.mark.anyio
@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1",
        "127.8.8.8",
        "[::1]",
        "10.1.2.3",
        "172.16.0.1",
        "192.168.1.1",
        "100.64.0.1",
        "[fd00::1]",
        "localhost",
    ],
)
async def test_this_machine_and_private_networks_are_allowed(host):
    await check_allowed(f"http://{host}:8000", PRIVATE)


@pytest.mark.anyio
@pytest.mark.parametrize(
    "host",
    [
        "169.254.169.254",  # cloud metadata
        "[fe80::1]",
        "[::ffff:127.0.0.1]",
        "[::ffff:169.254.169.254]",
        "8.8.8.8",
        "172.32.0.1",
        "100.128.0.1",
        "0.0.0.0",
        "[::]",
        "[2001:db8::1]",
        "2852039166",  # 169.254.169.254 as one number
        "0xa9.0xfe.0xa9.0xfe",
    ],
)
async def test_everything_else_is_refused(host):
    with pytest.raises(Forbidden, match="--worker-network"):
        await check_allowed(f"http://{host}:8000", PRIVATE)


@pytest.mark.anyio
async def test_a_network_may_be_allowed():
    await check_allowed("http://203.0.113.5:8000", (*PRIVATE, ipaddress.ip_network("203.0.113.0/24")))


@pytest.mark.anyio
async def test_a_name_that_does_not_resolve_is_the_registrations_fault():
    with pytest.raises(BadRequest, match="does not resolve"):
        await check_allowed("http://no-such-host.invalid:8000", PRIVATE)
