"""Can agents of other packages be trained unmodified, token by token?

    python experiments/programs/packages.py NAME… [--envs FOLDER]

NAME is a row of PACKAGES; without names, all rows are played. Each package gets its own virtual
environment. Its agent in agents/ plays episodes, unmodified and confined. The question is a sum,
and the agent has a tool for it.

In three episodes the policy's replies are scripted: a call and the answer, a call and a wrong
answer, and a call and the answer with thinking. In two more the embedded model replies freely. The
script appends a row to packages.csv and skips packages with a row. In the end it rebuilds the table
of README.md from all rows.

  unchanged    each file of the package has the digest of its record
  exact        each sampled reply stands in one training row, once, with its context, ids and
               log-probs; `difference` is the largest gap between a log-prob and a new forward pass
  scored       the reward belongs to the answer that the package gave its caller: the agent writes
               this answer to a file, and a verifier reads the file
  rows         training rows of a scripted episode, without and with thinking
  failed       episodes whose program ended with an error; they are not scored
"""

from __future__ import annotations

import argparse
import base64
import csv
import hashlib
import math
import re
import subprocess
import sys
import tempfile
import venv
from collections.abc import Mapping, Sequence
from datetime import date
from functools import partial
from importlib.metadata import Distribution, distributions
from pathlib import Path
from string import Template
from typing import Any, NamedTuple

import torch

from rlkit.engines import Batched, Cached
from rlkit.episodes import collect
from rlkit.episodes._assemble import split_into_rows
from rlkit.extras.programs import program
from rlkit.models import load_policy
from rlkit.models.chat import encode_scaffold
from rlkit.rewards import Reward, Term, numeric, score
from rlkit.types import Engine, Environment, Generation, Policy, Rollout, Task

HERE = Path(__file__).parent.resolve()
RESULTS = HERE / "packages.csv"
PAGE = HERE / "README.md"
TOLERANCE = 1e-4  # largest accepted gap of a log-prob: other batch shapes round differently


def call(name: str, arguments: str) -> str:
    """Return a reply with a call of a tool."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


ADD = call("add", '{"a": $a, "b": $b}')


class Package(NamedTuple):
    """A package, and the settings for episodes with its agent."""

    requirements: tuple[str, ...]  # pip requirements; the first is the package
    door: str
    # The scripted replies in order; the last one is repeated.
    replies: tuple[str, ...] = (ADD, "The answer is $answer.")
    # Settings of environment=program.
    settings: Mapping[str, Any] = {}


IGNORE = {"unsupported": "ignore"}
# Without this variable, litellm asks a host for its list of prices.
LITELLM = {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}
CHAT = "openai-chat"
PACKAGES = {
    "openai_chat": Package(("openai",), CHAT),
    "openai_responses": Package(("openai",), "openai-responses"),
    "anthropic_messages": Package(("anthropic",), "anthropic"),
    "smolagents_tools": Package(
        ("smolagents", "openai"),
        CHAT,
        (ADD, call("final_answer", '{"answer": "$answer"}')),
        {"answer": "tool:final_answer", **IGNORE},
    ),
    "pydantic_ai_agent": Package(("pydantic-ai-slim", "openai"), CHAT),
    "openai_agents": Package(("openai-agents",), "openai-responses"),
    "langchain_agent": Package(("langchain", "langchain-openai"), CHAT),
    "litellm_completion": Package(("litellm",), CHAT, settings={"variables": LITELLM}),
    "instructor_answer": Package(
        ("instructor",),
        CHAT,
        (call("Answer", '{"number": $answer}'),),
        {"answer": "tool:Answer", **IGNORE},
    ),
    "mini_swe_agent": Package(
        ("mini-swe-agent",),
        CHAT,
        (
            call("bash", '{"command": "echo $$(($a + $b))"}'),
            call("bash", '{"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; echo $answer"}'),
        ),
        {"answer": "tool:bash", "variables": {**LITELLM, "MSWEA_GLOBAL_CONFIG_DIR": "."}},
    ),
    "magentic_chain": Package(("magentic",), CHAT, settings=IGNORE),
    "mirascope_call": Package(("mirascope", "openai"), CHAT),
    "agno_agent": Package(("agno", "openai"), CHAT),
    "llama_index_agent": Package(("llama-index-core", "llama-index-llms-openai-like"), CHAT),
    "haystack_agent": Package(("haystack-ai",), CHAT),
    "strands_agent": Package(("strands-agents", "openai"), CHAT),
    "autogen_assistant": Package(("autogen-agentchat", "autogen-ext[openai]"), CHAT),
    "semantic_kernel_agent": Package(("semantic-kernel",), CHAT),
    "google_adk_agent": Package(("google-adk", "litellm"), CHAT, settings={"variables": LITELLM}),
    "crewai_crew": Package(("crewai",), CHAT),
    "qwen_agent_assistant": Package(  # it imports four packages without requiring them
        ("qwen-agent", "numpy", "soundfile", "tqdm", "python-dateutil"), CHAT
    ),
}


# ------------------------------------------------------------------------------------ the episodes


def make_task(a: int, b: int) -> Task:
    """Return a task with a question for a sum."""
    question = f"What is {a} + {b}? Answer with the number."
    return Task(f"{a}+{b}", ({"role": "user", "content": question},), answer=str(a + b))


def make_environment(name: str, python: str, confined: Any = True) -> Environment:
    """Return an environment that runs an agent with this interpreter."""
    return program(
        command=[python, str(HERE / "agents" / f"{name}.py")],
        verify=[sys.executable, str(HERE / "agents" / "verifier.py")],
        time_limit=1800,  # seconds; imports take long on a loaded machine
        confined=confined,
        **PACKAGES[name].settings,
    )


def recompute(policy: Policy, ids: Sequence[int]) -> list[float]:
    """Return the log-prob of each token but the first, from one forward pass."""
    with torch.no_grad():
        given = torch.tensor([ids])
        logits = policy.model(given).logits[0, :-1].float()
        return logits.log_softmax(-1).gather(-1, given[0, 1:, None])[:, 0].tolist()


def scripted(texts: list[str]) -> Batched:
    """Return an engine that gives these replies in order, with their log-probs under the policy."""
    left = list(texts)

    def complete(policy: Policy, prompts: Any, seeds: Any, params: Any) -> list[Generation]:
        out = []
        for prompt in prompts:
            text = left.pop(0) if len(left) > 1 else left[0]
            ids = tuple(encode_scaffold(policy.renderer, f"{text}<|im_end|>"))
            logprobs = recompute(policy, [*prompt, *ids])[-len(ids) :]
            out.append(Generation(ids, tuple(logprobs), "stop"))
        return out

    return Batched(complete)


class Heard(NamedTuple):
    """A reply as the engine gave it, and its context."""

    context: tuple[int, ...]
    ids: tuple[int, ...]
    logprobs: tuple[float, ...]


def note(engine: Any, heard: list[Heard]) -> Engine:
    """Make the engine record each of its replies in `heard`, and return the engine."""
    generate = engine.generate

    async def noting(key: int, prompt_ids: Sequence[int], seed: int, params: Any) -> Generation:
        reply = await generate(key, prompt_ids, seed, params)
        heard.append(Heard(tuple(prompt_ids), reply.token_ids, reply.logprobs))
        return reply

    engine.generate = noting
    return engine


def play_script(
    policy: Policy,
    name: str,
    environment: Environment,
    heard: list[Heard],
    *,
    off: int = 0,
    thinking: bool = False,
) -> Rollout:
    """Play a scripted episode with an answer that is wrong by `off`."""
    a, b = 17, 25
    told = {"a": a, "b": b, "answer": a + b + off}
    texts = [Template(text).substitute(told) for text in PACKAGES[name].replies]
    if thinking:
        texts = [f"<think>\nI see.\n</think>\n\n{text}" for text in texts]
    engine = note(scripted(texts), heard)
    (rollout,) = collect(policy, [make_task(a, b)], engine=engine, environment=environment)
    return rollout


def play_model(policy: Policy, environment: Environment, heard: list[Heard]) -> list[Rollout]:
    """Play two episodes of the embedded model at once."""
    return collect(
        policy,
        [make_task(3, 4)],
        engine=note(Cached(), heard),
        environment=environment,
        group_size=2,
        max_new_tokens=48,
    )


# --------------------------------------------------------------------------------------- the checks


def largest_difference(
    policy: Policy, rollouts: Sequence[Rollout], heard: Sequence[Heard]
) -> float:
    """Return the largest difference between a recorded log-prob and a recomputed one.

    The result is infinite if there is no reply, or if a reply does not stand in exactly one
    training row as sampled. A row may end a reply early, at a stop text of its request.
    """
    if not heard:
        return math.inf
    left = list(heard)
    worst = 0.0
    for row in (row for rollout in rollouts for row in split_into_rows(rollout)):
        anew = [0.0, *recompute(policy, row.ids)]
        for step in dict.fromkeys(s for s, own in zip(row.steps, row.sampled, strict=True) if own):
            at = [i for i, s in enumerate(row.steps) if s == step and row.sampled[i]]
            trained = Heard(
                tuple(row.ids[: at[0]]),
                tuple(row.ids[i] for i in at),
                tuple(row.logprobs[i] for i in at),
            )
            n = len(at)
            said = (h._replace(ids=h.ids[:n], logprobs=h.logprobs[:n]) for h in left)
            found = next((i for i, reply in enumerate(said) if reply == trained), None)
            if found is None:
                return math.inf
            del left[found]
            worst = max([worst, *(abs(anew[i] - row.logprobs[i]) for i in at)])
    return math.inf if left else worst


def is_unchanged(package: Distribution) -> bool:
    """Return whether each file of an installed package has the digest of its record."""
    for file in package.files or ():
        if file.hash:
            digest = hashlib.new(file.hash.mode, Path(str(file.locate())).read_bytes()).digest()
            if base64.urlsafe_b64encode(digest).rstrip(b"=").decode() != file.hash.value:
                return False
    return True


def shorten(error: str) -> str:
    """Return the last line of an error; it names a Python exception."""
    return (error.strip().splitlines() or [""])[-1][:300]


def check(name: str, python: str, *, confined: Any = True) -> dict[str, Any]:
    """Play a package's episodes with this interpreter and return the figures of its row."""
    policy = load_policy(path="tiny")._replace(context_length=1 << 16)  # agents' prompts are long
    environment = make_environment(name, python, confined)
    heard: list[Heard] = []
    play = partial(play_script, policy, name, environment, heard)
    script = [play(), play(off=1), play(thinking=True)]
    played = [*script, *play_model(policy, environment, heard)]
    difference = largest_difference(policy, played, heard)
    scored = score(played, Reward("numeric", {"numeric": Term(1.0, numeric)}))
    failed = [rollout for rollout in scored if rollout.reward is None]
    judged = [rollout for rollout in scored if rollout.reward is not None]
    rewards = [rollout.reward for rollout in scored[:3]]
    agree = all(rollout.reward == rollout.steps[-1].reward for rollout in judged)
    return {
        "episodes": len(played),
        "failed": len(failed),
        "rows": len(split_into_rows(script[0])),
        "rows_thinking": len(split_into_rows(script[2])),
        "exact": difference <= TOLERANCE,
        "difference": f"{difference:.1e}",
        "scored": agree and rewards == [1.0, 0.0, 1.0],
        "reason": shorten(failed[0].error) if failed else "",
    }


# ---------------------------------------------------------------------------------------- the table


def installed(requirements: Sequence[str], folder: Path) -> str:
    """Return the interpreter of an environment with these packages, and make it if necessary.

    Raises: CalledProcessError.
    """
    python = folder / "bin" / "python"
    if not (folder / "complete").exists():
        venv.create(folder, with_pip=True)
        subprocess.run(
            [str(python), "-m", "pip", "install", "-q", *requirements],
            check=True,
            capture_output=True,
            text=True,
        )
        (folder / "complete").touch()
    return str(python)


def measure(name: str, envs: Path) -> dict[str, Any]:
    """Install a package, play its episodes and return its row."""
    package = PACKAGES[name]
    commit = subprocess.run(
        ["git", "rev-parse", "--short=8", "HEAD"], cwd=HERE, capture_output=True, text=True
    )
    row = dict.fromkeys(FIELDS, "") | {
        "agent": name,
        "package": package.requirements[0].partition("[")[0],
        "date": date.today().isoformat(),
        "commit": commit.stdout.strip(),
        "door": package.door,
        "settings": " ".join(f"{key}={value}" for key, value in package.settings.items()),
    }
    folder = envs / package.requirements[0].partition("[")[0]
    try:
        python = installed(package.requirements, folder)
    except subprocess.CalledProcessError as error:
        return row | {"reason": f"pip: {shorten(error.stderr)}"}
    (site,) = folder.glob("lib/python*/site-packages")
    (own,) = distributions(name=row["package"], path=[str(site)])
    row["version"] = own.version
    return row | check(name, python) | {"unchanged": is_unchanged(own)}


FIELDS = (
    *("agent", "package", "version", "date", "commit", "door", "episodes", "failed", "rows"),
    *("rows_thinking", "unchanged", "exact", "difference", "scored", "settings", "reason"),
)


def read_rows() -> list[dict[str, str]]:
    """Return the rows of packages.csv, in the order of PACKAGES."""
    if not RESULTS.exists():
        return []
    with RESULTS.open(newline="") as file:
        measured = {row["agent"]: row for row in csv.DictReader(file)}
    return [measured[name] for name in PACKAGES if name in measured]


def make_table(measured: Sequence[Mapping[str, str]]) -> str:
    """Return the rows as a Markdown table."""
    heads = ("package", "agent", "rows", "failed", "unchanged", "exact", "difference", "scored")
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for row in measured:
        cells = {
            "package": f"{row['package']} {row['version']}",
            "agent": f"[{row['agent']}](agents/{row['agent']}.py)",
            "rows": f"{row['rows']}, {row['rows_thinking']}",
        }
        for name in ("unchanged", "exact", "scored"):
            cells[name] = {"True": "yes", "False": "no"}.get(row[name], "")
        lines.append("| " + " | ".join(cells.get(head) or row[head] for head in heads) + " |")
    return "\n".join(lines)


def write_page() -> None:
    """Replace the table in README.md by the table of all rows."""
    old = re.compile(r"^\| package \| agent \|.*\n(\|.*\n)+", re.MULTILINE)
    table = make_table(read_rows())
    PAGE.write_text(old.sub(lambda _: f"{table}\n", PAGE.read_text()))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--envs", type=Path, default=Path(tempfile.gettempdir(), "rlkit_packages"))
    arguments = parser.parse_args()
    unknown = set(arguments.names) - set(PACKAGES)
    if unknown:
        parser.error(
            f"no row of PACKAGES: {', '.join(sorted(unknown))}; there are {', '.join(PACKAGES)}"
        )
    known = {row["agent"] for row in read_rows()}
    for name in arguments.names or PACKAGES:
        if name in known:
            continue
        row = measure(name, arguments.envs)
        print(row, flush=True)
        new = not RESULTS.exists()
        with RESULTS.open("a", newline="") as file:
            writer = csv.DictWriter(file, FIELDS)
            if new:
                writer.writeheader()
            writer.writerow(row)
    write_page()


if __name__ == "__main__":
    main()
