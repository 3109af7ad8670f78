"""The processes beside the engine's own that have some of a model's heads each, and what they are told."""
