"""An engine that wraps the default one, with figures of its own in each step's row."""

import my_engine

import rlkit

SMALL = ("trainer.steps=2", "evaluation.n=0", "batch.prompts=4")
engine = my_engine.Counted(rlkit.engines.Cached())
mine = rlkit.train(rlkit.experiment(*SMALL, generation__engine=engine))
usual = rlkit.train(rlkit.experiment(*SMALL))
