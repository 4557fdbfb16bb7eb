"""An agent for the five tasks in sums/. It needs only the standard library.

It asks the question with a calculator, and writes the last reply into answer.txt.
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


def calculate(arguments: str) -> str:
    """Return the value of an expression of digits and operators."""
    try:
        expression = json.loads(arguments)["expression"]
        plain = set(expression) <= set("0123456789+-*/(). ") and "**" not in expression
        if plain and len(expression) < 50:
            return f"{eval(expression):g}"  # digits and operators alone
    except Exception as error:
        return f"Error: {error}"
    return "Error: digits, + - * / and brackets only"


def ask(messages: list) -> dict:
    """Send a request and return the policy's message."""
    body = json.dumps({"model": "policy", "messages": messages, "tools": [TOOL]}).encode()
    headers = {
        "Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}",
        "Content-Type": "application/json",
    }
    address = f"{os.environ['OPENAI_BASE_URL']}/chat/completions"
    with urllib.request.urlopen(urllib.request.Request(address, body, headers)) as reply:
        return json.load(reply)["choices"][0]["message"]


def main() -> None:
    (task,) = json.loads(os.environ["RLKIT_TASK"])["messages"]
    # Leave out the second paragraph, about the place of the answer: this program writes answer.txt.
    messages = [{"role": "user", "content": task["content"].split("\n\n")[0]}]
    for _ in range(4):
        reply = ask(messages)
        messages.append(reply)
        for call in reply.get("tool_calls") or []:
            result = calculate(call["function"]["arguments"])
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
        if not reply.get("tool_calls"):
            break
    with open("answer.txt", "w") as file:
        file.write(reply.get("content") or "")


main()
