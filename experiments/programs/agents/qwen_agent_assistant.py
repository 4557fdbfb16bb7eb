import json
import os

from question import ADD, QUESTION, add, leave
from qwen_agent.agents import Assistant
from qwen_agent.tools.base import BaseTool, register_tool


@register_tool("add")
class Add(BaseTool):
    description = ADD["description"]
    parameters = ADD["parameters"]

    def call(self, params, **kwargs):
        return str(add(**json.loads(params)))


llm = {
    "model": "policy",
    "model_server": os.environ["OPENAI_BASE_URL"],
    "api_key": os.environ["OPENAI_API_KEY"],
    "generate_cfg": {"use_raw_api": True},
}
*_, replies = Assistant(llm=llm, function_list=["add"]).run([{"role": "user", "content": QUESTION}])
leave(replies[-1]["content"])
