"""How each target is started in front of two workers, with affinity routing on where it has it."""

import os
import pwd
import sys
from collections.abc import Callable
from pathlib import Path

from .peers import Peers

MODEL = "bench"
NGINX = """
{user}
worker_processes 1;
daemon off;
pid {folder}/pid;
error_log stderr error;
events {{ worker_connections 8192; }}
http {{
  access_log off;
  client_body_temp_path {folder}/body;
  proxy_temp_path {folder}/proxy;
  fastcgi_temp_path {folder}/fastcgi;
  uwsgi_temp_path {folder}/uwsgi;
  scgi_temp_path {folder}/scgi;
  client_max_body_size 64m;
  # A long prompt stays in memory, as in the routers.
  client_body_buffer_size 1m;
  keepalive_requests 1000000000;
  upstream workers {{
    {servers}
    keepalive 1024;
    keepalive_requests 1000000000;
  }}
  server {{
    listen 127.0.0.1:{port} backlog=4096;
    location / {{
      proxy_pass http://workers;
      proxy_http_version 1.1;
      proxy_set_header Connection "";
      proxy_buffering off;
    }}
  }}
}}
"""

Words = Callable[[int, int, list[str], Path, Peers], list[str] | None]


def command(name: str, ports: tuple[int, int], urls: list[str], folder: Path, peers: Peers) -> list[str] | None:
    """Returns the words that start ``name`` on the first port (the second: its metrics); None when it is missing.

    Args:
        name: one of the targets but ``direct``.
        ports: two free ports.
        urls: the workers.
        folder: an empty folder for its files.
        peers: what is installed.
    """
    return STARTS[name](ports[0], ports[1], urls, folder, peers)


def _homing(port: int, _metrics: int, urls: list[str], folder: Path, _peers: Peers) -> list[str]:
    words = [sys.executable, "-m", "proxy", "serve", "--no-verify", "--listen", f"127.0.0.1:{port}"]
    words += ["--store-url", "embedded", "--state-dir", str(folder)]
    return words + [word for url in urls for word in ("--worker", url)]


def _vllm_router(port: int, metrics: int, urls: list[str], _folder: Path, peers: Peers) -> list[str] | None:
    if peers.python is None:
        return None
    # Through its interpreter: the script's first line would break with a long path.
    words = [str(peers.python), str(peers.python.parent / "vllm-router"), "--worker-urls", *urls]
    return [*words, *_router_words(port, metrics), "--log-level", "warning"]


def _sglang_router(port: int, metrics: int, urls: list[str], _folder: Path, peers: Peers) -> list[str] | None:
    if peers.python is None:
        return None
    words = [str(peers.python), "-m", "sglang_router.launch_router", "--worker-urls", *urls]
    return [*words, *_router_words(port, metrics), "--log-level", "warn"]


def _router_words(port: int, metrics: int) -> list[str]:
    words = {"--policy": "cache_aware", "--host": "127.0.0.1", "--port": port, "--prometheus-port": metrics}
    return [str(word) for pair in words.items() for word in pair]


def _nginx(port: int, _metrics: int, urls: list[str], folder: Path, peers: Peers) -> list[str] | None:
    if peers.nginx is None:
        return None
    # Its worker must reach files in a folder of ours; only root can tell it whom to run as.
    user = f"user {pwd.getpwuid(0).pw_name};" if os.geteuid() == 0 else ""
    servers = " ".join(f"server {url.removeprefix('http://')};" for url in urls)
    configuration = folder / "nginx.conf"
    configuration.write_text(NGINX.format(user=user, folder=folder, servers=servers, port=port))
    return [str(peers.nginx), "-p", str(folder), "-e", "stderr", "-c", str(configuration)]


STARTS: dict[str, Words] = {
    "homing": _homing,
    "nginx": _nginx,
    "vllm-router": _vllm_router,
    "sglang-router": _sglang_router,
}
