"""The one settings model: flag > environment (`HOMING_*`) > default. Read by `cli` and `app` only."""

from __future__ import annotations

import difflib
import ipaddress
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import Field, SecretStr, ValidationError, field_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from .errors import StartError

PREFIX = "HOMING_"
# Read from the environment alone, for a command line is seen by every process of the machine.
SECRETS = ("join_token", "admin_key", "fleet_seed")
PASSWORD = re.compile(r"//[^/]*@")


class Settings(BaseSettings):
    """Everything that can be set; docs/reference/settings.md is made from it."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX,
        extra="forbid",
        frozen=True,
        env_ignore_empty=True,  # a compose file passes on what is not set as an empty text
    )

    listen: str = Field("127.0.0.1:8080", description="address to serve on, HOST:PORT; an IPv6 host in brackets")
    worker: Annotated[tuple[str, ...], NoDecode] = Field(
        (), description="base URL of an engine, or NAME=URL; repeat the flag, or separate by commas"
    )
    verify: bool = Field(
        True, description="probe a joining worker twice before it serves; off: it serves once it answers"
    )
    store_url: str = Field(
        "embedded", description="embedded (a Valkey of our own), redis://…, rediss://… or unix://PATH"
    )
    state_dir: Path | None = Field(
        None,
        description="where the embedded store keeps its file; default: a folder per port under the state home",
    )
    join_token: SecretStr | None = Field(None, description="token that workers register with; none: no registrations")
    admin_key: SecretStr | None = Field(None, description="key for GET /workers; none: open to this machine only")
    worker_network: Annotated[tuple[str, ...], NoDecode] = Field(
        (), description="network in which registered workers may live, besides private ones; repeatable"
    )
    fleet_seed: SecretStr | None = Field(
        None, description="whole number that seeds prefix hashes; default: made once and kept in the store"
    )
    max_body_bytes: int = Field(32 * 1024 * 1024, ge=1024, description="longest request body")
    connect_timeout: float = Field(5.0, gt=0, description="seconds to connect to a worker")
    first_byte_timeout: float = Field(600.0, gt=0, description="seconds for a worker's first byte; prefill lies in it")
    idle_timeout: float = Field(300.0, gt=0, description="seconds between two pieces of an answer")
    log_format: Literal["auto", "text", "json"] = Field("auto", description="auto: text on a terminal, else JSON")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="least level that is written")

    @field_validator("worker", "worker_network", mode="before")
    @classmethod
    def split(cls, value: object) -> object:
        """Takes `a,b` from the environment as two."""
        if isinstance(value, str):
            return tuple(item.strip() for item in value.split(",") if item.strip())
        return value

    @field_validator("listen")
    @classmethod
    def check_listen(cls, value: str) -> str:
        """Checks HOST:PORT."""
        host_and_port(value)
        return value

    @field_validator("worker_network")
    @classmethod
    def check_networks(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        """Checks CIDR notation."""
        for item in value:
            ipaddress.ip_network(item)
        return value

    @field_validator("fleet_seed")
    @classmethod
    def check_seed(cls, value: SecretStr | None) -> SecretStr | None:
        """Checks that it is a whole number of 63 bits."""
        seed = None if value is None else value.get_secret_value()
        if seed is not None and not (seed.isdecimal() and len(seed) < 20 and int(seed) < 1 << 63):
            raise ValueError("must be a whole number below 2^63")
        return value

    @field_validator("store_url")
    @classmethod
    def check_store(cls, value: str) -> str:
        """Checks the scheme."""
        if value != "embedded" and urlsplit(value).scheme not in ("redis", "rediss", "unix"):
            raise ValueError("must be embedded, redis://HOST:PORT/DB, rediss://… or unix://PATH")
        return value

    @property
    def address(self) -> tuple[str, int]:
        """Host and port to listen on."""
        return host_and_port(self.listen)

    @property
    def state_home(self) -> Path:
        """The folder of the embedded store."""
        if self.state_dir is not None:
            return self.state_dir.expanduser().resolve()
        home = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
        return Path(home) / "homing" / str(self.address[1])


def read_settings(flags: Mapping[str, object], environ: Mapping[str, str]) -> Settings:
    """Builds the settings from flags (those that were given) over the environment.

    Raises:
        StartError: exit code 2, naming the setting, its value and what it should be.
    """
    known = {PREFIX + name.upper() for name in Settings.model_fields} | {PREFIX + "URL"}  # the other commands' own
    for name in environ:
        if name.startswith(PREFIX) and name not in known:
            # Compared without what they all begin with, which would make any two of them alike.
            near = difflib.get_close_matches(name[len(PREFIX) :], [one[len(PREFIX) :] for one in sorted(known)], 1)
            hint = f"; did you mean {PREFIX}{near[0]}?" if near else f"; known are {', '.join(sorted(known))}"
            raise StartError(f"unknown environment variable {name}{hint}", 2)
    try:
        return Settings(**{name: value for name, value in flags.items() if value is not None})  # type: ignore[arg-type]
    except ValidationError as problem:
        first = problem.errors()[0]
        name = str(first["loc"][0])
        variable, reason = PREFIX + name.upper(), first["msg"].removeprefix("Value error, ")
        if name in SECRETS:
            raise StartError(f"{variable}: {reason}", 2) from None
        shown = PASSWORD.sub("//***@", repr(first["input"]))
        raise StartError(f"--{name.replace('_', '-')} {shown}: {reason} (also {variable})", 2) from None


def host_and_port(listen: str) -> tuple[str, int]:
    """Splits HOST:PORT.

    Raises:
        ValueError: it is not of that form.
    """
    host, separator, port = listen.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not separator or not host or not port.isdecimal() or int(port) > 65535:
        raise ValueError("must be HOST:PORT, for example 127.0.0.1:8080")
    return host, int(port)
