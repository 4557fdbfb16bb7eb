"""The command line: each command is a file of this folder. Refusals are one sentence and exit
status 2, without a traceback."""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Callable, Sequence

from rlkit.commands.arguments import Arguments, drop, is_trusted, parse
from rlkit.errors import (
    TRACEBACK,
    ConfigError,
    Refusal,
    RLKitError,
    notes_of,
    raised_at,
    say,
    visible,
)
from rlkit.system import extras
from rlkit.system.leaving import leave_process
from rlkit.system.parent import end_with_parent
from rlkit.system.processors import wait_without_spinning

# a file of this folder each
COMMANDS = (
    "train",
    "evaluate",
    "rollout",
    "agent",
    "export",
    "runs",
    "compare",
    "plan",
    "check",
    "doctor",
    "replay",
    "metrics",
    "show",
)
HELP = """rlkit: reinforcement learning of language models on multi-turn, tool-using tasks

  rlkit train                                    the embedded default: learns offline, on a CPU, in about a minute
  rlkit train algorithm=reinforce kl=none        another option of a group
  rlkit train optimizer.lr=3e-4 batch.prompts=8  another number
  rlkit train -m algorithm=grpo,reinforce seed=1,2   a sweep: every combination, one process each
  rlkit train resume=outputs/NAME/TIME           continue a run (resume=auto: the newest unfinished one)
  rlkit evaluate run=outputs/NAME/TIME           greedy accuracy, avg@k and pass@k on test problems (split=validation, train)
  rlkit evaluate model=qwen3_0.6b task=gsm8k     of a model that no run has touched
  rlkit rollout task=guess_number n=64           episodes without training: recorded, scored, summed up
  rlkit agent "Kim has 19 toys. Kim buys 14 more. How many toys does Kim have now?" tools=[calculator]
                                                 a conversation with tools; run=FOLDER asks a trained policy
  rlkit runs algorithm=dapo                      runs with these settings, newest first; rlkit runs diff A B compares two
  rlkit compare outputs/grpo outputs/dapo        which is better and by how much, paired by seed; figure=, at=, pairs=all
  rlkit plan outputs/grpo outputs/dapo effect=0.02   how many seeds a comparison needs, and how long they take
  rlkit export run=outputs/NAME/TIME             the policy as a Hugging Face folder; merge=true adds adapters to the weights
  rlkit show algorithm=dapo kl=none              what a run is made of: options, keys that matter or differ, and where each comes from
  rlkit check experiment=gsm8k_tools             what train would do, in one small step, and what the run costs
  rlkit doctor                                   versions, devices, sandbox, disk and extras of this machine
  rlkit metrics kl/ref_k3                        what a number of metrics.jsonl means, a healthy value, and what to do otherwise
  rlkit replay bundle=outputs/NAME/TIME/debug/step_000007   an update that failed, once more: which rows and gradients are not finite{more}

  --config FILE       overrides from YAML, or the flat config of a GSM8K/MBPP trainer; what stands behind it wins
  --config-dir DIR    options of your own; --config-name NAME takes overrides from DIR/NAME.yaml
  --cfg job           print the composed config, without a run (--resolve: with references replaced; --info: which option of each group)
  debug=true          print the traceback of an error too
  trust=true          with run=, resume= or bundle=: a folder that is not your own may do what is not declared safe, which is printed.
                      environment.score=file needs it too. Every command takes it
  -m, --multirun      a sweep

groups and their options, those for everyday use first:
"""  # noqa: E501


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; the exit status: 0 done, 1 failed, 2 refused, 130 interrupted.

    Without `argv` the words are those of the process, which is the command's own: it ends with the
    command (`rlkit.system.leaving`).
    """
    if argv is not None:
        return run_command(argv)
    try:
        status = run_command(sys.argv[1:])
    except BaseException:
        sys.excepthook(*sys.exc_info())
        status = 1
    leave_process(status)
    return status


def _dispatch(name: str, words: Sequence[str]) -> int:
    """Runs the command of this name with its words; its exit status."""
    if name not in list_commands():
        known = ", ".join(list_commands())
        raise ConfigError(
            f"there is no command '{name}'; there are: {known}. Extras bring others (this copy has:"
            f" {', '.join(extras.list_extras()) or 'none'}), and so do other packages"
        )
    run = find_command(name)
    module = sys.modules[run.__module__]
    arguments = parse(words, texts=getattr(module, "TAKES_TEXTS", False))
    if arguments.help:
        print(full_help())
        return 0
    if arguments.multirun and name != "train":
        raise ConfigError(f"rlkit {name} takes one run at a time; -m belongs to rlkit train")
    is_trusted(arguments.overrides)  # every command takes the word, and no other value of it
    if getattr(module, "READS_NO_CODE", False):
        arguments = arguments._replace(overrides=drop(arguments.overrides, "trust"))
    if arguments.shown:
        return importlib.import_module("rlkit.commands.config_dump").command(name, arguments)
    return run(arguments)


def run_command(argv: Sequence[str]) -> int:
    """Runs a command in this process; its exit status."""
    end_with_parent()
    wait_without_spinning()
    from rlkit.system.output import guard_output

    guard_output()
    words = list(argv)
    # in the environment, for ranks and the jobs of a sweep are processes of their own
    if "debug=true" in words:
        os.environ[TRACEBACK] = "1"
        try:
            return run_command([word for word in words if word != "debug=true"])
        finally:
            del os.environ[TRACEBACK]
    broken = [word for word in words if re.search("[\ud800-\udfff]", word)]
    if broken:
        print(
            visible(
                f"rlkit: {broken[0]!a}: this word is not UTF-8; type it again, or set the"
                " terminal's encoding to UTF-8"
            ),
            file=sys.stderr,
        )
        return 2
    if not words or words[0] in ("-h", "--help"):
        print(full_help())
        return 0
    try:
        return _dispatch(words[0], words[1:])
    except Refusal as error:
        say(error, [f"rlkit: {line}" for line in str(error).splitlines()])
        return 2
    except RLKitError as error:
        say(error, [f"rlkit: {error}", *notes_of(error)])
        return 1
    except KeyboardInterrupt as error:
        print(visible(f"rlkit: interrupted: {raised_at(error)}"), file=sys.stderr)
        return 130
    except SystemExit as error:  # rlkit raises none
        print(
            visible(
                f"rlkit: {raised_at(error)} ended the command; a part of the config may not do that"
            ),
            file=sys.stderr,
        )
        return 1


def list_commands() -> tuple[str, ...]:
    """Commands of the core, of the extras that are there, and of other packages."""
    return tuple(dict.fromkeys([*COMMANDS, *extras.find_commands(), *extras.outside_commands()]))


def find_command(name: str) -> Callable[[Arguments], int]:
    """The function of a command. A name of the core stays the core's, whoever else has it.

    Its module may set TAKES_TEXTS, if words that set no key are allowed, and READS_NO_CODE, if all
    that it reads of a folder is data, so that trust=true changes nothing.
    """
    if name in COMMANDS:
        return importlib.import_module(f"rlkit.commands.{name}").command
    found = extras.load_command(name)
    assert found is not None, f"list_commands names {name}"
    return found


def full_help() -> str:
    """The page of `rlkit --help`."""
    lines = [f"  rlkit {name:<40} {said}" for name, said in extras.summarize_commands().items()]
    lines += [
        f"  rlkit {name:<40} from {point.value}"
        for name, point in extras.outside_commands().items()
    ]
    more = "\n".join(lines)
    return HELP.format(more=f"\n{more}" if more else "") + list_groups()


def list_groups() -> str:
    """The groups of conf/ and their options: those for everyday use, then on a second line the rest
    of the catalogue."""
    from rlkit.config.options import conf_dir, options_by_shelf

    lines = []
    for group in sorted(
        folder.name for folder in conf_dir().iterdir() if folder.is_dir() and folder.name != "hydra"
    ):
        shelves = options_by_shelf(group)
        lines.append(f"  {group:<12} {', '.join(shelves['everyday'])}")
        if shelves["catalogue"]:
            lines.append(f"  {'':<12} catalogue: {', '.join(shelves['catalogue'])}")
    return "\n".join(lines)
