"""A loss from its file of options and as a function: the same numbers give the same weights."""

import functools

import my_loss

import rlkit

SMALL = ("trainer.steps=1", "evaluation.n=0", "batch.prompts=4")
by_file = rlkit.train(
    rlkit.experiment(
        *SMALL,
        "algorithm/policy_loss=soft_clipped",
        "algorithm.policy_loss.sharpness=20.0",
        config_dir="my_conf",
    )
)
sharp = functools.partial(my_loss.soft_clipped, sharpness=20.0)
by_function = rlkit.train(rlkit.experiment(*SMALL, algorithm__policy_loss=sharp))
blunt = rlkit.train(rlkit.experiment(*SMALL, algorithm__policy_loss=my_loss.soft_clipped))
