"""The per-node checkpoint writer: turns sealed regions into durable, committed DCP checkpoints."""
