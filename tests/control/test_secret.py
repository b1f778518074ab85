"""What is read as the deployment's secret."""

from pathlib import Path

import pytest

from kvloop.control.secret import read_secret
from kvloop.errors import UserError


@pytest.mark.parametrize("text", [b"k" * 16, b"k" * 64, b"\n " + b"k" * 32 + b" \n"])
def test_the_key_is_the_file_without_its_line_break(tmp_path: Path, text: bytes) -> None:
    """As an editor or `openssl` leaves it."""
    file = tmp_path / "secret"
    file.write_bytes(text)
    assert read_secret(str(file), "--secret-file") == text.strip()


@pytest.mark.parametrize(
    ("text", "why"), [(b"k" * 15, "not 15"), (b"k" * 65 + b"\n", "not 65"), (None, "No such file")]
)
def test_what_is_no_key_is_the_operator_s_to_mend(tmp_path: Path, text: bytes | None, why: str) -> None:
    """The error names the setting, the file and what is wrong, and nothing of the secret."""
    file = tmp_path / "secret"
    if text is not None:
        file.write_bytes(text)
    with pytest.raises(UserError, match=rf"--secret-file .*secret.*{why}") as refused:
        read_secret(str(file), "--secret-file")
    assert "kkk" not in str(refused.value)
