"""A deterministic simulation of whole jobs: real tables, real clients; processes, storage, network, time modelled."""
