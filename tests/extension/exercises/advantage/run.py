"""The advantage as a function, with its hyperparameter as a keyword."""

import my_advantage

import rlkit

SMALL = ("trainer.steps=1", "evaluation.n=0", "batch.prompts=4")
usual = rlkit.train(rlkit.experiment(*SMALL))
mine = rlkit.train(
    rlkit.experiment(
        *SMALL,
        algorithm__advantage=my_advantage.halved_losers,
        algorithm__advantage__losers=0.25,
    )
)
