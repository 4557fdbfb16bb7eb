"""The same two things from Python: a number that follows a function, and a switch of the
algorithm."""

import functools

import my_schedule

import rlkit

x = rlkit.experiment(
    "schedule=grpo_to_dapo",
    "trainer.steps=3",
    "batch.prompts=2",
    schedule__numbers={"kl.coef": functools.partial(my_schedule.zigzag, low=0.02)},
    schedule__phases__explore__until=2,
)
rows = [step.metrics for step in rlkit.steps(x)]
