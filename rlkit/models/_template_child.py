"""Render a stranger's chat templates, one JSON line in and one out. rlkit.models.confined starts
and ends this process.

A template is a program: loops, products of texts and powers of numbers run without an end or fill
the memory, at compilation too. No wrapper around jinja's functions holds them all, so the limits
are the kernel's, on this process.
"""

from __future__ import annotations

import json
import resource
import sys
from typing import Any

from transformers.utils.chat_template_utils import render_jinja_template


def limit_memory(more: int) -> None:
    """Limit memory to so many bytes beyond the current use."""
    try:
        with open("/proc/self/statm") as file:
            used = int(file.read().split()[0]) * resource.getpagesize()
    except OSError:  # no Linux: the limit counts from nothing
        used = 1 << 30
    resource.setrlimit(resource.RLIMIT_AS, (used + more, used + more))


def limit_time(seconds: int) -> None:
    """Limit processor time to so many further seconds; then the kernel kills this process."""
    own = resource.getrusage(resource.RUSAGE_SELF)
    end = int(own.ru_utime + own.ru_stime) + 1 + seconds
    resource.setrlimit(resource.RLIMIT_CPU, (end, resource.RLIM_INFINITY))


def render_template(asked: dict) -> str:
    """The text of a conversation. Raises: whatever the template raises; MemoryError at the
    limit."""
    answer: Any = render_jinja_template(
        conversations=[asked["messages"]],
        tools=asked["tools"],
        chat_template=asked["template"],
        add_generation_prompt=True,
        **asked["arguments"],
    )
    return answer[0][0]


def main() -> None:
    """Answer until the input ends."""
    seconds, memory, characters = map(int, sys.argv[1:])
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    limit_memory(memory)
    for line in sys.stdin:
        limit_time(seconds)
        try:
            text = render_template(json.loads(line))
            said = {"text": text} if len(text) <= characters else {"limit": "length"}
        except (MemoryError, OverflowError):
            said = {"limit": "memory"}
        except BaseException as error:
            said = {"error": f"{type(error).__name__}: {error!s:.300}"}
        print(json.dumps(said), flush=True)


if __name__ == "__main__":
    main()
