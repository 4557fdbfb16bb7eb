"""Run the sampling process of asynchrony=overlap. This process samples and scores groups while the
trainer updates the weights.

    trainer ── weights of version v (shared memory) ────▶ sampling process
    trainer ── request (step v + staleness, version v) ─▶ sampling process ── groups ──▶ trainer

The sampling process builds its own experiment, model, engine and environments. It reads the
trainable weights of each version from memory shared with the trainer. It answers requests one by
one, in order. It samples with the same function as asynchrony=lag in the trainer (`sample_groups`).
Therefore its groups are the same, bit for bit, whichever process is faster. The sampling process
exits when the trainer exits, because the connection to the trainer is then closed.
"""

from __future__ import annotations

import os
import pickle
import queue
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import zip_longest
from multiprocessing.connection import Connection
from typing import Any, Literal, NamedTuple

import torch

from rlkit.episodes.stream import StreamState
from rlkit.errors import ConfigError, EngineError, Interrupted, RLKitError
from rlkit.system import rng
from rlkit.system.device import autocast, pick_device, silence_frameworks
from rlkit.system.leaving import end_process
from rlkit.system.output import guard_output
from rlkit.system.redaction import KNOWN
from rlkit.system.shared_state import NAMED
from rlkit.system.waiting import MAX_STEP_TIME, WATCHER, limit_waiting
from rlkit.training.ahead.flight import StepGroups
from rlkit.training.ahead.source import sample_groups
from rlkit.training.ahead.weights import WeightSlots
from rlkit.training.experiment import Experiment
from rlkit.training.metrics import Clock
from rlkit.types import CachingEngine, KernelEngine, Policy, SharedEngine

START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]);"
    " from rlkit.training.ahead import sampler; sampler.sampling_main()"
)


class Handshake(NamedTuple):
    """Hold the trainer's first message to the sampling process: the settings that both processes
    share."""

    slots: int  # how many versions of the weights fit into the shared memory
    layout: Sequence[Any]  # name, type and shape of each weight in a slot (`WeightSlots.layout`)
    # the decoding kernel that the trainer has chosen for generation.kernel
    kernel: Literal["auto", "eager", "fused"] | None
    cached_tokens: int | None  # size of the engine's cache in tokens; None: the engine decides


class Answer(NamedTuple):
    """Hold the sampling process's answer to a request."""

    groups: StepGroups
    # seconds of the sampling process. idle_s: waiting for the request. handover_s: reading the
    # weights. sampling_s: sampling and scoring the groups
    seconds: dict[str, float]
    sessions: list[float]  # seconds that each episode spent in its session
    engine: dict[str, float]  # metrics of the engine, for the step's row
    late: float  # seconds in which decoding waited for an answer of a session
    kernel: Any  # the kernel that the engine decoded with
    cached_tokens: int | None  # size in tokens of the cache that the engine decoded with
    # global state of the process that user functions have changed (rlkit.system.shared_state)
    named: Mapping[tuple[str, ...], str]


def sampling_main() -> None:
    """Run the sampling process with the connection and the shared memory inherited from the
    trainer."""
    guard_output()
    # before the tasks, whose modules may print when they are imported
    KNOWN.update(pickle.load(sys.stdin.buffer))
    connection, memory = map(int, sys.argv[2:])
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _stop)
    silence_frameworks()
    link = Connection(connection)
    messages = queue.SimpleQueue[Any]()
    threading.Thread(target=_listen, args=(link, messages, os.getppid()), daemon=True).start()
    lock = threading.Lock()

    def send(data: bytes) -> None:
        with lock:  # the watcher runs in its own thread
            link.send_bytes(data)

    # the trainer prints the watcher's lines, because the output of this process goes into a file
    WATCHER.tell = lambda line: send(pickle.dumps(line))
    # a signal ended the process, or the trainer no longer reads the answers
    with suppress(Interrupted, OSError):
        serve(lambda: pickle.load(sys.stdin.buffer), messages.get, send, memory)


def _stop(number: int, _: Any) -> None:
    raise Interrupted(number)


def _listen(link: Connection, messages: queue.SimpleQueue[Any], parent: int) -> None:
    """Put the trainer's messages into a queue as they arrive. If the trainer has exited, end this
    process immediately."""
    try:
        with suppress(EOFError, OSError):
            while os.getppid() == parent:
                if link.poll(1.0):
                    messages.put(pickle.loads(link.recv_bytes()))
    except Exception:  # an unreadable message; the log shows the error
        traceback.print_exc()
    finally:
        end_process(0)


def serve(
    begin: Callable[[], Any],
    receive: Callable[[], Any],
    send: Callable[[bytes], Any],
    memory: int,
) -> None:
    """Answer the trainer's requests until it sends None. If an error occurs, send the error as the
    last answer; the trainer raises it.

    Args:
      begin: a function that returns two values: a builder of the experiment, and the tasks.
      receive: waits for the next message and returns it.
      send: sends a pickled answer to the trainer.
      memory: the file descriptor of the shared memory with the weight slots.
    """
    try:
        again, tasks = begin()
        x = again()
        engine = x.generation.engine
        if isinstance(engine, SharedEngine):
            # no wait is needed in this process, because the trainer waits before it uses the shared
            # servers
            engine.lent = lambda: None
        policy, device = _load_policy(x)
        loaded = None
        behind = StreamState()  # the prompt stream after the last request
        while True:
            begun = time.perf_counter()
            message = receive()
            if message is None:
                return
            if isinstance(message, Handshake):
                slots = WeightSlots(memory, message.slots, policy.model)
                for theirs, own in zip_longest(message.layout, slots.layout):
                    if theirs != own:
                        raise ConfigError(
                            "asynchrony=overlap: the two processes have different models:"
                            f" {theirs} in the trainer, {own} in the sampler"
                        )
                if message.kernel and isinstance(engine, KernelEngine):
                    engine.kernel = message.kernel
                if message.cached_tokens and isinstance(engine, CachingEngine):
                    engine.keep_cached_tokens(message.cached_tokens)
                continue
            asked = time.perf_counter()
            if message.version != loaded:
                slots.read(message.version)
                loaded = message.version
            got = time.perf_counter()
            clock = Clock()
            hangs = partial("sampling for step {} hangs".format, message.step + 1)
            with autocast(x, device), limit_waiting(x.trainer.max_step_time, MAX_STEP_TIME, hangs):
                before = message.before or behind
                groups = sample_groups(x, policy, tasks, message, before, clock)
            behind = groups.after
            seconds = {
                "idle_s": asked - begun,
                "handover_s": got - asked,
                "sampling_s": time.perf_counter() - got,
            }
            kernel = engine.decodes if isinstance(engine, KernelEngine) else None
            size = engine.cached_tokens if isinstance(engine, CachingEngine) else None
            figures = clock.sessions, clock.engine, clock.late, kernel, size
            send(pickle.dumps(Answer(groups, seconds, *figures, dict(NAMED))))
    except Interrupted:
        raise
    except BaseException as error:
        send(_pickle_error(error))


def _load_policy(x: Experiment) -> tuple[Policy, torch.device]:
    """Load the policy onto the device of the sampling process, and set torch's number of threads.
    The trainer's weights replace the loaded weights later."""
    rng.seed(x.seed)
    device = pick_device(x)
    own = x.asynchrony.sampler
    if own.device != "auto":
        device = torch.device(own.device)
    elif device.type == "cuda" and torch.cuda.device_count() > 1:
        device = torch.device("cuda", 1)
    if device.type == "cuda":
        torch.cuda.set_device(device)  # else clocks wait for the trainer's GPU
    policy = x.model(device=device)
    torch.set_num_threads(own.threads)
    return policy, device


def _pickle_error(error: BaseException) -> bytes:
    """Serialise an error for the trainer, as text if it cannot be pickled."""
    if not isinstance(error, RLKitError):
        error.add_note("in the sampling process:\n" + "".join(traceback.format_exception(error)))
    with suppress(Exception):
        data = pickle.dumps(error)
        if type(pickle.loads(data)) is type(error):
            return data
    return pickle.dumps(
        EngineError(f"the sampling process failed: {type(error).__name__}: {error}")
    )
