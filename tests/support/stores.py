"""Real stores on unix sockets: the proxy's own embedded Valkey, and Redis where `redis-server` is installed.

CI must test both, so there a missing `redis-server` is an error; elsewhere only what is installed is tested.
"""

import os
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from proxy.fleet import embedded

KINDS = ("valkey", "redis") if shutil.which("redis-server") or os.environ.get("CI") == "true" else ("valkey",)
DEADLINE_SECONDS = 15.0


class Store:
    """One server in a folder of its own. `kind` is valkey or redis."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.folder = Path(tempfile.mkdtemp(prefix="homing-store-"))  # short: a unix socket's path is limited
        self.start()

    @property
    def url(self) -> str:
        return f"unix://{self.folder / 'valkey.sock'}"

    def start(self) -> None:
        if self.kind == "valkey":
            self.child = embedded.start(self.folder).child
            return
        binary = shutil.which("redis-server")
        assert binary, "CI tests Redis too: install redis-server (apt-get install redis-server)"
        path = self.folder / "valkey.sock"
        options = [
            "--port",
            "0",
            "--unixsocket",
            str(path),
            "--dir",
            str(self.folder),
            "--save",
            "",
            "--appendonly",
            "no",
        ]
        with (self.folder / "redis.log").open("ab") as log:
            self.child = subprocess.Popen([binary, *options], stdout=log, stderr=log)
        deadline = time.monotonic() + DEADLINE_SECONDS
        while not embedded.answers(path):
            assert self.child.poll() is None, (self.folder / "redis.log").read_text()
            assert time.monotonic() < deadline, "redis-server does not answer"
            time.sleep(0.01)

    def client(self, patience: float = 5.0) -> Redis:
        """A client as the proxy makes it; `patience` is its time limit in seconds."""
        return Redis.from_url(
            self.url, socket_timeout=patience, socket_connect_timeout=patience, retry=Retry(NoBackoff(), 0)
        )

    def kill(self) -> None:
        """Ends it as a crash does; what it held is gone."""
        self.child.kill()
        self.child.wait()
        shutil.rmtree(self.folder / "appendonlydir", ignore_errors=True)

    def freeze(self) -> None:
        self.child.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self.child.send_signal(signal.SIGCONT)

    def close(self) -> None:
        if self.child.poll() is None:
            self.thaw()
            self.child.kill()
        self.child.wait()
        shutil.rmtree(self.folder, ignore_errors=True)
