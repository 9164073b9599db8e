"""Where KV bytes live and how they move: keys, block layout, tiers, the directory's state, transports."""
