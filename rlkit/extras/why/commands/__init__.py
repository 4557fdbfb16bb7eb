"""The command `rlkit why`."""
