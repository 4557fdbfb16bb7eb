from anthropic import Anthropic
from question import ADD, QUESTION, add, leave

client = Anthropic()
tool = {"name": "add", "description": "Add two numbers.", "input_schema": ADD["parameters"]}
messages = [{"role": "user", "content": QUESTION}]
while True:
    reply = client.messages.create(model="policy", max_tokens=256, messages=messages, tools=[tool])
    messages.append({"role": "assistant", "content": reply.content})
    calls = [block for block in reply.content if block.type == "tool_use"]
    if not calls:
        break
    results = [
        {"type": "tool_result", "tool_use_id": call.id, "content": str(add(**call.input))}
        for call in calls
    ]
    messages.append({"role": "user", "content": results})
leave("".join(block.text for block in reply.content if block.type == "text"))
