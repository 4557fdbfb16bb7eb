import json

from openai import OpenAI
from question import ADD, QUESTION, add, leave

client = OpenAI()
items = [{"role": "user", "content": QUESTION}]
while True:
    reply = client.responses.create(
        model="policy", input=items, tools=[{"type": "function", **ADD}]
    )
    items += reply.output
    calls = [item for item in reply.output if item.type == "function_call"]
    if not calls:
        break
    for call in calls:
        result = add(**json.loads(call.arguments))
        items.append(
            {"type": "function_call_output", "call_id": call.call_id, "output": str(result)}
        )
leave(reply.output_text)
