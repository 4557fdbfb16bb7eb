"""Find out why a run does not learn, from its folder and by continuing it with one change.

`evidence` reads a run folder. `data`, `settings` and `attacks` look for causes, and `findings` puts
them in order. `remedies` proposes changes, `forks` continues the run with them, and `effects`
reports their effects. `suspicions` says it in short, and `tokens` follows one token.

Each file imports only files before it in this list: evidence, data, settings, attacks, remedies,
findings, suspicions, forks, effects, tokens, commands.
"""
