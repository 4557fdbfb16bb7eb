"""The pages of `rlkit --help` and `rlkit COMMAND --help`."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import re
import shutil
import textwrap
from pathlib import Path

from rlkit.system import extras

HELP = """rlkit: reinforcement learning of language models on multi-turn, tool-using tasks

  rlkit train                                    the embedded default: learns offline, on a CPU, in about a minute
  rlkit train algorithm=reinforce kl=none        another option of a group
  rlkit train optimizer.lr=3e-4 batch.prompts=8  another number
  rlkit train -m algorithm=grpo,reinforce seed=1,2   a sweep: every combination, one process each
  rlkit train reward=my_module.my_function       a reward of your own: a function of a rollout
  rlkit train resume=outputs/latest              continue a run: the newest one, or its folder outputs/NAME/TIME (auto: the newest unfinished one)
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

  --config FILE       overrides from YAML, or the flat config of a GSM8K/MBPP trainer; the command line wins
  --config-dir DIR    options of your own; --config-name NAME takes overrides from DIR/NAME.yaml
  --cfg job           print the composed config, without a run (--resolve: with references replaced; --info: which option of each group)
  --json              check, show, compare, plan, bench, runs, metrics: what the command found, for a program
  rlkit COMMAND --help   arguments, keys and examples of one command; rlkit --version
  debug=true          print the traceback of an error too
  trust=true          with run=, resume= or bundle=: somebody else's folder may use unsafe values; they are printed.
                      Every command takes it
  -m, --multirun      a sweep

groups and their options, those for everyday use first:
"""  # noqa: E501


WIDTH = 100  # columns, fewer on a narrow terminal
ROW = re.compile(r"(\S+(?: \S+)* {2,})(.*)", re.DOTALL)  # the words to type, and their meaning


def format_full_help() -> str:
    """Write the page of `rlkit --help`."""
    lines = [f"  rlkit {name:<40} {said}" for name, said in extras.summarize_commands().items()]
    lines += [
        f"  rlkit {name:<40} from {point.value}"
        for name, point in extras.find_outside_commands().items()
    ]
    more = "\n".join(lines)
    return HELP.format(more=f"\n{more}" if more else "") + list_groups()


def list_groups() -> str:
    """List the groups of conf/ and their options: first the everyday options, then, on a second
    line, the catalogue."""
    from rlkit.config.options import conf_dir, group_options_by_shelf

    lines = []
    for group in sorted(
        folder.name for folder in conf_dir().iterdir() if folder.is_dir() and folder.name != "hydra"
    ):
        shelves = group_options_by_shelf(group)
        lines.append(f"  {group:<12} {', '.join(shelves['everyday'])}")
        if shelves["catalogue"]:
            lines.append(f"  {'':<12} catalogue: {', '.join(shelves['catalogue'])}")
    return "\n".join(lines)


def format_command_help(name: str, module: str | None) -> str:
    """Write the page of `rlkit COMMAND --help`: the docstring of the command's function, wrapped to
    the terminal. Its blocks are prose, rows of a word and its meaning, and indented examples.

    Args:
      module: the command's module, read without an import; None for a command of another package.
    """
    if module is None:
        doc = inspect.getdoc(extras.load_command(name))
    else:
        spec = importlib.util.find_spec(module)
        assert spec is not None and spec.origin is not None
        body = ast.parse(Path(spec.origin).read_text()).body
        functions = {node.name: node for node in body if isinstance(node, ast.FunctionDef)}
        doc = ast.get_docstring(functions["command"])
    width = min(WIDTH, shutil.get_terminal_size().columns)
    blocks = (doc or "").split("\n\n")
    return "\n\n".join([f"rlkit {name}", *(_wrap_block(block, width) for block in blocks)])


def _wrap_block(block: str, width: int) -> str:
    if block.startswith(" "):
        return block
    rows = re.split(r"\n(?=\S)", block) if ROW.match(block) else [block]
    found = [ROW.match(row) for row in rows]
    return "\n".join(
        wrap_behind_label(row[1], row[2], width) if row else wrap_behind_label("", block, width)
        for row in found
    )


def wrap_behind_label(label: str, text: str, width: int = WIDTH) -> str:
    """Write a text behind a label, in lines of at most `width` characters."""
    return textwrap.fill(
        " ".join(text.split()),
        width,
        initial_indent=label,
        subsequent_indent=" " * len(label),
        break_long_words=False,
        break_on_hyphens=False,
    )
