from question import QUESTION, add, leave
from strands import Agent, tool
from strands.models.openai import OpenAIModel

agent = Agent(model=OpenAIModel(model_id="policy"), tools=[tool(add)], callback_handler=None)
leave(agent(QUESTION))
