"""The commands of this extra. Each file has one command."""
