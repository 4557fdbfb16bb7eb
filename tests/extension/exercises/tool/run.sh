PYTHONPATH=. rlkit train --config-dir my_conf environment=counting '~environment.tools.calculator' reward=called_once trainer.steps=1 evaluation.n=0 batch.prompts=4 name=mine
