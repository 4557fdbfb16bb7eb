import json

from openai import OpenAI
from question import ADD, QUESTION, add, leave

client = OpenAI()
messages = [{"role": "user", "content": QUESTION}]
while True:
    asked = client.chat.completions.create(
        model="policy", messages=messages, tools=[{"type": "function", "function": ADD}]
    )
    reply = asked.choices[0].message
    messages.append(reply)
    if not reply.tool_calls:
        break
    for call in reply.tool_calls:
        result = add(**json.loads(call.function.arguments))
        messages.append({"role": "tool", "tool_call_id": call.id, "content": str(result)})
leave(reply.content)
