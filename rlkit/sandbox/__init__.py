"""Running code that a model wrote: one confined child a program, verdicts computed outside it.

A child is a fresh interpreter with an empty environment, an empty folder, limits of time, memory,
output and files, and where the kernel has them Landlock (files), seccomp (processes, network,
signals) and namespaces. It reads the standard library, and no package that is installed beside it.
What holds is probed by a self-test: `probe()` gives the level.

What does not hold: a program can ask whether a file exists and how large it is (not read it);
without namespaces it can fill the disk with many small files until its time is up; on macOS there
are limits of time alone (untested). A bug of the kernel is beyond all of it: for code from an
adversary put a virtual machine around the whole run.

Files in the order of their imports: _child, values, judge, process, asserts, level, interpreter.
"""

from rlkit.sandbox.asserts import Check, Unsplittable, passes, split
from rlkit.sandbox.interpreter import Interpreter
from rlkit.sandbox.level import Level, probe, require, run, run_many, seen
from rlkit.sandbox.process import Job, Outcome, Result, Sandbox, Sandboxed, SandboxError
from rlkit.sandbox.values import Opaque, same
