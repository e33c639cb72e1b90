"""One folder a service, and what they share: membership, the stage actor, and the process around it."""
