"""A tool that counts its calls, in episodes of an environment and as the tool of a run."""

import counting_tools

import rlkit

environment = rlkit.environments.tool_use(
    tools={"counting": counting_tools.Counting}, parse_calls=rlkit.environments.hermes
)
reward = rlkit.Reward("called_once", {"called_once": rlkit.Term(1.0, counting_tools.called_once)})
policy = rlkit.load_policy(path="tiny")
tasks = rlkit.tasks.arithmetic(split="train", max_samples=4)
collected = rlkit.collect(policy, tasks, environment, group_size=4, max_new_tokens=64)
scored = rlkit.score(collected, reward)

x = rlkit.experiment(
    "environment=tool_use",
    environment__tools={"counting": counting_tools.Counting},
    reward=reward,
    trainer__steps=1,
    evaluation__n=0,
    batch__prompts=4,
)
