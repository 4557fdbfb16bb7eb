"""An agent written without rlkit: one question, a calculator, and the usual loop.

It needs the `anthropic` package.
"""

import json
import os

from anthropic import Anthropic

TOOL = {
    "name": "calculator",
    "description": "Evaluates arithmetic.",
    "input_schema": {
        "type": "object",
        "properties": {"expression": {"type": "string", "description": "The expression."}},
        "required": ["expression"],
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
    client = Anthropic()  # ANTHROPIC_BASE_URL and ANTHROPIC_API_KEY
    given = json.loads(os.environ["RLKIT_TASK"])["messages"]
    system = {"system": given[0]["content"]} if given[0]["role"] == "system" else {}
    messages = [message for message in given if message["role"] != "system"]
    for turn in range(4):
        asked = {
            "model": "policy",
            "max_tokens": 256,
            "messages": messages,
            "tools": [TOOL],
            **system,
        }
        if turn % 2:  # both ways give the same reply
            with client.messages.stream(**asked) as stream:
                reply = stream.get_final_message()
        else:
            reply = client.messages.create(**asked)
        messages.append(
            {
                "role": "assistant",
                "content": [block.model_dump(exclude_none=True) for block in reply.content],
            }
        )
        calls = [block for block in reply.content if block.type == "tool_use"]
        if not calls:
            return
        results = [(call.id, calculate(str(call.input.get("expression", "")))) for call in calls]
        content = [
            {"type": "tool_result", "tool_use_id": id, "content": result} for id, result in results
        ]
        messages.append({"role": "user", "content": content})


main()
