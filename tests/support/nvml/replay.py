"""NVML as a fixture recorded it, in place of the library: `monkeypatch.setitem(sys.modules, "pynvml", replay(name))`.

A fixture maps the text of a call to its answer; handles are names such as `gpu0` and `gpu0/mig1`. A recorded refusal
and a call that was never recorded both raise `NVMLError`, as a driver does that has no answer.
"""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

FOLDER = Path(__file__).parent
NOT_SUPPORTED = 3


class NVMLError(Exception):
    def __init__(self, value: int) -> None:
        super().__init__(f"NVML error {value}")
        self.value = value


class RecordedNvml:
    NVMLError = NVMLError

    def __init__(self, calls: dict[str, Any]) -> None:
        self.calls = calls
        self.is_open = False

    def nvmlInit(self) -> None:
        self.is_open = True

    def nvmlShutdown(self) -> None:
        self.is_open = False

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if not name.startswith("nvml"):
            raise AttributeError(name)
        return lambda *about: self.answer(name, *about)

    def answer(self, name: str, *about: Any) -> Any:
        assert self.is_open, f"{name} outside nvmlInit and nvmlShutdown"
        answer = self.calls.get(f"{name}({', '.join(map(str, about))})", {"error": NOT_SUPPORTED})
        if isinstance(answer, dict) and "error" in answer:
            raise NVMLError(answer["error"])
        return SimpleNamespace(**answer) if isinstance(answer, dict) else answer


def replay(fixture: str) -> RecordedNvml:
    return RecordedNvml(read_fixture(fixture)["calls"])


def read_fixture(fixture: str) -> dict[str, Any]:
    return json.loads((FOLDER / f"{fixture}.json").read_text(encoding="utf-8"))
