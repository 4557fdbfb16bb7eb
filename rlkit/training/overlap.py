"""The second process of asynchrony=overlap: it samples and scores groups while the trainer updates.

    trainer ── weights of version v (shared memory) ──▶ sampling process ── groups of step v +
            staleness ──▶ trainer ── request (step, version, progress) ────▶

The process builds the experiment, the model, the engine and the environments again, and takes each
version's trainable weights from memory that both map. It answers requests one by one, in their
order, with the function that asynchrony=lag calls in the trainer
(`rlkit.training.flight.dispatched`), so its groups are the same, bit for bit, whoever is faster. It
ends with the trainer, however that ends: the connection between them is closed then.
"""

from __future__ import annotations

import json
import os
import pickle
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from itertools import zip_longest
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor

from rlkit.distributed.launch import ending
from rlkit.episodes.stream import StreamState
from rlkit.errors import ConfigError, EngineError, Interrupted, RLKitError
from rlkit.system import rng
from rlkit.system.deadline import end_process
from rlkit.system.device import autocast, pick_device, quiet
from rlkit.system.shared_state import NAMED, say_once
from rlkit.system.waiting import MAX_STEP_TIME, WATCHER, limit_waiting, waiting_outside
from rlkit.training.experiment import Experiment
from rlkit.training.flight import Asked, Dispatched, dispatched
from rlkit.training.journal import Journal, digest
from rlkit.training.metrics import Clock
from rlkit.training.schedules import phases
from rlkit.types import SharedEngine, Task

GRACE = 5.0  # seconds in which a process that was told to end may close its sessions
START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from rlkit.training import overlap;"
    " overlap.sampling_main()"
)
PIECE = (
    1 << 30
)  # bytes that are copied at a time; the system takes a little less than twice as many


class Setup(NamedTuple):
    """What the sampling process is made of."""

    again: Callable[[], Experiment]
    tasks: Sequence[Task]


class Answer(NamedTuple):
    """A request is done. Seconds of its parts are for metrics alone."""

    groups: Dispatched
    idle_s: float  # that the process waited for the request
    load_s: float  # that it took to get its weights
    sampling_s: float  # that it worked on the groups
    sessions: list[float]  # that each episode spent in its session
    kernel: Any  # that drew the tokens
    named: Mapping[
        tuple[str, ...], str
    ] = {}  # what functions have changed of that process (rlkit.system.shared_state)


class Said(NamedTuple):
    """A line of the watcher, which the trainer prints: the output of the process goes into a
    file."""

    line: str


# ------------------------------------------------------------------------------------------ weights


class WeightSlots:
    """Trainable weights of the last versions in a file that is memory: slot v mod n holds version
    v, its number in front.

    n = staleness + 1 are enough: when version v is written, the groups of version v - staleness - 1
    have been consumed.
    """

    def __init__(self, file: int, count: int, model: Any):
        self.file = file
        self.count = count
        self.named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        self.size = sum(p.numel() * p.element_size() for _, p in self.named)

    @property
    def layout(self) -> list[tuple[str, str, tuple[int, ...]]]:
        """Name, type and shape of each; two models with the same layout understand one another."""
        return [(name, str(p.dtype), tuple(p.shape)) for name, p in self.named]

    def place(self, version: int) -> int:
        """Where a version's number is; its weights stand behind."""
        return version % self.count * (8 + self.size)

    def write(self, version: int) -> None:
        """The weights of now, as this version. Raises OSError where there is no memory for them."""
        at = self.place(version) + 8
        for _, p in self.named:
            at = _copy(os.pwrite, self.file, _bytes(p.detach().cpu().contiguous()), at)
        os.pwrite(self.file, version.to_bytes(8, "little"), self.place(version))

    def read(self, version: int) -> None:
        """That version's weights into the model. Raises EngineError where it is not there."""
        self.require(version)
        at = self.place(version) + 8
        with torch.no_grad():
            for _, p in self.named:
                own = (
                    p.data
                    if p.device.type == "cpu" and p.is_contiguous()
                    else torch.empty(p.shape, dtype=p.dtype)
                )
                at = _copy(
                    lambda file, data, at: os.preadv(file, [data], at), self.file, _bytes(own), at
                )
                if own is not p.data:
                    p.data.copy_(own)

    def require(self, version: int) -> None:
        """Raises EngineError where the slot of a version holds another one."""
        found = int.from_bytes(os.pread(self.file, 8, self.place(version)), "little")
        if (found) != version:
            raise EngineError(
                f"asynchrony=overlap: weights of version {version} are asked for, and their place"
                f" holds version {found}"
            )

    def saved(self, version: int) -> Tensor:
        """That version's weights as bytes, for a checkpoint."""
        self.require(version)
        out = torch.empty(self.size, dtype=torch.uint8)
        _copy(
            lambda file, data, at: os.preadv(file, [data], at),
            self.file,
            out.numpy().data,
            self.place(version) + 8,
        )
        return out

    def restore(self, version: int, saved: Tensor) -> None:
        """Puts that back."""
        if len(saved) != self.size:
            raise EngineError(
                f"the checkpoint's weights of version {version} have {len(saved)} bytes, and the"
                f" model's {self.size}"
            )
        _copy(os.pwrite, self.file, saved.contiguous().numpy().data, self.place(version) + 8)
        os.pwrite(self.file, version.to_bytes(8, "little"), self.place(version))


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def _copy(move: Callable[[int, memoryview, int], int], file: int, data: memoryview, at: int) -> int:
    """Moves all of the data between a file and memory; the place in the file behind it."""
    done = 0
    while done < len(data):
        done += move(file, data[done : done + PIECE], at + done)
    return at + done


def shared_memory() -> int:
    """A file in memory without a name, which is gone with the last process that holds it; elsewhere
    than on Linux a temporary one."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("rlkit-weights")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


# ------------------------------------------------------------------------------- the trainer's side


class SamplingProcess:
    """The second process, as the trainer sees it. Start it early: it loads while the trainer does.

    Args:
      again: builds the experiment in the other process; a function that pickle can name, with its
        arguments.
      tasks: the prompts of the run. log: takes what the process prints; None: it prints where the
        trainer does.
      journal: keeps what its engine would not sample again alike.
    """

    def __init__(
        self,
        again: Callable[[], Experiment],
        tasks: Sequence[Task],
        *,
        log: Path | None = None,
        journal: Journal | None = None,
    ):
        self.log = log
        self.journal = journal
        self.requests: dict[int, Asked] = {}  # step → what has no answer yet
        self.behind: StreamState | None = (
            None  # the prompts behind the last request, where the journal has answered it
        )
        self.weights = ""  # a digest of the published ones, for the journal
        self.here: dict[
            int, tuple[Answer, float]
        ] = {}  # step → groups that no one has taken yet, and the seconds to unpack them
        self.failure: BaseException | None = None  # why no more answers come
        self.slots: WeightSlots | None = None
        self.figures: dict[str, float] = {}  # of the last answer
        self.sessions: list[float] = []
        self.kernel: Any = None  # of its engine
        self.answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        data = _pickled(Setup(again, tasks))
        if log:
            log.parent.mkdir(parents=True, exist_ok=True)
        self.memory = shared_memory()
        self.connection, theirs = Pipe()
        handles = (theirs.fileno(), self.memory)
        with ExitStack() as files, theirs:
            setup = files.enter_context(
                tempfile.TemporaryFile()
            )  # however large, it waits there until it is read
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
        threading.Thread(target=self._receive, daemon=True).start()

    def send(self, message: Any) -> None:
        """To the process. Raises EngineError where it is gone."""
        try:
            self.connection.send_bytes(
                pickle.dumps(message)
            )  # `send` would share the memory of tensors, which needs a common key
        except OSError:
            raise self.gone() from None

    def _receive(self) -> None:
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
                self.answers.put((answer, time.perf_counter() - begun))
        self.answers.put((None, 0.0))

    def publish(self, model: Any, version: int, staleness: int) -> float:
        """The model's trainable weights are this version; the seconds that it took."""
        begun = time.perf_counter()
        slots = self.slots_of(model, staleness)
        try:
            slots.write(version)
        except OSError as error:
            raise EngineError(
                f"asynchrony=overlap: no memory for {slots.count} versions of"
                f" {slots.size / 2**20:,.0f} MiB ({error.strerror}); lower asynchrony.staleness, or"
                " train adapters (model.lora.rank)"
            ) from error
        self.weights = digest(model) if self.journal else ""
        return time.perf_counter() - begun

    def slots_of(self, model: Any, staleness: int) -> WeightSlots:
        """The slots for this model's weights, which the process learns of first."""
        if self.slots is None:
            self.slots = WeightSlots(self.memory, staleness + 1, model)
            self.send((self.slots.count, self.slots.layout))
        return self.slots

    def ask(self, request: Asked) -> Asked:
        """Asks for the groups of a step. Answers come in the order of the requests."""
        request = request._replace(
            weights=request.weights or self.weights, before=request.before or self.behind
        )
        groups = self.journal.find(request) if self.journal else None
        self.behind = groups.after if groups else None
        if groups:
            self.here[request.step] = Answer(groups, 0.0, 0.0, 0.0, [], None), 0.0
        else:
            self.send(request)
            self.requests[request.step] = request
        return request

    def receive(self, request: Asked) -> Dispatched:
        """The groups of a request; waits for them. Raises what sampling them raised; EngineError
        where the process is gone."""
        while request.step not in self.here and self.failure is None:
            self._take()
        if request.step not in self.here:
            assert self.failure is not None
            raise self.failure
        answer, unpacked_s = self.here.pop(request.step)
        self.figures = {
            "idle_s": answer.idle_s,
            "sampling_s": answer.sampling_s,
            "handover_s": answer.load_s + unpacked_s,
        }
        self.sessions = answer.sessions
        self.kernel = answer.kernel
        return answer.groups

    def _take(self) -> None:
        """Waits for the next answer."""
        with waiting_outside():
            answer, seconds = self.answers.get()
        if isinstance(answer, Answer):
            say_once(answer.named)
            request = self.requests.pop(answer.groups.step)
            if self.journal:
                self.journal.keep(answer.groups, request.weights)
            self.here[request.step] = answer, seconds
        else:
            self.failure = answer or self.gone()

    def arrived(self, ahead: Sequence[Dispatched | Asked]) -> tuple[Dispatched | Asked, ...]:
        """What is in flight, with the groups that are there already in place of their requests.
        Never waits, and takes none away."""
        while not self.answers.empty() and self.failure is None:
            self._take()
        if self.journal and ahead:
            self.journal.checkpoint(ahead[0].step)
        return tuple(
            self.here[groups.step][0].groups if groups.step in self.here else groups
            for groups in ahead
        )

    def idle(self) -> None:
        """Waits until nothing is being sampled."""
        while self.requests and self.failure is None:
            self._take()

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
    again: Callable[[], Experiment] | None,
    tasks: Sequence[Task],
    *,
    folder: Path | None = None,
) -> Iterator[SamplingProcess | None]:
    """The second process of a run with asynchrony=overlap; None in other modes.

    Args:
      folder: of the run, for the process's log and journal.
    Raises: ConfigError where the process cannot be made.
    """
    if x.asynchrony.mode != "overlap":
        yield None
        return
    if again is None:
        raise ConfigError(
            "asynchrony=overlap: a second process builds the experiment again from its config,"
            " which Python objects are not part of; name them by their import path (_target_), or"
            " choose asynchrony=lag"
        )
    engines = _shared(x)
    journal = Journal(folder / "journal", tasks, x.seed) if folder and engines else None
    process = SamplingProcess(
        again, tasks, log=folder / "sampler.log" if folder else None, journal=journal
    )
    for engine in engines:
        engine.lent = process.idle
    try:
        yield process
    finally:
        process.close()


def _shared(x: Experiment) -> list[SharedEngine]:
    """The engines that two processes use: servers, which hold one version at a time."""
    engines = [own.generation.engine for own in (x, *phases(x).values())]
    return [engine for engine in engines if isinstance(engine, SharedEngine)]


# ----------------------------------------------------------------------------- the sampling process


def sampling_main() -> None:
    """The sampling process, with a connection and weights that it has inherited."""
    connection, memory = map(int, sys.argv[2:])
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _stop)
    quiet()
    link, requests = Connection(connection), queue.SimpleQueue[Any]()
    threading.Thread(target=_listen, args=(link, requests, os.getppid()), daemon=True).start()
    lock = threading.Lock()

    def send(data: bytes) -> None:
        with lock:  # the watcher is a thread of its own
            link.send_bytes(data)

    WATCHER.tell = lambda line: send(pickle.dumps(Said(line)))
    with suppress(Interrupted, OSError):  # told to end, or no one hears
        serve(lambda: pickle.load(sys.stdin.buffer), requests.get, send, memory)


def _stop(number: int, _: Any) -> None:
    raise Interrupted(number)


def _listen(link: Connection, requests: queue.SimpleQueue[Any], parent: int) -> None:
    """Takes messages as they come. Ends the process, whatever it does, once the trainer is gone."""
    try:
        with suppress(EOFError, OSError):
            while os.getppid() == parent:
                if link.poll(1.0):
                    requests.put(pickle.loads(link.recv_bytes()))
    except Exception:  # of a message that cannot be read: the log says which
        traceback.print_exc()
    finally:
        end_process(0)


def serve(
    begin: Callable[[], Setup],
    receive: Callable[[], Any],
    send: Callable[[bytes], Any],
    memory: int,
) -> None:
    """Answers requests until there are no more (None). An error is the last answer: the trainer
    raises it."""
    try:
        setup = begin()
        x = setup.again()
        for shared in _shared(x):
            shared.lent = lambda: None  # the trainer waits before it uses them
        policy, device = _policy(x)
        slots = None
        loaded = None
        last = StreamState()
        while True:
            begun = time.perf_counter()
            message = receive()
            if message is None:
                return
            if not isinstance(message, Asked):
                slots = _agreed(WeightSlots(memory, message[0], policy.model), message[1])
                continue
            asked = time.perf_counter()
            clock = Clock()
            if slots is not None and message.version != loaded:
                slots.read(message.version)
                loaded = message.version
            got = time.perf_counter()
            engine = x.generation.engine
            if message.kernel and hasattr(engine, "kernel"):
                engine.kernel = message.kernel
            with (
                autocast(x, device),
                limit_waiting(
                    x.trainer.max_step_time,
                    MAX_STEP_TIME,
                    partial("sampling for step {} hangs".format, message.step + 1),
                ),
            ):
                groups = dispatched(x, policy, setup.tasks, message, last, clock=clock)
            last = groups.after
            done = time.perf_counter()
            seconds = asked - begun, got - asked, done - got
            kernel = getattr(engine, "decodes", None)
            send(pickle.dumps(Answer(groups, *seconds, clock.sessions, kernel, dict(NAMED))))
    except Interrupted:
        raise
    except BaseException as error:
        send(_told(error))


def _policy(x: Experiment) -> tuple[Any, Any]:
    """The policy on the device of the sampling process, with its number of threads; its weights are
    replaced by the trainer's."""
    rng.seed(x.seed)
    device = pick_device(x)
    own = x.asynchrony.sampler
    if own.device != "auto":
        device = torch.device(own.device)
    elif device.type == "cuda" and torch.cuda.device_count() > 1:
        device = torch.device("cuda", 1)
    policy = x.model(device=device)
    torch.set_num_threads(own.threads)
    return policy, device


def _agreed(slots: WeightSlots, layout: Sequence[Any]) -> WeightSlots:
    """The slots, where the trainer's model has the same trainable weights. Raises ConfigError."""
    odd = next((pair for pair in zip_longest(layout, slots.layout) if pair[0] != pair[1]), None)
    if odd:
        raise ConfigError(
            f"asynchrony=overlap: the two processes have different models: {odd[0]} in the trainer,"
            f" {odd[1]} in the sampler"
        )
    return slots


def _told(error: BaseException) -> bytes:
    """The error, to be raised in the trainer; one that pickle cannot carry in words."""
    if not isinstance(error, RLKitError):
        error.add_note("in the sampling process:\n" + "".join(traceback.format_exception(error)))
    with suppress(Exception):
        data = pickle.dumps(error)
        if type(pickle.loads(data)) is type(error):
            return data
    return pickle.dumps(
        EngineError(f"the sampling process failed: {type(error).__name__}: {error}")
    )
