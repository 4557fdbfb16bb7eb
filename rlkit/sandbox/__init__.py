"""Run code from a model: each program in one confined child, verdicts computed outside it.

A child is a fresh interpreter with an empty environment, an empty folder, and limits of time,
memory, output and files. If the kernel has them, it also gets Landlock (files), seccomp (processes,
network, signals) and namespaces. It reads the standard library, but no package installed beside it.
A self-test probes the protection: `find_level()` gives the level.

Some things are not prevented. A program can ask whether a file exists and how large it is (not read
it). Without namespaces it can fill the disk with many small files until its time is up. On macOS
there are limits of time alone (untested). A bug of the kernel is beyond all of it: for code from an
adversary put a virtual machine around the whole run.

Files in the order of their imports: _child, values, judge, process, asserts, level, interpreter.
"""

from rlkit.sandbox.asserts import Check, Unsplittable, passes, split
from rlkit.sandbox.interpreter import Interpreter
from rlkit.sandbox.level import Level, find_level, get_known_level, require, run, run_many
from rlkit.sandbox.process import Job, Outcome, Result, Sandbox, Sandboxed, SandboxError
from rlkit.sandbox.values import Opaque, are_equal
