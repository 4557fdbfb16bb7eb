from mirascope import llm
from question import QUESTION, add, leave

response = llm.Model("openai/policy:completions").call(QUESTION, tools=[llm.tool(add)])
while response.tool_calls:
    response = response.resume(response.execute_tools())
leave("".join(part.text for part in response.texts))
