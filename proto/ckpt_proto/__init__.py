"""The ground floor of ckpt-sidecar: what both sides of the socket and the files on storage agree on.

Standard library and msgpack only: no torch, no ZeroMQ, no threads.
"""
