"""A plain agent written without rlkit: one question, a calculator, and the usual loop.

It needs the `openai` package.
"""

import json
import os

from openai import OpenAI

# The embedded model knows one tool, described in these words. Other words make another prompt.
TOOL = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Evaluates arithmetic.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string", "description": "The expression."}},
            "required": ["expression"],
        },
        "return": {"type": "string"},
    },
}


def calculate(expression: str) -> str:
    """Return the value of an expression of digits and operators."""
    if (
        not set(expression) <= set("0123456789+-*/(). ")
        or len(expression) > 100
        or "**" in expression
    ):
        return "Error: digits, + - * / and brackets only"
    try:
        return f"{eval(expression):g}"  # digits and operators alone
    except Exception as error:
        return f"Error: {error}"


def main() -> None:
    client = OpenAI()  # OPENAI_BASE_URL and OPENAI_API_KEY
    messages = json.loads(os.environ["RLKIT_TASK"])["messages"]
    for _ in range(4):
        reply = (
            client.chat.completions.create(model="policy", messages=messages, tools=[TOOL])
            .choices[0]
            .message
        )
        messages.append(reply.model_dump(exclude_none=True))
        if not reply.tool_calls:
            return
        for call in reply.tool_calls:
            try:
                result = calculate(json.loads(call.function.arguments)["expression"])
            except (ValueError, KeyError, TypeError) as error:
                result = f"Error: {error}"
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


main()
