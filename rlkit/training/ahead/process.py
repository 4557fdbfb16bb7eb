"""The trainer's side of asynchrony=overlap: it publishes weights, sends requests, and takes answers
as they come (`rlkit.training.ahead.sampler` is the other side)."""

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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing.connection import Pipe
from pathlib import Path
from typing import Any, BinaryIO

from rlkit.distributed.launch import ending
from rlkit.errors import ConfigError, EngineError
from rlkit.system.shared_state import say_once
from rlkit.system.waiting import waiting_outside
from rlkit.training.ahead.flight import (
    Flight,
    Request,
    StepGroups,
    keep_valid,
    pack_flight,
    unpack_flight,
)
from rlkit.training.ahead.journal import Journal, digest
from rlkit.training.ahead.sampler import START, Answer, Layout, Said, Setup, shared_engines
from rlkit.training.ahead.weights import WeightSlots, shared_memory
from rlkit.training.experiment import Experiment
from rlkit.training.metrics import Clock
from rlkit.training.schedules.progress import Progress, at, foreseen
from rlkit.types import Policy, Task

GRACE = 5.0  # seconds in which a process that was told to end may close its sessions


class SamplingProcess:
    """Samples in a second process. Start it early: it loads while the trainer does.

    Args:
      x: the whole run. tasks: its prompts.
      again: builds the experiment in the other process; a function that pickle can name, with its
        arguments.
      log: takes what the process prints; None: it prints where the trainer does.
      journal: keeps what its engine would not sample again alike.
    """

    def __init__(
        self,
        x: Experiment,
        tasks: Sequence[Task],
        again: Callable[[], Experiment],
        *,
        log: Path | None = None,
        journal: Journal | None = None,
    ):
        self.x = x
        self.tasks = tasks
        self.log = log
        self.journal = journal
        self.requests: dict[int, Request] = {}  # step → a request without an answer
        self.here: dict[int, Answer] = {}  # step → an answer that no one has received
        self.failure: BaseException | None = None  # why no more answers come
        self.slots: WeightSlots | None = None
        self.weights = ""  # a digest of the published ones, for the journal
        self.publish_s = 0.0  # that publishing took since groups were last received
        self.answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        data = _pickled(Setup(again, tasks))
        if log:
            log.parent.mkdir(parents=True, exist_ok=True)
        self.memory = shared_memory()
        self.connection, theirs = Pipe()
        handles = (theirs.fileno(), self.memory)
        with ExitStack() as files, theirs:
            # however large the setup is, it waits in a file until it is read
            setup = files.enter_context(tempfile.TemporaryFile())
            setup.write(data)
            setup.seek(0)
            out: BinaryIO | None = files.enter_context(log.open("ab")) if log else None
            self.process = subprocess.Popen(
                [sys.executable, "-c", START, json.dumps(sys.path), *map(str, handles)],
                pass_fds=handles,
                stdin=setup,
                stdout=out,
                stderr=out,
                start_new_session=True,  # Ctrl-C is the trainer's
            )
        threading.Thread(target=self._listen, daemon=True).start()

    def publish(self, policy: Policy, version: int) -> None:
        """Copy the trainable weights into the slot of this version."""
        begun = time.perf_counter()
        slots = self.slots_of(policy.model)
        try:
            slots.write(version)
        except OSError as error:
            raise EngineError(
                f"asynchrony=overlap: no memory for {slots.count} versions of"
                f" {slots.size / 2**20:,.0f} MiB ({error.strerror}); lower asynchrony.staleness, or"
                " train adapters (model.lora.rank)"
            ) from error
        self.weights = digest(policy.model) if self.journal else ""
        self.publish_s += time.perf_counter() - begun

    def request(self, request: Request, clock: Clock) -> StepGroups | Request:
        """Send the request, unless the journal has its groups."""
        engine = at(self.x, request.progress).generation.engine
        request = request._replace(
            kernel=request.kernel or getattr(engine, "kernel", None),
            weights=request.weights or self.weights,
        )
        groups = self.journal.find(request) if self.journal else None
        if groups is not None:
            return groups
        self.send(request)
        self.requests[request.step] = request
        return request

    def receive(
        self, groups: StepGroups | Request, clock: Clock
    ) -> tuple[StepGroups, dict[str, float]]:
        """Wait for the answer to a request. Raises EngineError if the process is gone."""
        begun = time.perf_counter()
        seconds = {"idle_s": 0.0, "sampling_s": 0.0, "handover_s": self.publish_s}
        self.publish_s = 0.0
        if isinstance(groups, Request):
            with clock.part("generate"):
                answer = self._wait_for(groups.step)
            clock.sessions += answer.sessions
            engine = foreseen(self.x, groups.progress, groups.step).generation.engine
            if answer.kernel and hasattr(engine, "elsewhere"):
                engine.elsewhere = answer.kernel
            groups = answer.groups
            seconds["idle_s"] = answer.idle_s
            seconds["sampling_s"] = answer.sampling_s
            seconds["handover_s"] += answer.load_s
        return groups, {"wait_s": time.perf_counter() - begun, **seconds}

    def state(self, flight: Flight) -> dict[str, Any]:
        """The groups that are there, whole; the requests without an answer, and the weights due to
        sample them. Never waits, and takes no answer away."""
        flight = flight._replace(ahead=self.arrived(flight.ahead))
        if self.journal and flight.ahead:
            self.journal.checkpoint(flight.ahead[0].step)
        versions = {own.version for own in flight.ahead if isinstance(own, Request)}
        weights = {own: self.slots.saved(own) for own in versions} if self.slots else {}
        return pack_flight(flight, weights)

    def restore(self, saved: Mapping[str, Any], policy: Policy, progress: Progress) -> Flight:
        """The groups in flight. Requests are made again, of the weights that were due to answer
        them."""
        flight = unpack_flight(saved, self.tasks, seed=self.x.seed)
        kept = keep_valid(self.x, flight, progress, (StepGroups, Request)).ahead
        requests = [own for own in kept if isinstance(own, Request)]
        for version in {own.version for own in requests}:
            self.slots_of(policy.model).restore(version, saved["weights"][version])
        flight = Flight(flight.consumed, kept[: len(kept) - len(requests)])
        for own in requests:
            own = own._replace(before=flight.after)
            flight = flight.followed_by(self.request(own, Clock()))
        return flight

    def arrived(self, ahead: Sequence[StepGroups | Request]) -> tuple[StepGroups | Request, ...]:
        """What is in flight, with answers in place of their requests."""
        while not self.answers.empty() and self.failure is None:
            self._take()
        return tuple(self.here[own.step].groups if own.step in self.here else own for own in ahead)

    def idle(self) -> None:
        """Wait until nothing is being sampled."""
        while self.requests and self.failure is None:
            self._take()

    def slots_of(self, model: Any) -> WeightSlots:
        """The slots for this model's weights. The process is told of them first."""
        if self.slots is None:
            self.slots = WeightSlots(self.memory, self.x.asynchrony.staleness + 1, model)
            self.send(Layout(self.slots.count, self.slots.layout))
        return self.slots

    def send(self, message: Any) -> None:
        """To the process. Raises EngineError where it is gone."""
        # `Connection.send` would share the memory of tensors, which needs a common key
        data = pickle.dumps(message)
        try:
            self.connection.send_bytes(data)
        except OSError:
            raise self.gone() from None

    def _listen(self) -> None:
        """Takes answers as they come, so that the process never waits for the trainer to look."""
        with self.connection, suppress(EOFError, OSError):
            while True:
                data = self.connection.recv_bytes()
                begun = time.perf_counter()
                answer = pickle.loads(data)
                if isinstance(answer, Said):
                    if self.log:  # else it has printed it here itself
                        print(answer.line, file=sys.stderr, flush=True)
                    continue
                if isinstance(answer, Answer):
                    unpacked_s = time.perf_counter() - begun
                    answer = answer._replace(load_s=answer.load_s + unpacked_s)
                self.answers.put(answer)
        self.answers.put(None)

    def _wait_for(self, step: int) -> Answer:
        """The answer to the request of a step. Raises what sampling its groups raised."""
        while step not in self.here and self.failure is None:
            self._take()
        if step not in self.here:
            assert self.failure is not None
            raise self.failure
        return self.here.pop(step)

    def _take(self) -> None:
        """Waits for the next answer."""
        with waiting_outside():
            answer = self.answers.get()
        if isinstance(answer, Answer):
            say_once(answer.named)
            request = self.requests.pop(answer.groups.step)
            if self.journal:
                self.journal.keep(answer.groups, request.weights)
            self.here[request.step] = answer
        else:
            self.failure = answer or self.gone()

    def gone(self) -> EngineError:
        """Why there is no answer."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(GRACE)
        status = self.process.poll()
        how = "closed its connection" if status is None else ending(status) if status else "ended"
        where = f"; what it printed: {self.log}" if self.log else ""
        return EngineError(
            f"asynchrony=overlap: the sampling process {how}{where}. The run can be resumed from"
            " its last checkpoint"
        )

    def close(self) -> None:
        """The process has ended."""
        with suppress(OSError):
            self.connection.send(None)
        if not self.requests:  # it has nothing to do, and ends by itself
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(GRACE)
        self.process.terminate()
        try:
            self.process.wait(GRACE)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        os.close(self.memory)


def _pickled(setup: Setup) -> bytes:
    try:
        return pickle.dumps(setup)
    except Exception as error:  # whatever an object of the user's raises
        raise ConfigError(
            f"asynchrony=overlap: the tasks cannot be handed to a second process ({error}); keep"
            " plain values in their metadata, or choose asynchrony=lag"
        ) from error


@contextmanager
def sampling_process(
    x: Experiment,
    tasks: Sequence[Task],
    again: Callable[[], Experiment] | None,
    *,
    folder: Path | None = None,
) -> Iterator[SamplingProcess]:
    """The second process of a run; it has ended afterwards.

    Args:
      folder: of the run, for the process's log and journal.
    Raises: ConfigError where the process cannot be made.
    """
    if again is None:
        raise ConfigError(
            "asynchrony=overlap: a second process builds the experiment again from its config,"
            " which Python objects are not part of; name them by their import path (_target_), or"
            " choose asynchrony=lag"
        )
    engines = shared_engines(x)
    journal = Journal(folder / "journal", tasks, x.seed) if folder and engines else None
    log = folder / "sampler.log" if folder else None
    process = SamplingProcess(x, tasks, again, log=log, journal=journal)
    for engine in engines:
        engine.lent = process.idle
    try:
        yield process
    finally:
        process.close()
