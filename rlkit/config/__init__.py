"""From options to a checked experiment: compose it, check it against its schema, and find every
setting the run cannot use.

Each file imports only files before it in this list: changes, functions, hints, options,
suggestions, schema, parts, problems, trust, compose, keys, experiment, origins.
"""
