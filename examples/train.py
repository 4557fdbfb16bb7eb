"""The run of loop.py in a few lines: the options of the command line, with a part of your own
wherever you want one.

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
)  # folder="outputs/mine" keeps it: then `rlkit report outputs/mine` draws its curves
after = run.summary["after"]["accuracy"]
print(run)
print(run.rollouts[0])
