"""The deployment's secret, read from the file that `kvloop keygen` wrote."""

from pathlib import Path

from kvloop.core.key import KEY_MAX_BYTES, KEY_MIN_BYTES
from kvloop.errors import UserError


def read_secret(path: str, setting: str) -> bytes:
    """The key in the file at `path`, without surrounding white space; `setting` names what to change.

    UserError where it cannot be read, or is too short or too long for a key.
    """
    try:
        key = Path(path).read_bytes().strip()
    except OSError as error:
        raise UserError(f"{setting} {path!r} cannot be read: {error.strerror}") from error
    if not KEY_MIN_BYTES <= len(key) <= KEY_MAX_BYTES:
        raise UserError(
            f"{setting} {path!r} must hold {KEY_MIN_BYTES} to {KEY_MAX_BYTES} bytes, not {len(key)}"
        )
    return key
