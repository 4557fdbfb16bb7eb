"""Why a run does not learn: findings in what its folder holds, and the run continued with one thing
changed.

`evidence` reads a run folder. `data`, `settings` and `attacks` look for causes, and `findings` puts
them in order. `remedies` says what to change, `forks` continues the run with it, and `effects`
says what that did.

Files in the order of their imports: evidence, data, settings, attacks, findings, remedies, forks,
effects, commands.
"""
