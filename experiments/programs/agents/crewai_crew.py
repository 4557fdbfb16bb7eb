from crewai import LLM, Agent, Crew, Task
from crewai.tools import tool
from question import QUESTION, add, leave

llm = LLM("policy", custom_openai=True)
helper = Agent(role="helper", goal="Answer.", backstory="A clerk.", llm=llm, tools=[tool(add)])
task = Task(description=QUESTION, expected_output="A number.", agent=helper)
leave(Crew(agents=[helper], tasks=[task]).kickoff().raw)
