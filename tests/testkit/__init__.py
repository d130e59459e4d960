"""What the tests share: real sidecars, real ranks, stock loads, states, leak checks. Nothing here is a test."""
