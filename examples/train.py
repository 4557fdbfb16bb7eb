"""The run of loop.py in a few lines: options as on the command line, and your own parts.

python examples/train.py
"""

import os

import rlkit

x = rlkit.experiment(
    "algorithm=grpo",
    "kl=k3",
    reward=rlkit.rewards.numeric,
    trainer__steps=int(os.environ.get("EXAMPLE_STEPS", "20")),
)
run = rlkit.train(
    x
)  # folder="outputs/mine" keeps the run: `rlkit report outputs/mine` then draws its curves
after = run.summary["after"]["accuracy"]
print(run)
print(run.rollouts[0])
