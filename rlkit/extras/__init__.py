"""What a first reader of rlkit does not need, a folder each. Deleting a folder leaves rlkit whole.

The core imports nothing from here. An extra enters by the doors that a stranger's package has: the
`_target_` of an option in conf/, and a command, which is a file `NAME/commands/COMMAND.py` here and
an entry point of the group `rlkit.commands` elsewhere. `rlkit.system.extras` finds what is there.

Files in the order of their imports: adapters, bench, forecast, notebook, pretrained, programs,
report, vllm, why.
"""
