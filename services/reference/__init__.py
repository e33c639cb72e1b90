"""The frozen policy that the KL is measured to."""
