PYTHONPATH=. rlkit train --config-dir my_conf schedule=zigzag schedule.numbers.kl.coef.low=0.02 trainer.steps=3 evaluation.n=0 batch.prompts=2 name=mine
