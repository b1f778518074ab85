"""The deployment's secret: 32 random bytes as hex in a file that only its owner can read.

Digest chains, handles and control messages are keyed with it, so every engine of a deployment has the same
one and nobody else has it. It is created exclusively: an existing file is never overwritten, because that
would cut a running deployment in two.
"""

import os
import secrets
from pathlib import Path

from kvloop.errors import UserError

SECRET_BYTES = 32


def write_secret(path: str | Path) -> Path:
    """Create `path` (mode 0600) with a new secret. Raises `UserError` where it exists or cannot be
    written."""
    target = Path(path)
    try:
        descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise UserError(f"{target} exists already and is left as it is") from None
    except OSError as error:
        raise UserError(f"cannot write {target}: {error.strerror}") from error
    with os.fdopen(descriptor, "w") as file:
        file.write(secrets.token_hex(SECRET_BYTES) + "\n")
    return target
