"""Hold a conversation with tools, without training: `rlkit agent` and `run_agent`.

It uses rlkit.episodes.collect and the environment rlkit.environments.tool_use, so episodes are
sampled as in training.

    hook            signature
    tool_parser     (text without thinking) → list of calls; or a parser of the core, (content) →
                    (content, calls)
    tool_executor   (call) → str; the policy reads its errors as sentences
    stop_condition  (conversation) → bool, after each reply and before its calls are run
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rlkit.commands.arguments import Arguments, drop, find_option
from rlkit.commands.trust import read_model, with_limits
from rlkit.config.problems.numbers import sampling_problems
from rlkit.engines import Cached
from rlkit.environments import (
    calculator,
    execute,
    get_weather,
    hermes,
    python_tool,
    single_turn,
    tool_name,
    tool_use,
)
from rlkit.environments.tool_parsers import make_call
from rlkit.environments.tools import MAX_CHARS, TIMEOUT, tool_schema, with_schema
from rlkit.episodes import collect
from rlkit.errors import ConfigError, refuse_problems, show_controls
from rlkit.models import check_template, make_policy
from rlkit.sandbox import require
from rlkit.types import (
    Engine,
    Environment,
    Message,
    Messages,
    Policy,
    Rollout,
    Task,
    ToolCall,
    ToolParser,
    ToolResult,
)

TAKES_TEXTS = True

if TYPE_CHECKING:
    from rlkit.training.experiment import AgentRun

Tool = Callable[..., Any] | Mapping[str, Any]


class AgentResult(NamedTuple):
    """A finished conversation, as messages for notebooks and as a rollout."""

    # all messages; thinking is a separate entry, and a result has the id of its call
    messages: list[Message]
    # content of the last reply; '' if a limit or stop_condition cut the episode off before an
    # answer
    final_response: str
    tool_calls: list[dict[str, Any]]  # as in OpenAI's API, with unique ids
    turns: int  # number of replies
    rollout: Rollout  # its `status` and `truncation` say how it ended


def run_agent(
    messages: Messages | str,
    tools: Sequence[Tool] | Mapping[str, Callable[..., Any]] = (),
    tool_implementations: Mapping[str, Callable[..., Any]] | None = None,
    *,
    policy: Policy | None = None,
    model: Any = None,
    tokenizer: Any = None,
    engine: Engine | None = None,
    tool_parser: Callable[..., Any] = hermes,
    tool_executor: Callable[[dict[str, Any]], Any] | None = None,
    stop_condition: Callable[[list[Message]], bool] | None = None,
    system_prompt: str | None = None,
    max_turns: int = 10,
    max_calls: int = 8,
    max_chars: int = MAX_CHARS,
    timeout: float | None = TIMEOUT,
    max_new_tokens: int = 1024,
    temperature: float = 0.6,
    seed: int = 0,
    **settings: Any,
) -> AgentResult:
    """Let the policy answer, with tool calls as it needs them.

    Args:
      messages: the conversation so far, or one question.
      tools: typed functions with docstrings, or schemas of OpenAI's API. Without tools the policy
        gives one reply.
      tool_implementations: name → function, for tools given as schemas.
      policy: the model to talk to; or `model` and `tokenizer`, a causal LM and its tokenizer with a
        chat template.
      engine: the engine that samples the replies; None makes a new `rlkit.engines.Cached`.
      tool_parser, tool_executor, stop_condition: see the head of this file.
      system_prompt: system message put first; None adds no message.
      max_turns: most replies, at least 1.
      max_calls: most calls answered in one reply.
      max_chars: most characters of a tool's result; the rest is cut off.
      timeout: seconds for a call; None is no limit.
      max_new_tokens: most tokens of one reply.
      temperature: sampling temperature; 0 is greedy.
      seed: the only source of randomness.
      settings: further settings of the sampling, for example max_thinking_tokens or top_p.
    Returns: an AgentResult. If a limit ends the episode, the final response is empty, and the
      rollout names the limit.
    Raises: ConfigError, TemplateError if the tools, the limits or the model do not fit; a tool
      never raises.
    """
    if policy is None:
        if model is None or tokenizer is None:
            raise ConfigError(
                "run_agent: no model given; give policy=…, or model=… and tokenizer=…"
            )
        policy = make_policy(model, tokenizer)
    named = name_tools(tools, tool_implementations or {}, executed=tool_executor is not None)
    check_template(policy.renderer, [tool_schema(tool) for tool in named.values()])
    if named:
        environment = tool_use(
            tools=named,
            max_turns=max_turns,
            max_calls=max_calls,
            system_prompt=system_prompt,
            parse_calls=make_core_parser(tool_parser),
            max_chars=max_chars,
            timeout=timeout,
        )
    else:
        environment = single_turn(system_prompt=system_prompt)
    environment = _with_hooks(environment, tool_executor, stop_condition, max_chars, timeout)
    conversation: Messages = (
        [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
    )
    (rollout,) = collect(
        policy,
        [Task("agent", tuple(conversation))],
        engine=engine or Cached(),
        environment=environment,
        seed=seed,
        temperature=temperature,
        max_new_tokens=max_new_tokens,
        **settings,
    )
    return _read_result(rollout, conversation)


def _read_result(rollout: Rollout, conversation: Messages) -> AgentResult:
    """Make the AgentResult of an episode that began with this conversation."""
    answered = rollout.status == "terminated" and not rollout.steps[-1].tool_calls
    return AgentResult(
        messages=rollout.conversation if rollout.steps else list(conversation),
        final_response=rollout.final_content if answered else "",
        tool_calls=[convert_to_dict(call) for step in rollout.steps for call in step.tool_calls],
        turns=len(rollout.steps),
        rollout=rollout,
    )


def name_tools(
    tools: Sequence[Tool] | Mapping[str, Callable[..., Any]],
    implementations: Mapping[str, Callable[..., Any]],
    *,
    executed: bool = False,
) -> dict[str, Callable[..., Any]]:
    """Return name → function, for typed functions and for schemas with their implementations.

    Args:
      executed: True if an executor runs the calls, so that schemas need no implementation.
    Raises: ConfigError for a schema without implementation, an implementation without schema, or
      two tools of one name.
    """
    named: dict[str, Callable[..., Any]] = {}
    for tool in tools.values() if isinstance(tools, Mapping) else tools:
        if not callable(tool):
            schema = tool
            name = (
                str(schema.get("function", {}).get("name")) if isinstance(schema, Mapping) else ""
            )
            function: Any = implementations.get(name)
            if function is None and executed:
                function = _stand_in_for_tool
            tool = with_schema(schema, function)
        if tool_name(tool) in named:
            raise ConfigError(
                f"tools: there are two tools of the name {tool_name(tool)!r}; rename one"
            )
        named[tool_name(tool)] = tool
    unknown = [name for name in implementations if name not in named]
    if unknown:
        raise ConfigError(
            f"tool_implementations: {', '.join(unknown)} is in no schema of tools, so the policy"
            " would never know about it"
        )
    return named


def _stand_in_for_tool(**arguments: Any) -> None:
    """Stand in for a tool run by tool_executor."""


def make_core_parser(tool_parser: Callable[..., Any]) -> ToolParser:
    """Turn a tool_parser into a parser of the core. A list of calls does not tell where the calls
    are in the text, so a reply with calls gets no content."""

    @wraps(tool_parser)
    def parse(content: str, **given: Any) -> tuple[str, list[ToolCall]]:
        found = tool_parser(content, **given)
        if isinstance(found, tuple):
            return found
        calls = [read_call(call) for call in found]
        return "" if calls else content, calls

    return parse


def _with_hooks(
    environment: Environment,
    tool_executor: Callable[[dict[str, Any]], Any] | None,
    stop_condition: Callable[[list[Message]], bool] | None,
    max_chars: int,
    timeout: float | None,
) -> Environment:
    if stop_condition is not None:
        environment = environment._replace(
            stop=lambda rollout, step: stop_condition(rollout.conversation)
        )
    if tool_executor is not None:

        async def answer(call: ToolCall, tools: Mapping[str, Callable[..., Any]]) -> ToolResult:
            """Run the executor in place of the tool, with the same limits; its errors become
            text."""
            given = {call.name: partial(tool_executor, convert_to_dict(call))}
            return await execute(
                call._replace(arguments={}), given, max_chars=max_chars, timeout=timeout
            )

        environment = environment._replace(execute=answer)
    return environment


# ----------------------------------------------------------------------------------- calls as dicts


def convert_to_dict(call: ToolCall) -> dict[str, Any]:
    """Convert a call to {id, type, function {name, arguments}}, plus `error` if the text is not a
    call."""
    plain: dict[str, Any] = {
        "id": call.id,
        "type": "function",
        "function": {"name": call.name, "arguments": dict(call.arguments)},
    }
    return plain | {"error": call.error} if call.error else plain


def read_call(call: Any, id: str = "call_0") -> ToolCall:
    """Read a call in any of the accepted forms. Anything else becomes a call with an `error`."""
    if isinstance(call, ToolCall):
        return call
    if not isinstance(call, Mapping):
        return make_call(id, lambda: call)
    given = call.get("id", id)
    made = make_call(given if isinstance(given, str) else id, lambda: call.get("function", call))
    return made._replace(arguments={}, error=str(call["error"])) if call.get("error") else made


# -------------------------------------------------------------------------------------- the command


def find_tools(x: AgentRun) -> list[Callable[..., Any]]:
    """Find the tools of `tools=[…]`: shipped tools by name, the user's own as module.function.
    Raises: ConfigError."""
    from rlkit.config.schema import resolve, suggest_name

    shipped: dict[str, Callable[..., Any]] = {
        "calculator": calculator,
        "get_weather": get_weather,
        "python": python_tool(sandbox=x.sandbox),
    }
    unknown = [name for name in x.tools if name not in shipped and "." not in str(name)]
    if unknown:
        raise ConfigError(
            f"tools: there is no tool '{unknown[0]}'.{suggest_name(str(unknown[0]), shipped)}"
            f" There are {', '.join(shipped)}, and your own as module.function"
        )
    if "python" in x.tools:
        require(x.sandbox)
    return [shipped[name] if name in shipped else resolve(name) for name in x.tools]


def _ask(x: AgentRun, question: str, *, checkpoint: Path | None = None) -> AgentResult:
    """Load the model, or a run's newest checkpoint, and let it answer. Raises: ConfigError if the
    settings are out of range."""
    refuse_problems(sampling_problems(x.generation))
    tools = find_tools(x)
    from rlkit.commands.evaluate import restore_policy
    from rlkit.system.device import autocast, load_on_device

    policy, device = load_on_device(x)
    if checkpoint is not None:
        restore_policy(policy, checkpoint)
    with autocast(x, device):
        return run_agent(
            question,
            tools,
            policy=policy,
            engine=x.generation.engine,
            tool_parser=x.parse_calls,
            system_prompt=x.system_prompt,
            max_turns=x.max_turns,
            max_calls=x.max_calls,
            max_chars=x.max_chars,
            timeout=x.timeout,
            seed=x.seed,
            **x.generation.params,
        )


def show(rollout: Rollout) -> None:
    """Print a conversation, each part under its name. Colours appear only on a terminal, and the
    model's text is never read as markup."""
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, markup=False, emoji=False, soft_wrap=True)
    styles = {
        "thinking": "dim italic",
        "call": "cyan",
        "result": "green",
        "failed": "red",
        "assistant": "bold",
    }
    for name, text in parts(rollout):
        style = styles.get(name.partition(" ")[0], "")
        lines = [f"  {line}" for line in show_controls(text, kept="\n").split("\n")]
        console.print(
            Text(show_controls(name), f"{style} underline"),
            Text("\n".join(lines), style),
            "",
            sep="\n",
        )
    console.print(_describe_end(rollout))


def parts(rollout: Rollout) -> Iterator[tuple[str, str]]:
    """Yield a conversation part by part: (system, user, thinking, assistant, call ID, result ID or
    failed ID; text)."""
    for i, step in enumerate(rollout.steps):
        yield from (
            (m["role"], m.get("content") or "")
            for m in step.prompt
            if i == 0 or m["role"] != "tool"
        )
        if step.thinking:
            yield "thinking" if step.thinking_closed else "thinking (never closed)", step.thinking
        if step.content or not step.tool_calls:
            yield "assistant", step.content or "(nothing)"
        for call in step.tool_calls:
            arguments = json.dumps(dict(call.arguments), ensure_ascii=False)
            yield (
                f"call {call.id}",
                "(no call that can be read)" if call.error else f"{call.name}({arguments})",
            )
        for result in step.tool_results:
            yield f"{'result' if result.ok else 'failed'} {result.id}", result.content


def _describe_end(rollout: Rollout) -> str:
    """Describe the end of a conversation in one line."""
    calls = sum(len(step.tool_calls) for step in rollout.steps)
    counts = (
        f"{len(rollout.steps)} turn{'s' * (len(rollout.steps) != 1)}, {calls} tool"
        f" call{'s' * (calls != 1)}"
    )
    reasons = {
        "steps": "max_turns is reached",
        "length": "the last reply reached generation.max_new_tokens",
        "context": "the model's context is full",
    }
    return (
        f"cut off: {reasons.get(rollout.truncation, rollout.truncation)} ({counts})"
        if rollout.status == "truncated"
        else f"({counts})"
    )


def command(arguments: Arguments) -> int:
    """Answer one question with tools, by a model as it is or by the newest checkpoint of a run.

    "QUESTION"   in quotes
    tools=NAME   a shipped tool such as calculator, or MODULE.FUNCTION; [A,B] several
    run=FOLDER   the policy of this run
    max_turns=N  replies at most
    KEY=VALUE    any other setting; GROUP=OPTION an option

        rlkit agent "How much is 12 * 7?" tools=calculator
        rlkit agent "How much is 12 * 7?" tools=[calculator] run=outputs/latest
    """
    from rlkit.config.schema import build

    if len(arguments.texts) != 1 or not arguments.texts[0].strip():
        said = f", not {len(arguments.texts)}" if arguments.texts else ""
        raise ConfigError(
            f'rlkit agent takes one question in quotes{said}: rlkit agent "How many toys …?"'
            " tools=[calculator]"
        )
    config, checkpoint = compose_command(arguments, "agent")
    show(
        _ask(
            with_limits(build(config), arguments), arguments.texts[0], checkpoint=checkpoint
        ).rollout
    )
    return 0


def compose_command(arguments: Arguments, entry: str) -> tuple[dict[str, Any], Path | None]:
    """Compose the config of a command with a model. Return it with the checkpoint of
    run=FOLDER; the run's model then replaces the config's.

    Raises: ConfigError if the run does not exist, or if a model is named in addition to the run.
    """
    from rlkit.config.compose import compose
    from rlkit.config.schema import check
    from rlkit.runs import folder as runs

    named = find_option(arguments.overrides, "run")
    overrides = drop(arguments.overrides, "run")
    run = runs.find_run(named, "run") if named else None
    other = [o for o in overrides if re.match(r"[+~]*model\b(?!\.tools=)", o)]
    if run is not None and other:
        raise ConfigError(f"{other[0]}: run={named} has its own model; leave one of the two out")
    config = compose(overrides, entry=entry, config_dir=arguments.config_dir).config
    if named is None or run is None:
        return config, None
    own = read_model(run, f"run={named}", arguments)
    if find_option(overrides, "model.tools"):
        own["tools"] = config["model"]["tools"]
    config["model"] = own
    refuse_problems(check(config["model"], f"{run}/config.yaml, model"))
    return config, runs.find_checkpoint(named, run)
