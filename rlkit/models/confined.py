"""Render the chat template of an untrusted model in a separate process, with limits on time, memory
and length."""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from rlkit.errors import TemplateError
from rlkit.models.chat import name_template
from rlkit.types import Messages, Policy

CHILD = Path(__file__).with_name("_template_child.py")
SECONDS = 2  # largest processor time for one prompt, in seconds
MEMORY = 256 << 20  # largest memory, in bytes, beyond the process's use at its start
CHARACTERS = 4 << 20  # largest number of characters of a rendered prompt
# Seconds after which a process without an answer is ended. Such a process waits for something, or
# the machine is overloaded.
PATIENCE = 120.0


def confine_template(model: partial[Policy]) -> partial[Policy]:
    """Wrap the function that loads a model. The loaded policy then renders its chat template in a
    separate process with limits. The function's keywords stay as they are."""
    if not isinstance(model, partial):
        return model
    return partial(_load_confined, model.func, *model.args, **model.keywords)


def _load_confined(load: Any, *given: Any, **settings: Any) -> Policy:
    policy = load(*given, **settings)
    tokenizer = policy.renderer.tokenizer
    if policy.renderer.render is not None or not getattr(tokenizer, "chat_template", None):
        return policy
    render = TemplateProcess(tokenizer, dict(policy.renderer.template_arguments)).render
    return policy._replace(renderer=policy.renderer._replace(render=render))


class TemplateProcess:
    """Hold the process that renders one tokenizer's template. The process starts with the first
    prompt. If a prompt kills the process, a new process starts with the next prompt."""

    def __init__(self, tokenizer: Any, arguments: Mapping[str, Any]):
        self.tokenizer = tokenizer
        self.arguments = arguments
        self.lock = threading.Lock()
        self.process: subprocess.Popen[bytes] | None = None

    def render(self, messages: Messages, tools: Sequence[Mapping[str, Any]]) -> str:
        """Render a conversation up to the assistant's turn.

        Raises: TemplateError if the template fails, or exceeds a limit.
        """
        name = name_template(self.tokenizer)
        asked = {
            "template": self.tokenizer.get_chat_template(None, list(tools) or None),
            "messages": list(messages),
            "tools": list(tools) or None,
            "arguments": {**self.tokenizer.special_tokens_map, **self.arguments},
        }
        with self.lock:
            said = self._answer(json.dumps(asked).encode() + b"\n")
        if "error" in said:
            raise TemplateError(f"{name} fails: {said['error']}")
        if "text" not in said:
            raise TemplateError(
                f"{name} was stopped: one prompt took more than {SECONDS} s"
                f" of the processor, {MEMORY >> 20} MB or {CHARACTERS:,} characters. It comes from"
                " a folder that is not yours; do not use its model"
            )
        return said["text"]

    def _answer(self, line: bytes) -> dict[str, Any]:
        """Send a line to the process and return its answer. The answer is empty if the process has
        ended, or had to be ended."""
        if self.process is None or self.process.poll() is not None:
            self.process = _start_child()
            weakref.finalize(self, _end, self.process)
        process = self.process
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(line)
            process.stdin.flush()
            return json.loads(_read_line(process.stdout, time.monotonic() + PATIENCE))
        except (OSError, ValueError):
            _end(process)
            self.process = None
            return {}


def _start_child() -> subprocess.Popen[bytes]:
    """Start the process without the environment variables of this process: a template has no use
    for them."""
    own = {
        name: os.environ[name]
        for name in ("PATH", "LANG", "LC_ALL", "LD_LIBRARY_PATH")
        if name in os.environ
    }
    own_path = json.dumps([place for place in sys.path if place])
    limits = [str(SECONDS), str(MEMORY), str(CHARACTERS)]
    return subprocess.Popen(
        [sys.executable, "-I", str(CHILD), *limits, own_path],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=own,
    )


def _read_line(file: Any, end: float) -> bytes:
    """Read the next line.

    Raises: ValueError if the file ends before the end of the line. TimeoutError if the time `end`
      is reached.
    """
    out = b""
    with selectors.DefaultSelector() as ready:
        ready.register(file, selectors.EVENT_READ)
        while not out.endswith(b"\n"):
            if not ready.select(max(0.0, end - time.monotonic())):
                raise TimeoutError("the process that renders a chat template says nothing")
            chunk = os.read(file.fileno(), 1 << 16)
            if not chunk:
                raise ValueError("the process that renders a chat template has ended")
            out += chunk
    return out


def _end(process: subprocess.Popen[bytes]) -> None:
    with suppress(OSError):
        process.kill()
    for file in (process.stdin, process.stdout):
        if file is not None:
            with suppress(OSError):
                file.close()
    process.wait()
