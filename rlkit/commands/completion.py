"""Completion in the shell: commands, groups, options, keys and run folders. Groups and options are read from conf/, without Hydra."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from rlkit.errors import ConfigError

# Bash cuts words at = and :, and replaces only what stands behind the last of them.
BASH = """\
_rlkit() {
    local line="${COMP_LINE:0:COMP_POINT}" IFS=$'\\n'
    local word="${line##*[[:space:]]}"
    COMPREPLY=($("$1" --complete "$line" 2>/dev/null))
    [[ "$word" == *[=:]* ]] && COMPREPLY=("${COMPREPLY[@]#"${word%"${word##*[=:]}"}"}")
    [[ "${COMPREPLY[0]}" == *[=./] ]] && compopt -o nospace 2>/dev/null
    return 0
}
complete -o default -F _rlkit rlkit
"""
ZSH = """\
_rlkit() {
    local -a found=("${(@f)$("$words[1]" --complete "${(j: :)words[1,CURRENT]}" 2>/dev/null)}")
    if [[ -z "$found[1]" ]]; then
        _files
        return
    fi
    compadd -Q -S '' -- ${(M)found:#*[=./]}
    compadd -Q -- ${found:#*[=./]}
}
compdef _rlkit rlkit
"""
FISH = """\
complete -c rlkit -f -a '(rlkit --complete (commandline -cp) 2>/dev/null)'
complete -c rlkit -F -n '__fish_seen_subcommand_from report'
"""
SCRIPTS = {"bash": BASH, "zsh": ZSH, "fish": FISH}
ENTRIES = {"train": "train", "check": "train", "evaluate": "evaluate", "rollout": "rollout", "agent": "agent"}  # command → entry config
FOLDERS = ("run", "resume")  # keys whose value may be a run folder


def script(shell: str) -> str:
    """What a shell has to read: `eval "$(rlkit --completion bash)"`, the same in zsh after compinit, `rlkit --completion fish | source`.

    Raises: ConfigError for a shell that is not known.
    """
    if shell not in SCRIPTS:
        raise ConfigError(f"--completion {shell}: there is completion for {', '.join(SCRIPTS)}")
    return SCRIPTS[shell]


def complete(line: str, commands: Iterable[str], keys: Callable[[str, Sequence[str], str | None], Iterable[str]]) -> list[str]:
    """The words that the last one of a command line may become, sorted.

    Args:
      line: what has been typed up to the cursor, the program's name first.
      keys: (entry config, overrides so far, folder of own options) → all dotted keys of the composed config; asked for once a word
        has a dot, since composing takes a second.
    """
    words = line.split()
    word = "" if line[-1:].isspace() else words.pop()
    if len(words) < 2:
        return sorted(c for c in (*commands, "--help", "--completion") if c.startswith(word)) if words else []
    if word.startswith("-"):
        return [flag for flag in ("--config-dir", "--help", "--multirun") if flag.startswith(word)]
    own = own_folder(words)
    prefix = word[: len(word) - len(word.lstrip("+~"))]
    key, equals, value = word[len(prefix) :].partition("=")
    if equals:
        return [f"{prefix}{key}={v}" for v in _values(key, value, own)]
    group_names = [f"{name}=" for name in groups(own) if name.startswith(key) and ("/" in key or "/" not in name)]
    if "/" in key:
        return [f"{prefix}{name}" for name in sorted(group_names)]
    entry = ENTRIES.get(words[1])
    if entry is None:
        return []
    if "." in key:
        found = _next_parts(keys(entry, [w for w in words[2:] if "=" in w and not w.startswith("-")], own), key)
    else:
        above = {f"{name.partition('/')[0]}/" for name in groups(own) if "/" in name}
        found = {*group_names, *(name for name in above | entry_keys(entry) if name.startswith(key))}
    return sorted(f"{prefix}{name}" for name in found)


def own_folder(words: Sequence[str]) -> str | None:
    """The folder that --config-dir names."""
    for i, word in enumerate(words):
        if word.startswith("--config-dir="):
            return word.partition("=")[2]
        if word == "--config-dir" and i + 1 < len(words):
            return words[i + 1]
    return None


def groups(own: str | None) -> dict[str, list[str]]:
    """Group → its options, nested groups as group/subgroup, of conf/ and of a folder of the user's own."""
    from rlkit.config.compose import conf_dir

    found: dict[str, set[str]] = {}
    for root in [conf_dir(), *([Path(own)] if own else [])]:
        for file in root.rglob("*.yaml"):
            if file.parent != root:
                found.setdefault(file.parent.relative_to(root).as_posix(), set()).add(file.stem)
    return {name: sorted(options) for name, options in sorted(found.items())}


def entry_keys(entry: str) -> set[str]:
    """The keys that stand in an entry config itself: seed=, batch. and the like; read without composing."""
    import yaml

    from rlkit.config.compose import conf_dir

    written = yaml.safe_load((conf_dir() / f"{entry}.yaml").read_text())
    hidden = ("defaults", "_target_", "hydra")
    return {f"{key}." if isinstance(value, dict) else f"{key}=" for key, value in written.items() if key not in hidden}


def _values(key: str, value: str, own: str | None) -> list[str]:
    """Options of a group, the last one of a list or of a sweep; or run folders."""
    if key in FOLDERS:
        return [folder for folder in run_folders() if folder.startswith(value)]
    cut = max(value.rfind(","), value.rfind("[")) + 1
    options = groups(own).get(key.partition("@")[0], [])
    return [f"{value[:cut]}{option}" for option in options if option.startswith(value[cut:])]


def run_folders() -> list[str]:
    """Runs under outputs/, newest first."""
    from rlkit.runs.folder import OUTPUTS

    found = sorted((f.parent for f in OUTPUTS.glob("*/*/config.yaml")), key=lambda f: f.stat().st_mtime, reverse=True)
    return [str(folder) for folder in found]


def _next_parts(known: Iterable[str], typed: str) -> set[str]:
    """Keys up to their next dot: optimizer. for o, optimizer.lr= for optimizer.l."""
    start = typed.rfind(".") + 1
    return {k[:start] + k[start:].partition(".")[0] + ("." if "." in k[start:] else "=") for k in known if k.startswith(typed)}
