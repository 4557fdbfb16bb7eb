"""Run code written by a model. Each program runs in one confined child process, and verdicts are
computed outside the child.

A child is a fresh interpreter with an empty environment, an empty folder, and limits of time,
memory, output and files. If the kernel supports them, the child is also confined by Landlock
(files), seccomp (processes, network, signals) and namespaces. It can read the standard library, but
no installed package. A self-test probes the protection, and `find_level()` returns its level.

Some things are not prevented. A program can find out whether a file exists and how large it is, but
cannot read it. Without namespaces it can fill the disk with many small files until its time is up.
On macOS only time is limited (untested). None of this protects against a bug of the kernel: for
code from an adversary, put a virtual machine around the whole run.

Each file imports only files before it in this list: _child, values, judge, process, asserts, level,
interpreter.
"""

from rlkit.sandbox.asserts import Check, Unsplittable, passes, split
from rlkit.sandbox.interpreter import Interpreter
from rlkit.sandbox.level import Level, find_level, get_known_level, require, run, run_many
from rlkit.sandbox.process import Job, Outcome, Result, Sandbox, Sandboxed, SandboxError
from rlkit.sandbox.values import Opaque, are_equal
