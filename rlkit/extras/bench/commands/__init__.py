"""The commands `rlkit bench` and `rlkit prove`.

Each file imports only files before it in this list: bench, prove.
"""
