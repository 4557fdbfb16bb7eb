"""Make the schemas of tools for the chat template, and call tools for the policy. A tool is a plain
typed function:

    def get_weather(city: str, unit: str = "celsius") -> str:
        '''Tells the weather.

        Args:
            city: The city.
            unit: celsius or fahrenheit.
        '''

Every failure of a call is answered with a sentence for the policy, even if the tool tries to end
the process (sys.exit, os._exit, KeyboardInterrupt). The run ends only after a real interruption,
if a sandbox cannot run the policy's code, or if C exits or crashes, which Python cannot stop.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import types
import typing
from collections.abc import Callable, Mapping
from functools import wraps
from time import perf_counter
from typing import Any, Literal, Union

from rlkit.errors import ConfigError, Hung, describe_definition, name_error
from rlkit.sandbox import SandboxError
from rlkit.system.deadline import (
    DeadlinePassed,
    ProcessEndAsked,
    cancel_after,
    contain_block,
    contain_call,
    run_in_worker,
    warn_once,
)
from rlkit.system.shared_state import get_current_watch
from rlkit.system.waiting import waiting
from rlkit.types import HasSchema, Tool, ToolCall, ToolResult, bound, plain

MAX_CHARS = 2000  # longest result for the policy
TIMEOUT = 30.0  # seconds for one call


def tool_schema(tool: Callable[..., Any]) -> dict[str, Any]:
    """Make a tool's schema for chat templates, from its annotations and its Google-style docstring.

    Args:
      tool: a function, or a `functools.partial` of one. Every parameter needs a type, and the
        docstring must describe the function and every parameter. A keyword bound by the partial is
        not in the schema, because the policy cannot choose it. A function with its own schema
        (`with_schema`) needs neither types nor a docstring.
    Returns: {"type": "function", "function": {"name", "description", "parameters", …}}.
    Raises: ConfigError naming the function's file and line and the missing piece, with an example
      of a docstring.
    Source: transformers.utils.get_json_schema.
    """
    from transformers.utils import get_json_schema

    if isinstance(tool, HasSchema):
        return dict(tool.schema)
    function = plain(tool)
    try:
        schema: dict[str, Any] = get_json_schema(function)
    except Exception as error:
        raise ConfigError(
            f"{describe_definition(function)}: no schema can be made of the tool"
            f" {tool_name(tool)!r}:"
            f" {_reason(error)}. Give each parameter a type hint and a line under `Args:` in the"
            " docstring"
        ) from error
    parameters = schema["function"]["parameters"]
    fixed = bound(tool)
    for name in fixed:
        parameters["properties"].pop(name, None)
    if "required" in parameters:
        parameters["required"] = [name for name in parameters["required"] if name not in fixed]
    return schema


def tool_name(tool: Callable[..., Any]) -> str:
    """Return the tool's name in its schema. This is the name of the function, even if the tool is a
    `functools.partial` of the function."""
    return str(getattr(plain(tool), "__name__", repr(tool)))


def name_tools(tools: Mapping[str, Tool]) -> str:
    """List tools in words, as in `calculator; lend, give_back (my_tools.Shelf)`. Tools from outside
    rlkit have their module or class in parentheses."""
    names: dict[str, list[str]] = {}
    for name, tool in tools.items():
        function = plain(tool)
        place = f"{function.__module__}.{getattr(function, '__qualname__', '')}".rpartition(".")[0]
        names.setdefault("" if place.startswith("rlkit.") else f" ({place})", []).append(name)
    return "; ".join(f"{', '.join(own)}{place}" for place, own in names.items())


def with_schema(
    schema: Mapping[str, Any], implementation: Callable[..., Any]
) -> Callable[..., Any]:
    """Make a tool from an existing schema and a function. The function needs neither types nor a
    docstring.

    Args:
      schema: {"type": "function", "function": {"name", "description", "parameters"}}, as in
        OpenAI's API.
      implementation: the function, called with the arguments by name. If its parameters have types,
        the arguments are checked.
    Raises: ConfigError for a schema without a name, or an implementation that is not a function.
    """
    function = schema.get("function") if isinstance(schema, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not name or not isinstance(name, str):
        raise ConfigError(
            f'tools: {schema!r:.200} is no schema; write {{"type": "function", "function":'
            ' {"name": …, "parameters": …}}'
        )
    if not callable(implementation):
        raise ConfigError(
            f"tools: there is no implementation of {name!r}; give a function of that name"
        )

    @wraps(implementation)
    def tool(**arguments: Any) -> Any:
        return implementation(**arguments)

    tool.__name__ = name
    tool.schema = {"type": "function", **schema}  # type: ignore[attr-defined]
    return tool


async def execute(
    call: ToolCall,
    tools: Mapping[str, Tool],
    *,
    max_chars: int = MAX_CHARS,
    timeout: float | None = TIMEOUT,
) -> ToolResult:
    """Run one call and return a text for the policy: the result, or one sentence on the failure.

    An async tool runs in the event loop, a plain tool in a thread. The mark `tool.bounded = True`
    promises that a tool always returns quickly. Such a tool runs directly in the event loop,
    because a thread costs more than a short call. The calls of several episodes run at the same
    time, so plain tools must lock shared state.

    Args:
      call: the call. If its `error` is set, no tool is run, and the error is the content.
      tools: tools by name.
      max_chars: longest content, in characters. Longer content is cut, with a note.
      timeout: seconds for a tool without the mark `bounded`; None: no limit. After the timeout, an
        async tool is cancelled. A plain tool is ended if it has registered a function to end it, as
        the python tool does (rlkit.system.deadline.end_when_left). Otherwise the tool's thread goes
        on, and its result is dropped.
    Returns: a ToolResult with the call's id and name. `ok` is False for an unknown tool, for
      arguments that do not fit the signature or its types, and for a tool that raises, tries to end
      the process, or takes too long. `seconds` is the wall time of the call.
    If an async tool swallows its cancellation, it is abandoned after 10 more seconds, and its
    episode fails.
    Raises: CancelledError, KeyboardInterrupt or Interrupted if the episode is given up, or if the
      user or a signal interrupts the run; Hung; SandboxError or ConfigError if the sandbox of a
      tool cannot run here. Its code has not run, so this is no failure of the call.
    """
    started = perf_counter()
    content, ok = await _attempt(call, tools, timeout)
    seconds = perf_counter() - started
    # half of a surrogate pair cannot be tokenised
    content = content.encode("utf-8", "replace").decode("utf-8")
    if len(content) > max_chars:
        content = (
            f"{content[:max_chars]}\n[cut: {len(content)} characters, the first {max_chars} are"
            " shown]"
        )
    return ToolResult(id=call.id, name=call.name, content=content, ok=ok, seconds=seconds)


async def _attempt(
    call: ToolCall, tools: Mapping[str, Tool], timeout: float | None
) -> tuple[str, bool]:
    if call.error:
        return call.error, False
    try:
        if call.name not in tools:
            known = ", ".join(sorted(tools)) or "none"
            return f"Error: there is no tool {call.name!r}. The tools are: {known}.", False
        tool = tools[call.name]
        problem = _explain_misfit(tool, call.arguments)
        if problem:
            return f"Error: {problem}. Call it as {call.name}{_signature(tool)}.", False
        with waiting("the tool", tool):
            return await _run_for_text(tool, call, timeout), True
    # the episode has failed, or the machine or the config, and not only this call
    except (Hung, SandboxError, ConfigError):
        raise
    except DeadlinePassed:
        return f"Error: {call.name} took longer than {timeout:g} s and was given up.", False
    except ProcessEndAsked as error:
        warn_once(
            f"the tool {call.name} tried to end the process: {error}; its call counts as failed,"
            " and the run goes on"
        )
        return f"Error: {call.name} tried to end the process and was stopped ({error}).", False
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        return f"Error: {_reason(error)}.", False  # the tool itself raised CancelledError
    except Exception as error:  # whatever the tool raises, the episode goes on
        return f"Error: {_reason(error)}.", False


async def _run_for_text(tool: Tool, call: ToolCall, timeout: float | None) -> str:
    """Run a tool and turn its result into text. If the tool returns a lazy value, its computation
    during the conversion to text also counts towards the timeout. A bounded tool has no timeout."""

    bounded = has_mark(tool, "bounded")
    watch = get_current_watch()
    here = bounded or inspect.iscoroutinefunction(tool)

    def run() -> Any:
        with watch.watch_call(tool) if here else watch.watch_worker(tool):
            given = tool(**call.arguments)
            return given if inspect.isawaitable(given) else _format_value(given)

    given = (
        contain_call(run) if here else await run_in_worker(run, timeout, f"the tool {call.name}")
    )
    if isinstance(given, str):
        return given
    with contain_block(asyncio.CancelledError, GeneratorExit):
        async with cancel_after(None if bounded else timeout):
            text = _format_value(await given)
            if not bounded:
                # the call counts as a wait even if the answer came immediately, for example from a
                # cache
                await asyncio.sleep(0)
            return text


def _format_value(result: Any) -> str:
    """Write a result for the policy. A text is returned as it is, and other JSON types are written
    as JSON."""
    as_json = isinstance(result, dict | list | bool | int | float | None)
    return json.dumps(result, default=str) if as_json else str(result)


def has_mark(tool: Tool, word: str) -> bool:
    """Return whether a tool has the mark `word`, as in `tool.bounded = True`. A method also has the
    marks of its class."""
    function = plain(tool)
    return bool(getattr(function, word, getattr(getattr(function, "__self__", None), word, False)))


def text_arguments(
    name: str, tool: Callable[..., Any], text: str, load: Callable[[str], Any]
) -> dict[str, Any]:
    """Return the arguments of a call with a single text. The text is the value of the tool's only
    required parameter.

    Args:
      load: function that reads the text if the parameter is not a string. It raises ValueError if
        it cannot.
    Raises: ValueError if the tool does not have exactly one required parameter. If it has none and
      the text is empty, the call has no arguments.
    """
    signature = _signature(tool) or inspect.Signature()
    parameters = signature.parameters
    required = [
        p
        for p in parameters.values()
        if p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    ]
    if not required and not text:
        return {}
    if len(required) != 1:
        raise ValueError(
            f"a text cannot call {name}{signature}, which has {len(required)} required parameters,"
            " not one"
        )
    if _fits(text, required[0].annotation):
        return {required[0].name: text}
    try:
        return {required[0].name: load(text)}
    except ValueError:
        return {required[0].name: text}  # `execute` then tells the policy the expected type


def _explain_misfit(tool: Callable[..., Any], arguments: Mapping[str, Any]) -> str:
    """Explain why the arguments do not fit the tool's signature; return '' if they fit."""
    signature = _signature(tool)
    if signature is None:  # a builtin without a signature checks its arguments itself
        return ""
    parameters = signature.parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    named = {
        n: p for n, p in parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    }
    unexpected = [name for name in arguments if name not in named and not takes_any]
    if unexpected:
        return f"unexpected argument {', '.join(map(repr, unexpected))}"
    missing = [name for name, p in named.items() if p.default is p.empty and name not in arguments]
    if missing:
        return f"missing argument {', '.join(map(repr, missing))}"
    for name, value in arguments.items():
        if name in named and not _fits(value, named[name].annotation):
            return (
                f"argument {name!r} must be {_type_name(named[name].annotation)}, not"
                f" {_type_name(type(value))}"
            )
    return ""


def _fits(value: Any, annotation: Any) -> bool:
    """Return whether a JSON value fits a parameter of this type. If the annotation is no JSON type,
    every value fits."""
    origin = typing.get_origin(annotation)
    inner = typing.get_args(annotation)
    if origin in (Union, types.UnionType):
        return any(_fits(value, option) for option in inner)
    if origin is Literal:
        return any(type(value) is type(option) and value == option for option in inner)
    expected = origin or annotation
    if expected is list:
        return isinstance(value, list) and (
            not inner or all(_fits(item, inner[0]) for item in value)
        )
    if expected is dict:
        return isinstance(value, dict)
    if expected in (int, float):  # JSON's true is not a number, and 3 is also a float
        return isinstance(value, (int, expected)) and not isinstance(value, bool)
    if expected in (str, bool):
        return isinstance(value, expected)
    return value is None if expected in (None, type(None)) else True


def _signature(tool: Callable[..., Any]) -> inspect.Signature | None:
    """Return the parameters that a caller may give. The policy must neither change nor read the
    bound arguments of a partial."""
    for resolve in (True, False):  # if the annotations cannot be resolved, they are not checked
        try:
            found = inspect.signature(tool, eval_str=resolve)
        except Exception:
            continue
        free = [p for name, p in found.parameters.items() if name not in bound(tool)]
        return found.replace(parameters=free, return_annotation=inspect.Signature.empty)
    return None


def _type_name(annotation: Any) -> str:
    if annotation is type(None):
        return "null"
    return (
        annotation.__name__
        if isinstance(annotation, type) and not typing.get_args(annotation)
        else str(annotation)
    )


def _reason(error: BaseException) -> str:
    """Describe an error in one line. A ValueError is quoted without its type."""
    said = name_error(error).rstrip(".")
    return said.partition(": ")[2] or said if isinstance(error, ValueError) else said
