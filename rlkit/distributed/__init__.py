"""Several processes that train together: their ranks, the ways to start them, and Lightning's
strategies.

Each file imports only files before it in this list: launch, ranks, strategies.
"""
