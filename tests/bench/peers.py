"""The routers to compare with, in a cache of their own: pinned wheels in a venv, nginx from the PATH or from Debian.

What cannot be had is left out and said: its bars are then not measured, never guessed.
"""

import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

PINNED = ("vllm-router==0.1.17", "sglang-router==0.3.2", "py-spy==0.4.3")
INSTALL_SECONDS = 600


@dataclass(slots=True)
class Peers:
    """Where the peers are (None: not there), their versions, and what is missing and why."""

    python: Path | None = None
    nginx: Path | None = None
    versions: dict[str, str] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)


def cache() -> Path:
    """The folder that belongs to this set of versions on this Python."""
    key = "\n".join((*PINNED, platform.python_version(), platform.machine()))
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return home / "homing" / f"peers-{hashlib.sha256(key.encode()).hexdigest()[:12]}"


def install() -> Peers:
    """Installs what is not there yet (a minute or two, once) and returns what there is."""
    peers, folder = Peers(), cache()
    folder.mkdir(parents=True, exist_ok=True)
    _add_wheels(peers, folder)
    _add_nginx(peers, folder)
    return peers


def _add_wheels(peers: Peers, folder: Path) -> None:
    python, stamp = folder / "venv" / "bin" / "python", folder / ".ready"
    if not stamp.exists():
        print(f"installing {', '.join(PINNED)} into {folder} …", file=sys.stderr)
        pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *PINNED]
        for command in ([sys.executable, "-m", "venv", "--clear", str(folder / "venv")], pip):
            problem = _run(command)
            if problem:
                peers.missing.append(f"vllm-router, sglang-router and py-spy: {problem}")
                return
        stamp.touch()
    peers.python = python
    peers.versions.update((name, version) for name, _, version in (pin.partition("==") for pin in PINNED))


def _add_nginx(peers: Peers, folder: Path) -> None:
    found = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
    program = Path(found) if found else folder / "nginx" / "usr" / "sbin" / "nginx"
    problem = None if program.exists() else _unpack_nginx(folder / "nginx")
    if problem is None:
        done = subprocess.run([str(program), "-v"], capture_output=True, text=True, check=False)
        version = re.search(r"nginx/(\S+)", done.stderr)
        if version:
            peers.nginx, peers.versions["nginx"] = program, version[1]
            return
        problem = (done.stderr.strip().splitlines() or ["it does not say its version"])[-1]
    peers.missing.append(f"nginx: {problem}; install it (Debian: apt-get install nginx)")


def _unpack_nginx(folder: Path) -> str | None:
    """Unpacks Debian's package beside the venv: nothing is installed and no service starts. Returns what failed."""
    if not shutil.which("apt-get") or not shutil.which("dpkg-deb"):
        return "not on the PATH, and this is no Debian"
    folder.mkdir(exist_ok=True)
    problem = _run(["apt-get", "download", "nginx"], folder)
    if problem and os.geteuid() == 0:  # lists that are absent or too old
        problem = _run(["apt-get", "update", "-qq"]) or _run(["apt-get", "download", "nginx"], folder)
    for package in folder.glob("nginx_*.deb"):
        problem = _run(["dpkg-deb", "-x", str(package), str(folder)])
        package.unlink()
    return problem


def _run(command: list[str], folder: Path | None = None) -> str | None:
    """Runs a command; returns the last line of what it said when it failed."""
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=INSTALL_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as problem:
        return str(problem)
    if done.returncode == 0:
        return None
    return ((done.stderr + done.stdout).strip().splitlines() or [f"exit code {done.returncode}"])[-1]
