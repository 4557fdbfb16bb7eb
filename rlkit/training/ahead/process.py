"""Run the trainer's side of asynchrony=overlap. The trainer publishes weights, sends requests, and
stores answers as they arrive. `rlkit.training.ahead.sampler` is the side of the sampling
process."""

from __future__ import annotations

import json
import os
import pickle
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from multiprocessing.connection import Pipe
from pathlib import Path
from typing import Any

from rlkit.distributed.launch import describe_exit
from rlkit.errors import ConfigError, EngineError, tell_user
from rlkit.system.fingerprints import fingerprint
from rlkit.system.redaction import KNOWN
from rlkit.system.shared_state import say_once
from rlkit.system.waiting import waiting_outside
from rlkit.training.ahead.flight import (
    Flight,
    InFlight,
    Request,
    pack_flight,
    unpack_flight,
)
from rlkit.training.ahead.journal import Journal
from rlkit.training.ahead.sampler import START, Answer, Handshake
from rlkit.training.ahead.source import Received
from rlkit.training.ahead.weights import WeightSlots, make_shared_memory
from rlkit.training.experiment import Experiment
from rlkit.training.metrics import Clock
from rlkit.training.schedules.progress import Progress
from rlkit.types import CachingEngine, KernelEngine, Policy, SharedEngine, Task

GRACE = 5.0  # seconds for the process to close its sessions after it is told to end


class SamplingProcess:
    """Sample groups in a second process. Create it early, so that the second process loads its
    model while the trainer loads its own.

    Args:
      x: the experiment of the whole run.
      tasks: the training prompts of the run.
      again: a function to build the experiment in the second process. The function must be
        picklable, for example a partial of a module's function.
      folder: the run folder, for the journal and the output of the second process. None: the second
        process prints to the trainer's output, and no journal is kept.
    Raises: ConfigError if the second process cannot be made.
    """

    def __init__(
        self,
        x: Experiment,
        tasks: Sequence[Task],
        again: Callable[[], Experiment] | None,
        folder: Path | None = None,
    ):
        if again is None:
            raise ConfigError(
                "asynchrony=overlap: a second process builds the experiment again from its config,"
                " which cannot hold Python objects; name them by their import path (_target_),"
                " or choose asynchrony=lag"
            )
        self.x = x
        self.tasks = tasks
        self.log = folder / "sampler.log" if folder else None
        self.journal: Journal | None = None
        engine = x.generation.engine
        if isinstance(engine, SharedEngine):
            engine.lent = self.idle
            self.journal = Journal(folder / "journal", tasks, x.seed) if folder else None
        self.requests: dict[int, Request] = {}  # step → its request, until the answer arrives
        # step → its answer, kept because a checkpoint may need it
        self.here: dict[int, Answer] = {}
        self.failure: BaseException | None = None  # the reason why no more answers come, if any
        self.slots: WeightSlots | None = None
        self.weights = ""  # fingerprint of the published weights, for the journal
        self.next = 0  # the RL step whose groups are received next
        self.publish_s = 0.0  # seconds spent in `publish` since groups were last received
        self.answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        try:
            data = pickle.dumps(KNOWN) + pickle.dumps((again, tasks))
        except Exception as error:  # an object of the user may raise anything
            raise ConfigError(
                f"asynchrony=overlap: the tasks cannot be handed to a second process ({error});"
                " keep plain values in their metadata, or choose asynchrony=lag"
            ) from error
        if folder:
            folder.mkdir(parents=True, exist_ok=True)
        self.memory = make_shared_memory()
        self.connection, theirs = Pipe()
        handles = (theirs.fileno(), self.memory)
        with ExitStack() as files, theirs:
            # the setup may be large, so the second process reads it from a file
            setup = files.enter_context(tempfile.TemporaryFile())
            setup.write(data)
            setup.seek(0)
            out = files.enter_context(self.log.open("ab")) if self.log else None
            self.process = subprocess.Popen(
                [sys.executable, "-c", START, json.dumps(sys.path), *map(str, handles)],
                pass_fds=handles,
                stdin=setup,
                stdout=out,
                stderr=out,
                start_new_session=True,  # only the trainer handles Ctrl-C
            )
        threading.Thread(target=self._listen, daemon=True).start()

    def publish(self, policy: Policy, version: int) -> None:
        """Copy the policy's trainable weights into the slot of this version."""
        begun = time.perf_counter()
        slots = self.get_slots(policy.model)
        try:
            slots.write(version)
        except OSError as error:
            raise EngineError(
                f"asynchrony=overlap: no memory for {slots.count} versions of"
                f" {slots.size / 2**20:,.0f} MiB ({error.strerror}); lower asynchrony.staleness, or"
                " train adapters (model.lora.rank)"
            ) from error
        if self.journal:
            self.weights = repr(fingerprint([p for _, p in slots.named]))
        self.publish_s += time.perf_counter() - begun

    def request(self, request: Request, clock: Clock) -> InFlight:
        """Return the groups of a request if the journal holds these groups. Otherwise send the
        request to the sampling process, and return the request."""
        request = request._replace(weights=request.weights or self.weights)
        groups = self.journal.find(request) if self.journal else None
        if groups:
            return groups
        self.send(request)
        self.requests[request.step] = request
        return request

    def receive(self, groups: InFlight, clock: Clock) -> Received:
        """Wait for the answer to a request, and return its groups. Raise EngineError if the
        sampling process is gone."""
        seconds = {"wait_s": 0.0, "idle_s": 0.0, "sampling_s": 0.0, "handover_s": 0.0}
        if isinstance(groups, Request):
            begun = time.perf_counter()
            with clock.part("generate"):
                while groups.step not in self.here:
                    if self.failure:
                        raise self.failure
                    self._take()
            answer = self.here[groups.step]
            self.here.pop(groups.step - 1, None)  # the step with this answer is done
            groups = answer.groups
            clock.sessions += answer.sessions
            clock.engine = answer.engine
            clock.late += answer.late
            engine = self.x.generation.engine
            if answer.kernel and isinstance(engine, KernelEngine):
                engine.elsewhere = answer.kernel
            if answer.cached_tokens and isinstance(engine, CachingEngine):
                engine.keep_cached_tokens(answer.cached_tokens)
            seconds = answer.seconds | {"wait_s": time.perf_counter() - begun}
        seconds["handover_s"] += self.publish_s
        self.publish_s = 0.0
        self.next = groups.step + 1
        return groups, seconds

    def state(self, flight: Flight) -> dict[str, Any]:
        """Return the groups that have arrived, the requests without an answer, and the weights for
        these requests, for a checkpoint. The call never waits, and it removes no answer."""
        flight = flight._replace(ahead=self.take_answers(flight.ahead))
        if self.journal:
            self.journal.checkpoint(self.next)
        versions = {own.version for own in flight.ahead if isinstance(own, Request)}
        weights = {own: self.slots.save(own) for own in versions} if self.slots else {}
        return pack_flight(flight, weights)

    def restore(self, saved: Mapping[str, Any], policy: Policy, progress: Progress) -> Flight:
        """Restore the groups in flight. For each request without an answer, first write its weights
        back into their slot of the shared memory, and then send the request again."""
        kept = unpack_flight(saved, self.tasks, self.x, progress, InFlight)
        flight = kept._replace(ahead=())
        for own in kept.ahead:
            if isinstance(own, Request):
                weights = saved["weights"][own.version]
                self.get_slots(policy.model).restore(own.version, weights)
                own = self.request(own._replace(before=flight.after), Clock())
            flight = flight._replace(ahead=(*flight.ahead, own))
        return flight

    def take_answers(self, ahead: Sequence[InFlight]) -> tuple[InFlight, ...]:
        """Return the entries of `ahead`, and replace each answered request by its groups."""
        while not self.answers.empty() and not self.failure:
            self._take()
        return tuple(self.here[own.step].groups if own.step in self.here else own for own in ahead)

    def idle(self) -> None:
        """Wait until the sampling process has answered every request."""
        while self.requests and not self.failure:
            self._take()

    def get_slots(self, model: Any) -> WeightSlots:
        """Return the slots in shared memory for this model's weights. The first call also sends a
        `Handshake` to the sampling process. The handshake holds the layout of the slots, the
        decoding kernel chosen by the trainer, and the size of the engine's cache."""
        if self.slots is None:
            self.slots = WeightSlots(self.memory, self.x.asynchrony.staleness + 1, model)
            engine = self.x.generation.engine
            kernel = engine.kernel if isinstance(engine, KernelEngine) else None
            size = engine.cached_tokens if isinstance(engine, CachingEngine) else None
            self.send(Handshake(self.slots.count, self.slots.layout, kernel, size))
        return self.slots

    def send(self, message: Any) -> None:
        """Send a message to the sampling process. Raise EngineError if the sampling process is
        gone."""
        # `Connection.send` would pass tensors through shared memory, and then both sides need the
        # same authentication key
        data = pickle.dumps(message)
        try:
            self.connection.send_bytes(data)
        except OSError:
            raise self.make_gone_error() from None

    def _listen(self) -> None:
        """Receive answers as they arrive, so that the sampling process never waits for the
        trainer."""
        with self.connection, suppress(EOFError, OSError):
            while True:
                data = self.connection.recv_bytes()
                begun = time.perf_counter()
                try:
                    answer = pickle.loads(data)
                except Exception as error:  # an object of the user may raise anything
                    answer = EngineError(
                        "asynchrony=overlap: an answer of the sampling process cannot be read"
                        f" ({type(error).__name__}: {error}); keep plain values in what"
                        " environments and rewards return, or choose asynchrony=lag"
                    )
                if isinstance(answer, str):  # a line of the watcher
                    # without a log file the sampling process has printed the line here itself
                    if self.log:
                        tell_user(answer)
                    continue
                if isinstance(answer, Answer):
                    answer.seconds["handover_s"] += time.perf_counter() - begun
                self.answers.put(answer)
        self.answers.put(None)

    def _take(self) -> None:
        """Wait for the next answer from the sampling process, and store it by its step."""
        with waiting_outside():
            answer = self.answers.get()
        if isinstance(answer, Answer):
            say_once(answer.named)
            # a signal may have come after the request was sent and before it was noted
            request = self.requests.pop(answer.groups.step, None)
            if self.journal and request:
                self.journal.keep(answer.groups, request.weights)
            self.here[answer.groups.step] = answer
        else:
            self.failure = answer or self.make_gone_error()

    def make_gone_error(self) -> EngineError:
        """Return an EngineError that says how the sampling process ended."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(GRACE)
        status = self.process.poll()
        how = "closed its connection" if status is None else "ended"
        if status:
            how = describe_exit(status)
        where = f"; its output is in {self.log}" if self.log else ""
        return EngineError(
            f"asynchrony=overlap: the sampling process {how}{where}. The run can be resumed from"
            " its last checkpoint"
        )

    def close(self) -> None:
        """End the sampling process: ask it to stop, then terminate it, then kill it."""
        with suppress(OSError):
            self.connection.send(None)
        if not self.requests:  # the sampling process has nothing to do, and ends by itself
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(GRACE)
        self.process.terminate()
        try:
            self.process.wait(GRACE)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        os.close(self.memory)
