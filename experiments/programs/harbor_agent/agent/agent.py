"""An unmodified CodeAgent of smolagents: it answers with a line of Python.

The program writes the agent's answer into answer.txt. The agent's memory begins with two solved
tasks, because a model of this size does not follow smolagents' own instructions of 2,000 tokens.
"""

import json
import os
from pathlib import Path

from smolagents import ActionStep, CodeAgent, OpenAIServerModel, TaskStep, Timing
from smolagents.agents import EMPTY_PROMPT_TEMPLATES

SOLVED = (("58 or 731", "731"), ("904 or 26", "904"))

# Leave out the second paragraph, about the place of the answer: this program writes answer.txt.
task = json.loads(os.environ["RLKIT_TASK"])["messages"][-1]["content"].split("\n\n")[0]
agent = CodeAgent(
    tools=[],
    model=OpenAIServerModel("policy"),
    prompt_templates={**EMPTY_PROMPT_TEMPLATES, "system_prompt": "Answer with code."},
    max_steps=1,
    verbosity_level=0,
)
for numbers, answer in SOLVED:
    code = f"<code>final_answer({answer})</code>"
    agent.memory.steps += [
        TaskStep(f"Which number is larger, {numbers}?"),
        ActionStep(1, Timing(0.0, 0.0), model_output=code),
    ]
Path("answer.txt").write_text(str(agent.run(task, reset=False)))
