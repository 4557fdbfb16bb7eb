from question import QUESTION, add, leave
from smolagents import OpenAIServerModel, ToolCallingAgent, tool

agent = ToolCallingAgent(tools=[tool(add)], model=OpenAIServerModel("policy"), max_steps=4)
leave(agent.run(QUESTION))
