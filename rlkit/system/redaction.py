"""Keep secrets out of every text of a run: files, prints, and loggers.

A secret is found in three ways. From then on its value is covered wherever it appears.

by name     the value of a key in SECRET_KEYS, or of an environment variable with a secret's name
by origin   a value taken from the environment (`${oc.env:NAME}`); this expression replaces it, so
            a reader knows the source
by form     the password in a URL, and a token among the parameters of a URL
"""

from __future__ import annotations

import functools
import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

REDACTED = "<redacted>"
# Config keys that hold secrets, in lower case and with _ in place of -.
SECRET_WORDS = """
access_key access_key_id access_token api_key api_keys api_secret api_token apikey
auth_token authorization bearer_token client_secret cookie cookies credential credentials
github_token hf_token hub_token id_token passphrase passwd password passwords private_key
proxy_authorization refresh_token secret secret_access_key secret_key secret_token secrets
session_token set_cookie ssh_key token wandb_api_key x_api_key x_auth_token
"""
SECRET_KEYS = frozenset(SECRET_WORDS.split())
# names of environment variables with secrets
VARIABLE = re.compile(
    r"(^|_)(api_?keys?|access_?keys?|private_?keys?|secrets?|passwords?|passwd|credentials?"
    r"|authorization)(_|$)"
    r"|(?<!eos_)(?<!bos_)(?<!pad_)(?<!unk_)(?<![a-z])tokens?$",
    re.IGNORECASE,
)
CAPITALS = re.compile(r"[A-Z][A-Z0-9_]*")
URL = re.compile(r"(?<=://)([^/\s:@]*):([^/\s@]+)(?=@)")  # user:password
PARAMETER = re.compile(
    r"([?&](?:access_token|api_?key|auth|key|password|secret|sig|signature|token)=)([^&\s\"']+)",
    re.IGNORECASE,
)
FROM_ENVIRONMENT = re.compile(r"\$\{oc\.env:([A-Za-z_]\w*)[^{}]*\}")
# A value is covered in any text only if it has at least so many characters: NAMED for a variable
# found by its name, TAKEN for a value found by its origin.
NAMED = 8
TAKEN = 6
# values too common to be covered
PLAIN = re.compile(r"[-+]?[\d.,:eE]*|true|false|null|none", re.IGNORECASE)
KNOWN: dict[str, str] = {}  # secret value → its replacement, in this process


def learn(config: Any, raw: Any = None) -> None:
    """Remember the secrets of a config, and of the environment, for `cover`.

    Args:
      config: composed and resolved, in plain containers.
      raw: the config before its interpolations were resolved. A value written out in it is no
        secret, even if an environment variable has the same value.
    """
    for value in _variables():
        _add(value, REDACTED)
    clear = [FROM_ENVIRONMENT.sub("", text) for _, text in _texts(raw)]
    for name in {name for _, text in _texts(raw) for name in FROM_ENVIRONMENT.findall(text)}:
        value = os.environ.get(name, "")
        said = any(value in text for text in clear) and not _names_secret(name)
        if _is_rare(value) and not said and not Path(value).exists():
            _add(value, f"${{oc.env:{name}}}")
    for value in _find_secrets(config):
        if _is_rare(value):
            _add(value, KNOWN.get(value, REDACTED))


def _is_rare(value: str) -> bool:
    """Return whether a secret may be covered in any text. A short or common text, such as `none`,
    would be covered where it is no secret."""
    return len(value) >= TAKEN and not PLAIN.fullmatch(value)


def _is_held(key: str, text: str) -> bool:
    """Return whether a text under a key is a secret itself, and not the name of its source."""
    return is_secret_key(key) and text != REDACTED and not FROM_ENVIRONMENT.fullmatch(text)


def _add(value: str, place: str) -> None:
    """Add a secret in each of its possible spellings: as it is, line by line, escaped for JSON or
    Python, and quoted for a URL."""
    lines = [line for line in value.splitlines() if len(line) >= 2 * NAMED] if "\n" in value else []
    for form in (value, *lines):
        KNOWN.update(
            {
                text: place
                for text in (form, json.dumps(form)[1:-1], repr(form)[1:-1], quote(form, safe=""))
            }
        )


def cover(text: str) -> str:
    """Replace the known secrets in a text, and the passwords in its URLs."""
    return _cover_secrets(text, KNOWN)


def _cover_secrets(text: str, known: Mapping[str, str]) -> str:
    for value in sorted(known, key=len, reverse=True) if known else ():
        if value in text:
            text = text.replace(value, known[value])
    if "://" in text:
        text = URL.sub(lambda found: f"{found[1]}:{REDACTED}", text)
    return PARAMETER.sub(rf"\1{REDACTED}", text) if "=" in text else text


def redact_config(config: Any) -> Any:
    """Return the config in a form that may be written. Secrets under their keys are replaced.
    Their values are replaced anywhere else in the config too, unless they are short or common.
    Names of functions stay as they are."""
    own = {value for value in _find_secrets(config) if _is_rare(value)}
    known = KNOWN | {value: KNOWN.get(value, REDACTED) for value in _variables() | own}

    def hide(node: Any, key: str = "") -> Any:
        if isinstance(node, Mapping):
            return {name: hide(value, str(name)) for name, value in node.items()}
        if isinstance(node, list | tuple):
            return [hide(value, key) for value in node]
        if isinstance(node, str):
            if key == "_target_":
                return node
            covered = _cover_secrets(node, known)
            return REDACTED if covered and covered == node and _is_held(key, node) else covered
        is_number = isinstance(node, int | float) and not isinstance(node, bool)
        return REDACTED if is_number and is_secret_key(key) else node

    return hide(config)


def _variables() -> set[str]:
    """Return the values of environment variables with a secret's name."""
    return {
        value for name, value in os.environ.items() if len(value) >= NAMED and _names_secret(name)
    }


@functools.cache
def _names_secret(variable: str) -> bool:
    return bool(VARIABLE.search(variable))


@functools.cache
def is_secret_key(key: str) -> bool:
    """Return whether a config key holds a secret.

    A key in capitals is treated as the name of an environment variable, as in the `env` of an MCP
    server.
    """
    if CAPITALS.fullmatch(key) and _names_secret(key):
        return True
    return key.lower().replace("-", "_") in SECRET_KEYS


def _find_secrets(config: Any) -> set[str]:
    """Find the secret texts of a config, by name and by form."""
    out = set()
    for key, text in _texts(config):
        if is_secret_key(key):
            out.add(text)
        out |= {found[2] for pattern in (URL, PARAMETER) for found in pattern.finditer(text)}
    return {
        text for text in out if text and text != REDACTED and not FROM_ENVIRONMENT.fullmatch(text)
    }


def _texts(node: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Yield (nearest key, text) for every text of a config."""
    if isinstance(node, Mapping):
        for name, value in node.items():
            yield from _texts(value, str(name))
    elif isinstance(node, list | tuple):
        for value in node:
            yield from _texts(value, key)
    elif isinstance(node, str):
        yield key, node
