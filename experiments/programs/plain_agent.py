"""A plain agent written without rlkit: one question, a calculator, a loop.

It needs only the standard library.
"""

import json
import os
import urllib.request

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


def ask(messages: list) -> dict:
    """Send a request and return the policy's message."""
    body = json.dumps({"model": "policy", "messages": messages, "tools": [TOOL]}).encode()
    headers = {
        "Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}",
        "Content-Type": "application/json",
    }
    request = urllib.request.Request(
        f"{os.environ['OPENAI_BASE_URL']}/chat/completions", body, headers
    )
    with urllib.request.urlopen(request) as reply:
        return json.load(reply)["choices"][0]["message"]


def main() -> None:
    messages = json.loads(os.environ["RLKIT_TASK"])["messages"]
    for _ in range(4):
        reply = ask(messages)
        messages.append(reply)
        if not reply.get("tool_calls"):
            return
        for call in reply["tool_calls"]:
            try:
                result = calculate(json.loads(call["function"]["arguments"])["expression"])
            except (ValueError, KeyError, TypeError) as error:
                result = f"Error: {error}"
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})


main()
