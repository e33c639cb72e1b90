"""The queue: groups, leases, the staleness gate, and the prompts."""
