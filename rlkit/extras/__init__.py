"""Parts that a first reader of rlkit does not need, a folder each. rlkit works without any of them.

The core imports nothing from here. An extra enters like a stranger's package, by the `_target_` of
an option in conf/ or by a command. A command is a file `NAME/commands/COMMAND.py` here, and an
entry point of the group `rlkit.commands` elsewhere. `rlkit.system.extras` finds both.

Each file imports only files before it in this list: adapters, bench, forecast, notebook,
pretrained, programs, report, vllm, why.
"""
