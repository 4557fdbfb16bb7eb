import json

from litellm import completion
from question import ADD, QUESTION, add, leave

tools = [{"type": "function", "function": ADD}]
messages = [{"role": "user", "content": QUESTION}]
while True:
    reply = completion("openai/policy", messages, tools=tools).choices[0].message
    messages.append(reply)
    if not reply.tool_calls:
        break
    for call in reply.tool_calls:
        result = add(**json.loads(call.function.arguments))
        messages.append({"role": "tool", "tool_call_id": call.id, "content": str(result)})
leave(reply.content)
