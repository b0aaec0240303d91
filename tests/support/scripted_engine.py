"""An engine program that does only what a script tells it: it prints a log, fails or serves, heeds signals or not.

    python scripted_engine.py SCRIPT.json [vLLM's arguments]

SCRIPT holds `{"lives": [LIFE, …]}`; the n-th start plays the n-th life, and the last one again and again.
A life, all keys optional:
  log            list of lines, or of [seconds to wait before, line]
  exit           exit code after the log; without it the life serves on --port
  serve          false: after the log it hangs, and no port is opened
  ignore_sigterm true: SIGTERM is ignored
  child          true: a second process, as vLLM's EngineCore, in the same group
  running        what vllm:num_requests_running says
Each start appends {"pid", "child", "argv"} as one line to SCRIPT.json.starts.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

ENGINE = Path(__file__)

METRICS = """\
process_start_time_seconds {started}
vllm:cache_config_info{{engine="0",block_size="32",enable_prefix_caching="True",cache_dtype="auto",kv_cache_size_tokens="262144"}} 1.0
vllm:num_requests_running{{engine="0"}} {running}
vllm:num_requests_waiting{{engine="0"}} 0.0
vllm:kv_cache_usage_perc{{engine="0"}} 0.25
vllm:prompt_tokens_total{{engine="0"}} 100.0
vllm:generation_tokens_total{{engine="0"}} 10.0
"""


def main() -> None:
    script = Path(sys.argv[1])
    starts = script.with_name(f"{script.name}.starts")
    past = len(starts.read_text().splitlines()) if starts.exists() else 0
    lives = json.loads(script.read_text())["lives"]
    life = lives[min(past, len(lives) - 1)]
    if life.get("ignore_sigterm"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    child = subprocess.Popen(["sleep", "1000"]).pid if life.get("child") else None
    with starts.open("a") as file:
        file.write(json.dumps({"pid": os.getpid(), "child": child, "argv": sys.argv[2:]}) + "\n")
    for entry in life.get("log", []):
        seconds, line = entry if isinstance(entry, list) else (0, entry)
        time.sleep(seconds)
        print(line, flush=True)
    if "exit" in life:
        sys.exit(life["exit"])
    if not life.get("serve", True):
        while True:
            time.sleep(1000)
    serve(life)


def serve(life: dict) -> None:
    arguments = sys.argv[2:]
    port = int(arguments[arguments.index("--port") + 1])
    metrics = METRICS.format(started=repr(time.time()), running=life.get("running", 0.0))
    models = {"object": "list", "data": [{"id": "tiny", "object": "model", "max_model_len": 16384}]}
    pages = {
        "/health": "",
        "/version": json.dumps({"version": "0.32.0"}),
        "/v1/models": json.dumps(models),
        "/metrics": metrics,
    }

    class Pages(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            page = pages.get(self.path)
            body = (page or "").encode()
            self.send_response(404 if page is None else 200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    try:
        server = ThreadingHTTPServer(("127.0.0.1", port), Pages)
    except OSError as error:
        print(f"OSError: {error}", flush=True)
        sys.exit(1)
    print("INFO:     Application startup complete.", flush=True)
    server.serve_forever()


def read_starts(script: Path) -> list[dict]:
    notes = script.with_name(f"{script.name}.starts")
    return [json.loads(line) for line in notes.read_text().splitlines()] if notes.exists() else []


def every_process(starts: list[dict]) -> list[int]:
    return [pid for start in starts for pid in (start["pid"], start["child"]) if pid is not None]


def is_alive(pid: int) -> bool:
    """A zombie that nobody has reaped yet is dead."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in {"Z", "X"}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


if __name__ == "__main__":
    main()
