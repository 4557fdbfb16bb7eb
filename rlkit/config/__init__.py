"""Turn options into a checked experiment: compose the config, check it against its schema, and find
every setting that the run cannot use.

Each file imports only files before it in this list: changes, functions, options, hints,
suggestions, schema, parts, problems, trust, compose, keys, experiment, origins.
"""
