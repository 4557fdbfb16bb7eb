"""The commands `rlkit bench` and `rlkit prove`.

Files in the order of their imports: bench, prove.
"""
