"""Add commands to `rlkit`. Each file is one command."""
