"""An agent of pydantic-ai written without rlkit: one question and a calculator.

It needs `pydantic-ai-slim[openai]`.
"""

import json
import os
from contextlib import suppress

from pydantic_ai import Agent, ModelRetry, Tool
from pydantic_ai.exceptions import AgentRunError
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.usage import UsageLimits

# The embedded model knows one tool, described in these words. Other words make another prompt.
WORDS = {
    "name": "calculator",
    "description": "Evaluates arithmetic.",
    "parameters": {
        "type": "object",
        "properties": {"expression": {"type": "string", "description": "The expression."}},
        "required": ["expression"],
    },
}


def calculate(expression: str = "") -> str:
    """Return the value of an expression of digits and operators."""
    if (
        not set(expression) <= set("0123456789+-*/(). ")
        or len(expression) > 100
        or "**" in expression
    ):
        raise ModelRetry("Error: digits, + - * / and brackets only")
    try:
        return f"{eval(expression):g}"  # digits and operators alone
    except Exception as error:
        raise ModelRetry(f"Error: {error}") from error


def main() -> None:
    messages = json.loads(os.environ["RLKIT_TASK"])["messages"]
    said = {
        role: "\n".join(m["content"] for m in messages if m["role"] == role)
        for role in ("system", "user")
    }
    tool = Tool.from_schema(
        calculate,
        name=WORDS["name"],
        description=WORDS["description"],
        json_schema=WORDS["parameters"],
    )
    # In this protocol the library has no field for the schema of a result, and adds other fields.
    # Therefore the tools of a request are written here.
    written = [{"type": "function", "function": {**WORDS, "return": {"type": "string"}}}]
    model = OpenAIChatModel(
        "policy", settings={"extra_body": {"tools": written}}
    )  # OPENAI_BASE_URL and OPENAI_API_KEY
    agent = Agent(model, instructions=said["system"] or None, tools=[tool], retries=4)
    with suppress(AgentRunError):  # no answer within the limit gets reward 0
        agent.run_sync(said["user"], usage_limits=UsageLimits(request_limit=4))


main()
