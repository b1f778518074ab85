"""A new API key of a router's: its digest goes into the file of keys, the key itself is shown once."""

import hashlib
import os
import secrets
from pathlib import Path

from kvloop.errors import UserError
from kvloop.router.keys import KEY_NAME, read_keys

KEY_PREFIX = "kvloop-"  # so that a scanner of leaked secrets, and a person, can tell what it is
KEY_RANDOM_BYTES = 32


def add_api_key(path: str | Path, name: str) -> str:
    """Add a key called `name` to the file, which is made (mode 0600) if it is not there. The key.

    UserError where that cannot be; the file is as it was then.
    """
    if not KEY_NAME.fullmatch(name):
        raise UserError("--api-key must be a name of 1 to 64 letters, digits, dots, dashes or underscores")
    target = Path(path)
    key = KEY_PREFIX + secrets.token_urlsafe(KEY_RANDOM_BYTES)
    digest = hashlib.sha256(key.encode()).hexdigest()
    entry = f'  - name: "{name}"\n    sha256: "{digest}"\n'
    try:
        text = target.read_text() if target.exists() else "keys:\n"
        text = text if text.endswith("\n") else text + "\n"
        read_keys(str(target), (text + entry).encode())
        _replace(target, text + entry)
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot add a key to {target}: {error}") from None
    return key


def _replace(target: Path, text: str) -> None:
    """All at once: a router may be reading it. Its mode stays what it was."""
    mode = target.stat().st_mode & 0o777 if target.exists() else 0o600
    new = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
        new.replace(target)
    except OSError:
        new.unlink(missing_ok=True)
        raise
