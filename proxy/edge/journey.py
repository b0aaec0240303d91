"""One request on its one-way path: prompt → blocks → snapshot → overlap → placement → lease → worker → settle.

A state machine without a task of its own: a door begins it, the transport's callbacks drive it, and chunks go to the
client before they are understood. One loop only: nothing was sent to the client and the failure says that another try
is safe → place again without the worker that failed. `_settle` runs once, on every way out, and records everything.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, TypeVar

from ..core.placement import place
from ..core.reader import Reading
from ..core.stream import StreamScanner, read_answer, read_error_type
from ..core.types import Ask, Placement, Refusal, WorkerView
from ..errors import (
    ConnectFailed,
    HomingError,
    InternalError,
    ReuseFailed,
)
from .asgi import Headers
from .headers import to_client, to_worker
from .ports import Arrival, Booking, Call, Client, Exchange, Outcome, Trail
from .verdicts import receipt, refuse, result_of, stream_result

if TYPE_CHECKING:
    from .director import Director

# Tries for one request, the first included; each further one goes to another worker.
MOST_ATTEMPTS = 3
# Engines answer this while their queue is full or they shut down: before any work, so another worker may be asked.
REFUSED_BEFORE_WORK = 503
# An answer that is no stream is held until it is whole, up to here, so that a worker that dies inside it becomes a
# clean error and not a broken transfer. A longer one is passed on as it comes.
HELD_BYTES = 4 * 1024 * 1024

T = TypeVar("T", bound=Trail)
A = TypeVar("A")


class Journey(Generic[T, A]):
    """One request. It is the sink of its exchange, and the client's door tells it how the client fares."""

    def __init__(self, director: Director[T, A], arrival: Arrival, client: Client) -> None:
        self.rooms = director.rooms
        self.director = director
        self.arrival = arrival
        self.client = client
        self.outcome = Outcome(arrival.request_id, arrival.dialect.value, bytes_in=len(arrival.body))
        self.reading: Reading | None = None
        self.exchange: Exchange | None = None
        self.lease: Booking | None = None
        self.assumption: A | None = None
        self.scanner: StreamScanner | None = None
        self.has_started = False
        self.is_over = False
        self._excluded: set[str] = set()
        self._is_reuse_tried = False
        self._is_paused = False
        self._head: tuple[int, Headers] = (0, [])
        self._held: list[bytes] = []
        self._held_bytes = 0

    def begin(self) -> None:
        """Reads the request and sends it to the worker that is its home."""
        try:
            self._read()
            self._attempt(None)
        except HomingError as problem:
            self._fail(problem)
        except Exception as problem:  # noqa: BLE001 - the last door: the client gets a shaped error, the log the cause
            self._crash(problem)

    def client_gone(self) -> None:
        """The client has left: the worker's connection is closed with it."""
        if not self.is_over:
            self.outcome.result = "client_gone"
            self._settle()

    def client_behind(self) -> None:
        """The client does not read as fast as the worker writes: no more is read until it has caught up."""
        self._is_paused = True
        if self.exchange is not None:
            self.exchange.pause()

    def client_caught_up(self) -> None:
        """The client reads again."""
        self._is_paused = False
        if self.exchange is not None:
            self.exchange.resume()

    def on_head(self, status: int, headers: Headers) -> None:
        """The worker's answer has begun."""
        placement = self.outcome.placement
        if status == REFUSED_BEFORE_WORK and placement is not None and placement.candidates > 1 and self._may_retry():
            self._leave()
            self._excluded.add(placement.winner.worker)
            self._again(None)
            return
        self.outcome.status = status
        kept = to_client(headers)
        self._head = (status, kept)
        if any(name == b"content-type" and value.startswith(b"text/event-stream") for name, value in kept):
            # Should the worker die, an event of ours follows: a length that the worker announced would be wrong.
            self._head = (status, [header for header in kept if header[0] != b"content-length"])
            self.scanner = StreamScanner()
            self._start()

    def on_data(self, chunk: bytes) -> None:
        """A piece of the answer's body."""
        scanner = self.scanner
        if scanner is None:
            self._hold(chunk)
            return
        self.client.write(chunk)
        self.outcome.bytes_out += len(chunk)
        is_awaited = self.outcome.ttft is None
        scanner.feed(chunk)
        if is_awaited and scanner.has_content:
            self._note_content()

    def on_end(self) -> None:
        """The answer is whole."""
        self.exchange = None
        if self.scanner is None:
            self._end_whole()
        else:
            self.client.end()
            self.scanner.finish()
            self.outcome.usage = self.scanner.usage
            self.outcome.result, self.outcome.error = stream_result(self._head[0], self.scanner)
        self._settle()

    def on_fault(self, fault: HomingError) -> None:
        """The worker failed the call."""
        self.exchange = None
        worker = self.outcome.worker
        if isinstance(fault, ConnectFailed) and worker is not None:
            self.rooms.fleet.failed(worker)
        if fault.retry_safe and not self.has_started and self._may_retry() and worker is not None:
            self._leave()
            if isinstance(fault, ReuseFailed) and not self._is_reuse_tried:
                self._is_reuse_tried = True  # the worker is fine, the connection was old: the same one again
            else:
                self._excluded.add(worker)
            self._again(fault)
            return
        self._fail(fault)

    def _read(self) -> None:
        started = self.director.clock()
        self.outcome.stages["read"] = started - self.arrival.received
        self.reading = reading = self.director.reader.read(
            self.arrival.dialect, self.arrival.body, self.director.seed()
        )
        self.outcome.model, self.outcome.stream = reading.model, reading.stream
        self._lap("hash", started)

    def _again(self, fault: HomingError | None) -> None:
        try:
            self._attempt(fault)
        except HomingError as problem:
            self._fail(problem)
        except Exception as problem:  # noqa: BLE001 - as in `begin`
            self._crash(problem)

    def _attempt(self, fault: HomingError | None) -> None:
        """Places the request and opens the exchange. `fault` is what the last attempt failed of."""
        assert self.reading is not None  # noqa: S101 - `_read` came first
        placement, view, trail = self._place(self.reading, fault)
        winner = placement.winner
        self.lease = self.rooms.fleet.lease(
            view.id, placement.prompt_tokens - winner.expected_tokens, winner.cost.uncached
        )
        self.assumption = self.rooms.index.assume(view.id, trail, self.director.clock())
        arrival = self.arrival
        call = Call(
            self.rooms.fleet.address(view.id),
            arrival.target,
            to_worker(arrival.headers, arrival.request_id),
            arrival.body,
        )
        self.exchange = self.rooms.transport.open(view.id, call, self)
        if self._is_paused:
            self.exchange.pause()

    def _place(self, reading: Reading, fault: HomingError | None) -> tuple[Placement, WorkerView, T]:
        started = self.director.clock()
        snapshot = self.rooms.fleet.snapshot()
        ids = [worker.id for worker in snapshot.workers if reading.model in worker.models]
        trail = self.rooms.index.find(reading.blocks, reading.model)
        overlap = self.rooms.index.overlap(trail, ids, started)
        self.outcome.turn = trail.turn
        middle = self._lap("index", started)
        self.outcome.is_known_model = reading.model in snapshot.known_models
        ask = Ask(reading.model, reading.exact_tokens or trail.tokens, frozenset(self._excluded))
        decision = place(snapshot, overlap, ask, started, self.director.rng)
        self._lap("place", middle)
        if isinstance(decision, Refusal):
            refuse(decision, reading.model, snapshot.known_models, fault)
        view = next(worker for worker in snapshot.workers if worker.id == decision.winner.worker)
        self.outcome.placement, self.outcome.hardware = decision, view.hardware
        self.outcome.block_tokens = view.block_tokens
        self.outcome.attempts += 1
        return decision, view, trail

    def _may_retry(self) -> bool:
        return self.outcome.attempts < MOST_ATTEMPTS

    def _start(self) -> None:
        status, headers = self._head
        self.has_started = True
        self.client.start(status, [*headers, *self._receipt()])

    def _hold(self, chunk: bytes) -> None:
        self._held.append(chunk)
        self._held_bytes += len(chunk)
        if self.has_started or self._held_bytes > HELD_BYTES:
            if not self.has_started:
                self._start()
            for piece in self._held:
                self.client.write(piece)
            self.outcome.bytes_out += self._held_bytes
            self._held, self._held_bytes = [], 0

    def _end_whole(self) -> None:
        status, headers = self._head
        body = b"".join(self._held)
        if not self.has_started:
            if not any(name == b"content-length" for name, _ in headers):
                headers.append((b"content-length", str(len(body)).encode()))
            self._start()
        if body:
            self.client.write(body)
        self.client.end()
        self.outcome.bytes_out += len(body)
        if status < 300:
            self.outcome.usage, aborted = read_answer(body)
            self.outcome.result = "worker_aborted" if aborted else "ok"
            self._note_content()
        else:
            self.outcome.result = "client_error" if status < 500 else "worker_error"
            self.outcome.error = read_error_type(body)

    def _note_content(self) -> None:
        self.outcome.ttft = self.director.clock() - self.arrival.received
        if self.lease is not None:
            self.lease.prefilled()

    def _crash(self, problem: Exception) -> None:
        self.outcome.error = repr(problem)
        self._fail(InternalError(f"The proxy failed on request {self.arrival.request_id}; please report it."))

    def _fail(self, problem: HomingError) -> None:
        """Tells the client in whatever way is left, and settles."""
        if self.is_over:
            return
        self.outcome.result = result_of(problem)
        self.outcome.error = self.outcome.error or problem.message
        if self.scanner is not None:
            # An event of ours, set apart from what was cut; never an end marker, for the worker sent none.
            gap = b"" if self.scanner.is_between_events else b"\n\n"
            self.scanner.finish()
            self.outcome.usage = self.scanner.usage
            self.client.write(gap + b"data: " + problem.body() + b"\n\n")
            self.client.end()
        elif self.has_started:
            self.client.cut()
        else:
            self.outcome.status = problem.status
            self._answer(problem)
        self._settle()

    def _answer(self, problem: HomingError) -> None:
        body = problem.body()
        headers: Headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        if problem.retry_after is not None:
            headers.append((b"retry-after", str(problem.retry_after).encode()))
        self.has_started = True
        self.client.start(problem.status, [*headers, *self._receipt()])
        self.client.write(body)
        self.client.end()

    def _receipt(self) -> Headers:
        placement = self.outcome.placement
        return receipt(
            self.arrival.request_id,
            worker=self.outcome.worker,
            reason=None if placement is None else placement.reason.value,
            expected=None if placement is None else placement.winner.expected_tokens,
            attempts=self.outcome.attempts,
        )

    def _lap(self, stage: str, started: float) -> float:
        now = self.director.clock()
        self.outcome.stages[stage] = self.outcome.stages.get(stage, 0.0) + now - started
        return now

    def _leave(self) -> None:
        """Leaves the worker of this attempt before its work began: nothing of it counts."""
        exchange, self.exchange = self.exchange, None
        if exchange is not None:
            exchange.abort()
        lease, self.lease = self.lease, None
        if lease is not None:
            lease.release()
        assumption, self.assumption = self.assumption, None
        if assumption is not None:
            self.rooms.index.withdraw(assumption)

    def _settle(self) -> None:
        if self.is_over:
            return
        self.is_over = True
        outcome = self.outcome
        outcome.duration = self.director.clock() - self.arrival.received
        # An answer may be whole without any content, when the model's first token ends it.
        is_computed = outcome.ttft is not None or outcome.result == "ok"
        assumption, reading = self.assumption, self.reading
        if is_computed:
            self.assumption = None  # computed, so there is nothing to take back
        # The share goes back first: nothing that follows may keep it.
        self._leave()
        if is_computed and assumption is not None and reading is not None:
            known, delivered = outcome.usage.prompt_tokens, outcome.usage.cached_tokens
            self.rooms.index.confirm(
                assumption,
                reading.exact_tokens if known is None else known,
                delivered if reading.reads_cache else None,
                outcome.turn,
            )
        self.rooms.telemetry.observe(outcome)
