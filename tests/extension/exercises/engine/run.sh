PYTHONPATH=. rlkit train --config-dir my_conf generation=counted trainer.steps=1 evaluation.n=0 batch.prompts=4 name=mine
