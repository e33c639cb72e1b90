"""The wire: messages, codec, channels and events. SPEC.md describes it for other languages."""
