PYTHONPATH=. rlkit train --config-dir my_conf algorithm/advantage=halved_losers algorithm.advantage.losers=0.0 trainer.steps=1 evaluation.n=0 batch.prompts=4 name=mine
