"""From options to a checked experiment: compose it, check it against its schema, and find every
setting the run cannot use.

Files in the order of their imports: changes, functions, hints, options, suggestions, schema, parts,
problems, trust, compose, keys, experiment, origins.
"""
