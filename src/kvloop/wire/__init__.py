"""Bytes to values of `core` and back, without I/O. Whatever a peer sends, only `PeerError` comes out."""
