"""Settings: what wins, what is refused and how, and what is never shown."""

import os
from pathlib import Path

import pytest

from proxy.errors import StartError
from proxy.settings import SECRETS, Settings, host_and_port, read_settings


@pytest.fixture(autouse=True)
def _clean(monkeypatch):
    for name in list(os.environ):
        if name.startswith("HOMING_"):
            monkeypatch.delenv(name)


def read(monkeypatch, flags=None, **variables):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    return read_settings(flags or {}, os.environ)


def refusal(monkeypatch, flags=None, **variables):
    with pytest.raises(StartError) as caught:
        read(monkeypatch, flags, **variables)
    assert caught.value.exit_code == 2
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_a_flag_wins_over_a_variable_and_that_over_the_default(monkeypatch):
    assert read(monkeypatch).connect_timeout == 5.0
    assert read(monkeypatch, HOMING_CONNECT_TIMEOUT="7").connect_timeout == 7.0
    assert read(monkeypatch, {"connect_timeout": 9.0}, HOMING_CONNECT_TIMEOUT="7").connect_timeout == 9.0
    assert read(monkeypatch, {"connect_timeout": None}, HOMING_CONNECT_TIMEOUT="7").connect_timeout == 7.0


def test_the_defaults_are_safe(monkeypatch):
    settings = read(monkeypatch)
    assert settings.address == ("127.0.0.1", 8080)
    assert (settings.worker, settings.worker_network, settings.store_url) == ((), (), "embedded")
    assert (settings.join_token, settings.admin_key, settings.fleet_seed) == (None, None, None)
    assert (settings.max_body_bytes, settings.first_byte_timeout) == (32 * 1024 * 1024, 600.0)


@pytest.mark.parametrize("name", sorted(Settings.model_fields))
def test_an_empty_variable_is_an_unset_one(monkeypatch, name):
    assert read(monkeypatch, **{"HOMING_" + name.upper(): ""}) == Settings()


@pytest.mark.parametrize(
    ("written", "read_as"),
    [
        ("http://a", ("http://a",)),
        ("http://a,b=http://b", ("http://a", "b=http://b")),
        (" http://a , ,", ("http://a",)),
    ],
)
def test_lists_are_separated_by_commas(monkeypatch, written, read_as):
    assert read(monkeypatch, HOMING_WORKER=written).worker == read_as


def test_lists_of_flags_are_taken_as_they_are(monkeypatch):
    assert read(monkeypatch, {"worker": ("http://a", "http://b")}, HOMING_WORKER="http://c").worker == (
        "http://a",
        "http://b",
    )


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("HOMING_LISTN", "did you mean HOMING_LISTEN?"),
        ("HOMING_JOINTOKEN", "did you mean HOMING_JOIN_TOKEN?"),
        ("HOMING_WORKERS", "did you mean HOMING_WORKER?"),
        ("HOMING_QQQQ", "known are HOMING_ADMIN_KEY"),
    ],
)
def test_an_unknown_variable_is_refused_with_a_hint(monkeypatch, name, near):
    message = refusal(monkeypatch, **{name: "very secret"})
    assert name in message
    assert near in message
    assert "very secret" not in message


def test_other_programs_variables_are_their_own(monkeypatch):
    assert read(monkeypatch, HOMINGX="1", MY_HOMING_LISTEN="x", OTHER="y") == Settings()


BAD = [
    ("listen", "x", "HOST:PORT"),
    ("listen", "8080", "HOST:PORT"),
    ("listen", ":8080", "HOST:PORT"),
    ("listen", "host:", "HOST:PORT"),
    ("listen", "host:99999", "HOST:PORT"),
    ("listen", "host:-1", "HOST:PORT"),
    ("listen", "host:²", "HOST:PORT"),
    ("store_url", "http://x", "redis://"),
    ("store_url", "valkey", "redis://"),
    ("store_url", "redis://[", "IPv6"),
    ("worker_network", "10.0.0.1/8", "host bits"),
    ("worker_network", "home", "home"),
    ("max_body_bytes", "5", "1024"),
    ("max_body_bytes", "much", "integer"),
    ("connect_timeout", "0", "greater than 0"),
    ("first_byte_timeout", "-1", "greater than 0"),
    ("idle_timeout", "soon", "number"),
    ("log_format", "xml", "json"),
    ("log_level", "loud", "debug"),
]


@pytest.mark.parametrize(("name", "value", "says"), BAD)
def test_a_bad_value_is_refused_by_name(monkeypatch, name, value, says):
    variable = "HOMING_" + name.upper()
    for message in (refusal(monkeypatch, {name: value}), refusal(monkeypatch, **{variable: value})):
        assert "--" + name.replace("_", "-") in message
        assert variable in message
        assert value in message
        assert says in message
        monkeypatch.delenv(variable, raising=False)


@pytest.mark.parametrize("seed", ["x", "-1", "1.5", str(1 << 63), "²", "9" * 5000, "0x10", " 5"])
def test_a_bad_seed_is_refused_and_not_shown(monkeypatch, seed):
    message = refusal(monkeypatch, HOMING_FLEET_SEED=seed)
    assert message.startswith("HOMING_FLEET_SEED:")
    assert seed not in message.removeprefix("HOMING_FLEET_SEED:")
    assert "--" not in message  # there is no such flag


@pytest.mark.parametrize("seed", ["0", "42", str((1 << 63) - 1)])
def test_a_seed_is_a_whole_number(monkeypatch, seed):
    assert read(monkeypatch, HOMING_FLEET_SEED=seed).fleet_seed.get_secret_value() == seed


def test_a_password_in_a_bad_url_is_not_shown(monkeypatch):
    message = refusal(monkeypatch, HOMING_STORE_URL="http://user:hunter2@redis:6379")
    assert "hunter2" not in message
    assert "redis:6379" in message


def test_secrets_are_in_no_rendering(monkeypatch):
    variables = {"HOMING_" + name.upper(): f"1234{number}" for number, name in enumerate(SECRETS)}
    settings = read(monkeypatch, **variables)
    shown = repr(settings) + str(settings) + str(settings.model_dump()) + settings.model_dump_json()
    assert not [value for value in variables.values() if value in shown]
    assert [getattr(settings, name).get_secret_value() for name in SECRETS] == list(variables.values())


def test_every_setting_says_what_it_is():
    assert [name for name, field in Settings.model_fields.items() if not field.description] == []


@pytest.mark.parametrize(
    ("listen", "address"),
    [
        ("127.0.0.1:8080", ("127.0.0.1", 8080)),
        ("[::1]:80", ("::1", 80)),
        ("::1:80", ("::1", 80)),
        ("localhost:0", ("localhost", 0)),
        ("0.0.0.0:65535", ("0.0.0.0", 65535)),
    ],
)
def test_addresses(listen, address):
    assert host_and_port(listen) == address


def test_the_state_lies_in_the_state_home_by_port(monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", "/state")
    assert read(monkeypatch, {"listen": "localhost:9"}).state_home == Path("/state/homing/9")
    monkeypatch.setenv("HOME", "/home/ada")
    monkeypatch.delenv("XDG_STATE_HOME")
    assert read(monkeypatch).state_home == Path("/home/ada/.local/state/homing/8080")
    assert read(monkeypatch, HOMING_STATE_DIR="~/x").state_home == Path("/home/ada/x")


def test_settings_cannot_be_changed(monkeypatch):
    with pytest.raises(ValueError, match="frozen"):
        read(monkeypatch).listen = "x:1"
