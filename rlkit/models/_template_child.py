"""Render the chat templates of untrusted models in a process of its own. The process reads one JSON
line per request and writes one JSON line per answer. rlkit.models.confined starts and ends the
process.

A template is a program. Its loops, products of texts and powers of numbers can run without end or
fill the memory, even while it is compiled. No wrapper around jinja's functions can stop all of
this. Therefore the kernel of the operating system limits this whole process.
"""

from __future__ import annotations

import json
import resource
import sys
from typing import Any


def limit_memory(more: int) -> None:
    """Limit the memory of this process to `more` bytes beyond its current use."""
    try:
        with open("/proc/self/statm") as file:
            used = int(file.read().split()[0]) * resource.getpagesize()
    except OSError:  # not on Linux: assume that 1 GiB is in use
        used = 1 << 30
    resource.setrlimit(resource.RLIMIT_AS, (used + more, used + more))


def limit_time(seconds: int) -> None:
    """Limit this process to `seconds` of further processor time. After this time the kernel kills
    the process."""
    own = resource.getrusage(resource.RUSAGE_SELF)
    end = int(own.ru_utime + own.ru_stime) + 1 + seconds
    resource.setrlimit(resource.RLIMIT_CPU, (end, resource.RLIM_INFINITY))


def render_template(asked: dict) -> str:
    """Render a conversation with its template and return the text.

    Raises: whatever the template raises; MemoryError at the memory limit.
    """
    from transformers.utils.chat_template_utils import render_jinja_template

    answer: Any = render_jinja_template(
        conversations=[asked["messages"]],
        tools=asked["tools"],
        chat_template=asked["template"],
        add_generation_prompt=True,
        **asked["arguments"],
    )
    return answer[0][0]


def main() -> None:
    """Answer the requests on standard input, line by line, until the input ends."""
    *numbers, path = sys.argv[1:]
    seconds, memory, characters = map(int, numbers)
    # python -I leaves out PYTHONPATH and the packages of the user
    sys.path[:] = json.loads(path)
    import transformers.utils.chat_template_utils  # noqa: F401  (before the memory is limited)

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
