"""The text of an API key, of which only a hash is kept."""

import hashlib
import secrets

PREFIX = "sk-acs-"
LEGACY_PREFIX = "acs-bm-"
SHOWN_CHARACTERS = 12


def new_key_text() -> str:
    """`sk-acs-` and 43 URL-safe characters: 256 bits of randomness."""
    return PREFIX + secrets.token_urlsafe(32)


def digest_of(text: str) -> bytes:
    """The SHA-256 of a key's text. A key has 256 random bits, so nothing slower or salted is needed."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()


def is_key_text(text: str) -> bool:
    """Whether `text` could be a key of ours or of the old platform, and so is worth a query."""
    return text.startswith((PREFIX, LEGACY_PREFIX)) and len(text) <= 200 and text.isascii()
